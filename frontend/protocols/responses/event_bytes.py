"""Neutral events as bytes, so that any frontend can tell the stream of a response again.

Pieces of text of one choice that follow each other become one piece, and so do those of arguments. Pieces with log
probabilities stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from frontend.engine.events import (
    Arguments,
    Asked,
    CallBegun,
    CallEnded,
    Calling,
    Completed,
    Ended,
    Event,
    Finished,
    Produced,
    Reasoning,
    Session,
    Started,
    Text,
)
from frontend.protocols.responses.items import DamagedEvents

_OF_MODELS = (Started, Text, Reasoning, CallBegun, Arguments, CallEnded, Finished, Ended)
_OF_TOOLS = (Calling, Asked, Produced, Completed, Session)
KINDS: tuple[type[Any], ...] = (*_OF_MODELS, *_OF_TOOLS)
"""Kinds of events by the number that stands for each in the file."""
_encoder = msgspec.msgpack.Encoder()
_Kind = Annotated[int, msgspec.Meta(ge=0, lt=len(KINDS))]
_decoder = msgspec.msgpack.Decoder(list[tuple[_Kind, msgspec.Raw]])
_decoders = [msgspec.msgpack.Decoder(kind) for kind in KINDS]


def encode(events: Iterable[Event]) -> bytes:
    """The bytes of events."""
    return _encoder.encode([(KINDS.index(type(event)), event) for event in _joined(events)])


def decode(entries: bytes) -> list[Event]:
    """The events of bytes. Raises `DamagedEvents`."""
    try:
        return [_decoders[kind].decode(event) for kind, event in _decoder.decode(entries)]
    # NOTE: text that is no UTF-8 is no error of msgspec's own.
    except ValueError as error:
        raise DamagedEvents(str(error)) from error


def _joined(events: Iterable[Event]) -> list[Event]:
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if not (
            isinstance(event, Text | Reasoning | Arguments)
            and isinstance(last, Text | Reasoning | Arguments)
            and type(event) is type(last)
            and event.choice == last.choice
            and not (event.logprobs or last.logprobs)
        ):
            joined.append(event)
        elif isinstance(last, Arguments) or isinstance(event, Arguments):
            joined[-1] = msgspec.structs.replace(last, text=last.text + event.text)
        else:
            text, tokens = last.text + event.text, last.tokens + event.tokens
            joined[-1] = msgspec.structs.replace(last, text=text, tokens=tokens)
    return joined
