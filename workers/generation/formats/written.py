"""Calls that are told while they are written: which text is certain to be one, and the parts that a region tells.

A call is certain once three things stand in the text: what opens a call (a mark, or the beginning of a visible answer),
the name of a function of the request, and the beginning of an object of arguments, `{` and a key or the end of the
object. From there on the text stays a call whatever follows: where its arguments stop being JSON, the call breaks off,
and the text behind is visible.

| body | certain at |
|---|---|
| an object with `name` in front of `arguments` or `parameters`, alone or in a list | the beginning of the arguments |
| a name and an object (Mistral, DeepSeek, Gemma 4, Qwen3-Coder, Harmony) | the beginning of the object |
| `<function=name>` with parameters | the first parameter, or the end of the function |
| another order of keys, arguments in quotes, Gemma's own notation, Python, other functions | the end of the call |

A call whose end the bound on tokens cut off is certain at its name. All of this depends on the text alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ipc.wire.streams import ARGUMENTS, CALL_CUT, CALL_ENDED, CALLED, CalledFunction
from workers.generation.formats.bodies import Schemas
from workers.generation.formats.compact import CompactObject, CompactParameters, Writer
from workers.generation.request import Segment

MOST_HEAD = 1200
"""Characters from the beginning of a call to its arguments."""
_OBJECT = r"\s*(?=\{\s*[\"}])"
_KEYS = ("arguments", "parameters")
_OPENED = (
    r'\s*\{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]{0,128}"\s*,\s*)*(?:"function"\s*:\s*\{\s*)?'
    r'"name"\s*:\s*"(?P<name>[^"\\]{1,512})"\s*'
)


OBJECT = re.compile(_OBJECT)
"""What stands between the head of a call and its arguments."""


class Head(NamedTuple):
    """What stands in front of arguments, with a group `name`, and whether parameters in XML follow.

    `certain` matches up to the arguments, `cut` where at least the name is whole.
    """

    certain: re.Pattern[str]
    cut: re.Pattern[str]
    in_xml: bool = False

    def writer(self, at: int, schema: Mapping[str, Any]) -> Writer:
        """Writes the arguments that begin at a position."""
        if not self.in_xml:
            return CompactObject(at)
        properties = schema.get("properties")
        return CompactParameters(at, properties if isinstance(properties, Mapping) else {})


def named(before: str, cut: str) -> Head:
    """A head with the name outside of JSON: `before` matches the head, `cut` what proves that the name is whole."""
    return Head(re.compile(before + _OBJECT), re.compile(before + cut, re.DOTALL))


def in_xml(before: str) -> Head:
    """A head in front of parameters."""
    return Head(re.compile(before + r"(?=\s*(?:<parameter=|</function>))"), re.compile(before), in_xml=True)


def whole_only(cut: str) -> Head:
    """A head in front of arguments that only the whole call tells."""
    return Head(re.compile("(?!)"), re.compile(cut))


ITEM = Head(
    re.compile(_OPENED + r',\s*"(?:arguments|parameters)"\s*:' + _OBJECT),
    re.compile(_OPENED + r'(?:,\s*(?:"(?P<key>[a-z]*)(?P<behind>"\s*(?::.*)?)?)?)?\Z', re.DOTALL),
)
"""An object with a name and arguments."""


class Calls:
    """The calls of one region, as they are written. `at` is where the text behind the last call begins, 0 without any.

    `count` is the number of calls that were told. `is_open`: one of them goes on.
    """

    def __init__(self, schemas: Schemas, prefix: str = "call-") -> None:
        self._schemas, self._prefix = schemas, prefix
        self._writer: Writer | None = None
        self.count = self.at = 0
        self.broken_at: int | None = None
        """Where the text has stopped being a call."""

    @property
    def is_open(self) -> bool:
        """Whether a call has begun that has not ended."""
        return self._writer is not None

    def begin(self, text: str, begin: int, heads: Sequence[Head]) -> list[Segment]:
        """The beginning of the call whose text begins at a position, if the call is certain already."""
        for head in heads:
            found = head.certain.match(text, begin, begin + MOST_HEAD)
            if found is not None and (name := found["name"].strip()) in self._schemas:
                self._writer = head.writer(found.end(), self._schemas[name])
                return [self._begun(name)]
        return []

    def begin_named(self, text: str, name: str) -> list[Segment]:
        """The beginning of a call whose name stands elsewhere, if the text begins with its arguments."""
        found = OBJECT.match(text) if name in self._schemas else None
        if found is None:
            return []
        self._writer = CompactObject(found.end())
        return [self._begun(name)]

    def cut_named(self, name: str) -> list[Segment]:
        """A call whose name stands elsewhere, and whose text was cut off before its arguments."""
        return [self._begun(name), self._ended(0, CALL_CUT)] if name in self._schemas else []

    def go_on(self, text: str) -> list[Segment]:
        """What more of the text adds to the call that has begun."""
        writer = self._writer
        if writer is None:
            return []
        parts = _pieces(writer.write(text))
        if writer.is_whole:
            parts.append(self._ended(writer.at, CALL_ENDED))
        elif writer.is_broken:
            self.broken_at = writer.at
            parts.append(self._ended(writer.at, CALL_CUT))
        return parts

    def close(self, length: int, *, cut: bool) -> list[Segment]:
        """The region is over after `length` characters, and so is the call that goes on; `cut` within the region."""
        writer = self._writer
        if writer is None:
            return []
        parts = [] if cut else _pieces(writer.close())
        return [*parts, self._ended(length, CALL_ENDED if writer.is_whole else CALL_CUT)]

    def cut(self, text: str, begin: int, heads: Sequence[Head]) -> list[Segment]:
        """The call whose text begins at a position and was cut off before it was certain, if its name is known."""
        for head in heads:
            found = head.cut.match(text, begin, begin + MOST_HEAD if head is not ITEM else len(text))
            if found is None or (name := found["name"].strip()) not in self._schemas:
                continue
            if head is not ITEM or _may_be_arguments(found["key"], found["behind"]):
                return [self._begun(name), self._ended(len(text), CALL_CUT)]
        return []

    def _begun(self, name: str) -> Segment:
        self.count += 1
        return Segment(CALLED, call=CalledFunction(name, self._prefix))

    def _ended(self, at: int, kind: int) -> Segment:
        self._writer, self.at = None, at
        return Segment(kind)


def _pieces(text: str) -> list[Segment]:
    return [Segment(ARGUMENTS, text)] if text else []


def _may_be_arguments(key: str | None, behind: str | None) -> bool:
    """Whether the key behind a name is that of arguments, or may become it."""
    if key is None:
        return True
    return key in _KEYS if behind else any(known.startswith(key) for known in _KEYS)
