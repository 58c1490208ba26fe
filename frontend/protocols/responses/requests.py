"""Requests of POST /v1/responses: the body, and the call that it asks for.

1. Fields of OpenAI, and those that the contract adds. Unknown fields are ignored, null equals absent.
2. Everything but the conversation is checked here, before anything is looked up. The conversation is complete once
   the stored one of `previous_response_id` is known: `ResponsePlan.call_after`.
3. `background` wins over `stream`: the answer is JSON, and the stream can be had by GET.

`functions_of` reads the tools of a request:

1. A function of a namespace is known to the model as `namespace.name`. Its calls are told with both parts.
2. A web search that may not reach the internet can find nothing here, so such a tool is left out.
3. Code execution, the shell and web search become features of the request where the server offers them. All other tools
   that run on the server are refused with the reason.

Input items become items for the store (`kept_items`), and messages for chat templates (`Turns`):

1. A string is one message of a user. Items without a type that have a role are messages.
2. Calls that follow each other, or follow text of the assistant, belong to one message of the assistant.
3. Reasoning is accepted and not replayed. A reference to an item is dropped.
4. Output items of earlier responses have the same form, so the same functions read history and new input. Calls of
   tools that ran on the server, and what they gave, become turns of the tools.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from frontend.agent.tools import with_own
from frontend.generation.conversation import (
    MAX_FUNCTIONS,
    Conversation,
    Function,
    choice_of,
    function_of,
    refuse_hosted,
    tool_use,
)
from frontend.generation.errors import InvalidField
from frontend.generation.fields import (
    ChoiceFields,
    Effort,
    alternatives_of,
    choices_of,
    ending_of,
    salt_of,
    sampling_of,
    variables_of,
)
from frontend.generation.hosted import NOTHING, AgentPlan, Hosted, Offer, in_container
from frontend.generation.nested import checked_json, grammar_of, json_text
from frontend.generation.requests import DEFAULT, LONG_NBYTES, decode
from frontend.generation.running import new_id
from frontend.protocols.responses.items import Turns, joined
from ipc.settings import Limits
from ipc.wire.messages import GenerateCall, ToolUse

NAMESPACE = "namespace"
_SEARCHES = re.compile("web_search(_preview)?(_[0-9]{4}_[0-9]{2}_[0-9]{2})?")
SOURCES = "web_search_call.action.sources"
"""Value of `include` that asks for the pages of searches."""
LOGS = "code_interpreter_call.outputs"
"""Value of `include` that asks for the output of code."""
_NO_ID = re.compile("[^A-Za-z0-9_-]")
PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "shell_call": "sc",
    "shell_call_output": "sco",
    "code_interpreter_call": "ci",
    "mcp_call": "mcp",
    "web_search_call": "ws",
}
"""Kinds of items that are kept, and the beginning of their ids."""
REFERENCE = "item_reference"
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


def functions_of(tools: Sequence[Any] | None, hosted: Hosted) -> list[Function]:
    """All functions of a request; `hosted` learns of tools that run on the server. Raises `InvalidField`."""
    _check_number(len(tools or ()), "tools")
    functions = [
        function
        for index, tool in enumerate(tools or ())
        for function in _functions(tool, f"tools[{index}]", hosted)
    ]
    _check_number(len(functions), "tools")
    return functions


def _check_number(given: int, field: str) -> None:
    if given > MAX_FUNCTIONS:
        raise InvalidField(field, f"{given} given, the limit is {MAX_FUNCTIONS}")


def _functions(tool: Any, where: str, hosted: Hosted) -> list[Function]:
    if not isinstance(tool, dict):
        raise InvalidField(where, "expected an object")
    kind = tool.get("type")
    if kind == NAMESPACE:
        return _in_namespace(tool, where)
    if isinstance(kind, str) and _SEARCHES.fullmatch(kind):
        _use_search(tool, kind, where, hosted)
        return []
    if kind == "code_interpreter":
        hosted.use_code(tool, where)
        return []
    if kind == "shell":
        hosted.use_shell(tool, where)
        return []
    if kind != "function":
        refuse_hosted(kind, where, {})
    return [function_of(tool, where)]


def _use_search(tool: dict[str, Any], kind: str, where: str, hosted: Hosted) -> None:
    """A tool of web search, in any of its versions. Raises `InvalidField`."""
    for name in ("filters", "return_token_budget"):
        if kind.startswith("web_search_preview") and tool.get(name) is not None:
            raise InvalidField(f"{where}.{name}", "is not offered by the preview: use 'web_search'")
    hosted.use_search(tool, f"{kind!a}", where, f"{where}.type")


def _in_namespace(namespace: dict[str, Any], where: str) -> list[Function]:
    name, tools = namespace.get("name"), namespace.get("tools")
    if not isinstance(name, str) or not name:
        raise InvalidField(f"{where}.name", "expected the name of the namespace")
    if not isinstance(tools, list):
        raise InvalidField(f"{where}.tools", "expected a list of functions")
    _check_number(len(tools), f"{where}.tools")
    functions = []
    for index, tool in enumerate(tools):
        place = f"{where}.tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise InvalidField(f"{place}.type", "a namespace holds functions only")
        inner = tool.get("function", tool)
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise InvalidField(f"{place}.name", "expected the name of a function")
        functions.append(function_of({**inner, "name": joined(name, inner["name"])}, place))
    return functions


class Names:
    """Takes names of called functions apart, by the tools of their request."""

    def __init__(self, tools: Sequence[Any]) -> None:
        self._namespaces = {
            joined(tool["name"], (inner.get("function") or inner)["name"]): tool["name"]
            for tool in tools
            if tool.get("type") == NAMESPACE
            for inner in tool["tools"]
        }

    def fields(self, name: str) -> dict[str, str]:
        """`name`, and `namespace` where the function has one."""
        namespace = self._namespaces.get(name)
        if namespace is None:
            return {"name": name}
        return {"name": name[len(namespace) + 1 :], "namespace": namespace}


def item_id(kind: str, response: str, place: str) -> str:
    """The id of an item of a response, the same whenever the response is told again."""
    return f"{PREFIXES[kind]}_{response.partition('_')[2]}_{place}"


def kept_items(given: str | Sequence[Any], response: str) -> list[dict[str, Any]]:
    """Input items of the response with that id, each with a type and an id of its own. Raises `InvalidField`."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    by_id: dict[str, dict[str, Any]] = {}
    for index, item in enumerate(given):
        kind = _kind_of(item, f"input[{index}]")
        if kind != REFERENCE:
            new_id, id_ = item_id(kind, response, f"in{index}"), item.get("id")
            # NOTE: pages are asked for by the id of an item, and would never end if two items had the same.
            if not isinstance(id_, str) or not id_ or id_ in by_id:
                id_ = new_id
            by_id[id_] = _kept(item, kind, id_)
    return list(by_id.values())


