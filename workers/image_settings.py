"""The stored settings of an image processor, checked before and while the processor is made of them.

transformers takes most values as they are, and fails later with the error of whatever line first needs one, or makes
other pixels. So a damaged file would cost the first requests with pictures, or take the model's sight without a word.
`check` looks at the values that families read, and `trying` turns what is raised with the values into `DamagedFile`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workers.device.oom import is_out_of_memory

IMAGES, PROCESSOR = "preprocessor_config.json", "processor_config.json"
_NESTED = "image_processor"
"""The part of `PROCESSOR` that goes before `IMAGES`."""
_MOST = 1 << 13
_MOST_PIXELS = _MOST * _MOST
_CHANNELS = 3
_FILTERS = 6
"""Filters of Pillow, by number."""
_SHOWN = 60


class NotServed(ValueError):
    """A whole model whose pictures the families cannot read: the model is served without pictures."""


class DamagedFile(ValueError):
    """A file whose values make no image processor; the message names the file and the value."""


def read(directory: Path) -> tuple[str, Mapping[str, Any]]:
    """(name of the file, settings of the image processor) of a model directory; no settings without a file.

    Raises `DamagedFile` for a file that is no object of JSON.
    """
    nested = read_object(directory, PROCESSOR).get(_NESTED)
    name, stored = (PROCESSOR, nested) if nested is not None else (IMAGES, read_object(directory, IMAGES))
    if not isinstance(stored, Mapping):
        raise DamagedFile(f"{name}: {_NESTED} is {_shown(stored)}, an object is needed")
    return name, stored


def check(directory: Path) -> str:
    """The name of the file with the settings of the image processor in a model directory.

    Raises `DamagedFile` for a file that is no object of JSON and for a value that no image processor takes.
    """
    name, stored = read(directory)
    # NOTE: processors that cut a picture of any form into patches say pixels in all where others say a side.
    rules = _RULES | ({"size": _is_area_or_size} if stored.keys() >= _OF_ANY_FORM else {})
    for key, value in stored.items():
        rule = rules.get(key) or (_is_flag if key.startswith("do_") else None)
        # NOTE: files say null for a value that is not set.
        if rule is not None and value is not None and not rule(value):
            raise DamagedFile(f"{name}: {key} is {_shown(value)}, {_NEEDED[rule]} is needed")
    for least, most in (("min_patches", "max_patches"), ("min_pixels", "max_pixels")):
        if (stored.get(least) or 0) > (stored.get(most) or math.inf):
            raise DamagedFile(f"{name}: {least} is {stored[least]}, over {most}, {stored[most]}")
    size = stored.get("size")
    if rules["size"] is _is_area_or_size and isinstance(size, Mapping):
        short, long = size.get("shortest_edge"), size.get("longest_edge")
        if (short or 0) > (long or math.inf):
            raise DamagedFile(f"{name}: size.shortest_edge is {short}, over longest_edge, {long}")
    return name


@contextmanager
def trying(name: str) -> Iterator[None]:
    """Raise `DamagedFile` for what the code within raises of the values of a file.

    Lets `NotServed` and the errors of memory and of absent files pass.
    """
    try:
        yield
    except (NotServed, DamagedFile, OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # NOTE: what libraries raise of a value that they did not expect is of any class.
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DamagedFile(
            f"{name} does not fit the model's image processor and config.json ({why})"
        ) from error


def read_object(directory: Path, name: str) -> Mapping[str, Any]:
    """The object in a file of JSON; empty without the file. Raises `DamagedFile`."""
    try:
        content = json.loads((directory / name).read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{name}: is no JSON ({type(error).__name__})") from error
    if not isinstance(content, Mapping):
        raise DamagedFile(f"{name}: is {_shown(content)}, an object is needed")
    return content


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_flag(value: Any) -> bool:
    return value in (0, 1) and isinstance(value, int)


def _is_count(value: Any, most: int = _MOST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _is_area(value: Any) -> bool:
    return _is_count(value, _MOST_PIXELS)


def _is_size(value: Any, edge: Callable[[Any], bool] = _is_count) -> bool:
    """A side, sides in order, or sides by name, of which `edge` judges those that are called edges."""
    if isinstance(value, list):
        return 1 <= len(value) <= 2 and all(map(_is_count, value))
    if not isinstance(value, Mapping):
        return _is_count(value)
    sides = {name: side for name, side in value.items() if side is not None}
    return bool(sides) and all(
        edge(side)
        if name.endswith("_edge")
        else _is_area(side)
        if name.endswith("_pixels")
        else _is_count(side)
        for name, side in sides.items()
    )


def _is_area_or_size(value: Any) -> bool:
    return _is_size(value, _is_area)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_factor(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_per_channel(value: Any) -> bool:
    return _is_number(value) or (
        isinstance(value, list) and len(value) == _CHANNELS and all(map(_is_number, value))
    )


def _is_spread(value: Any) -> bool:
    return _is_per_channel(value) and all(
        each > 0 for each in (value if isinstance(value, list) else [value])
    )


def _is_filter(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _FILTERS


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_RULES: dict[str, Callable[[Any], bool]] = {
    "image_processor_type": _is_text,
    "size": _is_size,
    "max_image_size": _is_size,
    "patch_size": _is_size,
    "merge_size": _is_count,
    "temporal_patch_size": _is_count,
    "min_patches": _is_count,
    "max_patches": _is_count,
    "min_pixels": _is_area,
    "max_pixels": _is_area,
    "rescale_factor": _is_factor,
    "image_mean": _is_per_channel,
    "image_std": _is_spread,
    "resample": _is_filter,
}
"""What the values of the file must be, by name. Other names may have any value."""
_OF_ANY_FORM = {"patch_size", "merge_size"}
"""Names that only processors for pictures of any form have together."""
_NEEDED: dict[Callable[[Any], bool], str] = {
    _is_text: "a text",
    _is_flag: "true or false",
    _is_count: f"a whole number of 1 to {_MOST}",
    _is_area: f"a number of pixels of 1 to {_MOST_PIXELS}",
    _is_size: f"a side of 1 to {_MOST} pixels, or an object of sides,",
    _is_area_or_size: f"a side of 1 to {_MOST} pixels, or an object of edges of 1 to {_MOST_PIXELS} pixels in all,",
    _is_factor: "a number over 0",
    _is_per_channel: f"a number, or {_CHANNELS} for the channels,",
    _is_spread: f"a number over 0, or {_CHANNELS} for the channels,",
    _is_filter: f"the number of a filter of Pillow, 0 to {_FILTERS - 1},",
}
