"""Tools as text, for chat templates that know none: functions, earlier calls, and what the functions gave.

1. The load finds out what a template shows (`shown`): functions, calls, results. A function shows if its name stands in
   the prompt of every conversation that the template takes.
2. Functions that a template does not show stand in a system text (`told`): behind the system message, in one of their
   own, or before the first message of the user where the template has no system messages.
3. A call becomes what the model is told to write, in the text of its message. Parsers and grammars read and write the
   same form (`Wrapper`).
4. Results in a row become one message of the user, together with the message of the user behind them: many templates
   want the roles in turns.

A content with pictures is a list of parts. Texts are put before and behind such a list, and pictures that a function
gave stand behind its text.

Strings of a request have their marks already (`workers.generation.templates`); the words of this module stay tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from workers.generation.formats.tags import Wrapper

TEMPLATE, SYSTEM_TEXT, NONE = "template", "system text", "none"
"""How a model is shown functions: by its template, by a system text, or not at all."""
_NAME, _VALUE, _ID = "penstock0probe", "penstock1says2", "abcdefghi"
_PARAMETERS = {
    "type": "object",
    "properties": {"text": {"type": "string", "description": "Any text."}},
    "required": ["text"],
}
PROBE: Mapping[str, Any] = {
    "type": "function",
    "function": {"name": _NAME, "description": "Takes a text.", "parameters": _PARAMETERS},
}
"""The function that templates are tried with."""
_USER, _ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}
_SYSTEM = {"role": "system", "content": "a"}
_TALKS = ([_USER], [_SYSTEM, _USER], [_USER, _ASSISTANT, _USER])
Render = Callable[[list[dict[str, Any]], Mapping[str, Any]], str | None]
"""The text of a conversation under variables; None if the template refuses the conversation."""


class Shown(NamedTuple):
    """What a template shows of tools. Results show only where calls do."""

    functions: bool
    calls: bool
    results: bool


def shown(render: Render, has_results: bool) -> Shown:
    """What a template shows; `has_results`: the template takes messages of tools."""
    tools = {"tools": [PROBE]}
    texts = [text for talk in _TALKS if (text := render(talk, tools)) is not None]
    functions = bool(texts) and all(_NAME in text for text in texts)
    prompts = [render([_USER, _called(arguments)], tools) for arguments in ({"text": _VALUE}, f'"{_VALUE}"')]
    calls = any(text is not None and _VALUE in text and _NAME in text for text in prompts)
    return Shown(functions, calls, calls and has_results)


def _called(arguments: Any) -> dict[str, Any]:
    function = {"name": _NAME, "arguments": arguments}
    call = {"id": _ID, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def told(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    shows: Shown,
    has_system: bool,
    wrapper: Wrapper,
) -> tuple[list[dict[str, Any]], Sequence[Mapping[str, Any]] | None]:
    """(messages, functions) for a template: what the template would not show of them has become text.

    `has_system`: the template takes system messages. `wrapper` is how the model writes calls.
    """
    given = list(messages) if shows.calls else [_with_calls(message, wrapper) for message in messages]
    if not shows.results:
        given = _with_results(given)
    if shows.functions or not tools:
        return given, tools
    return _with_text(given, _system_text(tools, shows, wrapper), has_system), None


def _with_text(messages: list[dict[str, Any]], text: str, has_system: bool) -> list[dict[str, Any]]:
    """The messages with a system text."""
    first = messages[0]
    if first["role"] == "system" and has_system:
        said = first.get("content") or ""
        return [{**first, "content": _joined(said, text, "\n\n") if said else text}, *messages[1:]]
    if has_system:
        return [{"role": "system", "content": text}, *messages]
    at = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
    if at is None:
        return [{"role": "user", "content": text}, *messages]
    asked = {**messages[at], "content": _joined(text, messages[at].get("content") or "", "\n\n")}
    return [*messages[:at], asked, *messages[at + 1 :]]


def _system_text(tools: Sequence[Mapping[str, Any]], shows: Shown, wrapper: Wrapper) -> str:
    """The functions, and how the model calls one."""
    functions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        "# Tools\n\nYou may call functions to help the user. These are the functions, each with the schema of its "
        f"arguments:\n<tools>\n{functions}\n</tools>\n\nTo call a function, write its name for NAME and a JSON object "
        f"for ARGUMENTS:\n{_calls_text([('NAME', 'ARGUMENTS')], wrapper)}"
    )
    if shows.results:
        return text
    return f"{text}\n\nWhat a function gives comes within <tool_response></tool_response>."


def _with_calls(message: dict[str, Any], wrapper: Wrapper) -> dict[str, Any]:
    """A message whose calls stand in its text, behind what the assistant said."""
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [(each["name"], json.dumps(each["arguments"], ensure_ascii=False)) for each in functions]
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    said, text = message.get("content"), _calls_text(calls, wrapper)
    return {**others, "content": _joined(said, text, "\n") if said else text}


def _calls_text(calls: Sequence[tuple[str, str]], wrapper: Wrapper) -> str:
    """Calls, each a name and JSON text of arguments, as the model writes them."""
    written = [
        f"{wrapper.begins}{_written(name, wrapper)}{wrapper.between}{arguments}{wrapper.ends}"
        for name, arguments in calls
    ]
    return f"{wrapper.opened}{wrapper.joined.join(written)}{wrapper.closed}"


def _written(name: str, wrapper: Wrapper) -> str:
    return json.dumps(name, ensure_ascii=False)[1:-1] if wrapper.begins.endswith('"') else name


def _with_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with results of functions as messages of the user."""
    merged: list[dict[str, Any]] = []
    behind_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        said = _result(message) if is_result else message.get("content")
        if behind_result and (is_result or message["role"] == "user"):
            merged[-1] = {"role": "user", "content": _joined(merged[-1]["content"], said, "\n")}
        else:
            merged.append({"role": "user", "content": said} if is_result else message)
        behind_result = is_result
    return merged


def _result(message: Mapping[str, Any]) -> Any:
    """The content of a message that tells what a function gave: JSON stands as it is, other text as a JSON string."""
    given = message.get("content") or ""
    parts = given if isinstance(given, list) else []
    text = "\n".join(part["text"] for part in parts if part["type"] == "text") if parts else given
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        text = json.dumps(text, ensure_ascii=False)
    name = f'"name": {json.dumps(message["name"], ensure_ascii=False)}, ' if message.get("name") else ""
    response = f'<tool_response>\n{{{name}"content": {text}}}\n</tool_response>'
    pictures = [part for part in parts if part["type"] != "text"]
    return [{"type": "text", "text": response}, *pictures] if pictures else response


def _joined(first: Any, second: Any, between: str) -> Any:
    """Two contents one behind the other, with a text between them; a list of parts if one of them is a list."""
    if not isinstance(first, list) and not isinstance(second, list):
        return f"{first}{between}{second}"
    before, after = _as_parts(first), _as_parts(second)
    text = between
    if before and before[-1]["type"] == "text":
        text = before.pop()["text"] + text
    if after and after[0]["type"] == "text":
        text += after.pop(0)["text"]
    return [*before, {"type": "text", "text": text}, *after]


def _as_parts(content: Any) -> list[Any]:
    return list(content) if isinstance(content, list) else [{"type": "text", "text": content}]
