"""Llama 4's image processor on Pillow: canvases by the published rule, pixels of torch's own resizing."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image

from workers.generation.pictures.tiled import Llama4Images

SIDE = 32
SETTINGS = {"size": {"height": SIDE, "width": SIDE}, "max_patches": 6}
DRAWN = random.Random(28)
SIZES = [(1, 1), (32, 32), (33, 32), (64, 32), (1, 150), (150, 1), (1000, 800)]
SIZES += [(DRAWN.randrange(4, 400), DRAWN.randrange(4, 400)) for _ in range(60)]


def best_canvas(height: int, width: int, most: int) -> tuple[int, int]:
    """The canvas that enlarges least, else shrinks least; of several the smallest."""
    canvases = [
        (rows * SIDE, columns * SIDE)
        for rows in range(1, most + 1)
        for columns in range(1, most + 1)
        if rows * columns <= most
    ]
    scale = {canvas: min(Fraction(canvas[0], height), Fraction(canvas[1], width)) for canvas in canvases}
    larger = [found for found in scale.values() if found >= 1]
    chosen = min(larger) if larger else max(scale.values())
    return min(
        (canvas for canvas in canvases if scale[canvas] == chosen), key=lambda canvas: canvas[0] * canvas[1]
    )


def resized(pixels: np.ndarray, height: int, width: int) -> torch.Tensor:
    """fp32 [3, height, width] in levels, by torch."""
    given = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    scaled = torch.nn.functional.interpolate(given, (height, width), mode="bilinear", antialias=True)
    return scaled[0].round().clamp(0, 255)


@pytest.mark.parametrize("size", SIZES)
def test_a_picture_lies_on_the_canvas_that_shrinks_least(size: tuple[int, int]) -> None:
    width, height = size
    pixels = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    images = Llama4Images(SETTINGS)
    tall, wide = best_canvas(height, width, 6)
    assert images.canvas(height, width) == (tall, wide)
    found = images.tiles(Image.fromarray(pixels))
    rows, columns = tall // SIDE, wide // SIDE
    assert len(found) == rows * columns + (rows * columns > 1)
    levels = (found * 0.5 + 0.5) * 255
    if rows * columns > 1:
        torch.testing.assert_close(levels[-1], resized(pixels, SIDE, SIDE), rtol=0, atol=2)
    down, across = min(max(height, SIDE), tall), min(max(width, SIDE), wide)
    scale = min(down / height, across / width)
    kept = max(int(height * scale + 1e-4), 1), max(int(width * scale + 1e-4), 1)
    canvas = torch.zeros(3, tall, wide)
    canvas[:, : kept[0], : kept[1]] = resized(pixels, *kept)
    whole = levels[: rows * columns].view(rows, columns, 3, SIDE, SIDE).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(whole.reshape(3, tall, wide), canvas, rtol=0, atol=2)


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        ({"do_resize": False}, "do_resize must not be false"),
        ({"size": {"height": 32, "width": 48}}, "other values"),
    ],
)
def test_settings_that_are_not_served_end_the_load(stored: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Llama4Images({**SETTINGS, **stored})
