"""POST /v1/completions: the resource, and its answer, whole and as a chunk for each event.

Both forms of the answer have the object `text_completion`.

Requests of /v1/completions: the body, and a call for each of its prompts.

1. A prompt is text or a list of token ids; a list of prompts asks for choices of each, in the order of the prompts.
2. `best_of` choices are generated for each prompt, and the `n` likeliest of them are the answer.
3. An `echo` of text is known here. A worker tells the text of token ids, and the log probabilities of a prompt.
4. A `suffix` has an effect only in models that fill in; those of this server do not.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import orjson
from falcon.asgi import Request, Response
from msgspec import Meta

from frontend.engine.events import Ended, Event, Finished, Generation, Prompted, Text
from frontend.generation.errors import InvalidField, shown
from frontend.generation.fields import (
    MAX_ALTERNATIVES,
    MAX_CHOICES,
    SamplingFields,
    choices_of,
    ending_of,
    salt_of,
    sampling_of,
)
from frontend.generation.nested import grammar_of
from frontend.generation.outcome import ChoiceOutcome, Outcome, entered, finite, text_of_token
from frontend.generation.requests import decode, named_model, receive
from frontend.generation.running import gathered, running, send_json
from frontend.protocols.chat.chat import StreamOptions, send_events
from frontend.protocols.chat.output import Envelope, Usage, last_chunks, usage_of
from frontend.scope import RequestScope
from frontend.sending import DONE, InferenceRoute, data
from ipc.catalog.entries import ModelEntry
from ipc.settings import Limits
from ipc.wire.messages import GenerateCall
from ipc.wire.streams import PromptToken, TokenLogprob

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Prompt = str | list[int]
OBJECT = "text_completion"


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        str | list[TokenId | str | list[TokenId]],
        Meta(description="A text, the token ids of one, or a list of either."),
    ]
    model: Annotated[str | None, Meta(description="Name of the model.")] = None
    best_of: Annotated[
        int | None, Meta(description="So many choices are generated and the `n` likeliest are told.")
    ] = None
    echo: Annotated[bool | None, Meta(description="Put the prompt before each text.")] = None
    n: Annotated[int | None, Meta(description="Number of choices, 1 to 128.")] = None
    max_tokens: Annotated[
        int | None, Meta(description="Most tokens to generate; 0: none, for an echo alone.")
    ] = None
    logprobs: Annotated[
        int | None,
        Meta(
            description="Log probabilities of the tokens, with `echo` also of the prompt's; 0 to 20 alternatives."
        ),
    ] = None
    stop: Annotated[
        str | list[str] | None,
        Meta(description="Texts that end the answer and are not part of the answer, at most 64."),
    ] = None
    stream: Annotated[bool | None, Meta(description="Answer with events as the text comes.")] = None
    stream_options: Annotated[StreamOptions | None, Meta(description="Options of a stream.")] = None
    suffix: Annotated[str | None, Meta(description="Ignored: no model here fills in.")] = None
    tools: Annotated[
        list[Any] | None, Meta(description="Functions that the model may call, at most 128.")
    ] = None
    response_format: Annotated[
        Any, Meta(description="The form of the answer: text, any JSON, or JSON of a schema.")
    ] = None
    grammar: Annotated[
        Any, Meta(description="A grammar that the answer keeps to; not beside a form of the answer.")
    ] = None
    truncate_sequence: Annotated[
        bool | None,
        Meta(description="Cut the beginning of a prompt that is too long, in place of a refusal."),
    ] = None


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """What to generate: a call for each prompt, of whose choices the `kept` likeliest are told.

    `echoes` has the text in front of each told choice, empty where the worker tells the prompt.
    """

    model: str | None
    calls: list[GenerateCall]
    kept: int
    echoes: list[str]
    has_logprobs: bool
    streams: bool
    include_usage: bool


def parse(body: bytes, limits: Limits) -> CompletionPlan:
    """The plan of a body. Raises `MalformedBody` and `InvalidField`."""
    request = decode(body, CompletionRequest, limits.max_items)
    prompts, n = _prompts(request, limits), choices_of(request.n)
    best = _best_of(request, n, len(prompts))
    if request.tools:
        raise InvalidField("tools", "a plain completion has no form for calls: use POST /v1/chat/completions")
    streams, options = bool(request.stream), request.stream_options
    calls = _calls(request, prompts, best, ranked=best > n)
    return CompletionPlan(
        model=request.model,
        calls=calls,
        kept=n,
        echoes=[_echo(request, call) for call in calls for _ in range(n)],
        has_logprobs=request.logprobs is not None,
        streams=streams,
        include_usage=streams and options is not None and bool(options.include_usage),
    )


def _calls(
    request: CompletionRequest, prompts: list[Prompt], choices: int, ranked: bool
) -> list[GenerateCall]:
    """A call for each prompt; choices that are `ranked` need the log probabilities of their tokens."""
    alternatives = request.logprobs
    if alternatives is not None and not 0 <= alternatives <= MAX_ALTERNATIVES:
        raise InvalidField("logprobs", f"{shown(alternatives)} is not in 0 to {MAX_ALTERNATIVES}")
    scores = alternatives is not None and bool(request.echo)
    first = GenerateCall(
        sampling=sampling_of(request, 0 if ranked and alternatives is None else alternatives),
        ending=ending_of(request.max_tokens, request.stop, request.ignore_eos, least=0),
        grammar=grammar_of(request.response_format, request.grammar),
        n=choices,
        truncate=bool(request.truncate_sequence),
        salt=salt_of(request.cache_salt),
        splits=False,
        tells_prompt=scores,
        prompt_logprobs=alternatives if scores else None,
    )
    return [
        msgspec.structs.replace(first, text=prompt)
        if isinstance(prompt, str)
        else msgspec.structs.replace(first, ids=prompt, tells_prompt=bool(request.echo))
        for prompt in prompts
    ]


def _prompts(request: CompletionRequest, limits: Limits) -> list[Prompt]:
    """The prompts, one or several; a list of numbers is one prompt. Raises `InvalidField`."""
    given = request.prompt
    if isinstance(given, str):
        return [_checked_text(given, "prompt", limits)]
    kinds = {type(each) for each in given}
    if not given or len(kinds) > 1:
        raise InvalidField("prompt", "expected text, token ids, or a list of one of both")
    if kinds == {int}:
        return [_checked_ids(given, "prompt", limits)]
    if kinds == {str}:
        return [_checked_text(each, f"prompt[{index}]", limits) for index, each in enumerate(given)]
    return [_checked_ids(each, f"prompt[{index}]", limits) for index, each in enumerate(given)]


def _checked_text(text: Any, where: str, limits: Limits) -> str:
    if "\0" in text:
        raise InvalidField(where, "holds a NUL character")
    nbytes = len(text.encode())
    if nbytes > limits.max_text_bytes:
        raise InvalidField(
            where, f"{nbytes} bytes, the limit is {limits.max_text_bytes} (limits.max_text_bytes)"
        )
    return str(text)


def _checked_ids(ids: Any, where: str, limits: Limits) -> list[int]:
    if not ids:
        raise InvalidField(where, "may not be empty")
    if len(ids) > limits.max_text_bytes // 4:
        raise InvalidField(where, f"{len(ids)} token ids, the limit is {limits.max_text_bytes // 4}")
    return list(ids)


def _best_of(request: CompletionRequest, n: int, prompts: int) -> int:
    """Choices to generate for each prompt."""
    best = n if request.best_of is None else choices_of(request.best_of, "best_of")
    if n > best:
        raise InvalidField("n", f"{n} is more than best_of: {best}")
    if best > n and request.stream:
        raise InvalidField("best_of", f"{best} with n: {n} cannot be streamed, the choice is made at the end")
    if best * prompts > MAX_CHOICES:
        raise InvalidField(
            "prompt", f"{prompts} prompts with {best} choices each, the limit is {MAX_CHOICES} choices"
        )
    return best


def _echo(request: CompletionRequest, call: GenerateCall) -> str:
    """The text in front of a choice, as far as the worker does not tell the text."""
    return call.text or "" if request.echo and not call.tells_prompt else ""


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
        columns: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token in tokens:
            columns["tokens"].append(text_of_token(token.raw))
            columns["token_logprobs"].append(None if token.logprob is None else finite(token.logprob))
            columns["top_logprobs"].append(_likely(token))
            if isinstance(token, PromptToken):
                columns["text_offset"].append(token.start)
            else:
                columns["text_offset"].append(self._offset)
                self._offset += len(self._characters.decode(b"" if token.is_silent else token.raw))
        return columns


def _likely(token: PromptToken | TokenLogprob) -> dict[str, float] | None:
    """Log probabilities by text: the likeliest tokens and the token itself, of two with one text the likelier."""
    if token.logprob is None:
        return None
    logprobs: dict[str, float] = {}
    for raw, value in (*((raw, value) for _, raw, value in token.top), (token.raw, token.logprob)):
        logprobs.setdefault(text_of_token(raw), finite(value))
    return logprobs


class Completed(NamedTuple):
    """One choice of an answer, and the choice that has its prompt; `echo` is the text of the prompt where known."""

    choice: ChoiceOutcome
    prompt: ChoiceOutcome
    echo: str


class CompletionChoice(msgspec.Struct):
    """One choice of a completion."""

    index: Annotated[int, Meta(description="Place in the request's list.")]
    text: Annotated[str, Meta(description="The text.")]
    finish_reason: Annotated[str, Meta(description="Why the text ended.")]
    logprobs: Annotated[dict[str, Any] | None, Meta(description="Log probabilities of the tokens.")]


class CompletionAnswer(msgspec.Struct):
    """A whole completion."""

    id: Annotated[str, Meta(description="Id of the answer.")]
    object: Annotated[Literal["text_completion"], Meta(description="Names the form of this object.")]
    created: Annotated[int, Meta(description="Unix time of the beginning.")]
    model: Annotated[str, Meta(description="Name of the model.")]
    system_fingerprint: Annotated[str, Meta(description="Always `local`.")]
    choices: Annotated[list[CompletionChoice], Meta(description="The texts, by their index.")]
    usage: Annotated[Usage, Meta(description="Counts of tokens.")]


def answer_of(
    envelope: Envelope, completed: Sequence[Completed], counts: Ended, logprobs: bool
) -> CompletionAnswer:
    """The body."""
    choices = [_choice(index, each, logprobs) for index, each in enumerate(completed)]
    return CompletionAnswer(**envelope.fields(), choices=choices, usage=usage_of(counts))


def _choice(index: int, completed: Completed, logprobs: bool) -> CompletionChoice:
    choice, prompt = completed.choice, completed.prompt
    before = completed.echo + "".join(prompt.prompt_texts)
    tokens: list[PromptToken | TokenLogprob] = [*prompt.prompt_tokens, *choice.logprobs]
    columns = TokenTable(len(before)).columns(tokens) if logprobs else None
    return CompletionChoice(index, before + choice.text, choice.reason, columns)


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
        choice = {"index": index, "text": text, "finish_reason": reason, "logprobs": columns}
        return {**self._fields, "choices": [choice], "usage": None}

    def _end(self, event: Ended) -> list[dict[str, Any]]:
        return last_chunks(self._fields, self._last, event, self._include_usage)


class CompletionsResource(InferenceRoute):
    """Some prompts, answered whole or as a stream of chunks."""

    operation = "completions"

    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: str) -> None:
        """One request."""
        services = self.services
        plan = await receive(services, req, partial(parse, limits=services.settings.limits))
        entry = named_model(services, scope, plan.model)
        envelope = Envelope.new("cmpl", OBJECT, entry.id)
        if plan.streams:
            events = self._chunks(scope, entry, plan, envelope)
            await send_events(services, req, resp, events)
            return
        render = partial(_body, envelope, plan)
        async with self._running(scope, entry, plan) as generation:
            outcome = await gathered(generation, plan.calls[0].n * len(plan.calls), render)
        await send_json(resp, render, outcome)

    async def _chunks(
        self, scope: RequestScope, entry: ModelEntry, plan: CompletionPlan, envelope: Envelope
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream, after an empty piece once the prompts have been accepted."""
        chunks = CompletionChunks(
            envelope,
            plan.echoes,
            plan.kept,
            logprobs=plan.has_logprobs,
            include_usage=plan.include_usage,
        )
        async with self._running(scope, entry, plan) as generation:
            yield b""
            async for events in generation:
                if pieces := chunks.feed(events):
                    yield b"".join(map(data, pieces))
        yield DONE

    @asynccontextmanager
    async def _running(
        self, scope: RequestScope, entry: ModelEntry, plan: CompletionPlan
    ) -> AsyncIterator[Generation]:
        """All prompts at once, as one generation."""
        async with AsyncExitStack() as stack:
            generations = [
                await stack.enter_async_context(running(self.services, scope, entry, call))
                for call in plan.calls
            ]
            yield await entered(stack, generations, plan.calls[0].n)


def _body(envelope: Envelope, plan: CompletionPlan, outcome: Outcome) -> CompletionAnswer:
    generated, choices, echoes = plan.calls[0].n, outcome.choices, iter(plan.echoes)
    groups = [choices[start : start + generated] for start in range(0, len(choices), generated)]
    completed = [
        Completed(choice, group[0], next(echoes))
        for group in groups
        for choice in _likeliest(group, plan.kept)
    ]
    return answer_of(envelope, completed, outcome.counts, plan.has_logprobs)


def _likeliest(choices: list[ChoiceOutcome], kept: int) -> list[ChoiceOutcome]:
    """The `kept` choices of one prompt with the highest mean log probability, likeliest first; all in their order."""
    return choices if len(choices) == kept else sorted(choices, key=_mean_logprob, reverse=True)[:kept]


def _mean_logprob(choice: ChoiceOutcome) -> float:
    if not choice.logprobs:
        return float("-inf")
    return sum(token.logprob for token in choice.logprobs) / len(choice.logprobs)
