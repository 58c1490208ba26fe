"""Sends answers of generated text: JSON that is whole, or events while the text comes."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable
from http import HTTPStatus
from typing import Any

import falcon
import orjson
from falcon.asgi import Request, Response

from frontend.engine.events import Generation
from frontend.generation.errors import status_of
from frontend.generation.outcome import Outcome
from frontend.http.rendering import off_loop_if
from frontend.services import Services
from frontend.sse import COMMENT, CONTENT_TYPE, EventStream, Opening, RenderError, comment
from ipc.errors import PenstockError

MANY_TOKENS = 2048
"""Log probabilities of more tokens are written by a thread."""

Render = Callable[[Outcome], dict[str, Any]]
"""The body of an outcome."""


def new_id(prefix: str) -> str:
    """An id that no other process gives: `prefix` and 32 hexadecimal digits."""
    return f"{prefix}{random.getrandbits(128):032x}"


async def gathered(generation: Generation, choices: int, render: Render) -> Outcome:
    """All that a generation gives. The error of a model that fails has the answer so far as its `partial_response`."""
    outcome = Outcome(choices)
    try:
        await outcome.gather(generation)
    except PenstockError as error:
        if status_of(error) == HTTPStatus.INTERNAL_SERVER_ERROR and not outcome.is_empty:
            error.detail["partial_response"] = render(outcome)
        raise
    return outcome


async def send_json(resp: Response, render: Render, outcome: Outcome) -> None:
    """Answer with the body of an outcome."""
    long = sum(len(each.logprobs) + len(each.prompt_tokens) for each in outcome.choices) > MANY_TOKENS
    resp.content_type = falcon.MEDIA_JSON
    resp.data = await off_loop_if(long, lambda: orjson.dumps(render(outcome)))


async def send_stream(
    services: Services,
    req: Request,
    resp: Response,
    events: AsyncGenerator[bytes, None],
    protocol: str,
    last_events: RenderError,
    *,
    opening: Opening = comment,
    idle: bytes = COMMENT,
    content_type: str = CONTENT_TYPE,
) -> None:
    """Answer with `events`, whose first piece says that the stream has begun. Raises what fails before that.

    `last_events` end a stream that fails; `idle` is sent at the keep-alive interval while no event comes, and `opening`
    in place of the first.
    """
    idle_s = services.settings.generation.keep_alive_s
    stream = EventStream(
        services, req, events, protocol, last_events, opening=opening, idle=idle, idle_s=idle_s
    )
    await stream.begin()
    stream.answer(resp, content_type)
