"""Neutral events as bytes, so that any frontend can tell the stream of a response again.

Pieces of text of one choice that follow each other become one piece. Pieces with log probabilities stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec

from frontend.engine.events import Called, Ended, Event, Finished, Reasoning, Started, Text

KINDS: tuple[type[Any], ...] = (Started, Text, Reasoning, Called, Finished, Ended)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[tuple[int, msgspec.Raw]])
_decoders = [msgspec.msgpack.Decoder(kind) for kind in KINDS]


def encode(events: Iterable[Event]) -> bytes:
    """The bytes of events."""
    return _encoder.encode([(KINDS.index(type(event)), event) for event in _joined(events)])


def decode(entries: bytes) -> list[Event]:
    """The events of bytes."""
    return [_decoders[kind].decode(event) for kind, event in _decoder.decode(entries)]


def _joined(events: Iterable[Event]) -> list[Event]:
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if (
            isinstance(event, Text | Reasoning)
            and isinstance(last, Text | Reasoning)
            and type(event) is type(last)
            and event.choice == last.choice
            and not (event.logprobs or last.logprobs)
        ):
            joined[-1] = replace(last, text=last.text + event.text, tokens=last.tokens + event.tokens)
        else:
            joined.append(event)
    return joined
