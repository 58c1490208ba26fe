"""The functions of a request to Messages, how freely the model calls them, and whether the model thinks first.

`tools` declares functions. The blocks `tool_addition` and `tool_removal` of system messages add functions, withdraw
functions, and bring withdrawn functions back. A chat template shows one list: the functions after the last message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from frontend.generation.errors import InvalidField
from frontend.generation.grammars import kind_of
from frontend.generation.tools import (
    MAX_FUNCTIONS,
    Choice,
    Function,
    declared,
    declared_name,
    mode_of,
    not_offered,
    read_functions,
    tool_use,
)
from frontend.protocols.messages.blocks import Message, changes_tools
from ipc.wire.messages import ToolUse

_HOSTED = {"web_search": "web search", "code_execution": "code execution"}
"""Tools that run on the server, by the beginning of their type, and what each needs there."""
_MODES = {"auto": "auto", "any": "required"}
_THINKING = {"enabled": True, "adaptive": True, "disabled": False}


def tools_of(tools: list[Any] | None, messages: Sequence[Message], tool_choice: Any) -> ToolUse | None:
    """The functions as workers take them; a choice of `none` removes all tools. Raises `InvalidField`."""
    if tool_choice is not None and kind_of(tool_choice, "tool_choice") == "none":
        return None
    functions = _offered(read_functions(tools, _function), messages)
    names = [function.name for function in functions]
    return tool_use(functions, _choice(tool_choice, names), parallel=_is_parallel(tool_choice))


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
    _refuse_hosted(kind, name if "input_schema" not in tool else None, where)
    if kind not in (None, "custom"):
        raise InvalidField(f"{where}.type", f"{kind[:64]!a} is no known kind of tool, expected 'custom'")
    schema, strict = tool.get("input_schema"), tool.get("strict")
    return declared(name, tool.get("description"), schema, strict, where, schema_field="input_schema")


def _refuse_hosted(kind: str | None, name: Any, where: str) -> None:
    for hosted, feature in _HOSTED.items():
        if kind is not None and kind.startswith(f"{hosted}_"):
            raise not_offered(kind, feature, f"{where}.type")
        if name == hosted:
            raise not_offered(name, feature, f"{where}.name")


def _choice(given: Any, names: Collection[str]) -> Choice:
    if given is None:
        return Choice()
    kind = kind_of(given, "tool_choice")
    if kind == "tool":
        return Choice("named", declared_name(given.get("name"), names, "tool_choice.name"))
    if kind not in _MODES:
        raise InvalidField("tool_choice.type", f"{kind[:64]!a} is not one of auto, any, tool, none")
    if kind == "any" and not names:
        raise InvalidField("tool_choice.type", "'any' needs at least one tool in tools")
    return mode_of(_MODES[kind], names, "tool_choice.type")
