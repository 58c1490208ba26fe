"""Items of a response: messages, reasoning, tools that ran on the server with the citations of their files.

| item | when |
|---|---|
| shell_call, shell_call_output | before and after commands of the shell, in place of progress events |
| code_interpreter_call | opened before the code, done after the code, beside the progress events |

A model may call with arguments of wrong types, and tools may give NUL. Items have neither: clients, and the server
itself, take items back as input.

Entries of a shell's output serve two dialects: `type` with `text`, and `stdout`, `stderr` and `outcome` of OpenAI. Each
text stands once in each dialect. A call that was denied has the exit code 126 of a shell.
"""

from __future__ import annotations

from typing import Any

from frontend.agent.tools import EXECUTE, SHELL_TOOL, values_of
from frontend.engine.events import Calling, Completed

Item = dict[str, Any]
SHELL_CALL, SHELL_OUTPUT, CODE_CALL = "shell_call", "shell_call_output", "code_interpreter_call"
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


def is_code(event: Calling | Completed) -> bool:
    """Whether an item of code execution tells the event."""
    return event.name == EXECUTE


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


def code_call(id_: str, event: Calling, container: str, status: str) -> Item:
    """Code that runs; `code_done` adds what the code gave."""
    code = _plain(event.data.get("code"))
    begun = {"type": CODE_CALL, "id": id_, "call_id": event.id, "code": code, "container_id": container}
    return {**begun, "outputs": None, "status": status}


def code_done(item: Item, event: Completed) -> Item:
    """The item of code that has run, with its output as logs."""
    text = "".join(_plain(event.data.get(name)) for name in ("stdout", "stderr", "exception"))
    logs = [{"type": "logs", "logs": text}] if text else []
    return {**item, "outputs": logs, "status": "failed" if event.data.get("exception") else "completed"}


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
