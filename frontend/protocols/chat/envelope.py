"""What every answer of this contract begins and ends with: identity and usage."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from frontend.engine.events import Called, Ended
from frontend.generation.sending import new_id

FINGERPRINT = "local"


@dataclass(frozen=True, slots=True)
class Envelope:
    """Id, object, instant and model of an answer, whole or in chunks; `created` is in seconds since 1970."""

    id: str
    object: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, kind: str, model: str) -> Envelope:
        """An envelope with a new id, unique over all processes."""
        return cls(new_id(f"{prefix}-"), kind, int(time.time()), model)

    def fields(self) -> dict[str, Any]:
        """The fields in the order of the contract."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }


def usage_of(ended: Ended) -> dict[str, Any]:
    """Token counts, times in seconds, and tokens per second (0 where no time passed)."""
    total = ended.prompt_tokens + ended.completion_tokens
    total_s = ended.prompt_s + ended.completion_s
    return {
        "prompt_tokens": ended.prompt_tokens,
        "completion_tokens": ended.completion_tokens,
        "total_tokens": total,
        "avg_tok_per_sec": _rate(total, total_s),
        "avg_prompt_tok_per_sec": _rate(ended.prompt_tokens, ended.prompt_s),
        "avg_compl_tok_per_sec": _rate(ended.completion_tokens, ended.completion_s),
        "total_time_sec": round(total_s, 6),
        "total_prompt_time_sec": round(ended.prompt_s, 6),
        "total_completion_time_sec": round(ended.completion_s, 6),
        "prompt_tokens_details": {"cached_tokens": ended.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": ended.reasoning_tokens},
    }


def last_chunks(
    fields: dict[str, Any], last: dict[str, Any] | None, ended: Ended, include_usage: bool
) -> list[dict[str, Any]]:
    """The end of a stream: the chunk that finishes the `last` choice, and with `include_usage` one without choices.

    One of both has the usage, since some clients add up the usage of all chunks. `fields` begin each chunk.
    """
    usage = usage_of(ended)
    if include_usage:
        return [*([last] if last else []), {**fields, "choices": [], "usage": usage}]
    return [{**last, "usage": usage}] if last else []


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 3) if seconds > 0 else 0.0


def call_of(call: Called, *, indexed: bool) -> dict[str, Any]:
    """A tool call; chunks tell its index among the calls of the choice."""
    function = {"name": call.name, "arguments": call.arguments}
    told = {"id": call.id, "type": "function", "function": function}
    return {"index": call.index, **told} if indexed else told
