"""Items of a response, as clients get items and as clients and the store bring items back.

The functions at the top write items: messages, reasoning, and tools that ran on the server with their citations.

| item | when |
|---|---|
| shell_call, shell_call_output | before and after commands of the shell, in place of progress events |
| code_interpreter_call | opened before the code, done after the code, beside the progress events |
| web_search_call | the same for a search, and for a page that is read; the request decides about the sources |
| mcp_call | the same, for a tool of an MCP server |

A model may call with arguments of wrong types, and tools may give NUL. Items have neither: clients, and the server
itself, take items back as input.

Clients see the output of code only where they ask for the output (`shown`), and the pages of searches likewise.

Entries of a shell's output serve two dialects: `type` with `text`, and `stdout`, `stderr` and `outcome` of OpenAI. Each
text stands once in each dialect. A call that was denied has the exit code 126 of a shell.

`Turns` reads items as messages for chat templates:

1. Items without a type that have a role are messages. Calls that follow each other, or follow text of the assistant,
   belong to one message of the assistant.
2. Reasoning is accepted and not replayed. A reference to an item is dropped.
3. Output items of earlier responses have the same form, so the same class reads history and new input. Calls of
   tools that ran on the server, and what they gave, become turns of the tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from frontend.agent.tools import EXECUTE, EXTRACT, SEARCH_TOOL, SHELL_TOOL, values_of
from frontend.engine.events import Calling, Completed
from frontend.generation.contents import content_of
from frontend.generation.conversation import Conversation
from frontend.generation.errors import InvalidField
from frontend.generation.hosted import Hosted
from frontend.generation.nested import json_text
from frontend.generation.outcome import entries_of
from frontend.generation.pictures import Content, Standing
from ipc.wire.streams import TokenLogprob

Item = dict[str, Any]
SHELL_CALL, SHELL_OUTPUT, CODE_CALL = "shell_call", "shell_call_output", "code_interpreter_call"
SEARCH_CALL, MCP_CALL = "web_search_call", "mcp_call"
_OPEN = {EXECUTE: CODE_CALL, SEARCH_TOOL: SEARCH_CALL, EXTRACT: SEARCH_CALL}
_STATES = {CODE_CALL: "interpreting", SEARCH_CALL: "searching"}
_WRITTEN = {CODE_CALL: "code", MCP_CALL: "arguments"}
"""What the model has written of a call, by the kind of the item."""
_DENIED_CODE, _FAILED_CODE = 126, 1
_OF_TOOLS = (SHELL_CALL, SHELL_OUTPUT, CODE_CALL, SEARCH_CALL, MCP_CALL)
_LOOKS = {"search": (SEARCH_TOOL, "query"), "open_page": (EXTRACT, "url")}
"""Tool and argument of a web search, by the type of its action."""


def message(id_: str, status: str, *parts: dict[str, Any]) -> Item:
    """A message of the assistant."""
    return {"type": "message", "id": id_, "role": "assistant", "status": status, "content": list(parts)}


def text_part(text: str) -> dict[str, Any]:
    """A text of a message."""
    return {"type": "output_text", "text": text, "annotations": []}


def reasoning(id_: str, status: str = "in_progress", *parts: dict[str, Any]) -> Item:
    """How the model thought."""
    return {"type": "reasoning", "id": id_, "status": status, "summary": [], "content": list(parts)}


class DamagedEvents(ValueError):
    """Kept events that cannot be read, or that do not follow from those before."""


@dataclass(slots=True)
class Growing:
    """An item whose text still grows; of a call the arguments, with `fields` that name the call."""

    kind: str
    index: int
    id: str
    fields: dict[str, Any] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    annotations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        """The fields of events that say where their text belongs."""
        place = {"item_id": self.id, "output_index": self.index}
        return place | ({"call_id": self.fields["call_id"]} if self.fields else {"content_index": 0})

    def whole(self, status: str) -> Item:
        """The item with all of its text."""
        text = "".join(self.texts)
        if self.fields:
            return {"type": self.kind, "id": self.id, **self.fields, "arguments": text, "status": status}
        if self.kind == "reasoning":
            return reasoning(self.id, status, {"type": "reasoning_text", "text": text})
        logprobs = {"logprobs": entries_of(self.logprobs)} if self.logprobs else {}
        return message(self.id, status, {**text_part(text), "annotations": self.annotations, **logprobs})


def is_shell(event: Calling | Completed) -> bool:
    """Whether items of the shell tell the event."""
    return event.name == SHELL_TOOL


def open_kind(event: Calling) -> str:
    """The kind of the item that is open while the tool runs; empty for a tool without such an item."""
    return _OPEN.get(event.name) or (MCP_CALL if event.server else "")


def shell_call(id_: str, event: Calling, status: str) -> Item:
    """The commands that a shell is given."""
    values = values_of(event.arguments)
    given = values if isinstance(values, dict) else {}
    commands = given.get("commands")
    action: dict[str, Any] = {
        "commands": [_plain(each) for each in commands if isinstance(each, str)]
        if isinstance(commands, list)
        else []
    }
    for name in ("timeout_ms", "max_output_length"):
        action[name] = given.get(name) if type(given.get(name)) is int else None
    begun = {"type": SHELL_CALL, "id": id_, "call_id": event.id}
    return {**begun, "action": action, "environment": None, "status": status}


def shell_output(id_: str, event: Completed, most_characters: Any) -> Item:
    """What the shell gave."""
    entries, data = [], event.data
    if data.get("timed_out"):
        outcome: dict[str, Any] = {"type": "timeout"}
    else:
        default = _DENIED_CODE if data.get("status") == "denied" else _FAILED_CODE
        outcome = {"type": "exit", "exit_code": data.get("exit_code", default)}
    silent = {"stdout": "", "stderr": "", "outcome": outcome}
    for name in ("stdout", "stderr"):
        if text := _plain(data.get(name)):
            entries.append({"type": name, "text": text, **silent, name: text})
    ended = {"type": "outcome", "status": data.get("status", "error")}
    if "exit_code" in outcome:
        ended["exit_code"] = outcome["exit_code"]
    else:
        ended["timed_out"] = True
    entries.append({**ended, **silent})
    begun = {"type": SHELL_OUTPUT, "id": id_, "call_id": event.id, "max_output_length": most_characters}
    return {**begun, "output": entries, "status": "completed"}


def opened(kind: str, id_: str, event: Calling, container: str) -> Item:
    """The item of an `open_kind`; `closed` adds what the tool gave."""
    begun: Item = {"type": kind, "id": id_, "call_id": event.id}
    if kind == CODE_CALL:
        begun |= {"code": _plain(event.data.get("code")), "container_id": container, "outputs": None}
    elif kind == SEARCH_CALL:
        name, action = ("url", "open_page") if event.name == EXTRACT else ("query", "search")
        begun["action"] = {"type": action, name: _plain(event.data.get(name))}
    else:
        begun |= {
            "server_label": _plain(event.server),
            "name": event.name,
            "arguments": _plain(event.arguments),
        }
        begun |= {"output": None, "error": None}
    return {**begun, "status": "in_progress"}


def opening(item: Item) -> list[tuple[str, dict[str, Any]]]:
    """Events of the beginning of an open item: names, and fields beside those that all events of an item have."""
    kind = item["type"]
    events: list[tuple[str, dict[str, Any]]] = [(f"response.{kind}.in_progress", {})]
    if kind in _WRITTEN:
        name, text = f"response.{kind}_{_WRITTEN[kind]}", item[_WRITTEN[kind]]
        events += [(f"{name}.delta", {"delta": text}), (f"{name}.done", {_WRITTEN[kind]: text})]
    if kind in _STATES:
        events.append((f"response.{kind}.{_STATES[kind]}", {}))
    return events


def unwritten(item: Item) -> Item:
    """An open item before the events of its beginning, which bring the code or the arguments."""
    return {**item, _WRITTEN[item["type"]]: ""} if item["type"] in _WRITTEN else item


def shown(item: Item, *, tells_logs: bool) -> Item:
    """An item as clients see the item. The store keeps what code has printed, for responses that go on from there."""
    return {**item, "outputs": None} if item["type"] == CODE_CALL and not tells_logs else item


def closed(item: Item, event: Completed) -> tuple[Item, str]:
    """The item of a call that has ended, and the name of the event of the end.

    Code has its output as logs, a search the pages that were found. A tool of an MCP server has an output, or an error
    in place of the output.
    """
    if item["type"] == CODE_CALL:
        text = "".join(_plain(event.data.get(name)) for name in ("stdout", "stderr", "exception"))
        logs = [{"type": "logs", "logs": text}] if text else []
        status = "failed" if event.data.get("exception") else "completed"
        return {**item, "outputs": logs, "status": status}, f"response.{CODE_CALL}.completed"
    is_well = event.status == "success"
    if item["type"] == SEARCH_CALL:
        urls = [{"type": "url", "url": each["url"]} for each in event.sources]
        action = {**item["action"], "sources": urls} if urls else item["action"]
        status = "completed" if is_well else "failed"
        return {**item, "action": action, "status": status}, f"response.{SEARCH_CALL}.completed"
    status, field = ("completed", "output") if is_well else ("failed", "error")
    fields = {field: _plain(event.data.get("content")), "status": status}
    return {**item, **fields}, f"response.{MCP_CALL}.{status}"


def _plain(value: Any) -> str:
    """A text without NUL; empty for all that is no text."""
    return value.replace("\0", "") if isinstance(value, str) else ""


def settled(item: Item) -> Item:
    """An item of a response that has ended: what has not ended by then never will."""
    return {**item, "status": "incomplete"} if item["status"] == "in_progress" else item


def citation(file: dict[str, Any], container: str) -> dict[str, Any]:
    """The annotation of a file that a tool has made."""
    named = {"file_id": file["id"], "container_id": container, "filename": file["name"]}
    return {"type": "container_file_citation", **named, "start_index": 0, "end_index": 0}


def joined(namespace: Any, name: str) -> str:
    """The name of a function as the model knows the function."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


