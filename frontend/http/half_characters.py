"""Finds the text of a JSON body that is no Unicode: half of a surrogate pair, or bytes that are not UTF-8.

Decoders refuse such a body at a byte. A client with thousands of texts needs the field and the index.
"""

from __future__ import annotations

import json
import re
from typing import Any

_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")
_HALF = re.compile("[\ud800-\udfff]")
_BYTES = range(0xDC80, 0xDD00)
"""What stands for a byte that is not UTF-8 (PEP 383)."""
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_HOLDING = (str, list, dict)
_SHOWN = 200
LARGEST_NBYTES = 4 << 20
"""Bodies up to this size are searched; the search takes several times the memory of the body."""


def fault_of(body: bytes | memoryview) -> str:
    """JSON path and fault of the first such text; empty where there is none, or the body is no JSON or too long."""
    if len(body) > LARGEST_NBYTES:
        return ""
    raw = bytes(body)
    text = raw.decode(errors="surrogateescape")
    if not _ESCAPED.search(raw) and not _HALF.search(text):
        return ""
    try:
        found = _half_in(json.loads(text))
    except (ValueError, RecursionError):
        return ""
    if found is None:
        return ""
    path, half = found
    place = f"...{path[-_SHOWN:]}" if len(path) > _SHOWN else path.lstrip(".") or "body"
    if ord(half) in _BYTES:
        return f"{place}: byte 0x{ord(half) - 0xDC00:02x} of the body is not UTF-8"
    return f"{place}: \\u{ord(half):04x} is half of a character, which a JSON body cannot hold"


def _half_in(value: Any) -> tuple[str, str] | None:
    """(path, half) of the first text with one, in the order of the body.

    PERF: paths are made on the way back only, as bodies up to 512 KiB are searched on the event loop.
    """
    if type(value) is str:
        half = _HALF.search(value)
        return ("", half[0]) if half else None
    if type(value) is list:
        for at, entry in enumerate(value):
            if entry and type(entry) in _HOLDING and (found := _half_in(entry)):
                return f"[{at}]{found[0]}", found[1]
    elif type(value) is dict:
        for name, entry in value.items():
            if half := _HALF.search(name):
                return "[key]", half[0]
            if entry and type(entry) in _HOLDING and (found := _half_in(entry)):
                return f".{name}{found[0]}" if _FIELD.fullmatch(name) else f"[...]{found[0]}", found[1]
    return None
