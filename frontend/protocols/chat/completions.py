"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from falcon.asgi import Request, Response

from frontend.engine.events import Generation
from frontend.generation import bodies
from frontend.generation.outcome import ChoiceOutcome, Outcome
from frontend.generation.running import named_model, running
from frontend.generation.sending import gathered, send_json
from frontend.generation.together import entered
from frontend.protocols.chat.completion_answer import OBJECT, CompletionChunks, Told, answer_of
from frontend.protocols.chat.completion_requests import CompletionPlan, parse
from frontend.protocols.chat.envelope import Envelope
from frontend.protocols.chat.sending import send_events
from frontend.resources.inference import InferenceRoute
from frontend.scope import RequestScope
from frontend.sse import DONE, data
from ipc.catalog.entries import ModelEntry


class CompletionsResource(InferenceRoute):
    """Some prompts, answered whole or as a stream of chunks."""

    operation = "completions"

    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: str) -> None:
        """One request."""
        services = self.services
        plan = await bodies.receive(services, req, partial(parse, limits=services.settings.limits))
        entry = named_model(services, scope, plan.model)
        envelope = Envelope.new("cmpl", OBJECT, entry.id)
        if plan.streams:
            events = self._chunks(req, scope, entry, plan, envelope)
            await send_events(services, req, resp, events)
            return
        render = partial(_body, envelope, plan)
        async with self._running(req, scope, entry, plan) as generation:
            outcome = await gathered(generation, plan.calls[0].n * len(plan.calls), render)
        await send_json(resp, render, outcome)

    async def _chunks(
        self, req: Request, scope: RequestScope, entry: ModelEntry, plan: CompletionPlan, envelope: Envelope
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream, after an empty piece once the prompts have been accepted."""
        chunks = CompletionChunks(
            envelope,
            plan.echoes,
            plan.kept,
            logprobs=plan.has_logprobs,
            include_usage=plan.include_usage,
        )
        async with self._running(req, scope, entry, plan) as generation:
            yield b""
            async for events in generation:
                if made := chunks.feed(events):
                    yield b"".join(map(data, made))
        yield DONE

    @asynccontextmanager
    async def _running(
        self, req: Request, scope: RequestScope, entry: ModelEntry, plan: CompletionPlan
    ) -> AsyncIterator[Generation]:
        """All prompts at once, as one generation."""
        async with AsyncExitStack() as stack:
            generations = [
                await stack.enter_async_context(running(self.services, req, scope, entry, call))
                for call in plan.calls
            ]
            yield await entered(stack, generations, plan.calls[0].n)


def _body(envelope: Envelope, plan: CompletionPlan, outcome: Outcome) -> dict[str, Any]:
    generated, choices, echoes = plan.calls[0].n, outcome.choices, iter(plan.echoes)
    groups = [choices[start : start + generated] for start in range(0, len(choices), generated)]
    told = [
        Told(choice, group[0], next(echoes)) for group in groups for choice in _likeliest(group, plan.kept)
    ]
    return answer_of(envelope, told, outcome.counts, plan.has_logprobs)


def _likeliest(choices: list[ChoiceOutcome], kept: int) -> list[ChoiceOutcome]:
    """The `kept` choices of one prompt with the highest mean log probability, likeliest first; all in their order."""
    return choices if len(choices) == kept else sorted(choices, key=_mean_logprob, reverse=True)[:kept]


def _mean_logprob(choice: ChoiceOutcome) -> float:
    if not choice.logprobs:
        return float("-inf")
    return sum(token.logprob for token in choice.logprobs) / len(choice.logprobs)
