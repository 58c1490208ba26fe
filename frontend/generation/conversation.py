"""Messages and functions as chat templates read them, made from the fields that a protocol has parsed.

Messages:

1. A protocol gives each message to a `Conversation`: role, text, calls of the assistant, answers of tools.
   `messages_of` reads messages in the form of OpenAI.
2. Arguments of calls are JSON text on the wire and objects in templates. Their integers are exact, however long.
3. Texts may hold anything but NUL. The number of messages and their bytes in all are bounded by the limits of texts,
   and so are the arguments of calls.
4. Messages of users and of tools may have pictures (`frontend.generation.pictures`), which stand in parts.

The functions that a model may call, and how freely, are `tools` and `tool_choice` of a request:

1. A function stands nested (`{"type": "function", "function": {...}}`) or flat (`{"type": "function", "name": ...}`).
   Both become the nested form that chat templates read.
2. Tools that run on the server become features of the request where the server offers them. All others (`HOSTED`) are
   refused with the reason. A protocol passes the hints that fit its clients.
3. `tool_choice` names functions of the request only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from frontend.generation.contents import content_of
from frontend.generation.errors import InvalidField
from frontend.generation.hosted import REMOTE, Hosted
from frontend.generation.nested import arguments_of, json_text, values_of
from frontend.generation.pictures import Album, Content, Standing, texts_of
from frontend.http.fields import one_of
from ipc.settings import Limits
from ipc.wire.messages import ToolUse

MAX_FUNCTIONS = 128
MAX_FUNCTIONS_NBYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_MODES = ("none", "auto", "required")
HOSTED = {
    "code_interpreter": "code execution",
    "web_search": "web search",
    "web_search_preview": "web search",
    "shell": "a shell",
    "file_search": "file search",
    "image_generation": "image generation",
    "computer_use_preview": "computer use",
}
"""Kinds of tools that run on the server, and what each needs there."""
ROLES = ("system", "developer", "user", "assistant", "tool")
SEEN_ROLES = ("user", "tool")
"""Roles whose messages may have pictures."""
CONTINUING: Mapping[str, bool] = {"add_generation_prompt": False, "continue_final_message": True}
"""Variables of a template whose last message the answer continues."""
BeginsAnswer = Annotated[
    bool | None, Meta(description="End the conversation with the beginning of an answer; the default.")
]
ContinuesMessage = Annotated[
    bool | None,
    Meta(description="End with the last message, unfinished; excludes a true `add_generation_prompt`."),
]


@dataclass(frozen=True, slots=True)
class Function:
    """One function: `definition` in the nested form; with `strict` its arguments must match the schema."""

    name: str
    definition: dict[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """How freely the model calls functions, in the terms of `ToolUse`."""

    mode: str = "auto"
    name: str = ""
    allowed: tuple[str, ...] = ()


_FREE = Choice()


def declared(
    name: Any, description: Any, parameters: Any, strict: Any, where: str, schema_field: str = "parameters"
) -> Function:
    """One function from its parts, which are checked; `where` is the path of its object. Raises `InvalidField`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidField(f"{where}.name", "expected 1 to 128 letters, digits, or characters of _.:-")
    if not isinstance(description, str | None):
        raise InvalidField(f"{where}.description", "expected a string")
    json_text(description, f"{where}.description")
    if not isinstance(parameters, dict | None):
        raise InvalidField(f"{where}.{schema_field}", "expected an object, the JSON schema of the arguments")
    json_text(parameters, f"{where}.{schema_field}")
    if not isinstance(strict, bool | None):
        raise InvalidField(f"{where}.strict", "expected true or false")
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    # NOTE: many chat templates read the parameters of every function.
    function["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    return Function(name, {"type": "function", "function": function}, bool(strict))


def function_of(tool: Mapping[str, Any], where: str) -> Function:
    """A tool of type `function` in either form. Raises `InvalidField`."""
    inner = tool.get("function")
    if inner is None:
        inner = tool
    elif isinstance(inner, dict):
        where = f"{where}.function"
    else:
        raise InvalidField(f"{where}.function", "expected an object")
    strict = inner.get("strict", tool.get("strict"))
    return declared(inner.get("name"), inner.get("description"), inner.get("parameters"), strict, where)


def functions_of(
    tools: Sequence[Any] | None, hints: Mapping[str, str] | None = None, hosted: Hosted | None = None
) -> list[Function]:
    """All functions of a request in the forms of OpenAI; `hosted` learns of code execution on the server.

    `hints` maps kinds of tools to what a client should do instead. Raises `InvalidField`.
    """
    if not tools:
        return []
    known = hints or {}

    def read(tool: Mapping[str, Any], where: str) -> Function | None:
        kind = tool.get("type")
        if kind == "code_interpreter" and hosted is not None:
            hosted.use_code(tool, where)
            return None
        if kind != "function":
            refuse_hosted(kind, where, known)
        return function_of(tool, where)

    return read_functions(tools, read)


def read_functions(
    tools: Sequence[Any] | None, read: Callable[[Mapping[str, Any], str], Function | None]
) -> list[Function]:
    """All functions of a request; `read(tool, where)` makes one of them, or None. Raises `InvalidField`."""
    given = tools or ()
    if len(given) > MAX_FUNCTIONS:
        raise InvalidField("tools", f"{len(given)} given, the limit is {MAX_FUNCTIONS}")
    functions = []
    for index, tool in enumerate(given):
        if not isinstance(tool, dict):
            raise InvalidField(f"tools[{index}]", "expected an object")
        function = read(tool, f"tools[{index}]")
        if function is not None:
            functions.append(function)
    return functions


def refuse_hosted(kind: Any, where: str, hints: Mapping[str, str]) -> None:
    """Raise the `InvalidField` of a tool that is no function."""
    if not isinstance(kind, str):
        raise InvalidField(f"{where}.type", "expected a string")
    if kind in hints:
        raise InvalidField(f"{where}.type", f"{kind!a} {hints[kind]}")
    if kind == "mcp":
        raise InvalidField(f"{where}.type", REMOTE)
    if kind in HOSTED:
        raise not_offered(kind, HOSTED[kind], f"{where}.type")
    raise InvalidField(f"{where}.type", f"{kind[:64]!a} is no known kind of tool, expected 'function'")


def not_offered(kind: str, feature: str, field: str) -> InvalidField:
    """The error of a tool that runs on the server and needs `feature` there."""
    return InvalidField(field, f"{kind[:64]!a} needs {feature}, which this server does not offer")


def tool_use(functions: Sequence[Function], choice: Choice, parallel: bool | None) -> ToolUse | None:
    """The functions of a request as workers take them. Raises `InvalidField`.

    None without functions, and with a choice of `none`: a model that reads functions writes calls, which would be text.
    """
    if not functions:
        return None
    names = [function.name for function in functions]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidField(f"tools[{index}]", f"function {name!a} is declared twice")
    definitions = [function.definition for function in functions]
    nbytes = len(orjson.dumps(definitions))
    if nbytes > MAX_FUNCTIONS_NBYTES:
        raise InvalidField("tools", f"{nbytes} bytes of functions, the limit is {MAX_FUNCTIONS_NBYTES}")
    if choice.mode == "none":
        return None
    strict = [function.name for function in functions if function.strict]
    return ToolUse(definitions, choice.mode, choice.name, list(choice.allowed), strict, parallel is not False)


def choice_of(given: Any, names: Collection[str], own: Collection[str] = ()) -> Choice:
    """`tool_choice` in all forms of the OpenAI protocols. Raises `InvalidField`.

    `names` are those of the functions, which alone can be named; `own` are tools of this server beside them.
    """
    if given is None:
        return _FREE
    if isinstance(given, str):
        return mode_of(given, [*names, *own], "tool_choice")
    if not isinstance(given, dict):
        raise InvalidField("tool_choice", "expected a string or an object")
    kind = given.get("type")
    if kind == "allowed_tools":
        choice = _allowed(given, names)
        return replace(choice, allowed=(*choice.allowed, *own))
    if kind != "function":
        shown = f"{kind[:64]!a}" if isinstance(kind, str) else "without a type"
        raise InvalidField("tool_choice.type", f"{shown} cannot be forced, only a function can")
    return Choice("named", _named(given, names, "tool_choice"))


def mode_of(mode: Any, names: Collection[str], where: str) -> Choice:
    """A choice by mode alone. Raises `InvalidField` for an unknown mode, and for `required` without functions."""
    if mode not in _MODES:
        raise InvalidField(where, _not_among(mode, _MODES))
    if mode == "required" and not names:
        raise InvalidField(where, "'required' needs at least one function in tools")
    return Choice(mode)


def _not_among(mode: Any, known: Sequence[str]) -> str:
    shown = f"{mode[:64]!a}" if isinstance(mode, str) else "the value"
    return f"{shown} is not one of {', '.join(known)}"


def _named(given: Mapping[str, Any], names: Collection[str], where: str) -> str:
    inner = given.get("function")
    if isinstance(inner, dict):
        given, where = inner, f"{where}.function"
    return declared_name(given.get("name"), names, f"{where}.name")


def declared_name(name: Any, names: Collection[str], where: str) -> str:
    """`name`, if the request declares a function of this name. Raises `InvalidField`."""
    if not isinstance(name, str):
        raise InvalidField(where, "expected the name of a function")
    if name not in names:
        raise InvalidField(where, f"no function {name[:128]!a} is declared in tools")
    return name


def _allowed(given: Mapping[str, Any], names: Collection[str]) -> Choice:
    inner = given.get("allowed_tools")
    where = "tool_choice.allowed_tools" if isinstance(inner, dict) else "tool_choice"
    stated = inner if isinstance(inner, dict) else given
    mode, tools = stated.get("mode"), stated.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidField(f"{where}.mode", _not_among(mode, ("auto", "required")))
    if not isinstance(tools, list) or not tools:
        raise InvalidField(f"{where}.tools", "expected at least one function")
    allowed = []
    for index, tool in enumerate(tools):
        place = f"{where}.tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise InvalidField(f"{place}.type", "only functions can be allowed")
        allowed.append(_named(tool, names, place))
    return Choice(mode, "", tuple(dict.fromkeys(allowed)))


class Conversation:
    """Messages in the form of chat templates, in their order. `field` is the path of the list in the request."""

    def __init__(self, limits: Limits, field: str = "messages") -> None:
        self.messages: list[dict[str, Any]] = []
        self.field = field
        self._limits = limits
        self._nbytes = 0
        self._called: dict[str, str] = {}

    @cached_property
    def album(self) -> Album:
        """The pictures of all messages, made with the first message that is no plain text."""
        return Album(self._limits)

    def add(
        self,
        role: str,
        content: Content | None,
        where: str,
        *,
        calls: Sequence[dict[str, Any]] = (),
        call_id: str | None = None,
        name: str | None = None,
        reasoning: str | None = None,
    ) -> None:
        """Append a message, whose content has parts where it has pictures, which `album` has taken.

        Raises `InvalidField` for an unknown role, for pictures of a role that shows none, and for too much of anything.
        """
        if role not in ROLES:
            raise InvalidField(f"{where}.role", f"{role[:64]!a} is not one of {', '.join(ROLES)}")
        if content is None and not calls:
            raise InvalidField(f"{where}.content", "may be absent only together with tool_calls")
        if len(self.messages) >= self._limits.max_items:
            raise InvalidField(self.field, f"more than {self._limits.max_items} messages (limits.max_items)")
        # Templates know the role of a developer by its older name.
        message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
        for key, value in (("tool_call_id", call_id), ("name", name), ("reasoning_content", reasoning)):
            if value is not None:
                message[key] = self.checked(value, f"{where}.{key}")
        if role == "tool" and name is None and call_id in self._called:
            # Clients name the call, some templates want the name of the function.
            message["name"] = self._called[call_id]
        if isinstance(content, list) and role not in SEEN_ROLES:
            text = f"images stand in messages of {' and '.join(SEEN_ROLES)} only, not of {role}"
            raise InvalidField(f"{where}.content", text)
        for text in texts_of(content):
            self.checked(text, f"{where}.content")
        if calls:
            message["tool_calls"] = list(calls)
        self.messages.append(message)

    def call(
        self, call_id: Any, name: Any, arguments: Any, where: str, field: str = "arguments"
    ) -> dict[str, Any]:
        """One call of the assistant in the form of templates; `arguments` is JSON text or an object.

        `field` is the name of the arguments in the request. Raises `InvalidField`.
        """
        if not isinstance(name, str) or not name:
            raise InvalidField(f"{where}.name", "expected the name of a function")
        if not isinstance(call_id, str | None):
            raise InvalidField(f"{where}.id", "expected a string")
        place = f"{where}.{field}"
        told, text = arguments_of(_arguments(arguments, place), place)
        self.checked(text, place)
        function = {"name": self.checked(name, f"{where}.name"), "arguments": told}
        call: dict[str, Any] = {"type": "function", "function": function}
        if call_id is None:
            return call
        self._called[call_id] = name
        return {"id": self.checked(call_id, f"{where}.id"), **call}

    def checked(self, text: str, where: str) -> str:
        """`text`, which counts for the limit of the conversation. Raises `InvalidField` for NUL or too much text."""
        if "\0" in text:
            raise InvalidField(where, "holds a NUL character")
        self._nbytes += len(text.encode())
        limit = self._limits.max_text_bytes
        if self._nbytes > limit:
            raise InvalidField(where, f"more than {limit} bytes of text up to here (limits.max_text_bytes)")
        return text

    def finished(self) -> list[dict[str, Any]]:
        """The messages. Raises `InvalidField` if there is none."""
        if not self.messages:
            raise InvalidField(self.field, "may not be empty")
        return self.messages


def is_continued(message: Mapping[str, Any]) -> bool:
    """Whether an answer can go on with this message: the assistant says something there, and calls nothing."""
    return (
        message["role"] == "assistant" and message.get("content") is not None and "tool_calls" not in message
    )


def _arguments(given: Any, where: str) -> dict[str, Any]:
    """The arguments of a call as an object; no text at all means no arguments. Raises `InvalidField`."""
    if isinstance(given, str):
        given = values_of(given, where) if given.strip() else {}
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise InvalidField(where, "expected an object, or its JSON text")
    return given


def calls_of(conversation: Conversation, given: Any, where: str) -> list[dict[str, Any]]:
    """`tool_calls` of a message of the assistant in the form of OpenAI. Raises `InvalidField`."""
    if given is None:
        return []
    if not isinstance(given, list) or len(given) > MAX_FUNCTIONS:
        raise InvalidField(where, f"expected a list of at most {MAX_FUNCTIONS} calls")
    calls = []
    for index, each in enumerate(given):
        place = f"{where}[{index}]"
        function = each.get("function") if isinstance(each, dict) else None
        if not isinstance(function, dict):
            raise InvalidField(f"{place}.function", "expected an object")
        arguments, parameters = function.get("arguments"), function.get("parameters")
        if arguments is not None and parameters is not None:
            raise InvalidField(
                f"{place}.function.parameters", "is a duplicate of arguments: send one of them"
            )
        arguments = parameters if arguments is None else arguments
        calls.append(conversation.call(each.get("id"), function.get("name"), arguments, f"{place}.function"))
    return calls


class ChatMessage(msgspec.Struct):
    """One message; `content` is text, a list of parts, or null beside `tool_calls`."""

    role: Annotated[Annotated[str, one_of(ROLES, required=True)], Meta(description="Who speaks.")]
    content: Annotated[Any, Meta(description="What is said: a text or parts.")] = None
    name: Annotated[str | None, Meta(description="Name of the speaker, or of the called function.")] = None
    tool_calls: Annotated[list[Any] | None, Meta(description="Functions that the model calls.")] = None
    tool_call_id: Annotated[str | None, Meta(description="Id of the call that this message answers.")] = None
    reasoning_content: Annotated[
        str | None, Meta(description="What the model thought before its answer.")
    ] = None
    reasoning: Annotated[str | None, Meta(description="What the model thought before its answer.")] = None


def messages_of(
    given: list[ChatMessage] | str, limits: Limits, hosted: Hosted | None = None
) -> list[dict[str, Any]]:
    """The messages as chat templates read them; a bare text is what a user says. Raises `InvalidField`.

    `hosted` takes the files of messages.
    """
    talk = Conversation(limits)
    if isinstance(given, str):
        talk.add("user", given, "messages")
        return talk.finished()
    for index, message in enumerate(given):
        where, content = f"messages[{index}]", message.content
        # PERF: most messages are a text without calls.
        if not isinstance(content, str | None):
            standing = Standing(in_result=message.role == "tool")
            content = content_of(content, f"{where}.content", talk.album, hosted, standing)
        told = message.tool_calls
        talk.add(
            message.role,
            content,
            where,
            calls=() if told is None else calls_of(talk, told, f"{where}.tool_calls"),
            call_id=message.tool_call_id,
            name=message.name,
            reasoning=_reasoning(message, where),
        )
    return talk.finished()


def end_variables(add_generation_prompt: bool | None, continue_final_message: bool | None) -> dict[str, bool]:
    """Variables of the template for where the prompt ends. Raises `InvalidField` where both fields are true."""
    if continue_final_message and add_generation_prompt:
        raise InvalidField("continue_final_message", "cannot be true beside add_generation_prompt")
    if continue_final_message:
        return dict(CONTINUING)
    return {"add_generation_prompt": False} if add_generation_prompt is False else {}


def _reasoning(message: ChatMessage, where: str) -> str | None:
    """The reasoning under either name; clients that send back what they got may have both."""
    reasoning, alias = message.reasoning_content, message.reasoning
    if reasoning and alias and reasoning != alias:
        raise InvalidField(f"{where}.reasoning", "is a duplicate of reasoning_content: send one of them")
    return reasoning or alias
