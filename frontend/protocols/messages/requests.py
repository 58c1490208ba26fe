"""Requests of /v1/messages and /v1/messages/count_tokens: the body, and the call that the body asks for.

1. `parse` reads the body: fields of Anthropic, and those that the contract adds. Unknown fields are ignored, null is
   absence.
2. `system` is the first message of the conversation. `add_messages` appends what the messages and their blocks say.
3. `_functions` finds the functions that stand when the last message is read: system messages add and withdraw
   functions.
4. `output_config` of newer clients, and `output_format` of older ones, stand for `response_format` and
   `reasoning_effort`, which win.
5. A `thread` is refused in a form that the SDKs of Anthropic know: they send the whole conversation next.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from frontend.agent.tools import with_own
from frontend.generation.contents import text_of
from frontend.generation.conversation import (
    CONTINUING,
    MAX_FUNCTIONS,
    Choice,
    Conversation,
    Function,
    declared,
    declared_name,
    is_continued,
    mode_of,
    read_functions,
    tool_use,
)
from frontend.generation.errors import InvalidField
from frontend.generation.fields import (
    Effort,
    TalkFields,
    alternatives_of,
    ending_of,
    salt_of,
    sampling_of,
    variables_of,
)
from frontend.generation.hosted import CODE, NOTHING, REMOTE, SHELL, AgentPlan, Hosted, Offer
from frontend.generation.nested import grammar_of, kind_of
from frontend.generation.requests import decode
from frontend.protocols.messages.blocks import Message, add_messages, changes_tools
from ipc.settings import Limits
from ipc.wire.messages import GenerateCall, Grammar, ToolUse

_HOSTED = ("web_search", "code_execution")
"""Tools that run on the server, by the beginning of their type."""
_WITH_CODE = "web_search_20260209"
"""The version of web search that runs code as well."""
_MODES = {"auto": "auto", "any": "required"}
_THINKING = {"enabled": True, "adaptive": True, "disabled": False}
_NO_THREADS = "the server keeps no conversations: send the whole conversation in messages"
_NO_THREADS_DETAILS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def _functions(request: MessagesRequest, hosted: Hosted) -> list[Function] | None:
    """The functions of the client; a choice of `none` removes all tools, then None. Raises `InvalidField`.

    `tools` declares functions, and code execution for `hosted`. The blocks `tool_addition` and `tool_removal` of system
    messages add functions, withdraw functions, and bring withdrawn functions back. A chat template shows one list: the
    functions after the last message.
    """
    if request.tool_choice is not None and kind_of(request.tool_choice, "tool_choice") == "none":
        return None

    def read(tool: Mapping[str, Any], where: str) -> Function | None:
        return None if _is_hosted(tool, where, hosted) else _function(tool, where)

    return _offered(read_functions(request.tools, read), request.messages)


def _tool_use(
    request: MessagesRequest, functions: list[Function] | None, plan: AgentPlan | None
) -> ToolUse | None:
    """The functions of the client and the tools of this server, as workers take both. Raises `InvalidField`."""
    if functions is None:
        return None
    choice, names = request.tool_choice, [function.name for function in functions]
    offered = with_own(functions, plan)
    return tool_use(offered, _choice(choice, names, len(offered) > len(names)), parallel=_is_parallel(choice))


def _offered(declared: list[Function], messages: Sequence[Message]) -> list[Function]:
    """The functions after the last message; `declared` as it is where a name stands twice. Raises `InvalidField`."""
    changes = [
        (block, f"messages[{index}].content[{place}]")
        for index, message in enumerate(messages)
        if message.role == "system" and isinstance(message.content, list)
        for place, block in enumerate(message.content)
        if changes_tools(block)
    ]
    known = {function.name: function for function in declared}
    if not changes or len(known) < len(declared):
        return declared
    offered = dict(known)
    for block, where in changes:
        tool = block.get("tool")
        kind = kind_of(tool, f"{where}.tool")
        if kind == "tool_definition" and block["type"] == "tool_addition":
            definition = tool.get("definition")
            if not isinstance(definition, dict):
                raise InvalidField(f"{where}.tool.definition", "expected an object")
            function = _function(definition, f"{where}.tool.definition")
            known[function.name] = offered[function.name] = function
            if len(known) > MAX_FUNCTIONS:
                raise InvalidField(where, f"more than {MAX_FUNCTIONS} tools")
            continue
        if kind != "tool_reference":
            raise InvalidField(
                f"{where}.tool.type", f"{kind[:64]!a} is no known kind of tool in a {block['type']}"
            )
        name = declared_name(tool.get("name"), known, f"{where}.tool.name")
        if block["type"] == "tool_removal":
            offered.pop(name, None)
        else:
            offered[name] = known[name]
    return list(offered.values())


def thinking_of(thinking: Any, enable_thinking: bool | None) -> bool | None:
    """Whether the model thinks first; None leaves that to the template. Raises `InvalidField`."""
    if thinking is None:
        return enable_thinking
    kind = kind_of(thinking, "thinking")
    if kind not in _THINKING:
        raise InvalidField("thinking.type", f"{kind[:64]!a} is not one of {', '.join(_THINKING)}")
    on = _THINKING[kind]
    if enable_thinking is not None and enable_thinking is not on:
        raise InvalidField("thinking.type", f"{kind!a} contradicts enable_thinking: {str(not on).lower()}")
    return on


def _is_parallel(tool_choice: Any) -> bool:
    """Whether an answer may have several calls. Raises `InvalidField`."""
    given = None if tool_choice is None else tool_choice.get("disable_parallel_tool_use")
    if not isinstance(given, bool | None):
        raise InvalidField("tool_choice.disable_parallel_tool_use", "expected true or false")
    return not given


def _function(tool: Mapping[str, Any], where: str) -> Function:
    kind, name = tool.get("type"), tool.get("name")
    if not isinstance(kind, str | None):
        raise InvalidField(f"{where}.type", "expected a string")
    if kind not in (None, "custom"):
        raise InvalidField(f"{where}.type", f"{kind[:64]!a} is no known kind of tool, expected 'custom'")
    schema, strict = tool.get("input_schema"), tool.get("strict")
    return declared(name, tool.get("description"), schema, strict, where, schema_field="input_schema")


def _is_hosted(tool: Mapping[str, Any], where: str, hosted: Hosted) -> bool:
    """Whether a tool runs on this server; then `hosted` learns of it. Raises `InvalidField` for what is not offered."""
    kind, name = tool.get("type"), tool.get("name") if "input_schema" not in tool else None
    for known in _HOSTED:
        by_type = isinstance(kind, str) and kind.startswith(f"{known}_")
        if not by_type and name != known:
            continue
        field, shown = f"{where}.{'type' if by_type else 'name'}", f"{str(kind if by_type else name)[:64]!a}"
        if known == "web_search":
            hosted.use_search(tool, shown, where, field)
        if known != "web_search" or kind == _WITH_CODE:
            hosted.use(CODE, shown, field)
        return True
    return False


def _choice(given: Any, names: Collection[str], has_own: bool) -> Choice:
    """`tool_choice`; `has_own`: tools of this server are offered beside the functions. Raises `InvalidField`."""
    if given is None:
        return Choice()
    kind = kind_of(given, "tool_choice")
    if kind == "tool" and has_own and given.get("name") in _HOSTED:
        return Choice()
    if kind == "tool":
        return Choice("named", declared_name(given.get("name"), names, "tool_choice.name"))
    if kind not in _MODES:
        raise InvalidField("tool_choice.type", f"{kind[:64]!a} is not one of auto, any, tool, none")
    if kind == "any" and has_own:
        return Choice("required")
    if kind == "any" and not names:
        raise InvalidField("tool_choice.type", "'any' needs at least one tool in tools")
    return mode_of(_MODES[kind], names, "tool_choice.type")


class OutputConfig(msgspec.Struct):
    """Form of the answer and effort of the reasoning, as newer clients send them."""

    format: Annotated[Any, Meta(description="The form.")] = None
    effort: Annotated[Effort, Meta(description="How long the model thinks.")] = None


class MessagesRequest(TalkFields, kw_only=True):
    """Body of POST /v1/messages."""

    unserved: ClassVar[Mapping[str, str]] = {
        **TalkFields.unserved,
        "mcp_servers": REMOTE,
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
    container: Annotated[
        Any, Meta(description="Skills for the shell of this server; all else is ignored.")
    ] = None
    output_config: Annotated[
        OutputConfig | None, Meta(description="Form of the answer and effort of the model.")
    ] = None
    output_format: Annotated[
        Any, Meta(description="Form of the answer, as older clients name `output_config.format`.")
    ] = None
    thread: Annotated[Any, Meta(description="Refused: the server keeps no conversations.")] = None
    mcp_servers: Annotated[
        Any, Meta(description="Refused unless empty: the operator names the MCP servers.")
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
    agent: AgentPlan | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer tells log probabilities."""
        return self.call.sampling.logprobs is not None


