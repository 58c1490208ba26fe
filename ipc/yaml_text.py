"""YAML documents of the operator, decoded within bounds.

NOTE: libyaml's composer recurses in C: some tens of thousands of levels would end the process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import yaml

MOST_OPENED = 4000
"""Brackets and braces of a document, and columns and dashes before the text of a line."""
_OPENING = re.compile(rb"^[ \t]+|[-?][ \t]", re.MULTILINE)


def decode(data: bytes) -> Any:
    """The plain values of a document. Raises `ValueError` or `msgspec.DecodeError` where it is none, or nested deep."""
    line = max((sum(map(len, _OPENING.findall(each))) for each in data.splitlines()), default=0)
    if data.count(b"[") + data.count(b"{") > MOST_OPENED or line > MOST_OPENED:
        raise ValueError(f"nested too deeply, or more than {MOST_OPENED} brackets")
    return msgspec.yaml.decode(data)


def line_of(data: bytes, path: Sequence[str]) -> int:
    """The line, from 1, of the field `path` in a document that `decode` reads, or of the last part that is there.

    The line of the mistake in a document that is no YAML. A part is searched at every depth below the one before.
    """
    try:
        node = yaml.compose(data)
    except yaml.MarkedYAMLError as error:
        return error.problem_mark.line + 1 if error.problem_mark is not None else 1
    except (yaml.YAMLError, RecursionError):
        return 1
    line = 1
    for part in path:
        found = _field(node, part)
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line


def _field(node: yaml.Node | None, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    """Key and value of the field `name` nearest below `node`."""
    level: list[yaml.Node] = [node] if node is not None else []
    for _ in range(MOST_OPENED):
        pairs = [pair for each in level if isinstance(each, yaml.MappingNode) for pair in each.value]
        found = next((pair for pair in pairs if pair[0].value == name), None)
        if found is not None or not level:
            return found
        lists = [child for each in level if isinstance(each, yaml.SequenceNode) for child in each.value]
        level = [value for _, value in pairs] + lists
    return None
