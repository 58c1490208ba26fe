"""The functions that a model may call, and how freely: `tools` and `tool_choice` of a request.

1. A function stands nested (`{"type": "function", "function": {...}}`) or flat (`{"type": "function", "name": ...}`).
   Both become the nested form that chat templates read.
2. Tools that run on the server are refused with the reason. A protocol passes the hints that fit its clients.
3. `tool_choice` names functions of the request only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from frontend.generation.errors import InvalidField
from frontend.generation.nested import json_text
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
    "mcp": "MCP servers",
}
"""Kinds of tools that run on the server, and what each needs there."""


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


def functions_of(tools: Sequence[Any] | None, hints: Mapping[str, str] | None = None) -> list[Function]:
    """All functions of a request in the forms of OpenAI, without tools that run on the server.

    `hints` maps kinds of tools to what a client should do instead. Raises `InvalidField`.
    """
    known = hints or {}

    def read(tool: Mapping[str, Any], where: str) -> Function:
        if tool.get("type") != "function":
            refuse_hosted(tool.get("type"), where, known)
        return function_of(tool, where)

    return read_functions(tools, read)


def read_functions(
    tools: Sequence[Any] | None, read: Callable[[Mapping[str, Any], str], Function]
) -> list[Function]:
    """All functions of a request; `read(tool, where)` makes one of them. Raises `InvalidField`."""
    given = tools or ()
    if len(given) > MAX_FUNCTIONS:
        raise InvalidField("tools", f"{len(given)} given, the limit is {MAX_FUNCTIONS}")
    functions = []
    for index, tool in enumerate(given):
        if not isinstance(tool, dict):
            raise InvalidField(f"tools[{index}]", "expected an object")
        functions.append(read(tool, f"tools[{index}]"))
    return functions


def refuse_hosted(kind: Any, where: str, hints: Mapping[str, str]) -> None:
    """Raise the `InvalidField` of a tool that is no function."""
    if not isinstance(kind, str):
        raise InvalidField(f"{where}.type", "expected a string")
    if kind in hints:
        raise InvalidField(f"{where}.type", f"{kind!a} {hints[kind]}")
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
    names = [function.name for function in functions]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidField(f"tools[{index}]", f"function {name!a} is declared twice")
    if not functions:
        return None
    definitions = [function.definition for function in functions]
    nbytes = len(orjson.dumps(definitions))
    if nbytes > MAX_FUNCTIONS_NBYTES:
        raise InvalidField("tools", f"{nbytes} bytes of functions, the limit is {MAX_FUNCTIONS_NBYTES}")
    if choice.mode == "none":
        return None
    strict = [function.name for function in functions if function.strict]
    return ToolUse(definitions, choice.mode, choice.name, list(choice.allowed), strict, parallel is not False)


def choice_of(given: Any, names: Collection[str]) -> Choice:
    """`tool_choice` in all forms of the OpenAI protocols; `names` are those of the functions. Raises `InvalidField`."""
    if given is None:
        return Choice()
    if isinstance(given, str):
        return mode_of(given, names, "tool_choice")
    if not isinstance(given, dict):
        raise InvalidField("tool_choice", "expected a string or an object")
    kind = given.get("type")
    if kind == "allowed_tools":
        return _allowed(given, names)
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
    told = f"{mode[:64]!a}" if isinstance(mode, str) else "the value"
    return f"{told} is not one of {', '.join(known)}"


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