def parse(body: bytes, limits: Limits, offer: Offer = NOTHING) -> MessagesPlan:
    """The plan of a body; `offer` is what this server runs. Raises `MalformedBody` and `InvalidField`."""
    request = decode(body, MessagesRequest, limits.max_items)
    return _planned(request, limits, offer, streams=bool(request.stream))


def _planned(request: MessagesRequest, limits: Limits, offer: Offer, *, streams: bool) -> MessagesPlan:
    request.refuse_unserved()
    if request.thread is not None:
        raise InvalidField("thread", _NO_THREADS, details=_NO_THREADS_DETAILS)
    hosted = Hosted(offer, tells_sources=True)
    _add_skills(hosted, request.container)
    messages, functions = _messages(request, limits, hosted), _functions(request, hosted)
    plan = request.plan(hosted, streams, functions or ())
    return MessagesPlan(
        request.model, _call(request, messages, _tool_use(request, functions, plan)), streams, plan
    )


def _add_skills(hosted: Hosted, container: Any) -> None:
    """The skills of `container`, which a shell of this server runs. Raises `InvalidField`."""
    skills = container.get("skills") if isinstance(container, dict) else None
    if not skills:
        return
    if not isinstance(skills, list):
        raise InvalidField("container.skills", "expected a list")
    hosted.use(SHELL, "a skill", "container.skills")
    for index, skill in enumerate(skills):
        where = f"container.skills[{index}]"
        if kind_of(skill, where) != "custom":
            raise InvalidField(f"{where}.type", "expected 'custom': other skills are not offered")
        hosted.add_skill(skill.get("skill_id"), skill.get("version"), where)


def parse_count(body: bytes, limits: Limits, offer: Offer = NOTHING) -> MessagesPlan:
    """The plan of a body whose prompt tokens are to be counted. Raises as `parse` does."""
    # NOTE: nothing runs, so a permission of `ask` needs no stream here.
    plan = _planned(decode(body, MessagesRequest, limits.max_items), limits, offer, streams=True)
    return MessagesPlan(plan.model, msgspec.structs.replace(plan.call, counts_only=True), streams=False)


def _call(request: MessagesRequest, messages: list[dict[str, Any]], tools: ToolUse | None) -> GenerateCall:
    grammar = _grammar(request)
    end = _continuing(request, messages, grammar) if request.messages[-1].role == "assistant" else {}
    return GenerateCall(
        messages=messages,
        tools=tools,
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


def _messages(request: MessagesRequest, limits: Limits, hosted: Hosted) -> list[dict[str, Any]]:
    talk = Conversation(limits)
    if not request.messages:
        raise InvalidField("messages", "may not be empty")
    if request.system:
        talk.add("system", text_of(request.system, "system"), "system")
    add_messages(talk, request.messages, hosted)
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
