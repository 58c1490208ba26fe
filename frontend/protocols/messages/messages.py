"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

import falcon
import orjson
from falcon.asgi import Request, Response

from frontend.engine.scope import RequestScope
from frontend.generation import bodies
from frontend.generation.outcome import Outcome
from frontend.generation.running import find_loaded, running
from frontend.generation.sending import new_id, send_json, send_stream
from frontend.http.inference import InferenceRoute
from frontend.protocols.messages.errors import status_of, stream_error
from frontend.protocols.messages.message_answer import answer_of
from frontend.protocols.messages.message_events import PING, MessageEvents
from frontend.protocols.messages.message_requests import MessagesPlan, parse, parse_count
from frontend.sse import COMMENT, named
from ipc.catalog.entries import ModelEntry
from ipc.errors import PenstockError
from ipc.wire.messages import ModelStatus

PROTOCOL = "messages"


class MessagesResource(InferenceRoute):
    """One conversation, answered whole or as a stream of named events."""

    operation = "messages"

    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: str) -> None:
        """One request."""
        services = self.services
        plan = await bodies.receive(services, req, partial(parse, limits=services.settings.limits))
        entry, status = await find_loaded(services, req, scope, plan.model)
        identity = new_id("msg_")
        if plan.streams:
            events = self._events(scope, entry, status, plan, identity)
            await send_stream(services, req, resp, events, PROTOCOL, last_event, idle=COMMENT + PING)
            return
        outcome = Outcome(plan.call.n)
        async with running(services, scope, entry, status, plan.call) as generation:
            await outcome.gather(generation)
        await send_json(resp, partial(answer_of, identity, entry.id, logprobs=plan.has_logprobs), outcome)

    async def _events(
        self, scope: RequestScope, entry: ModelEntry, status: ModelStatus, plan: MessagesPlan, identity: str
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream, after an empty piece once the prompt has been accepted."""
        made = MessageEvents(identity, entry.id, logprobs=plan.has_logprobs)
        async with running(self.services, scope, entry, status, plan.call) as generation:
            yield b""
            async for events in generation:
                if told := made.feed(events):
                    yield b"".join(told)


class CountTokensResource(InferenceRoute):
    """The number of tokens of a prompt, which is the `input_tokens` of its answer."""

    operation = "count_tokens"

    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: str) -> None:
        """One request."""
        services = self.services
        plan = await bodies.receive(services, req, partial(parse_count, limits=services.settings.limits))
        entry, status = await find_loaded(services, req, scope, plan.model)
        outcome = Outcome(plan.call.n)
        async with running(services, scope, entry, status, plan.call) as generation:
            await outcome.gather(generation)
        resp.content_type = falcon.MEDIA_JSON
        resp.data = orjson.dumps({"input_tokens": outcome.counts.prompt_tokens})


def last_event(error: PenstockError) -> tuple[int, bytes]:
    """(status to count, event) of an error that ends a stream."""
    return status_of(error), named("error", orjson.dumps(stream_error(error)))
