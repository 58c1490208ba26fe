"""Pictures for models that see: drawn here, so that no file has to be shipped."""

from __future__ import annotations

import io
from typing import Any

from ipc import extras
from ipc.errors import DependencyConflict

_SCENES = (
    ((320, 240), (235, 240, 250), (("ellipse", (40, 40, 140, 140), (200, 30, 30)),)),
    ((200, 320), (20, 60, 30), (("rectangle", (30, 60, 160, 220), (250, 220, 40)),)),
    ((256, 256), (90, 140, 220), (("polygon", (128, 30, 220, 220, 36, 220), (90, 60, 20)),)),
    (
        (400, 300),
        (255, 255, 255),
        tuple(
            ("rectangle", (30, 30 + 25 * row, 340 - 13 * row, 42 + 25 * row), (40, 40, 40))
            for row in range(9)
        ),
    ),
)


def drawn() -> list[bytes]:
    """Four PNG files: a disc, a door, a mountain, a page.  Raises `DependencyConflict` without Pillow."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise DependencyConflict(
            f"verify needs the package pillow for this model: {extras.needed('vision')}"
        ) from error
    files = []
    for size, background, shapes in _SCENES:
        picture = Image.new("RGB", size, background)
        canvas: Any = ImageDraw.Draw(picture)
        for shape, box, colour in shapes:
            getattr(canvas, shape)(box, fill=colour)
        stream = io.BytesIO()
        picture.save(stream, "PNG")
        files.append(stream.getvalue())
    return files


def opened(files: list[bytes]) -> list[Any]:
    """The same as Pillow's RGB images."""
    from PIL import Image

    return [Image.open(io.BytesIO(data)).convert("RGB") for data in files]
