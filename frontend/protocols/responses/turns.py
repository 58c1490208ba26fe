"""Items of a conversation as messages for chat templates.

1. Items without a type that have a role are messages. Calls that follow each other, or follow text of the assistant,
   belong to one message of the assistant.
2. Reasoning is accepted and not replayed. A reference to an item is dropped.
3. Output items of earlier responses have the same form, so the same class reads history and new input. Calls of
   tools that ran on the server, and what they gave, become turns of the tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend.agent.tools import EXECUTE, EXTRACT, SEARCH_TOOL, SHELL_TOOL
from frontend.generation.conversation import Conversation, text_of
from frontend.generation.errors import InvalidField
from frontend.generation.hosted import Hosted
from frontend.generation.nested import json_text

_OF_TOOLS = ("shell_call", "shell_call_output", "code_interpreter_call", "web_search_call", "mcp_call")
_LOOKS = {"search": (SEARCH_TOOL, "query"), "open_page": (EXTRACT, "url")}
"""Tool and argument of a web search, by the type of its action."""


def joined(namespace: Any, name: str) -> str:
    """The name of a function as the model knows the function."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


class Turns:
    """Adds items to a conversation, and joins what the assistant says and calls in one turn."""

    def __init__(self, talk: Conversation, hosted: Hosted) -> None:
        """`hosted` takes the files of messages."""
        self._talk, self._hosted = talk, hosted
        self._said: tuple[str | None, str] | None = None
        """Text and place of the assistant's turn that is not added yet."""
        self._calls: list[dict[str, Any]] = []

    def add(self, items: Sequence[dict[str, Any]], field: str, *, is_past: bool) -> None:
        """Items in their order; `field` is the path of their list. Raises `InvalidField`.

        `is_past`: earlier requests brought the items, and files of theirs may have expired.
        """
        for index, item in enumerate(items):
            where = f"{field}[{index}]"
            if item["type"] == "message":
                self._message(item, where, is_past)
            elif item["type"] == "function_call":
                self._call(item, where)
            elif item["type"] == "function_call_output":
                self._output(item, where)
            elif item["type"] in _OF_TOOLS:
                self._of_tools(item, where)
        self._flush()

    def _of_tools(self, item: dict[str, Any], where: str) -> None:
        """A call that ran on the server, its result, or both."""
        kind = item["type"]
        if kind == "shell_call":
            action = item.get("action")
            commands = action.get("commands") if isinstance(action, dict) else None
            call_id = _text_in(item, "call_id", where)
            if not isinstance(commands, list) or not all(isinstance(each, str) for each in commands):
                raise InvalidField(f"{where}.action.commands", "expected a list of strings")
            self._add_call(call_id, SHELL_TOOL, {"commands": commands}, where)
            return
        if kind == "shell_call_output":
            self._flush()
            text = json_text(_shell_result(item.get("output"), f"{where}.output"), f"{where}.output")
            self._talk.add("tool", text, where, call_id=_text_in(item, "call_id", where))
            return
        call_id = _text_in(item, "call_id" if item.get("call_id") else "id", where)
        if kind == "mcp_call":
            self._add_call(call_id, _text_in(item, "name", where), item.get("arguments"), where)
            self._flush()
            said = "output" if item.get("error") is None else "error"
            text = "" if item.get(said) is None else _text_in(item, said, where)
            self._talk.add("tool", text, where, call_id=call_id)
            return
        if kind == "web_search_call":
            self._search(item, call_id, where)
            return
        self._add_call(call_id, EXECUTE, {"code": _text_in(item, "code", where)}, where)
        self._flush()
        outputs = item.get("outputs")
        logs = [str(each.get("logs", "")) for each in outputs or () if isinstance(each, dict)]
        self._talk.add("tool", "\n".join(logs), where, call_id=call_id)

    def _search(self, item: dict[str, Any], call_id: str, where: str) -> None:
        """A search, or a page that was read; of the result the item has the sources at most."""
        action, place = item.get("action"), f"{where}.action"
        kind = action.get("type") if isinstance(action, dict) else None
        if not isinstance(action, dict) or kind not in _LOOKS:
            raise InvalidField(f"{place}.type", f"expected one of {', '.join(_LOOKS)}")
        tool, name = _LOOKS[kind]
        self._add_call(call_id, tool, {name: _text_in(action, name, place)}, where)
        self._flush()
        sources = action.get("sources")
        urls = (
            [each.get("url") for each in sources if isinstance(each, dict)]
            if isinstance(sources, list)
            else []
        )
        self._talk.add("tool", json_text({"sources": urls}, f"{place}.sources"), where, call_id=call_id)

    def _message(self, item: dict[str, Any], where: str, is_past: bool) -> None:
        role = item.get("role")
        text = text_of(item.get("content"), f"{where}.content", self._hosted, required=not is_past)
        if not isinstance(role, str):
            raise InvalidField(f"{where}.role", "expected a string")
        self._flush()
        if role == "assistant" and text is not None:
            self._said = text, where
        else:
            self._talk.add(role, text, where)

    def _call(self, item: dict[str, Any], where: str) -> None:
        call_id = _text_in(item, "call_id", where)
        self._add_call(
            call_id,
            joined(item.get("namespace"), _text_in(item, "name", where)),
            item.get("arguments"),
            where,
        )

    def _add_call(self, call_id: str, name: str, arguments: Any, where: str) -> None:
        self._calls.append(self._talk.call(call_id, name, arguments, where))
        self._said = self._said or (None, where)

    def _output(self, item: dict[str, Any], where: str) -> None:
        call_id = _text_in(item, "call_id", where)
        text = text_of(item.get("output"), f"{where}.output")
        if text is None:
            raise InvalidField(f"{where}.output", "is required")
        self._flush()
        self._talk.add("tool", text, where, call_id=call_id)

    def _flush(self) -> None:
        """The turn of the assistant is complete."""
        if self._said is not None:
            self._talk.add("assistant", *self._said, calls=self._calls)
        self._said, self._calls = None, []


def _shell_result(output: Any, where: str) -> dict[str, Any]:
    """What a shell gave, by the entries of an output in either form. Raises `InvalidField`."""
    if not isinstance(output, list) or not all(isinstance(each, dict) for each in output):
        raise InvalidField(where, "expected a list of objects")
    streams = {name: "".join(_stream_of(each, name) for each in output) for name in ("stdout", "stderr")}
    outcomes = [each["outcome"] for each in output if isinstance(each.get("outcome"), dict)]
    last = outcomes[-1] if outcomes else {}
    return {**streams, "exit_code": last.get("exit_code"), "timed_out": last.get("type") == "timeout"}


def _stream_of(entry: dict[str, Any], name: str) -> str:
    text = entry.get(name)
    if text is None and entry.get("type") == name:
        text = entry.get("text")
    return text if isinstance(text, str) else ""


def _text_in(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidField(f"{where}.{name}", "expected a string")
    return value
