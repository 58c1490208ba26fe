"""Pictures for tests: coloured rectangles that follow from a number, as pixels and as files."""

from __future__ import annotations

import io
import random

from PIL import Image, ImageDraw


def picture(number: int, width: int = 96, height: int = 72) -> Image.Image:
    """An RGB picture of rectangles; every number gives another one."""
    chosen = random.Random(number)
    image = Image.new("RGB", (width, height), _colour(chosen))
    draw = ImageDraw.Draw(image)
    for _ in range(6):
        left, top = chosen.randrange(width), chosen.randrange(height)
        right, bottom = left + chosen.randrange(4, width), top + chosen.randrange(4, height)
        draw.rectangle((left, top, right, bottom), _colour(chosen))
    return image


def encoded(image: Image.Image, form: str = "PNG") -> bytes:
    """The bytes of an image file."""
    out = io.BytesIO()
    image.save(out, form)
    return out.getvalue()


def _colour(chosen: random.Random) -> tuple[int, int, int]:
    return chosen.randrange(256), chosen.randrange(256), chosen.randrange(256)
