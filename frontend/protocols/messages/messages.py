"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

import falcon
import orjson
from falcon.asgi import Request, Response

from frontend.generation import bodies
from frontend.generation.outcome import Outcome
from frontend.generation.running import named_model, running
from frontend.generation.sending import new_id, send_json, send_stream
from frontend.protocols.messages.errors import status_of, stream_error
from frontend.protocols.messages.message_answer import answer_of
from frontend.protocols.messages.message_events import PING, MessageEvents
from frontend.protocols.messages.message_requests import MessagesPlan, parse, parse_count
from frontend.resources.inference import InferenceRoute
from frontend.scope import RequestScope
from frontend.sse import COMMENT, named
from ipc.catalog.entries import ModelEntry
from ipc.errors import PenstockError

PROTOCOL = "messages"


class MessagesResource(InferenceRoute):
    """One conversation, answered whole or as a stream of named events."""

    operation = "messages"

    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: str) -> None:
        """One request."""
        services = self.services
        plan = await bodies.receive(services, req, partial(parse, limits=services.settings.limits))
        entry, identity = named_model(services, scope, plan.model), new_id("msg_")
        if plan.streams:
            message = MessageEvents(identity, entry.id, logprobs=plan.has_logprobs)
            events = self._events(req, scope, entry, plan, message)
            await send_stream(
                services, req, resp, events, PROTOCOL, last_event, opening=message.open, idle=COMMENT + PING
            )
            return
        outcome = Outcome(plan.call.n)
        async with running(services, req, scope, entry, plan.call) as generation:
            await outcome.gather(generation)
        await send_json(resp, partial(answer_of, identity, entry.id, logprobs=plan.has_logprobs), outcome)

    async def _events(
        self, req: Request, scope: RequestScope, entry: ModelEntry, plan: MessagesPlan, message: MessageEvents
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream; the first once the prompt has been accepted."""
        async with running(self.services, req, scope, entry, plan.call) as generation:
            yield message.open(generation.prompt_tokens)
            async for events in generation:
                if told := message.feed(events):
                    yield b"".join(told)


class CountTokensResource(InferenceRoute):
    """The number of tokens of a prompt, which is the `input_tokens` of its answer."""

    operation = "count_tokens"

    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: str) -> None:
        """One request."""
        services = self.services
        plan = await bodies.receive(services, req, partial(parse_count, limits=services.settings.limits))
        entry = named_model(services, scope, plan.model)
        outcome = Outcome(plan.call.n)
        async with running(services, req, scope, entry, plan.call) as generation:
            await outcome.gather(generation)
        resp.content_type = falcon.MEDIA_JSON
        resp.data = orjson.dumps({"input_tokens": outcome.counts.prompt_tokens})


def last_event(error: PenstockError) -> tuple[int, bytes]:
    """(status to count, event) of an error that ends a stream."""
    return status_of(error), named("error", orjson.dumps(stream_error(error)))
