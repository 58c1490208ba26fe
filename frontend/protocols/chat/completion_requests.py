"""Requests of /v1/completions: the body, and a call for each of its prompts.

1. A prompt is text or a list of token ids; a list of prompts asks for choices of each, in the order of the prompts.
2. `best_of` choices are generated for each prompt, and the `n` likeliest of them are the answer.
3. An `echo` of text is known here. A worker tells the text of token ids, and the log probabilities of a prompt.
4. A `suffix` has an effect only in models that fill in; those of this server do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from frontend.generation import bodies
from frontend.generation.errors import InvalidField, shown
from frontend.generation.grammars import grammar_of
from frontend.generation.sampling import (
    MAX_ALTERNATIVES,
    MAX_CHOICES,
    SamplingFields,
    choices_of,
    ending_of,
    salt_of,
    sampling_of,
)
from frontend.protocols.chat.chat_requests import StreamOptions
from ipc.settings import Limits
from ipc.wire.messages import GenerateCall

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Prompt = str | list[int]


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
    request = bodies.decode(body, CompletionRequest, limits.max_items)
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
    wanted = request.logprobs
    if wanted is not None and not 0 <= wanted <= MAX_ALTERNATIVES:
        raise InvalidField("logprobs", f"{shown(wanted)} is not in 0 to {MAX_ALTERNATIVES}")
    scores = wanted is not None and bool(request.echo)
    first = GenerateCall(
        sampling=sampling_of(request, 0 if ranked and wanted is None else wanted),
        ending=ending_of(request.max_tokens, request.stop, request.ignore_eos, least=0),
        grammar=grammar_of(request.response_format, request.grammar),
        n=choices,
        truncate=bool(request.truncate_sequence),
        salt=salt_of(request.cache_salt),
        splits=False,
        tells_prompt=scores,
        prompt_logprobs=wanted if scores else None,
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
