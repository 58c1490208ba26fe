"""Requests of /api/chat and /api/generate: the body, and the call that it asks for.

1. Unknown fields and options are ignored, null equals absent. An option that would change the text, and has no effect
   here, is refused with the reason.
2. A request without messages, or without a prompt, asks only for the load of its model.
3. A last message of the assistant is continued.
4. Names end in `:latest` where a client adds that tag of its own accord (`known_name`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from frontend.generation.conversation import (
    CONTINUING,
    Choice,
    Conversation,
    calls_of,
    functions_of,
    is_continued,
    tool_use,
)
from frontend.generation.errors import InvalidField, shown
from frontend.generation.fields import SamplingFields, ending_of, sampling_of, variables_of
from frontend.generation.nested import grammar_of, schema_grammar
from frontend.generation.pictures import Album, Content, content_of_parts
from frontend.generation.requests import decode
from frontend.http.fields import one_of
from ipc.catalog.entries import Catalog
from ipc.settings import Limits
from ipc.wire.messages import Ending, GenerateCall, Grammar, Sampling

LATEST = ":latest"
"""The tag that clients add to names without a tag."""
_ROLES = ("system", "user", "assistant", "tool")
_STAYS = "no model is unloaded by keep_alive: use POST /v1/admin/unload/{model}, or `penstock serve` with fewer models"

_ZERO = re.compile(r"-?0+(\.0*)?(ns|us|µs|ms|s|m|h)?")
"""A duration of nothing, as a number or with a unit."""

Name = Annotated[str | None, Meta(description="Name of the model, with or without `:latest`.")]
Images = Annotated[list[Any] | None, Meta(description="Pictures as base64, for models that see.")]
KeepAlive = Annotated[
    float | str | None,
    Meta(description="No effect: a model stays until its memory is needed. 0 without a prompt is refused."),
]


class TextOptions(msgspec.Struct):
    """The options that have an effect, and those that are refused."""

    temperature: Annotated[
        float | None, Meta(description="Spread of the choice; 0 or absent: the likeliest token.")
    ] = None
    top_k: Annotated[int | None, Meta(description="Keep so many of the likeliest tokens; 0: all.")] = None
    top_p: Annotated[float | None, Meta(description="Keep the likeliest tokens up to this probability.")] = (
        None
    )
    min_p: Annotated[
        float | None, Meta(description="Keep tokens of at least this part of the best probability.")
    ] = None
    seed: Annotated[int | None, Meta(description="The same seed gives the same text; -1: a new one.")] = None
    num_predict: Annotated[int | None, Meta(description="Most tokens to generate; 0 and less: no limit.")] = (
        None
    )
    stop: Annotated[str | list[str] | None, Meta(description="Texts that end the answer, at most 64.")] = None
    repeat_penalty: Annotated[
        float | None, Meta(description="Divides the logits of tokens that have occurred; 1: off.")
    ] = None
    presence_penalty: Annotated[
        float | None, Meta(description="Taken from the logit of each token that has occurred.")
    ] = None
    frequency_penalty: Annotated[
        float | None, Meta(description="Taken from the logit of a token for each time.")
    ] = None
    mirostat: Annotated[int | None, Meta(description="Refused unless 0.")] = None
    tfs_z: Annotated[float | None, Meta(description="Refused unless 1.")] = None
    typical_p: Annotated[float | None, Meta(description="Refused unless 1.")] = None

    @property
    def ending(self) -> Ending:
        """What ends a text. Raises `InvalidField`."""
        most = self.num_predict if (self.num_predict or 0) > 0 else None
        return ending_of(most, self.stop, names=("options.num_predict", "options.stop"))

    def sampling(self, alternatives: int | None) -> Sampling:
        """How the next token is chosen; `alternatives` as in `sampling_of`. Raises `InvalidField`."""
        for name, off in (("mirostat", 0), ("tfs_z", 1), ("typical_p", 1)):
            value = getattr(self, name)
            if value not in (None, off):
                raise InvalidField(f"options.{name}", f"{shown(value)} is not offered, only {off}: off")
        fields = SamplingFields(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repeat_penalty,
            seed=None if self.seed == -1 else self.seed,
        )
        return sampling_of(fields, alternatives)


class TextFields(msgspec.Struct, kw_only=True):
    """Fields of the bodies of both routes."""

    model: Name = None
    format: Annotated[Any, Meta(description="The form of the answer: `json`, or a JSON schema.")] = None
    options: Annotated[TextOptions | None, Meta(description="Sampling and length.")] = None
    stream: Annotated[
        bool | None, Meta(description="Answer with lines of JSON as the text comes; the default.")
    ] = None
    think: Annotated[
        bool | str | None,
        Meta(description="Whether the model thinks first, or how long; absent: as its template does."),
    ] = None
    keep_alive: KeepAlive = None
    logprobs: Annotated[bool | None, Meta(description="Log probabilities of the tokens.")] = None
    top_logprobs: Annotated[
        int | None, Meta(description="Number of alternatives beside each token, 0 to 20.")
    ] = None
    truncate: Annotated[
        bool | None,
        Meta(description="Cut the beginning of a prompt that is too long, in place of a refusal."),
    ] = None


class OllamaMessage(msgspec.Struct):
    """One message of a conversation."""

    role: Annotated[Annotated[str, one_of(_ROLES, required=True)], Meta(description="Who speaks.")]
    content: Annotated[str | None, Meta(description="What is said.")] = None
    thinking: Annotated[str | None, Meta(description="What the model thought before its answer.")] = None
    images: Images = None
    tool_calls: Annotated[list[Any] | None, Meta(description="Functions that the model calls.")] = None
    tool_name: Annotated[str | None, Meta(description="The function whose result this message is.")] = None
    tool_call_id: Annotated[str | None, Meta(description="Id of the call that this message answers.")] = None


class OllamaChatRequest(TextFields, kw_only=True):
    """Body of POST /api/chat."""

    messages: Annotated[
        list[OllamaMessage] | None, Meta(description="The conversation so far; none: only load the model.")
    ] = None
    tools: Annotated[
        list[Any] | None, Meta(description="Functions that the model may call, at most 128.")
    ] = None


class OllamaGenerateRequest(TextFields, kw_only=True):
    """Body of POST /api/generate."""

    prompt: Annotated[str | None, Meta(description="What the user says; none: only load the model.")] = None
    system: Annotated[str | None, Meta(description="What the model should know before the conversation.")] = (
        None
    )
    raw: Annotated[bool | None, Meta(description="Continue the prompt as it is, without a template.")] = None
    images: Images = None
    suffix: Annotated[str | None, Meta(description="Refused unless empty: no model here fills in.")] = None
    template: Annotated[str | None, Meta(description="Refused unless empty: the model has its own.")] = None
    context: Annotated[
        list[Any] | None, Meta(description="Refused unless empty: `/api/chat` continues conversations.")
    ] = None


@dataclass(frozen=True, slots=True)
class TextPlan:
    """What to generate, on which model (None: the default), and whether as a stream.

    Without a `call` the model is only loaded.
    """

    model: str | None
    call: GenerateCall | None = None
    streams: bool = False


def known_name(name: str | None, catalog: Catalog) -> str:
    """`name` as the catalog knows the model: a tag `:latest` that no model has is taken off."""
    given = name or ""
    return given if given in catalog else given.removesuffix(LATEST)


def parse_chat(body: bytes, limits: Limits) -> TextPlan:
    """The plan of a conversation. Raises `MalformedBody` and `InvalidField`."""
    request = decode(body, OllamaChatRequest, limits.max_items)
    if not request.messages:
        return _loading(request)
    messages = _messages(request.messages, limits)
    functions = functions_of(request.tools)
    end: Mapping[str, bool] = CONTINUING if is_continued(messages[-1]) else {}
    call = _call(request, end)
    call = msgspec.structs.replace(call, messages=messages, tools=tool_use(functions, Choice(), None))
    return TextPlan(request.model, call, request.stream is not False)


def parse_generate(body: bytes, limits: Limits) -> TextPlan:
    """The plan of a prompt. Raises `MalformedBody` and `InvalidField`."""
    request = decode(body, OllamaGenerateRequest, limits.max_items)
    _refuse(request)
    if not request.prompt:
        return _loading(request)
    call = _call(request, {})
    talk = Conversation(limits, "prompt")
    if request.raw:
        prompt = talk.checked(request.prompt, "prompt")
        call = msgspec.structs.replace(call, text=prompt, splits=False, variables={})
    else:
        if request.system:
            talk.add("system", request.system, "system")
        talk.add("user", _content(request.prompt, request.images, "images", talk.album), "prompt")
        call = msgspec.structs.replace(call, messages=talk.finished())
    return TextPlan(request.model, call, request.stream is not False)


def _loading(request: TextFields) -> TextPlan:
    """The plan of a request without a prompt. Raises `InvalidField` where `keep_alive` asks for an unload."""
    keep_alive = request.keep_alive
    if keep_alive is not None and _ZERO.fullmatch(str(keep_alive).strip()):
        raise InvalidField("keep_alive", _STAYS)
    return TextPlan(request.model)


def _refuse(request: OllamaGenerateRequest) -> None:
    reasons = {
        "suffix": "no model here fills in",
        "template": "the model has a template of its own: send the prompt with raw: true",
        "context": "the server keeps no conversations: send the messages to POST /api/chat",
    }
    for name, reason in reasons.items():
        if getattr(request, name):
            raise InvalidField(name, reason)
    if request.raw and request.system:
        raise InvalidField("system", "cannot be used together with raw: write it into the prompt")
    if request.raw and request.images:
        raise InvalidField("images", "cannot be used together with raw: a chat template shows images")


def _call(request: TextFields, end: Mapping[str, bool]) -> GenerateCall:
    """All of a call but its prompt."""
    options = request.options or TextOptions()
    effort = request.think if isinstance(request.think, str) else None
    thinking = request.think if isinstance(request.think, bool) else None
    return GenerateCall(
        variables={**variables_of(thinking, effort, names=("think", "think")), **end},
        sampling=options.sampling((request.top_logprobs or 0) if request.logprobs else None),
        ending=options.ending,
        grammar=_grammar(request.format),
        truncate=bool(request.truncate),
    )


def _grammar(form: Any) -> Grammar | None:
    if form is None or form == "":
        return None
    if form == "json":
        return grammar_of({"type": "json_object"}, None, "format")
    if not isinstance(form, dict):
        raise InvalidField("format", "expected 'json' or a JSON schema")
    return schema_grammar(form, "format")


def _content(text: str | None, images: Sequence[Any] | None, where: str, album: Album) -> Content | None:
    """The content of a message: its pictures, then its text. Raises `InvalidField`."""
    if not images:
        return text
    parts = [album.from_base64(image, "", f"{where}[{index}]") for index, image in enumerate(images)]
    return content_of_parts([*parts, {"type": "text", "text": text}] if text else parts)


def _messages(given: Sequence[OllamaMessage], limits: Limits) -> list[dict[str, Any]]:
    """The messages as chat templates read them. Raises `InvalidField`."""
    talk = Conversation(limits)
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        if message.role not in _ROLES:
            raise InvalidField(f"{where}.role", f"{shown(message.role)!a} is not one of {', '.join(_ROLES)}")
        talk.add(
            message.role,
            _content(message.content, message.images, f"{where}.images", talk.album),
            where,
            calls=calls_of(talk, message.tool_calls, f"{where}.tool_calls"),
            call_id=message.tool_call_id,
            name=message.tool_name,
            reasoning=message.thinking,
        )
    return talk.finished()
