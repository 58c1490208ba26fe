"""Calls put together from what parsers and choices tell in parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ipc.wire.streams import ARGUMENTS, CALL_CUT, CALL_ENDED, HELD
from workers.generation.request import Emission, Segment


class Told(NamedTuple):
    """One call: all pieces of its arguments, the beginning of its id, and whether it was said to be whole."""

    name: str
    pieces: tuple[str, ...]
    prefix: str
    is_whole: bool

    @property
    def arguments(self) -> str:
        """The sum of the pieces."""
        return "".join(self.pieces)


def calls_in(found: Iterable[Segment | Emission]) -> list[Told]:
    """The calls among segments or emissions of one choice. Fails for parts that stand in no order."""
    calls: list[Told] = []
    is_open = False
    for each in found:
        if each.call is not None:
            assert not is_open, f"a call begins within {calls[-1]}"
            calls.append(Told(each.call.name, (), each.call.prefix, is_whole=False))
            is_open = True
        elif each.kind == ARGUMENTS:
            assert is_open and each.text
            calls[-1] = calls[-1]._replace(pieces=(*calls[-1].pieces, each.text))
        elif each.kind in (CALL_ENDED, CALL_CUT):
            assert is_open
            calls[-1] = calls[-1]._replace(is_whole=each.kind == CALL_ENDED)
            is_open = False
        elif each.kind != HELD:
            assert not is_open, f"{each} stands within {calls[-1]}"
    assert not is_open
    return calls
