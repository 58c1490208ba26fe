"""Requests of /v1/messages and /v1/messages/count_tokens: the body, and the call that it asks for.

1. Fields of Anthropic, and those that the contract adds. Unknown fields are ignored, null equals absent.
2. `system` is the first message of the conversation.
3. `output_config` of newer clients, and `output_format` of older ones, stand for `response_format` and
   `reasoning_effort`, which win.
4. The tools are those that stand when the last message is read: system messages add and withdraw tools.
5. A `thread` is refused in a form that the SDKs of Anthropic know: they send the whole conversation next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from frontend.generation import bodies
from frontend.generation.conversation import CONTINUING, Conversation, is_continued, text_of
from frontend.generation.errors import InvalidField
from frontend.generation.grammars import grammar_of
from frontend.generation.reasoning import Effort, variables_of
from frontend.generation.sampling import alternatives_of, ending_of, salt_of, sampling_of
from frontend.generation.talk_fields import TalkFields
from frontend.protocols.messages.blocks import Message, add_messages
from frontend.protocols.messages.message_tools import thinking_of, tools_of
from ipc.settings import Limits
from ipc.wire.messages import GenerateCall, Grammar

_NO_THREADS = "the server keeps no conversations: send the whole conversation in messages"
_NO_THREADS_DETAILS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


class OutputConfig(msgspec.Struct):
    """Form of the answer and effort of the reasoning, as newer clients send them."""

    format: Annotated[Any, Meta(description="The form.")] = None
    effort: Annotated[Effort, Meta(description="How long the model thinks.")] = None


class MessagesRequest(TalkFields, kw_only=True):
    """Body of POST /v1/messages."""

    unserved: ClassVar[Mapping[str, str]] = {
        **TalkFields.unserved,
        "mcp_servers": "MCP servers are not offered by this server",
    }
    messages: Annotated[list[Message], Meta(description="The conversation so far, the oldest message first.")]
    system: Annotated[
        str | list[Any] | None, Meta(description="What the model should know before the conversation.")
    ] = None
    stop_sequences: Annotated[
        list[str] | None,
        Meta(description="Texts that end the answer and are not part of the answer, at most 64."),
    ] = None
    thinking: Annotated[Any, Meta(description="Whether the model thinks first.")] = None
    container: Annotated[Any, Meta(description="Skills are refused; all else is ignored.")] = None
    output_config: Annotated[
        OutputConfig | None, Meta(description="Form of the answer and effort of the model.")
    ] = None
    output_format: Annotated[
        Any, Meta(description="Form of the answer, as older clients name `output_config.format`.")
    ] = None
    thread: Annotated[Any, Meta(description="Refused: the server keeps no conversations.")] = None
    mcp_servers: Annotated[
        Any, Meta(description="Refused unless empty: the server calls no MCP servers.")
    ] = None
    enable_thinking: Annotated[
        bool | None, Meta(description="Whether the model thinks first; absent: as its template does.")
    ] = None
    reasoning_effort: Annotated[Effort, Meta(description="How long the model thinks.")] = None
    truncate_sequence: Annotated[
        bool | None,
        Meta(description="Cut the beginning of a prompt that is too long, in place of a refusal."),
    ] = None


@dataclass(frozen=True, slots=True)
class MessagesPlan:
    """What to generate, on which model (None: the default), and whether as a stream."""

    model: str | None
    call: GenerateCall
    streams: bool

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer tells log probabilities."""
        return self.call.sampling.logprobs is not None


def parse(body: bytes, limits: Limits) -> MessagesPlan:
    """The plan of a body. Raises `MalformedBody` and `InvalidField`."""
    request = bodies.decode(body, MessagesRequest, limits.max_items)
    streams = bool(request.stream)
    if request.thread is not None:
        raise InvalidField("thread", _NO_THREADS, details=_NO_THREADS_DETAILS)
    request.refuse_hosted(streams)
    if isinstance(request.container, dict) and request.container.get("skills"):
        raise InvalidField("container.skills", "skills are not offered by this server")
    return MessagesPlan(request.model, _call(request, limits), streams)


def parse_count(body: bytes, limits: Limits) -> MessagesPlan:
    """The plan of a body whose prompt tokens are to be counted. Raises as `parse` does."""
    plan = parse(body, limits)
    return MessagesPlan(plan.model, msgspec.structs.replace(plan.call, counts_only=True), streams=False)


def _call(request: MessagesRequest, limits: Limits) -> GenerateCall:
    messages, grammar = _messages(request, limits), _grammar(request)
    end = _continuing(request, messages, grammar) if request.messages[-1].role == "assistant" else {}
    return GenerateCall(
        messages=messages,
        tools=tools_of(request.tools, request.messages, request.tool_choice),
        variables={**_variables(request), **end},
        sampling=sampling_of(request, alternatives_of(request.logprobs, request.top_logprobs)),
        ending=ending_of(
            request.max_tokens,
            request.stop_sequences,
            request.ignore_eos,
            names=("max_tokens", "stop_sequences"),
        ),
        grammar=grammar,
        truncate=bool(request.truncate_sequence),
        salt=salt_of(request.cache_salt),
    )


def _messages(request: MessagesRequest, limits: Limits) -> list[dict[str, Any]]:
    talk = Conversation(limits)
    if not request.messages:
        raise InvalidField("messages", "may not be empty")
    if request.system:
        talk.add("system", text_of(request.system, "system"), "system")
    add_messages(talk, request.messages)
    return talk.finished()


def _continuing(
    request: MessagesRequest, messages: list[dict[str, Any]], grammar: Grammar | None
) -> Mapping[str, bool]:
    """Variables of a template whose last message the answer continues; an empty message is taken off `messages`.

    Raises `InvalidField` for a message that Anthropic would not continue.
    """
    last, where = messages[-1], f"messages[{len(request.messages) - 1}].content"
    if not is_continued(last):
        raise InvalidField(
            where, "a last message with tool_use cannot be continued: send its tool_result next"
        )
    if not last["content"] and len(messages) > 1:
        messages.pop()
        return {}
    if last["content"][-1:].isspace():
        raise InvalidField("messages", "final assistant content cannot end with trailing whitespace")
    if thinking_of(request.thinking, request.enable_thinking):
        raise InvalidField(where, "a last message of the assistant cannot be continued with thinking")
    if grammar is not None and request.grammar is None:
        raise InvalidField(grammar.field, "not offered where the answer continues a message of the assistant")
    return CONTINUING


def _variables(request: MessagesRequest) -> dict[str, Any]:
    thinking = thinking_of(request.thinking, request.enable_thinking)
    config = request.output_config
    if request.reasoning_effort is None and config is not None and thinking is not False:
        return variables_of(thinking, config.effort, names=("thinking", "output_config.effort"))
    return variables_of(thinking, request.reasoning_effort, names=("thinking", "reasoning_effort"))


def _grammar(request: MessagesRequest) -> Grammar | None:
    config = request.output_config
    forms = {
        "response_format": request.response_format,
        "output_config.format": None if config is None else config.format,
        "output_format": request.output_format,
    }
    name = next((name for name, form in forms.items() if form is not None), "response_format")
    return grammar_of(forms[name], request.grammar, name)
