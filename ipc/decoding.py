"""Structs that several threads decode.

msgspec keeps what a first decoder learns of a struct at the class, and other threads see this knowledge before it is
complete. A thread that decodes such a struct meanwhile reads a null pointer, and the process dies.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_LEARNING = threading.Lock()
_known: set[Any] = set()


def learnt(kind: type[T]) -> type[T]:
    """`kind`, once msgspec has learnt all of its structs. One thread learns at a time.

    Modules that build their decoders while they are imported do not need this.
    """
    if kind not in _known:
        with _LEARNING:
            msgspec.json.Decoder(kind)
        _known.add(kind)
    return kind
