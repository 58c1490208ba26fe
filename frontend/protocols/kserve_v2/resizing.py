"""Bilinear resizing with half-pixel centres and no filter over areas, as OpenCV's INTER_LINEAR does it.

OpenVINO Model Server casts a picture to the datatype of the model before the resize, so that a float model gets the
values between the integers. The same values come out here without a large copy: only integer results are rounded.
"""

from __future__ import annotations

import numpy as np


def resize(pixels: np.ndarray, height: int, width: int, dtype: np.dtype) -> np.ndarray:
    """`pixels` [h, w, channels] of uint8 or uint16 as [height, width, channels] of `dtype`, which can hold them."""
    if pixels.shape[:2] == (height, width):
        return pixels.astype(dtype)
    # PERF: the order that makes the smaller array in between; it bounds memory for very wide or high images too.
    if height * pixels.shape[1] <= width * pixels.shape[0]:
        made = _along(_along(pixels, height, 0), width, 1)
    else:
        made = _along(_along(pixels, width, 1), height, 0)
    resized: np.ndarray = (made if dtype.kind == "f" else np.rint(made)).astype(dtype)
    return resized


def _along(values: np.ndarray, size: int, axis: int) -> np.ndarray:
    """Linear interpolation to `size` places along one axis, in float32."""
    given = values.shape[axis]
    if given == size:
        return values.astype(np.float32)
    places = (np.arange(size) + 0.5) * (given / size) - 0.5
    places = places.clip(0, given - 1)
    lower = np.floor(places).astype(np.intp)
    shape = [1, 1, 1]
    shape[axis] = size
    share = (places - lower).astype(np.float32).reshape(shape)
    low = values.take(lower, axis).astype(np.float32)
    high = values.take(np.minimum(lower + 1, given - 1), axis).astype(np.float32)
    between: np.ndarray = low + (high - low) * share
    return between
