"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

from falcon.asgi import Request, Response

from frontend.generation import bodies
from frontend.generation.running import named_model, running
from frontend.generation.sending import gathered, send_json
from frontend.protocols.chat import chat_answer, chat_chunks
from frontend.protocols.chat.chat_requests import ChatPlan, parse
from frontend.protocols.chat.envelope import Envelope
from frontend.protocols.chat.sending import send_events
from frontend.resources.inference import InferenceRoute
from frontend.scope import RequestScope
from frontend.sse import DONE, data
from ipc.catalog.entries import ModelEntry


class ChatResource(InferenceRoute):
    """One conversation, answered whole or as a stream of chunks."""

    operation = "chat"

    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: str) -> None:
        """One request."""
        services = self.services
        plan = await bodies.receive(services, req, partial(parse, limits=services.settings.limits))
        entry = named_model(services, scope, plan.model)
        if plan.streams:
            await send_events(services, req, resp, self._chunks(req, scope, entry, plan))
            return
        envelope = Envelope.new("chatcmpl", chat_answer.OBJECT, entry.id)
        render = partial(chat_answer.answer_of, envelope, logprobs=plan.has_logprobs)
        async with running(services, req, scope, entry, plan.call) as generation:
            outcome = await gathered(generation, plan.call.n, render)
        await send_json(resp, render, outcome)

    async def _chunks(
        self, req: Request, scope: RequestScope, entry: ModelEntry, plan: ChatPlan
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream, after an empty piece once the prompt has been accepted."""
        envelope = Envelope.new("chatcmpl", chat_chunks.OBJECT, entry.id)
        chunks = chat_chunks.ChatChunks(
            envelope, plan.call.n, logprobs=plan.has_logprobs, include_usage=plan.include_usage
        )
        async with running(self.services, req, scope, entry, plan.call) as generation:
            yield b""
            async for events in generation:
                if made := chunks.feed(events):
                    yield b"".join(map(data, made))
        yield DONE
