"""Which calls of a choice leave, and when: the parts of calls between parser and `Emission`s.

1. Where an answer may have one call, a second one ends the choice as soon as it begins.
2. Where the model must call, a call that repeats an earlier one ends the choice. The parts of a call wait while the
   call may still become such a repetition. A model that must call cannot stop between two calls unless the model has
   learned to: without this rule such a model makes the same call again and again.
3. Where arguments leave in one piece, the parts of a call wait for the end of the call.
"""

from __future__ import annotations

from collections.abc import Iterable

from ipc.wire.messages import ToolUse
from ipc.wire.streams import ARGUMENTS, CALL_CUT, CALL_ENDED, CALLED
from workers.generation.request import Segment

PARTS = frozenset((CALLED, ARGUMENTS, CALL_ENDED, CALL_CUT))
"""Kinds of segments that tell a call."""


class CalledFunctions:
    """The calls of one choice. `is_over`: a call has come that the request does not want.

    `count` is the number of calls that have left, or are about to.
    """

    def __init__(self, tools: ToolUse | None, *, in_pieces: bool) -> None:
        self.is_over = False
        self.count = 0
        self._is_single = tools is not None and tools.is_single
        self._must_differ = tools is not None and tools.choice == "required" and not tools.is_single
        self._in_pieces = in_pieces
        self._earlier: list[tuple[str, str]] = []
        self._name = ""
        self._texts: list[str] = []
        self._length = 0
        self._rivals: list[str] = []
        """Arguments of earlier calls of the same function that begin with those of the present call."""
        self._held: list[Segment] = []

    def take(self, segment: Segment) -> list[Segment]:
        """The parts that leave, once a further part of a call is known."""
        if segment.call is not None:
            if self._is_single and self.count:
                self.is_over = True
                return []
            self._begin(segment.call.name)
        elif segment.kind == ARGUMENTS:
            self._grow(segment.text)
        has_ended = segment.kind in (CALL_ENDED, CALL_CUT)
        if segment.kind == CALL_ENDED and self._repeats():
            self.is_over = True
            self.count -= 1
            return []
        self._held.append(segment)
        if not has_ended and (self._rivals or not self._in_pieces):
            return []
        parts, self._held = self._held, []
        return parts if self._in_pieces else _joined(parts)

    def _begin(self, name: str) -> None:
        self.count += 1
        self._name, self._texts, self._length = name, [], 0
        self._rivals = [arguments for earlier, arguments in self._earlier if earlier == name]

    def _grow(self, text: str) -> None:
        if self._must_differ:
            self._rivals = [rival for rival in self._rivals if rival.startswith(text, self._length)]
            self._texts.append(text)
            self._length += len(text)

    def _repeats(self) -> bool:
        """Whether the call that ends is an earlier one again; else the call is an earlier one from now on."""
        if not self._must_differ:
            return False
        if any(len(rival) == self._length for rival in self._rivals):
            return True
        self._earlier.append((self._name, "".join(self._texts)))
        return False


def _joined(parts: Iterable[Segment]) -> list[Segment]:
    """The parts of one call with all arguments in one piece."""
    begun, *pieces, end = parts
    if not pieces:
        return [begun, end]
    text, tokens = "".join(piece.text for piece in pieces), sum(piece.tokens for piece in pieces)
    return [begun, Segment(ARGUMENTS, text, tokens=tokens), end]
