"""Finds the text of a JSON body that is no Unicode: half of a surrogate pair, or bytes that are not UTF-8.

Decoders refuse such a body at a byte. A client with thousands of texts needs the field and the index.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")
_HALF = re.compile("[\ud800-\udfff]")
_BYTES = range(0xDC80, 0xDD00)
"""What stands for a byte that is not UTF-8 (PEP 383)."""
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_SHOWN = 200


def fault_of(body: bytes | memoryview) -> str:
    """JSON path and fault of the first such text; empty where there is none, or the body is no JSON."""
    raw = bytes(body)
    text = raw.decode(errors="surrogateescape")
    if not _ESCAPED.search(raw) and not _HALF.search(text):
        return ""
    try:
        found = next(_halves(json.loads(text)), None)
    except (ValueError, RecursionError):
        return ""
    if found is None:
        return ""
    path, half = found
    place = f"...{path[-_SHOWN:]}" if len(path) > _SHOWN else path.lstrip(".") or "body"
    if ord(half) in _BYTES:
        return f"{place}: byte 0x{ord(half) - 0xDC00:02x} of the body is not UTF-8"
    return f"{place}: \\u{ord(half):04x} is half of a character, which a JSON body cannot hold"


def _halves(value: Any) -> Iterator[tuple[str, str]]:
    """(path, half) of each text with one, in the order of the body."""
    stack: list[tuple[str, Any]] = [("", value)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, str):
            half = _HALF.search(value)
            if half:
                yield path, half[0]
        elif isinstance(value, list):
            stack.extend((f"{path}[{at}]", value[at]) for at in reversed(range(len(value))))
        elif isinstance(value, dict):
            for name in reversed(value):
                named = f"{path}.{name}" if _FIELD.fullmatch(name) else f"{path}[...]"
                stack += [(named, value[name]), (f"{path}[key]", name)]