def _kind_of(item: Any, where: str) -> str:
    if not isinstance(item, dict):
        raise InvalidField(where, "expected an object")
    kind = item.get("type")
    if kind is None and "role" in item:
        kind = "message"
    if not isinstance(kind, str):
        raise InvalidField(f"{where}.type", "expected a string")
    if kind not in PREFIXES and kind != REFERENCE:
        raise InvalidField(
            f"{where}.type", f"{kind[:64]!a} is not one of {', '.join((*PREFIXES, REFERENCE))}"
        )
    return kind


def _kept(item: dict[str, Any], kind: str, id_: str) -> dict[str, Any]:
    stored = {**item, "type": kind, "id": id_}
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        stored["content"] = [{"type": part, "text": item["content"]}]
    return stored


class ReasoningOptions(msgspec.Struct):
    """How hard the model thinks; a summary is never made."""

    effort: Annotated[Effort, Meta(description="How long the model thinks.")] = None
    summary: Annotated[Any, Meta(description="Ignored.")] = None


class ResponseRequest(ChoiceFields, kw_only=True):
    """Body of POST /v1/responses."""

    # The contract ignores `web_search_options` here: a search is asked for as a tool.
    searches_by_field: ClassVar[bool] = False
    unserved: ClassVar[Mapping[str, str]] = {
        **ChoiceFields.unserved,
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
    include: Annotated[
        Any,
        Meta(
            description=f"With `{SOURCES}` items of searches tell the pages, with `{LOGS}` items of code the output."
        ),
    ] = None
    max_output_tokens: Annotated[int | None, Meta(description="Most tokens to generate, at least 1.")] = None
    max_tool_calls: Annotated[
        Any, Meta(description="Refused: `max_tool_rounds` bounds the turns with calls.")
    ] = None
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

    `call` lacks its messages and tools; `functions` are those of the client, and `hosted` has what `tools` ask of this
    server. `items` are the new input as the store keeps items; `fields` are those that the answer repeats. `id` is that
    of the response. `is_long`: the body is one that a thread has to read. `tells_logs`: items of code have outputs.
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
    request: ResponseRequest
    functions: list[Function]
    hosted: Hosted
    is_long: bool
    tells_logs: bool

    def call_after(
        self, history: Sequence[dict[str, Any]], limits: Limits
    ) -> tuple[GenerateCall, AgentPlan | None]:
        """The call with all of its messages: instructions, stored items, new items; and how tools of this server run.

        Raises `InvalidField`.
        """
        talk, hosted = Conversation(limits, "input"), self.hosted.copied()
        if self.instructions is not None:
            talk.add("system", self.instructions, "instructions")
        turns = Turns(talk, hosted)
        turns.add(history, "previous_response_id", is_past=True)
        turns.add(self.items, "input", is_past=False)
        agent = in_container(self.request.plan(hosted, self.streams, self.functions), container_of(self.id))
        tools = _tool_use(self.request, self.functions, agent)
        call = msgspec.structs.replace(self.call, messages=_with_one_beginning(talk.finished()), tools=tools)
        return call, agent


def _with_one_beginning(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` whose first system messages are one: many templates refuse a second one behind the instructions."""
    count = next((k for k, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]


def container_of(response: str) -> str:
    """The container of the files of a response."""
    return f"cntr_{_NO_ID.sub('_', response)}"


def parse(body: bytes, limits: Limits, offer: Offer = NOTHING) -> ResponsePlan:
    """The plan of a body; `offer` is what this server runs. Raises `MalformedBody` and `InvalidField`."""
    request = decode(body, ResponseRequest, limits.max_items, (LIMITS,))
    request.refuse_unserved()
    background = bool(request.background)
    streams = bool(request.stream) and not background
    included = request.include if isinstance(request.include, list) else []
    hosted = Hosted(offer, tells_sources=SOURCES in included)
    stores = request.store is not False
    if background and not stores:
        raise InvalidField("store", "a response in the background has to be stored")
    functions = functions_of(request.tools, hosted)
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
        request,
        functions,
        hosted,
        len(body) > LONG_NBYTES,
        LOGS in included,
    )


def _check_values(request: ResponseRequest) -> None:
    """Raise `InvalidField` for what cannot be told and stored again as JSON."""
    for name in ("metadata", "text", "tool_choice", "tools"):
        json_text(getattr(request, name), name)
    for index, item in enumerate(request.input if isinstance(request.input, list) else ()):
        checked_json(item, f"input[{index}]")


def _tool_use(request: ResponseRequest, functions: list[Function], agent: AgentPlan | None) -> ToolUse | None:
    """The functions of the client and the tools of this server, as workers take both. Raises `InvalidField`."""
    offered, names = with_own(functions, agent), [function.name for function in functions]
    choice = choice_of(request.tool_choice, names, [function.name for function in offered[len(names) :]])
    return tool_use(offered, choice, request.parallel_tool_calls)


def _call(request: ResponseRequest) -> GenerateCall:
    """The call without what the conversation decides: messages and tools."""
    limit_name = next((name for name in LIMITS if getattr(request, name) is not None), LIMITS[0])
    return GenerateCall(
        messages=[],
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
    has_log_probabilities = request.top_logprobs is not None if request.logprobs is None else request.logprobs
    return alternatives_of(has_log_probabilities, request.top_logprobs)


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
    fields = {
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
    return {name: value for name, value in fields.items() if value is not None}
