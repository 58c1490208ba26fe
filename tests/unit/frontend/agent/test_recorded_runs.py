"""Runs with tools, byte by byte: each example of `recorded/` over three dialects, as a stream and whole.

A section of a recorded file is the whole body of one answer. Only ids (by the order of their coming) and instants are
replaced. The recorded files are the contract (the events and File objects of the mistral.rs HTTP API, the items of
OpenAI): with `RECORD_RUNS=1` in the environment the test writes them anew, for a reader who holds each change against
that contract.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from frontend.state.approvals import Decision
from ipc.errors import InferenceFailed, PenstockError
from ipc.wire.tools import PythonResult, Result, ShellResult
from tests.fakes.agent import Files
from tests.fakes.generation import Step
from tests.fakes.generation_server import CHAT
from tests.unit.frontend.agent.test_agent_chat import EXECUTE, FINAL, SHELL, AgentServer, calls

RECORDED = Path(__file__).with_name("recorded")
READ, LIST, SURFACE = "mistralrs_read_file", "mistralrs_list_files", "mistralrs_surface_outputs"
PNG = b"\x89PNG\xff"
SEEDS_ARGUMENTS = '{"code":"...","outputs":[]}'
SCHEMA = {"type": "object", "properties": {}}
ASKED = [{"role": "user", "content": "6 times 7?"}]


@dataclass(frozen=True)
class Example:
    """What the model tells, what tools give, and what the request asks besides."""

    rounds: Sequence[Sequence[Step] | PenstockError]
    results: Sequence[Result | PenstockError] = ()
    files: Sequence[Files] = ()
    decisions: Sequence[Decision] = ()
    fields: dict[str, Any] = field(default_factory=dict)


COMMANDS = '{"commands":["make","cat out.csv"],"timeout_ms":5000,"max_output_length":100}'
EXAMPLES = {
    "code_makes_files": Example(
        [calls((EXECUTE, '{"code":"6*7","outputs":[{"name":"c.csv"}]}'), text="Wait. "), FINAL],
        [PythonResult("success", 3, "/mnt/data", "42\n", "warned\n", "", "42", "int", [PNG])],
        [{"a.csv": b"1,2\n", "plots/b.png": PNG, "c.csv": None}],
    ),
    "code_fails": Example(
        [calls((EXECUTE, '{"code":"1/0"}')), FINAL],
        [PythonResult("error", 3, "/mnt/data", exception="ZeroDivisionError: division by zero")],
    ),
    "code_takes_too_long": Example(
        [calls((EXECUTE, '{"code":"while 1: pass"}')), FINAL],
        [PythonResult("timeout", 60000, "/mnt/data", "so far\n", interrupted=True)],
    ),
    "the_seeds_approval": Example(
        [calls((LIST, "{}")), calls((EXECUTE, SEEDS_ARGUMENTS)), FINAL],
        decisions=[Decision(True), Decision(True)],
        fields={"agent_permission": "ask"},
    ),
    "each_tool_is_denied": Example(
        [
            calls(
                (EXECUTE, '{"code":"1"}'),
                (SHELL, '{"commands":["ls"]}'),
                (LIST, "{}"),
                (SURFACE, '{"outputs":[{"name":"a.csv"}]}'),
            ),
            FINAL,
        ],
        fields={"agent_permission": "deny"},
    ),
    "somebody_denies": Example(
        [calls((EXECUTE, '{"code":"1"}'), (SHELL, '{"commands":["ls"]}')), FINAL],
        decisions=[Decision(False, message="Use a pen."), Decision(False, timed_out=True)],
        fields={"agent_permission": "ask"},
    ),
    "a_shell_exits": Example(
        [calls((SHELL, COMMANDS)), FINAL],
        [ShellResult("error", "/mnt/data", "1,2\n", "make: no rule\n", 2)],
        [{"out.csv": b"1,2\n"}],
    ),
    "a_shell_takes_too_long": Example(
        [calls((SHELL, '{"commands":["sleep 9"],"timeout_ms":1}')), FINAL],
        [ShellResult("timeout", "/mnt/data", "so far\n", "", None, True)],
    ),
    "helpers_of_files": Example(
        [
            calls((EXECUTE, '{"code":"1"}')),
            calls((LIST, "{}"), (READ, '{"file_id":"file-0"}'), (SURFACE, '{"outputs":[{"name":"a.csv"}]}')),
            FINAL,
        ],
        files=[{}, {"a.csv": b"1,2\n"}],
    ),
    "a_call_of_the_client_comes_between": Example(
        [calls((EXECUTE, '{"code":"1"}'), ("weather", "{}"), (SHELL, '{"commands":["ls"]}'), text="Wait. ")],
    ),
    "no_round_may_run": Example([calls((EXECUTE, '{"code":"1"}'))], fields={"max_tool_rounds": 0}),
    "arguments_are_broken": Example(
        [
            calls(
                (EXECUTE, '{"code":'),
                (SHELL, "[]"),
                (SHELL, '{"commands":["ls"],"timeout_ms":0}'),
                (READ, '{"file_id":5}'),
                (SURFACE, '{"outputs":[]}'),
            ),
            FINAL,
        ]
    ),
    "the_model_fails_behind_a_tool": Example(
        [calls((EXECUTE, '{"code":"1"}')), [InferenceFailed("the model failed")]]
    ),
}
CODE_TOOL = {"type": "code_interpreter", "container": {"type": "auto"}}
SHELL_TOOL = {"type": "shell", "environment": {"type": "container_auto"}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "messages": ASKED,
            "tools": [CODE_TOOL, {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
            "enable_shell": True,
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "input": "6 times 7?",
            "tools": [
                CODE_TOOL,
                SHELL_TOOL,
                {"type": "function", "name": "weather", "parameters": SCHEMA},
            ],
            "include": ["code_interpreter_call.outputs"],
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": ASKED,
            "tools": [
                {"type": "code_execution_20250825", "name": "code_execution"},
                {"name": "weather", "input_schema": SCHEMA},
            ],
            "enable_shell": True,
        },
    ),
}
MANNERS = [(dialect, streams) for dialect in BODIES for streams in (True, False)]


def _answer(root: Path, example: Example, dialect: str, streams: bool) -> str:
    """The body of an answer to an example, without ids and instants."""
    server = AgentServer(root, *example.rounds)
    server.parts.host.results.extend(example.results)
    server.parts.host.files.extend(example.files)
    server.parts.approvals.decisions.extend(example.decisions)
    path, body = BODIES[dialect]
    asked = {**body, "model": CHAT, "session_id": "a session", "stream": streams, **example.fields}
    return _plain(server.post(path, asked).text)


def _plain(text: str) -> str:
    """The text with its ids numbered as they come, and without instants."""
    ids: dict[str, str] = {}
    numbered = re.sub(
        r"(?<=file_)[0-9a-f]{12}(?=_r)|[0-9a-f]{32}",
        lambda found: ids.setdefault(found[0], f"<id {len(ids)}>"),
        text,
    )
    return re.sub(r'("created"|"created_at"|"completed_at"):\d{9,}', r"\1:<time>", numbered)


def _title(dialect: str, streams: bool) -> str:
    return f"=== {dialect}, {'stream' if streams else 'whole'}\n"


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_run_is_told_as_it_was_recorded(name: str, tmp_path: Path) -> None:
    file, told = RECORDED / f"{name}.txt", ""
    for dialect, streams in MANNERS:
        place = tmp_path / f"{dialect}-{streams}"
        place.mkdir()
        told += (
            _title(dialect, streams) + _answer(place, EXAMPLES[name], dialect, streams).rstrip("\n") + "\n"
        )
    if os.environ.get("RECORD_RUNS"):
        file.write_text(told)
    assert told == file.read_text()


def test_each_recorded_file_is_of_an_example() -> None:
    assert {path.stem for path in RECORDED.iterdir()} == {*EXAMPLES}


def test_the_event_of_an_approval_is_that_of_the_seed_byte_by_byte() -> None:
    seeds = (
        "event: agentic_tool_approval_required\n"
        'data: {"type":"agentic_tool_approval_required","approval_id":"appr_abc123","session_id":"...","round":1,'
        '"tool":{"source":"built_in","kind":"code_execution","label":"Python code"},'
        '"arguments":{"code":"...","outputs":[]}}\n\n'
    )
    ids = r'"approval_id":"[^"]*","session_id":"[^"]*"'
    told = (RECORDED / "the_seeds_approval.txt").read_text()
    sections = dict(re.findall(r"=== (.*)\n((?:(?!=== ).*\n)*)", told))
    for dialect in ("chat", "messages"):
        assert re.sub(ids, "", seeds) in re.sub(ids, "", sections[f"{dialect}, stream"])
    numbered = re.sub(r'"sequence_number":\d+,', "", sections["responses, stream"])
    assert re.sub(ids, "", seeds) in re.sub(ids, "", numbered)
