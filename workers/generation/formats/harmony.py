"""The parser of Harmony, the format of gpt-oss: messages with a header that names channel and recipient.

1. A message is `<|start|>role to=recipient<|channel|>name <|constrain|>json<|message|>body<|end|>`. The prompt ends
   within the first header.
2. A body of the channel `analysis` is reasoning. A body with a recipient is a call. All other bodies are visible.
3. A header waits until it is whole. Arguments leave as they are written, once the body has begun as an object for a
   function of the request (`written`); other bodies of calls wait for their end. Text without a header is visible.
"""

from __future__ import annotations

import re

from ipc.wire.streams import CALLED, REASONING, TEXT
from workers.generation.formats.bodies import Schemas, read_arguments
from workers.generation.formats.regions import JsonEnd
from workers.generation.formats.tags import Marks, SegmentParser
from workers.generation.formats.written import Calls
from workers.generation.request import Call, Segment

MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
OPENINGS = ("<|start|>", "<|channel|>")
"""Marks that begin a message, also within the body of another."""
_ENDS = Marks(["<|end|>", "<|return|>", "<|call|>", *OPENINGS])
_MOST_HEADER = 300
_BODY = "<|message|>"
_HEADS = ("<|start|>", "<|channel|>", _BODY, "to=", "assistant")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")


class HarmonyParser(SegmentParser):
    """An `OutputParser` for Harmony. Without `calls`, messages to functions are visible as they were written.

    `continues`: the prompt ends within a visible body. `held`: a grammar holds the answer. Then the first body that is
    neither reasoning nor a call is text to its end.
    """

    def __init__(self, schemas: Schemas, *, calls: bool, continues: bool = False, held: bool = False) -> None:
        super().__init__()
        self._schemas, self._calls, self._held = schemas, calls, held
        self._is_plain = False
        self._ends = _ENDS
        self._rest = self._header = ""
        self._kind: int | None = TEXT if continues else None
        self._recipient = ""
        self._arguments, self._from = JsonEnd(0), 0
        self._call = Calls(schemas, "call_")

    def feed(self, text: str, tokens: int, has_mark: bool = False) -> list[Segment]:
        """More text of the answer."""
        self._is_plain |= self._held and self._kind == TEXT and not has_mark
        self._rest += text
        self._tokens += tokens
        while self._rest and (self._read_header() if self._kind is None else self._read_body()):
            pass
        return self._taken()

    def finish(self, cut: bool) -> list[Segment]:
        """The answer has ended; a header without a body says nothing and is dropped."""
        if self._kind == CALLED:
            self._end_call(self._rest, cut)
        elif self._kind is not None:
            self._emit(self._kind, self._rest)
        elif "<|" not in self._rest and "to=" not in self._rest:
            self._emit(TEXT, self._rest)
        self._rest, self._kind = "", None
        return self._taken()

    def _read_header(self) -> bool:
        """A header, or text without one; false when more text is needed."""
        head = self._rest.lstrip()
        if not any(head.startswith(mark) or mark.startswith(head) for mark in _HEADS):
            self._kind, self._recipient = TEXT, ""
            return True
        at = self._rest[:_MOST_HEADER].find(_BODY)
        if at < 0:
            if len(self._rest) < _MOST_HEADER:
                return False
            self._emit(TEXT, self._rest[:_MOST_HEADER])
            self._rest = self._rest[_MOST_HEADER:]
            self._kind, self._recipient = TEXT, ""
            return True
        self._header = self._rest[: at + len(_BODY)]
        self._rest = self._rest[at + len(_BODY) :]
        self._begin_body()
        return True

    def _begin_body(self) -> None:
        """What the header says of the body that follows."""
        recipients = _RECIPIENT.findall(self._header)
        channels = _CHANNEL.findall(self._header)
        self._recipient = recipients[-1].removeprefix("functions.") if recipients else ""
        if self._recipient and self._calls:
            self._kind = CALLED
            self._arguments, self._from = JsonEnd(0), 0
            self._call = Calls(self._schemas, "call_")
        elif self._recipient:
            self._kind = TEXT
            self._emit(TEXT, self._header)
        else:
            self._kind = REASONING if channels[-1:] == ["analysis"] else TEXT
            self._is_plain = self._held and self._kind == TEXT

    def _read_body(self) -> bool:
        """Text of a body, up to the mark that ends the body."""
        if self._is_plain:
            self._emit(TEXT, self._rest)
            self._rest = ""
            return False
        if self._kind == CALLED and self._breaks_off():
            return True
        mark = self._ends.find(self._rest) if self._kind != CALLED else self._end_of_arguments()
        if self._kind == CALLED:
            if mark is None:
                return False
            self._end_call(self._rest[: mark.start()])
        else:
            settled = mark.start() if mark else self._ends.settled(self._rest)
            self._emit(TEXT if self._kind is None else self._kind, self._rest[:settled])
            if mark is None:
                self._rest = self._rest[settled:]
                return False
        starts_next = mark[0] in OPENINGS
        self._rest = self._rest[mark.start() if starts_next else mark.end() :]
        self._kind = None
        return True

    def _end_of_arguments(self) -> re.Match[str] | None:
        """The mark behind the arguments of a call; marks in strings of their JSON are text."""
        while mark := self._ends.find(self._rest, self._from):
            self._arguments.pass_over(self._rest, mark.start())
            if not self._arguments.in_string:
                return mark
            self._from = mark.end()
        self._from = self._ends.settled(self._rest)
        return None

    def _breaks_off(self) -> bool:
        """Tell what the body of a call adds; true if the arguments break off, behind which the body is visible."""
        call = self._call
        if not call.count:
            self._tell(call.begin_named(self._rest, self._recipient))
        self._tell(call.go_on(self._rest))
        if call.broken_at is None:
            return False
        self._rest, self._kind = self._rest[call.broken_at :], TEXT
        return bool(self._rest)

    def _end_call(self, body: str, cut: bool = False) -> None:
        """The whole body of a call, or the beginning of one that was cut off."""
        if self._call.count:
            self._tell(self._call.close(len(body), cut=cut))
            return
        arguments = read_arguments(body) if body.strip() or not cut else None
        if arguments is not None:
            self._tell(Call(self._recipient, arguments, "call_").segments())
        elif cut and (parts := self._call.cut_named(self._recipient)):
            self._tell(parts)
        else:
            self._emit(TEXT, self._header + body)
