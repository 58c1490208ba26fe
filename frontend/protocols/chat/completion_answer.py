"""The answer of /v1/completions: whole, or a chunk for each event. Both have the object `text_completion`."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from frontend.generation.events import Ended, Event, Finished, Text
from frontend.generation.logprobs import finite, text_of_token
from frontend.generation.outcome import ChoiceOutcome
from frontend.protocols.chat.envelope import Envelope, last_chunks, usage_of
from ipc.wire.generation import TokenLogprob

OBJECT = "text_completion"


class TokenTable:
    """Log probabilities of one choice in the older form of OpenAI: columns, with offsets in characters of the text.

    The tokens of a character that lies in several tokens have the offset of the character.
    """

    def __init__(self, start: int = 0) -> None:
        self._offset = start
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def columns(self, tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
        """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}` of further tokens."""
        told: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token in tokens:
            told["tokens"].append(text_of_token(token.raw))
            told["token_logprobs"].append(finite(token.logprob))
            told["top_logprobs"].append({text_of_token(raw): finite(value) for _, raw, value in token.top})
            told["text_offset"].append(self._offset)
            self._offset += len(self._characters.decode(token.raw))
        return told


def answer_of(
    envelope: Envelope, choices: Sequence[ChoiceOutcome], counts: Ended, echoes: Sequence[str], logprobs: bool
) -> dict[str, Any]:
    """The body; `echoes` has the text that stands in front of each choice."""
    return {
        **envelope.fields(),
        "choices": [
            {
                "index": index,
                "text": echo + choice.text,
                "finish_reason": choice.reason,
                "logprobs": TokenTable(len(echo)).columns(choice.logprobs) if logprobs else None,
            }
            for index, (choice, echo) in enumerate(zip(choices, echoes, strict=True))
        ],
        "usage": usage_of(counts),
    }


class CompletionChunks:
    """Makes the chunks of one request; `echoes` has the text that each choice begins with."""

    def __init__(
        self, envelope: Envelope, echoes: Sequence[str], *, logprobs: bool, include_usage: bool
    ) -> None:
        self._fields = envelope.fields()
        self._open, self._include_usage = len(echoes), include_usage
        self._tables = [TokenTable(len(echo)) for echo in echoes] if logprobs else []
        self._first = [self._chunk(index, echo, None) for index, echo in enumerate(echoes) if echo]
        self._last: dict[str, Any] | None = None

    def feed(self, events: Iterable[Event]) -> list[bytes]:
        """The chunks of more events, each the JSON of one `data:` line."""
        chunks, self._first = self._first, []
        for event in events:
            if isinstance(event, Text):
                chunks.append(self._chunk(event.choice, event.text, None, event.logprobs))
            elif isinstance(event, Finished):
                chunk = self._chunk(event.choice, "", event.reason)
                self._open -= 1
                if self._open:
                    chunks.append(chunk)
                else:
                    self._last = chunk
            elif isinstance(event, Ended):
                chunks += self._end(event)
        return [orjson.dumps(chunk) for chunk in chunks]

    def _chunk(
        self, index: int, text: str, reason: str | None, logprobs: Sequence[TokenLogprob] | None = None
    ) -> dict[str, Any]:
        columns = self._tables[index].columns(logprobs) if self._tables and logprobs else None
        told = {"index": index, "text": text, "finish_reason": reason, "logprobs": columns}
        return {**self._fields, "choices": [told], "usage": None}

    def _end(self, event: Ended) -> list[dict[str, Any]]:
        return last_chunks(self._fields, self._last, event, self._include_usage)
