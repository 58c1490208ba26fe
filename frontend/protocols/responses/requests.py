"""Requests of POST /v1/responses: the body, and the call that it asks for.

1. Fields of OpenAI, and those that the contract adds. Unknown fields are ignored, null equals absent.
2. Everything but the conversation is checked here, before anything is looked up. The conversation is complete once
   the stored one of `previous_response_id` is known: `ResponsePlan.call_after`.
3. `background` wins over `stream`: the answer is JSON, and the stream can be had by GET.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from frontend.generation import bodies
from frontend.generation.conversation import Conversation
from frontend.generation.errors import InvalidField
from frontend.generation.grammars import grammar_of
from frontend.generation.models import DEFAULT
from frontend.generation.nested import checked_json, json_text
from frontend.generation.reasoning import Effort, variables_of
from frontend.generation.sampling import alternatives_of, choices_of, ending_of, salt_of, sampling_of
from frontend.generation.sending import new_id
from frontend.generation.talk_fields import ChoiceFields
from frontend.generation.tools import choice_of, tool_use
from frontend.protocols.responses.items import Turns, kept_items
from frontend.protocols.responses.tools import functions_of
from ipc.settings import Limits
from ipc.wire.messages import GenerateCall

LIMITS = ("max_output_tokens", "max_tokens", "max_completion_tokens")
"""Names of one field."""
TRUNCATIONS = {"auto": True, "disabled": False}
ECHOED = (
    "instructions",
    "previous_response_id",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "session_id",
)
"""Fields that an answer repeats where a request has them."""


class ReasoningOptions(msgspec.Struct):
    """How hard the model thinks; a summary is never made."""

    effort: Annotated[Effort, Meta(description="How long the model thinks.")] = None
    summary: Annotated[Any, Meta(description="Ignored.")] = None


class ResponseRequest(ChoiceFields, kw_only=True):
    """Body of POST /v1/responses."""

    # The contract ignores `web_search_options` here: a search is asked for as a tool.
    unserved: ClassVar[Mapping[str, str]] = {
        **{name: why for name, why in ChoiceFields.unserved.items() if name != "web_search_options"},
        "max_tool_calls": "a bound on the number of calls is not offered by this server",
        "conversation": "the server keeps no conversations: use previous_response_id, or send all items",
        "prompt": "stored prompts are not offered by this server: send input and instructions",
    }
    input: Annotated[str | list[Any], Meta(description="The new input: a text, or items of a conversation.")]
    instructions: Annotated[
        str | None, Meta(description="What the model should know before the conversation.")
    ] = None
    previous_response_id: Annotated[
        str | None, Meta(description="Id of the stored response that the conversation goes on from.")
    ] = None
    stream_options: Annotated[Any, Meta(description="Ignored.")] = None
    background: Annotated[
        bool | None, Meta(description="Whether the response goes on without its client.")
    ] = None
    store: Annotated[bool | None, Meta(description="Whether the response is kept for later requests.")] = None
    metadata: Annotated[dict[str, Any] | None, Meta(description="Values of the caller, by name.")] = None
    include: Annotated[Any, Meta(description="Ignored.")] = None
    max_output_tokens: Annotated[int | None, Meta(description="Most tokens to generate, at least 1.")] = None
    max_tool_calls: Annotated[Any, Meta(description="Refused: no tool runs on the server.")] = None
    conversation: Annotated[Any, Meta(description="Refused: the server keeps no conversations.")] = None
    prompt: Annotated[Any, Meta(description="Refused: the server keeps no prompts.")] = None
    reasoning: Annotated[ReasoningOptions | None, Meta(description="How the model thinks.")] = None
    text: Annotated[
        dict[str, Any] | None,
        Meta(description="The form of the answer: text, any JSON, or JSON of a schema."),
    ] = None
    truncation: Annotated[
        Annotated[str | None, msgspec.Meta(extra_json_schema={"enum": [*TRUNCATIONS, None]})],
        Meta(description="`auto`: cut the beginning of a prompt that is too long."),
    ] = None


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """What to generate, on which model (None: the default), and in which form the answer goes out.

    `call` lacks its messages; `items` are the new input as the store keeps items; `fields` are those that the answer
    repeats. `id` is that of the response.
    """

    id: str
    model: str | None
    call: GenerateCall
    items: list[dict[str, Any]]
    instructions: str | None
    previous: str | None
    streams: bool
    background: bool
    stores: bool
    fields: dict[str, Any]

    def call_after(self, history: Sequence[dict[str, Any]], limits: Limits) -> GenerateCall:
        """The call with all of its messages: instructions, stored items, new items. Raises `InvalidField`."""
        talk = Conversation(limits, "input")
        if self.instructions is not None:
            talk.add("system", self.instructions, "instructions")
        turns = Turns(talk)
        turns.add(history, "previous_response_id")
        turns.add(self.items, "input")
        return msgspec.structs.replace(self.call, messages=_with_one_beginning(talk.finished()))


def _with_one_beginning(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` whose first system messages are one: many templates refuse a second one behind the instructions."""
    count = next((k for k, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]


def parse(body: bytes, limits: Limits) -> ResponsePlan:
    """The plan of a body. Raises `MalformedBody` and `InvalidField`."""
    request = bodies.decode(body, ResponseRequest, limits.max_items, (LIMITS,))
    background = bool(request.background)
    streams = bool(request.stream) and not background
    request.refuse_hosted(streams)
    stores = request.store is not False
    if background and not stores:
        raise InvalidField("store", "a response in the background has to be stored")
    id_, call = new_id("resp_"), _call(request)
    _check_values(request)
    return ResponsePlan(
        id_,
        request.model,
        call,
        kept_items(request.input, id_),
        request.instructions,
        request.previous_response_id,
        streams,
        background,
        stores,
        _fields(request, call, stores),
    )


def _check_values(request: ResponseRequest) -> None:
    """Raise `InvalidField` for what cannot be told and stored again as JSON."""
    for name in ("metadata", "text", "tool_choice", "tools"):
        json_text(getattr(request, name), name)
    for index, item in enumerate(request.input if isinstance(request.input, list) else ()):
        checked_json(item, f"input[{index}]")


def _call(request: ResponseRequest) -> GenerateCall:
    functions = functions_of(request.tools)
    choice = choice_of(request.tool_choice, [function.name for function in functions])
    limit_name = next((name for name in LIMITS if getattr(request, name) is not None), LIMITS[0])
    return GenerateCall(
        messages=[],
        tools=tool_use(functions, choice, request.parallel_tool_calls),
        variables=variables_of(None, _effort(request), names=("", "reasoning.effort")),
        sampling=sampling_of(request, _alternatives(request)),
        ending=ending_of(
            getattr(request, limit_name), request.stop, request.ignore_eos, names=(limit_name, "stop")
        ),
        grammar=_grammar(request),
        n=choices_of(request.n),
        truncate=_truncates(request.truncation),
        salt=salt_of(request.cache_salt),
    )


def _effort(request: ResponseRequest) -> str | None:
    return None if request.reasoning is None else request.reasoning.effort


def _alternatives(request: ResponseRequest) -> int | None:
    """Alternatives of each token; their number alone asks for log probabilities, unless those are off."""
    wanted = request.top_logprobs is not None if request.logprobs is None else request.logprobs
    return alternatives_of(wanted, request.top_logprobs)


def _grammar(request: ResponseRequest) -> Any:
    """The grammar of the answer; `text.format` wins over `response_format`."""
    given = (request.text or {}).get("format")
    if given is None:
        return grammar_of(request.response_format, request.grammar)
    return grammar_of(given, request.grammar, "text.format")


def _truncates(truncation: str | None) -> bool:
    if truncation is None:
        return False
    if truncation not in TRUNCATIONS:
        raise InvalidField("truncation", f"{truncation[:64]!a} is not one of {', '.join(TRUNCATIONS)}")
    return TRUNCATIONS[truncation]


def _fields(request: ResponseRequest, call: GenerateCall, stores: bool) -> dict[str, Any]:
    """Fields of the answer that are known from the request; those without a value are left out."""
    told = {
        "model": request.model or DEFAULT,
        "background": bool(request.background),
        "store": stores,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "text": request.text or {"format": {"type": "text"}},
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": request.tools or [],
        "truncation": request.truncation or "disabled",
        "max_output_tokens": call.ending.max_tokens,
        **{name: getattr(request, name) for name in ECHOED},
    }
    return {name: value for name, value in told.items() if value is not None}