class Turns:
    """Adds items to a conversation, and joins what the assistant says and calls in one turn."""

    def __init__(self, talk: Conversation, hosted: Hosted) -> None:
        """`hosted` takes the files of messages."""
        self._talk, self._hosted = talk, hosted
        self._said: tuple[Content | None, str] | None = None
        """Content and place of the assistant's turn that is not added yet."""
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
                self._output(item, where, is_past)
            elif item["type"] in _OF_TOOLS:
                self._of_tools(item, where)
        self._flush()

    def _of_tools(self, item: dict[str, Any], where: str) -> None:
        """A call that ran on the server, its result, or both."""
        kind = item["type"]
        if kind == SHELL_CALL:
            action = item.get("action")
            commands = action.get("commands") if isinstance(action, dict) else None
            call_id = _text_in(item, "call_id", where)
            if not isinstance(commands, list) or not all(isinstance(each, str) for each in commands):
                raise InvalidField(f"{where}.action.commands", "expected a list of strings")
            self._add_call(call_id, SHELL_TOOL, {"commands": commands}, where)
            return
        if kind == SHELL_OUTPUT:
            self._flush()
            text = json_text(_shell_result(item.get("output"), f"{where}.output"), f"{where}.output")
            self._talk.add("tool", text, where, call_id=_text_in(item, "call_id", where))
            return
        call_id = _text_in(item, "call_id" if item.get("call_id") else "id", where)
        if kind == MCP_CALL:
            self._add_call(call_id, _text_in(item, "name", where), item.get("arguments"), where)
            self._flush()
            said = "output" if item.get("error") is None else "error"
            text = "" if item.get(said) is None else _text_in(item, said, where)
            self._talk.add("tool", text, where, call_id=call_id)
            return
        if kind == SEARCH_CALL:
            self._search(item, call_id, where)
            return
        self._add_call(call_id, EXECUTE, {"code": _text_in(item, "code", where)}, where)
        self._flush()
        outputs = [] if item.get("outputs") is None else item["outputs"]
        if not isinstance(outputs, list):
            raise InvalidField(f"{where}.outputs", "expected a list of objects, or null")
        logs = [str(each.get("logs", "")) for each in outputs if isinstance(each, dict)]
        self._talk.add("tool", "\n".join(logs), where, call_id=call_id)

    def _search(self, item: dict[str, Any], call_id: str, where: str) -> None:
        """A search, or a page that was read; of the result the item has the sources at most."""
        action, place = item.get("action"), f"{where}.action"
        kind = action.get("type") if isinstance(action, dict) else None
        if not (isinstance(action, dict) and isinstance(kind, str) and kind in _LOOKS):
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
        album, place = self._talk.album, f"{where}.content"
        content = content_of(item.get("content"), place, album, self._hosted, Standing(is_past=is_past))
        if not isinstance(role, str):
            raise InvalidField(f"{where}.role", "expected a string")
        if role == "assistant" and self._calls and self._said is not None and isinstance(content, str):
            # NOTE: text behind calls is of their turn. No other message may stand between calls and their results.
            said, place = self._said
            if not isinstance(said, list):
                self._said = (said or "") + content, place
                return
        self._flush()
        if role == "assistant" and content is not None:
            self._said = content, where
        else:
            self._talk.add(role, content, where)

    def _call(self, item: dict[str, Any], where: str) -> None:
        if item.get("status") == "incomplete":
            # NOTE: the arguments break off, and nobody has answered the call.
            return
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

    def _output(self, item: dict[str, Any], where: str, is_past: bool) -> None:
        call_id, place = _text_in(item, "call_id", where), f"{where}.output"
        content = content_of(item.get("output"), place, self._talk.album, standing=Standing(True, is_past))
        if content is None:
            raise InvalidField(place, "is required")
        self._flush()
        self._talk.add("tool", content, where, call_id=call_id)

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
