"""The parser of tokenizers that describe their own answers: transformers' response parser, as an `OutputParser`.

1. transformers splits text into the fields of the tokenizer's response template.
2. Fields of reasoning and of content pass as they stream. A call in JSON leaves as it is written, once it is certain to
   be one (`written`); the text of other calls waits for the end of its field.
3. transformers raises an error for a call that is not what the template says. The raw text of the field, marks
   included, is then visible, and a new parser goes on behind the field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from ipc.wire.streams import REASONING, TEXT
from workers.generation.formats.bodies import Schemas, calls_of
from workers.generation.formats.tags import SegmentParser, templated_wrapper
from workers.generation.formats.written import ITEM, Calls
from workers.generation.request import Segment

_REASONING = ("reasoning_content", "thinking", "reasoning")
_CALLS = "tool_calls"
_UNREADABLE = (ValueError, RecursionError)
"""What transformers raises for a call that is not what the template says, and for one with too many levels."""
# NOTE: an error of transformers loses the events of its text, so that no text may hold more than one end of a mark.
_PIECES = re.compile(r"\w+|\W")


class JsonStrings:
    """Escapes in the strings of one JSON value, piece by piece, what transformers would not read as text there.

    That are line breaks and tabs as models write them, and the beginnings of marks.
    """

    def __init__(self) -> None:
        self._within = self._escapes = False

    def escaped(self, piece: str) -> str:
        """A piece as `_PIECES` makes them."""
        escapes, self._escapes = self._escapes, False
        if escapes:
            return piece
        if piece == '"':
            self._within = not self._within
        elif self._within and piece == "\\":
            self._escapes = True
        elif self._within and (piece < " " or piece in "<>[]|"):
            return f"\\u{ord(piece):04x}"
        return piece


class TemplatedParser(SegmentParser):
    """An `OutputParser` by a response template. `prompt` is the text of the prompt, `tools` the request's functions."""

    def __init__(
        self,
        template: Any,
        prompt: str,
        tools: Sequence[Mapping[str, Any]],
        schemas: Schemas,
        *,
        calls: bool,
    ) -> None:
        super().__init__()
        self._template = load_response_template(template)
        self._tools: list[Any] = [dict(tool) for tool in tools]
        self._calls = calls
        self._parser = ResponseParser(self._template, prefix=prompt, tools=self._tools)
        self._unsaid = ""
        self._json: JsonStrings | None = None
        self._schemas = schemas
        self._streams = templated_wrapper(template) is not None and calls
        self._call: Calls | None = None
        """The call of the present field, where calls leave as they are written."""

    def feed(self, text: str, tokens: int, has_mark: bool = False) -> list[Segment]:
        """More text of the answer."""
        self._tokens += tokens
        for piece in _PIECES.findall(text):
            while piece:
                piece = self._feed(piece)
        return self._taken()

    def finish(self, cut: bool) -> list[Segment]:
        """The answer has ended."""
        if self._call is not None and self._end_call(cut):
            return self._taken()
        try:
            _, events = self._parser.finalize()
        except _UNREADABLE:
            self._emit(TEXT, self._unsaid)
        else:
            self._read(events)
        self._unsaid = ""
        return self._taken()

    def _feed(self, text: str) -> str:
        """Feed a text; returns what a new parser has to read again after a field that is no call."""
        self._unsaid += text
        try:
            events = self._parser.feed(self._json.escaped(text) if self._json else text)
        except _UNREADABLE:
            return self._release()
        self._read(events)
        return self._written() if self._call is not None else ""

    def _written(self) -> str:
        """Tell what the text adds to a call; returns what a new parser has to read if the arguments break off."""
        call, begin = self._call, self._begin
        assert call is not None
        if not call.count:
            self._tell(call.begin(self._unsaid, begin, (ITEM,)))
        self._tell(call.go_on(self._unsaid))
        if call.broken_at is None:
            return ""
        rest = self._unsaid[call.broken_at :]
        self._restart()
        return rest

    @property
    def _begin(self) -> int:
        """Where the text of the present field begins."""
        opened = self._template.fields[_CALLS].open_re.search(self._unsaid)
        return opened.end() if opened else 0

    def _end_call(self, cut: bool) -> bool:
        """The answer has ended within a call; whether that was told."""
        assert self._call is not None
        parts = (
            self._call.close(len(self._unsaid), cut=cut)
            if self._call.count
            else self._call.cut(self._unsaid, self._begin, (ITEM,))
            if cut
            else []
        )
        self._tell(parts)
        return bool(self._call.count)

    def _restart(self) -> None:
        """Go on with a new parser."""
        self._unsaid, self._json, self._call = "", None, None
        self._parser = ResponseParser(self._template, prefix="", tools=self._tools)

    def _read(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Turn the events of transformers into segments."""
        for event in events:
            field = event["field"]
            if event["type"] == "region_open":
                self._forget_up_to_mark(field)
                self._json = JsonStrings() if field == _CALLS and self._is_json else None
                self._call = Calls(self._schemas) if field == _CALLS and self._streams else None
            elif event["type"] == "region_chunk" and field != _CALLS:
                self._say(REASONING if field in _REASONING else TEXT, event["text"])
            elif event["type"] == "region_close" and field == _CALLS:
                self._json = None
                self._close(event["value"])

    @property
    def _is_json(self) -> bool:
        """Whether calls are JSON with the strings of JSON."""
        field = self._template.fields[_CALLS]
        return field.content == "json" and not field.content_args.get("string_delims")

    def _forget_up_to_mark(self, field: str) -> None:
        """Drop closing marks before the mark that opens a field."""
        pattern = self._template.fields[field].open_re
        match = pattern.search(self._unsaid) if pattern is not None else None
        if match is not None:
            self._unsaid = self._unsaid[match.start() :]

    def _say(self, kind: int, text: str) -> None:
        at = self._unsaid.find(text)
        self._unsaid = self._unsaid[max(at, 0) + len(text) :]
        self._emit(kind, text)

    def _close(self, value: Any) -> None:
        """The value of a field of calls: one call, or several."""
        told, self._call = self._call, None
        if told is not None:
            self._tell([] if told.count else told.begin(self._unsaid, self._begin, (ITEM,)))
            self._tell(told.go_on(self._unsaid))
        if told is None or not told.count:
            calls = calls_of(value) if self._calls else None
            if calls is None:
                self._emit(TEXT, self._unsaid)
            for call in calls or ():
                self._tell(call.segments())
        self._unsaid = ""

    def _release(self) -> str:
        """The field that could not be read becomes visible; returns the text behind the field."""
        field = self._template.fields[_CALLS]
        opened = field.open_re.search(self._unsaid) if field.open_re is not None else None
        begin = opened.end() if opened else 0
        closed = field.close_re.search(self._unsaid, begin) if field.close_re is not None else None
        end = closed.end() if closed else len(self._unsaid)
        rest = self._unsaid[end:]
        if self._call is None or not self._call.count:
            self._emit(TEXT, self._unsaid[opened.start() if opened else 0 : end])
        self._restart()
        return rest
