"""Marks of what a program keeps between two runs, to notice that a run has changed something."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch


def mark(value: Any) -> object:
    """Equal for equal values: a checksum for a tensor, and the same for what lists and dictionaries hold."""
    if isinstance(value, torch.Tensor):
        return _mark_of_tensor(value.detach())
    if isinstance(value, dict):
        return tuple((key, mark(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(mark, value))
    return repr(value) if isinstance(value, (str, bytes, bool, int, float, type(None))) else ""


def marks(values: Iterable[Any]) -> tuple[object, ...]:
    """The mark of each value."""
    return tuple(map(mark, values))


def _mark_of_tensor(tensor: torch.Tensor) -> object:
    if tensor.layout != torch.strided or tensor.is_quantized:
        return None
    raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), zlib.crc32(raw.numpy().data)
