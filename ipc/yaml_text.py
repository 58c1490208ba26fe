"""YAML documents of the operator, decoded within bounds.

NOTE: libyaml's composer recurses in C: some tens of thousands of levels would end the process.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

MOST_OPENED = 4000
"""Brackets and braces of a document, and columns and dashes before the text of a line."""
_OPENING = re.compile(rb"^[ \t]+|[-?][ \t]", re.MULTILINE)


def decode(data: bytes) -> Any:
    """The plain values of a document. Raises `ValueError` or `msgspec.DecodeError` where it is none, or nested deep."""
    line = max((sum(map(len, _OPENING.findall(each))) for each in data.splitlines()), default=0)
    if data.count(b"[") + data.count(b"{") > MOST_OPENED or line > MOST_OPENED:
        raise ValueError(f"nested too deeply, or more than {MOST_OPENED} brackets")
    return msgspec.yaml.decode(data)
