"""The stream of /v1/messages: named events, from `message_start` to `message_stop`.

1. `message_start` leaves once the prompt is tokenized, with the number of its tokens. A stream that opens before, since
   the request waits, tells 0 tokens there; `message_delta` has the true number always.
2. Blocks come in the order of arrival. Text closes a block of reasoning and the reverse; a call is a block of its own.
3. `message_delta` waits for the counts of the request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from frontend.engine.events import Called, Ended, Event, Finished, Reasoning, Started, Text
from frontend.generation.logprobs import entries_of
from frontend.protocols.messages.message_answer import (
    call_block,
    envelope,
    stop_of,
    thinking_block,
    usage_of,
)
from frontend.sse import named
from ipc.wire.generation import TokenLogprob

PING = named("ping", b'{"type":"ping"}')
_TEXT, _THINKING = "text", "thinking"


class MessageEvents:
    """Makes the framed events of one message."""

    def __init__(self, identity: str, model: str, *, logprobs: bool) -> None:
        self._identity, self._model, self._logprobs = identity, model, logprobs
        self._index = -1
        self._open = ""
        self._is_started = False
        self._has_calls = False
        self._finished = Finished(0, "canceled")

    def feed(self, events: Iterable[Event]) -> list[bytes]:
        """The events of the contract for more events of the generation."""
        told: list[bytes] = []
        for event in events:
            if isinstance(event, Text):
                told += self._spoken(_TEXT, event)
            elif isinstance(event, Reasoning):
                told += self._spoken(_THINKING, event)
            elif isinstance(event, Called):
                told += self._called(event)
            elif isinstance(event, Finished):
                self._finished = event
            elif isinstance(event, Ended):
                told += self._end(event)
            elif isinstance(event, Started) and not self._is_started:
                told.append(self.open(event.prompt_tokens))
        return told

    def open(self, prompt_tokens: int | None = 0) -> bytes:
        """`message_start` with the tokens of the prompt, 0 while they are unknown. Empty if it is told, or for None."""
        if self._is_started or prompt_tokens is None:
            return b""
        self._is_started = True
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        told = {**envelope(self._identity, self._model), "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**told, "usage": usage})

    def _spoken(self, kind: str, event: Text | Reasoning) -> list[bytes]:
        """A piece of text or of reasoning, in the open block if that is of its kind."""
        if not event.text and not event.logprobs:
            return []
        told = [] if self._open == kind else self._begin(kind)
        if entries := self._entries(event.logprobs):
            delta = {"type": f"{kind}_delta", kind: event.text}
            told.append(_event("content_block_delta", index=self._index, delta=delta, **entries))
        else:
            told.append(_piece(self._index, kind, event.text))
        return told

    def _entries(self, logprobs: list[TokenLogprob] | None) -> dict[str, Any]:
        """The field that stands beside a delta; none where the request asks for none."""
        return {"logprobs": {"content": entries_of(logprobs)}} if logprobs and self._logprobs else {}

    def _begin(self, kind: str) -> list[bytes]:
        """The end of the open block, and the beginning of another one."""
        block = thinking_block("") if kind == _THINKING else {"type": _TEXT, "text": ""}
        told = self._stop()
        self._open = kind
        self._index += 1
        return [*told, _event("content_block_start", index=self._index, content_block=block)]

    def _stop(self) -> list[bytes]:
        if not self._open:
            return []
        self._open = ""
        return [_event("content_block_stop", index=self._index)]

    def _called(self, event: Called) -> list[bytes]:
        told = self._stop()
        self._index += 1
        self._has_calls = True
        delta = {"type": "input_json_delta", "partial_json": event.arguments}
        entries = self._entries(event.logprobs)
        return [
            *told,
            _event("content_block_start", index=self._index, content_block=call_block(event)),
            _event("content_block_delta", index=self._index, delta=delta, **entries),
            _event("content_block_stop", index=self._index),
        ]

    def _end(self, event: Ended) -> list[bytes]:
        delta = stop_of(self._finished, self._has_calls)
        return [
            *self._stop(),
            _event(
                "message_delta", delta=delta, usage=usage_of(event), **self._entries(self._finished.logprobs)
            ),
            _event("message_stop"),
        ]


def _event(name: str, **fields: Any) -> bytes:
    return named(name, orjson.dumps({"type": name, **fields}))


def _piece(index: int, kind: str, text: str) -> bytes:
    # PERF: most events of a stream are such pieces.
    return (
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
        b'"delta":{"type":"%s_delta","%s":%s}}\n\n'
    ) % (index, kind.encode(), kind.encode(), orjson.dumps(text))
