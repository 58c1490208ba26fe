"""The stream of /v1/chat/completions: a chunk of JSON for each event.

1. Text and reasoning leave as they come. The role stands on every delta.
2. The calls of a choice leave together, in the chunk with its finish reason.
3. The chunk that finishes the last choice waits for the counts of the request, and has the usage.
4. `include_usage` adds a chunk without choices that has the usage in place of the finishing one: clients add them up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from frontend.engine.events import Called, Ended, Event, Finished, Reasoning, Started, Text
from frontend.generation.logprobs import entries_of
from frontend.generation.outcome import finish_reason
from frontend.protocols.chat.envelope import Envelope, call_of, last_chunks

OBJECT = "chat.completion.chunk"


class ChatChunks:
    """Makes the chunks of one request with `choices` choices."""

    def __init__(self, envelope: Envelope, choices: int, *, logprobs: bool, include_usage: bool) -> None:
        self._fields = envelope.fields()
        # PERF: the bytes around a text are the same for every chunk of the request.
        self._head = orjson.dumps(self._fields)[:-1] + b',"choices":[{"index":'
        self._open, self._logprobs, self._include_usage = choices, logprobs, include_usage
        self._calls: dict[int, list[Called]] = {}
        self._last: dict[str, Any] | None = None

    def feed(self, events: Iterable[Event]) -> list[bytes]:
        """The chunks of more events, each the JSON of one `data:` line."""
        chunks: list[bytes] = []
        for event in events:
            if isinstance(event, Text):
                chunks.append(self._text(event))
            elif isinstance(event, Reasoning):
                chunks.append(self._reasoning(event))
            elif isinstance(event, Called):
                self._calls.setdefault(event.choice, []).append(event)
            elif isinstance(event, Finished):
                chunks += self._finish(event)
            elif isinstance(event, Ended):
                chunks += self._end(event)
            else:
                assert isinstance(event, Started)
        return chunks

    def _text(self, event: Text) -> bytes:
        if event.logprobs and self._logprobs:
            return self._dumped(event.choice, {"content": event.text, "tool_calls": None}, event.logprobs)
        return b'%s%d,"delta":{"role":"assistant","content":%s,"tool_calls":null},%s' % (
            self._head,
            event.choice,
            orjson.dumps(event.text),
            b'"finish_reason":null,"logprobs":null}],"usage":null}',
        )

    def _reasoning(self, event: Reasoning) -> bytes:
        delta = {"content": None, "tool_calls": None, "reasoning_content": event.text}
        return self._dumped(event.choice, delta, event.logprobs if self._logprobs else None)

    def _dumped(self, choice: int, delta: dict[str, Any], logprobs: Any) -> bytes:
        return orjson.dumps(self._chunk(choice, delta, None, logprobs))

    def _chunk(
        self, choice: int, delta: dict[str, Any], reason: str | None, logprobs: Any = None
    ) -> dict[str, Any]:
        told = {
            "index": choice,
            "delta": {"role": "assistant", **delta},
            "finish_reason": reason,
            "logprobs": {"content": entries_of(logprobs)} if logprobs else None,
        }
        return {**self._fields, "choices": [told], "usage": None}

    def _finish(self, event: Finished) -> list[bytes]:
        """The chunk of a choice that ends; that of the last one waits for the usage."""
        calls = self._calls.pop(event.choice, [])
        told = [call_of(call, indexed=True) for call in calls] or None
        delta = {"content": None if calls else "", "tool_calls": told}
        parts: list[Called | Finished] = [*calls, event] if self._logprobs else []
        logprobs = [token for part in parts for token in part.logprobs or ()]
        chunk = self._chunk(event.choice, delta, finish_reason(event, bool(calls)), logprobs)
        self._open -= 1
        if self._open:
            return [orjson.dumps(chunk)]
        self._last = chunk
        return []

    def _end(self, event: Ended) -> list[bytes]:
        chunks = last_chunks(self._fields, self._last, event, self._include_usage)
        return [orjson.dumps(chunk) for chunk in chunks]
