"""POST /v1/completions: the resource, and its answer, whole and as a chunk for each event.

Both forms of the answer have the object `text_completion`.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import orjson
from falcon.asgi import Request, Response

from frontend.engine.events import Ended, Event, Finished, Generation, Prompted, Text
from frontend.generation import bodies
from frontend.generation.logprobs import finite, text_of_token
from frontend.generation.outcome import ChoiceOutcome, Outcome
from frontend.generation.running import named_model, running
from frontend.generation.sending import gathered, send_json
from frontend.generation.together import entered
from frontend.protocols.chat.completion_requests import CompletionPlan, parse
from frontend.protocols.chat.envelope import Envelope, last_chunks, send_events, usage_of
from frontend.resources.sending import InferenceRoute
from frontend.scope import RequestScope
from frontend.sse import DONE, data
from ipc.catalog.entries import ModelEntry
from ipc.wire.streams import PromptToken, TokenLogprob

OBJECT = "text_completion"


class TokenTable:
    """Log probabilities of one choice in the older form of OpenAI: columns, with offsets in characters of the text.

    The tokens of a character that lies in several tokens have the offset of the character. The first token of a prompt
    has no log probability: null.
    """

    def __init__(self, start: int = 0) -> None:
        self._offset = start
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def begin(self, offset: int) -> None:
        """The text of the choice begins so many characters behind the begin of its prompt."""
        self._offset = offset

    def columns(self, tokens: Iterable[PromptToken | TokenLogprob]) -> dict[str, Any]:
        """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}` of further tokens."""
        told: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token in tokens:
            told["tokens"].append(text_of_token(token.raw))
            told["token_logprobs"].append(None if token.logprob is None else finite(token.logprob))
            told["top_logprobs"].append(_likely(token))
            if isinstance(token, PromptToken):
                told["text_offset"].append(token.start)
            else:
                told["text_offset"].append(self._offset)
                self._offset += len(self._characters.decode(b"" if token.is_silent else token.raw))
        return told


def _likely(token: PromptToken | TokenLogprob) -> dict[str, float] | None:
    """Log probabilities by text: the likeliest tokens and the token itself, of two with one text the likelier."""
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for raw, value in (*((raw, value) for _, raw, value in token.top), (token.raw, token.logprob)):
        found.setdefault(text_of_token(raw), finite(value))
    return found


class Told(NamedTuple):
    """One choice of an answer, and the choice that has its prompt; `echo` is the text of the prompt where known."""

    choice: ChoiceOutcome
    prompt: ChoiceOutcome
    echo: str


def answer_of(envelope: Envelope, told: Sequence[Told], counts: Ended, logprobs: bool) -> dict[str, Any]:
    """The body."""
    return {
        **envelope.fields(),
        "choices": [_choice(index, each, logprobs) for index, each in enumerate(told)],
        "usage": usage_of(counts),
    }


def _choice(index: int, told: Told, logprobs: bool) -> dict[str, Any]:
    choice, prompt = told.choice, told.prompt
    before = told.echo + "".join(prompt.prompt_texts)
    tokens: list[PromptToken | TokenLogprob] = [*prompt.prompt_tokens, *choice.logprobs]
    return {
        "index": index,
        "text": before + choice.text,
        "finish_reason": choice.reason,
        "logprobs": TokenTable(len(before)).columns(tokens) if logprobs else None,
    }


class CompletionChunks:
    """Makes the chunks of one request with `n` choices a prompt; `echoes` has the text that each choice begins with."""

    def __init__(
        self, envelope: Envelope, echoes: Sequence[str], n: int, *, logprobs: bool, include_usage: bool
    ) -> None:
        self._fields, self._n = envelope.fields(), n
        self._open, self._include_usage = len(echoes), include_usage
        self._tables = [TokenTable(len(echo)) for echo in echoes] if logprobs else []
        self._first = [self._chunk(index, echo, None) for index, echo in enumerate(echoes) if echo]
        self._last: dict[str, Any] | None = None

    def feed(self, events: Iterable[Event]) -> list[bytes]:
        """The chunks of more events, each the JSON of one `data:` line."""
        chunks, self._first = self._first, []
        for event in events:
            if isinstance(event, Prompted):
                chunks += [
                    self._prompt(index, event) for index in range(event.choice, event.choice + self._n)
                ]
            elif isinstance(event, Text):
                chunks.append(self._chunk(event.choice, event.text, None, event.logprobs))
            elif isinstance(event, Finished):
                chunk = self._chunk(event.choice, "", event.reason, event.logprobs)
                self._open -= 1
                if self._open:
                    chunks.append(chunk)
                else:
                    self._last = chunk
            elif isinstance(event, Ended):
                chunks += self._end(event)
        return [orjson.dumps(chunk) for chunk in chunks]

    def _prompt(self, index: int, piece: Prompted) -> dict[str, Any]:
        if self._tables:
            self._tables[index].begin(piece.start + len(piece.text))
        return self._chunk(index, piece.text, None, piece.tokens)

    def _chunk(
        self,
        index: int,
        text: str,
        reason: str | None,
        logprobs: Sequence[PromptToken | TokenLogprob] | None = None,
    ) -> dict[str, Any]:
        columns = self._tables[index].columns(logprobs) if self._tables and logprobs else None
        told = {"index": index, "text": text, "finish_reason": reason, "logprobs": columns}
        return {**self._fields, "choices": [told], "usage": None}

    def _end(self, event: Ended) -> list[dict[str, Any]]:
        return last_chunks(self._fields, self._last, event, self._include_usage)


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
