"""YAML documents of the operator, decoded within bounds and with every key once.

NOTE: libyaml's composer recurses in C: some tens of thousands of levels would end the process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

MOST_OPENED = 4000
"""Brackets and braces of a document, and columns and dashes before the text of a line."""
_OPENING = re.compile(rb"^[ \t]+|[-?][ \t]", re.MULTILINE)
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE = "tag:yaml.org,2002:merge"


def decode(data: bytes, *, aliases: bool = True) -> Any:
    """The plain values of a document.

    Raises `ValueError` where the bytes are none, are nested deep, where a map has a key twice, and without `aliases`
    where the document repeats a part of its own by an alias: a few lines of these stand for billions of values.
    """
    return decode_with_lines(data, aliases=aliases)[0]


def decode_with_lines(data: bytes, *, aliases: bool = True) -> tuple[Any, dict[tuple[Any, ...], int]]:
    """As `decode`, and the lines of the keys of the first two levels, from 1: by `(section,)` and `(section, key)`."""
    _check_depth(data)
    try:
        loader = _LOADER(data)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        _refuse_repeated(node, aliases)
        return loader.construct_document(node), dict(_lines(loader, node, 2))
    except yaml.YAMLError as error:
        raise ValueError(_told(error)) from error


def _check_depth(data: bytes) -> None:
    line = max((sum(map(len, _OPENING.findall(each))) for each in data.splitlines()), default=0)
    if data.count(b"[") + data.count(b"{") > MOST_OPENED or line > MOST_OPENED:
        raise ValueError(f"nested too deeply, or more than {MOST_OPENED} brackets")


def _refuse_repeated(root: yaml.Node, aliases: bool) -> None:
    """Raise `ValueError` for a key that stands twice in its map: PyYAML takes the last one without a word.

    Without `aliases` also for a part of the document that stands at two places.
    """
    places, seen = [root], set()
    while places:
        node = places.pop()
        if id(node) in seen:
            if not aliases:
                raise ValueError(f"the part of line {node.start_mark.line + 1} is repeated by an alias")
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            places += node.value
        elif isinstance(node, yaml.MappingNode):
            first: dict[tuple[str, str], int] = {}
            for key, value in node.value:
                places.append(value)
                if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                    name, line = (key.tag, key.value), key.start_mark.line + 1
                    if name in first:
                        raise ValueError(
                            f"{key.value!r} stands twice: in line {first[name]} and in line {line}"
                        )
                    first[name] = line


def _lines(loader: Any, node: yaml.Node, levels: int) -> Iterator[tuple[tuple[Any, ...], int]]:
    if levels and isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = loader.construct_object(key, deep=True)
            yield (name,), key.start_mark.line + 1
            for below, line in _lines(loader, value, levels - 1):
                yield (name, *below), line


def _told(error: yaml.YAMLError) -> str:
    """What the parser says, in one line, with the line of the document."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    context = f"{error.context}: " if isinstance(error, yaml.MarkedYAMLError) and error.context else ""
    return f"{context}{problem}" + (f" (line {mark.line + 1}, column {mark.column + 1})" if mark else "")


def line_of(data: bytes, path: Sequence[str]) -> int:
    """The line, from 1, of the field `path` in a document that `decode` reads, or of the last part that is there.

    A part is searched at every depth below the one before; the nearest counts. 1 for a text that is no document.
    """
    try:
        _check_depth(data)
        node = yaml.compose(data, _LOADER)
    except (ValueError, yaml.YAMLError):
        return 1
    line = 1
    for part in path:
        place = _field(node, part)
        if place is None:
            break
        line, node = place[0].start_mark.line + 1, place[1]
    return line


def _field(root: yaml.Node | None, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    """Key and value of the field `name` nearest below `root`; aliases are followed once."""
    level: list[yaml.Node] = [root] if root is not None else []
    seen: set[int] = set()
    while level:
        below: list[yaml.Node] = []
        for node in level:
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, yaml.MappingNode):
                for key, value in node.value:
                    if key.value == name:
                        return key, value
                    below.append(value)
            elif isinstance(node, yaml.SequenceNode):
                below += node.value
        level = below
    return None
