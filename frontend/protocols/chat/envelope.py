"""What every answer of this contract begins and ends with: identity, usage, and `data: [DONE]` behind a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import orjson
from falcon.asgi import Request, Response

from frontend.engine.events import Called, Ended
from frontend.generation.errors import status_of, stream_error
from frontend.generation.sending import new_id, send_stream
from frontend.services import Services
from frontend.sse import DONE, data
from ipc.errors import PenstockError

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


PROTOCOL = "chat"


async def send_events(
    services: Services, req: Request, resp: Response, events: AsyncGenerator[bytes, None]
) -> None:
    """Answer with `events`, whose first piece says that the stream has begun. Raises what fails before that."""
    await send_stream(services, req, resp, events, PROTOCOL, last_events)


def last_events(error: PenstockError) -> tuple[int, bytes]:
    """(status to count, events) of an error that ends a stream."""
    return status_of(error), data(orjson.dumps(stream_error(error))) + DONE
