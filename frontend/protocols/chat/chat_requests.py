"""Requests of /v1/chat/completions: the body, and the call that it asks for.

1. Fields of OpenAI, and those that the contract adds. Unknown fields are ignored, null equals absent.
2. Messages become a `Conversation`. A bare string is one message of a user.
3. Everything is checked before a model is looked up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from frontend.generation import bodies
from frontend.generation.chat_messages import (
    BeginsAnswer,
    ChatMessage,
    ContinuesMessage,
    end_variables,
    messages_of,
)
from frontend.generation.conversation import is_continued
from frontend.generation.errors import InvalidField
from frontend.generation.grammars import grammar_of
from frontend.generation.reasoning import Effort, template_variables
from frontend.generation.sampling import alternatives_of, choices_of, ending_of, salt_of, sampling_of
from frontend.generation.talk_fields import ChoiceFields
from frontend.generation.tools import choice_of, functions_of, tool_use
from frontend.http.fields import one_of
from ipc.settings import Limits
from ipc.wire.messages import GenerateCall

_ALIASES = (("max_tokens", "max_completion_tokens"),)
_MODALITIES = ("text",)
_INSTEAD = "is no tool of chat completions: use POST /v1/responses"
_HINTS = dict.fromkeys(("web_search", "web_search_preview", "shell", "namespace"), _INSTEAD)


class StreamOptions(msgspec.Struct):
    """Options of a stream."""

    include_usage: Annotated[bool | None, Meta(description="Add a last event with the counts of tokens.")] = (
        None
    )


class ChatRequest(ChoiceFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    unserved: ClassVar[Mapping[str, str]] = {
        **ChoiceFields.unserved,
        "audio": "speech is not offered by this server",
        "functions": "this older form of functions is not offered: use tools",
        "function_call": "this older form of a choice is not offered: use tool_choice",
    }
    messages: Annotated[
        list[ChatMessage] | str, Meta(description="The conversation so far, the oldest message first.")
    ]
    stream_options: Annotated[StreamOptions | None, Meta(description="Options of a stream.")] = None
    modalities: Annotated[
        list[Annotated[str, one_of(_MODALITIES, required=True)]] | None,
        Meta(description="Kinds of answers: `text` only, as no model here speaks."),
    ] = None
    audio: Annotated[Any, Meta(description="Refused: no model here speaks.")] = None
    functions: Annotated[Any, Meta(description="Refused: `tools` takes its place.")] = None
    function_call: Annotated[Any, Meta(description="Refused: `tool_choice` takes its place.")] = None
    enable_thinking: Annotated[
        bool | None, Meta(description="Whether the model thinks first; absent: as its template does.")
    ] = None
    reasoning_effort: Annotated[Effort, Meta(description="How long the model thinks.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Values for the template of the conversation.")
    ] = None
    add_generation_prompt: BeginsAnswer = None
    continue_final_message: ContinuesMessage = None
    truncate_sequence: Annotated[
        bool | None,
        Meta(description="Cut the beginning of a prompt that is too long, in place of a refusal."),
    ] = None


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """What to generate, on which model (None: the default), and in which form the answer goes out."""

    model: str | None
    call: GenerateCall
    streams: bool
    include_usage: bool

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer tells log probabilities."""
        return self.call.sampling.logprobs is not None


def parse(body: bytes, limits: Limits) -> ChatPlan:
    """The plan of a body. Raises `MalformedBody` and `InvalidField`."""
    request = bodies.decode(body, ChatRequest, limits.max_items, _ALIASES)
    streams = bool(request.stream)
    request.refuse_hosted(streams)
    if any(kind not in _MODALITIES for kind in request.modalities or ()):
        raise InvalidField("modalities", "the models of this server answer with text only")
    options = request.stream_options
    usage = streams and options is not None and bool(options.include_usage)
    return ChatPlan(request.model, _call(request, limits), streams, usage)


def _call(request: ChatRequest, limits: Limits) -> GenerateCall:
    functions = functions_of(request.tools, _HINTS)
    choice = choice_of(request.tool_choice, [function.name for function in functions])
    limit = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    limit_name = "max_completion_tokens" if request.max_tokens is None else "max_tokens"
    messages = messages_of(request.messages, limits)
    end = end_variables(request.add_generation_prompt, request.continue_final_message)
    if request.continue_final_message and not is_continued(messages[-1]):
        where = f"messages[{len(messages) - 1}]"
        raise InvalidField(where, "continue_final_message needs a text of the assistant here, without calls")
    return GenerateCall(
        messages=messages,
        tools=tool_use(functions, choice, request.parallel_tool_calls),
        variables=template_variables(
            request.enable_thinking, request.reasoning_effort, request.chat_template_kwargs
        )
        | end,
        sampling=sampling_of(request, alternatives_of(request.logprobs, request.top_logprobs)),
        ending=ending_of(limit, request.stop, request.ignore_eos, names=(limit_name, "stop")),
        grammar=grammar_of(request.response_format, request.grammar),
        n=choices_of(request.n),
        truncate=bool(request.truncate_sequence),
        salt=salt_of(request.cache_salt),
    )
