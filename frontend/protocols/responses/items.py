"""Items of a response: messages, reasoning, tools that ran on the server with the citations of their files.

| item | when |
|---|---|
| shell_call, shell_call_output | before and after commands of the shell, in place of progress events |
| code_interpreter_call | opened before the code, done after the code, beside the progress events |
| web_search_call | the same for a search, and for a page that is read; the request decides about the sources |
| mcp_call | the same, for a tool of an MCP server |

A model may call with arguments of wrong types, and tools may give NUL. Items have neither: clients, and the server
itself, take items back as input.

Entries of a shell's output serve two dialects: `type` with `text`, and `stdout`, `stderr` and `outcome` of OpenAI. Each
text stands once in each dialect. A call that was denied has the exit code 126 of a shell.
"""

from __future__ import annotations

from typing import Any

from frontend.agent.tools import EXECUTE, EXTRACT, SEARCH_TOOL, SHELL_TOOL, values_of
from frontend.engine.events import Calling, Completed

Item = dict[str, Any]
SHELL_CALL, SHELL_OUTPUT, CODE_CALL = "shell_call", "shell_call_output", "code_interpreter_call"
SEARCH_CALL, MCP_CALL = "web_search_call", "mcp_call"
_OPEN = {EXECUTE: CODE_CALL, SEARCH_TOOL: SEARCH_CALL, EXTRACT: SEARCH_CALL}
_STATES = {CODE_CALL: "interpreting", SEARCH_CALL: "searching"}
_DENIED_CODE, _FAILED_CODE = 126, 1


def message(id_: str, status: str, *parts: dict[str, Any]) -> Item:
    """A message of the assistant."""
    return {"type": "message", "id": id_, "role": "assistant", "status": status, "content": list(parts)}


def text_part(text: str) -> dict[str, Any]:
    """A text of a message."""
    return {"type": "output_text", "text": text, "annotations": []}


def reasoning(id_: str, status: str = "in_progress", *parts: dict[str, Any]) -> Item:
    """How the model thought."""
    return {"type": "reasoning", "id": id_, "status": status, "summary": [], "content": list(parts)}


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
    action |= {name: given.get(name) for name in ("timeout_ms", "max_output_length")}
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
    begin: tuple[str, dict[str, Any]] = (f"response.{item['type']}.in_progress", {})
    if item["type"] in _STATES:
        return [begin, (f"response.{item['type']}.{_STATES[item['type']]}", {})]
    arguments = item["arguments"]
    name = f"response.{MCP_CALL}_arguments"
    return [begin, (f"{name}.delta", {"delta": arguments}), (f"{name}.done", {"arguments": arguments})]


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
        found = [{"type": "url", "url": each["url"]} for each in event.sources]
        action = {**item["action"], "sources": found} if found else item["action"]
        status = "completed" if is_well else "failed"
        return {**item, "action": action, "status": status}, f"response.{SEARCH_CALL}.completed"
    status, field = ("completed", "output") if is_well else ("failed", "error")
    told = {field: _plain(event.data.get("content")), "status": status}
    return {**item, **told}, f"response.{MCP_CALL}.{status}"


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
