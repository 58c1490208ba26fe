"""What a call of a tool has given: for the model, for progress events, for the record of the call.

`Answer` has all three. `python`, `shell`, `reset`, `surfaced`, `found` and `content` make one of a result, `refused` of
a call that was denied or could not run. Values that are absent are left out, except where the contract lists them.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from frontend.agent.tools import SURFACE, Tool, calling
from ipc.wire.tools import PythonResult, ShellResult

DENIED, ERROR, FAILED, SUCCESS = "denied", "error", "failed", "success"
Data = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """`text` is what the model reads; `data` completes the progress event; `content` stands in the record.

    `images` are figures as base64 of PNG. `status` is success, error, timeout, denied or failed. `sources` are the
    pages of a search, with `url` and `title`.
    """

    text: str
    data: Data
    content: str
    images: list[str] = field(default_factory=list)
    status: str = SUCCESS
    sources: list[dict[str, str]] = field(default_factory=list)


def python(result: PythonResult, timeout_s: float, files: Sequence[str], pictures: Sequence[bytes]) -> Answer:
    """The answer of code; `files` are names of what the code has made, `pictures` the figures that clients get."""
    exception = result.exception
    if result.status == "timeout" and not exception:
        exception = f"the code ran for more than {timeout_s:g} s"
    images = [base64.b64encode(picture).decode() for picture in pictures]
    read: Data = {"status": result.status, "execution_time_ms": result.execution_time_ms}
    read["working_directory"] = result.working_directory
    read |= _present(stdout=result.stdout, stderr=result.stderr)
    if result.status == "timeout":
        del read["execution_time_ms"]
        read["timeout_info"] = {
            "timeout_secs": timeout_s,
            "interrupted": result.interrupted,
            "killed": result.killed,
        }
    else:
        read |= _present(
            exception=exception,
            result=result.result,
            result_type=result.result_type,
            images_generated=len(result.images_png),
            files=list(files),
        )
    streams = _present(stdout=result.stdout, stderr=result.stderr, exception=exception)
    data = {
        "tool_type": "code_execution",
        **streams,
        **_present(images_base64=images, working_directory=result.working_directory),
        "execution_time_ms": result.execution_time_ms,
    }
    return Answer(_json(read), data, _lines(streams), images, result.status)


def shell(result: ShellResult, commands: Sequence[str]) -> Answer:
    """The answer of shell commands."""
    ended = {
        "stdout": result.stdout,
        "stderr": result.stderr,
        "exit_code": result.exit_code,
        "status": result.status,
        "working_directory": result.working_directory,
        "timed_out": result.timed_out,
    }
    read = {"status": result.status, "commands": list(commands), **ended}
    fields = {name: value for name, value in ended.items() if value is not None}
    data = {"tool_type": "shell", "commands": list(commands), **fields}
    return Answer(_json(read), data, _json(fields), status=result.status)


def reset(status: str) -> Answer:
    """The answer of a new interpreter."""
    text = _json({"status": status})
    return Answer(text, {"tool_type": "code_execution"}, text, status=status)


def surfaced(files: Sequence[Data], arguments: Any) -> Answer:
    """The answer of files that were asked for, each with name, format, bytes and status."""
    status = SUCCESS if all(each["status"] == SUCCESS for each in files) else ERROR
    text = _json({"status": status, "files": list(files)})
    return Answer(text, {"tool_type": "custom", "arguments": arguments, "content": text}, text, status=status)


def found(output: Any, hosts: Sequence[str], sources: list[dict[str, str]]) -> Answer:
    """The answer of a search, or of a page that was read; `sources` have `url` and `title` of each."""
    names = list(dict.fromkeys(hosts))
    text = _json({"sources": names, "output": output})
    data = {"tool_type": "web_search", "results_count": len(sources), **_present(sources=names)}
    lines = [f"{len(sources)} results", *([f"sources: {', '.join(names)}"] if names else [])]
    return Answer(text, data, "\n".join(lines), sources=sources)


def content(value: Data) -> Answer:
    """The answer of a tool whose result is JSON, with an `error` where the tool failed."""
    return said(_json(value), ERROR if "error" in value else SUCCESS)


def said(text: str, status: str = SUCCESS) -> Answer:
    """The answer of a tool whose result is a text."""
    return Answer(text, {"tool_type": "custom", "content": text}, text, status=status)


def failed(tool: Tool, reason: str) -> Answer:
    """The answer of a tool of another program that gave none; `reason` is for the model too."""
    return said(_json({"error": reason, "tool": tool.name, "status": FAILED}), FAILED)


def refused(tool: Tool, status: str, reason: str, arguments: str) -> Answer:
    """The answer of a call that was denied, or that failed before its tool ran; `reason` is for the model too."""
    text = _json({"status": status, "exception": reason})
    if tool.tool_type == "code_execution":
        data = {"tool_type": tool.tool_type, "exception": reason}
        return Answer(text, data, f"exception: {reason}", status=status)
    if tool.tool_type == "shell":
        fields = {"stderr": reason, "status": status, "timed_out": False}
        return Answer(text, {**calling(tool, arguments), **fields}, _json(fields), status=status)
    answer = said(text, status)
    if tool.tool_type == "web_search":
        return replace(answer, data={**answer.data, "tool_type": tool.tool_type})
    return (
        replace(answer, data={**calling(tool, arguments), **answer.data}) if tool.name == SURFACE else answer
    )


def record(round_: int, name: str, arguments: str, answer: Answer, file_ids: Sequence[str]) -> Data:
    """The entry of `agentic_tool_calls` for a call."""
    entry = {"round": round_, "name": name, "arguments": arguments, "result_content": answer.content}
    return entry | _present(result_images_base64=answer.images, file_ids=list(file_ids))


def _present(**values: Any) -> Data:
    return {name: value for name, value in values.items() if value}


def _lines(told: Data) -> str:
    return "\n".join(f"{name}: {value}" for name, value in told.items())


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
