"""A server that runs tools for a tiny model, and streamed runs of tools on the server."""

from __future__ import annotations

import http.client
import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import psutil

from tests.harness.server import Answer, Server, serving, wait_until
from tests.tiny import chat_models

MODEL = "tiny/chatml"


@contextmanager
def agent_server(root: Path, *, graceful_timeout_s: int) -> Iterator[Server]:
    """Two frontends, a worker with a tiny model, a tool host."""
    catalog = root / "catalog"
    catalog.mkdir()
    chat_models.write_entry(catalog, MODEL, chat_models.save("chatml", root / "chatml", context=4096))
    settings: dict[str, Any] = {"server.frontends": 2, "agent.code_execution": "true", "agent.shell": "true"}
    settings["server.graceful_timeout_s"] = graceful_timeout_s
    with serving(root, (MODEL,), settings, catalog=catalog) as running:
        yield running


class Run:
    """A streamed run of chat whose model has called the shell with each of `commands`, and that asks before a call."""

    def __init__(
        self, server: Server, session: str, commands: Sequence[str], permission: str = "ask"
    ) -> None:
        calls = [
            {
                "type": "function",
                "id": f"call-{uuid4().hex}-{number}",
                "function": {"name": "mistralrs_shell", "arguments": json.dumps({"commands": [command]})},
            }
            for number, command in enumerate(commands)
        ]
        asked = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Go."}, {"role": "assistant", "tool_calls": calls}],
            "max_tokens": 4,
            "stream": True,
            "enable_shell": True,
            "agent_permission": permission,
            "session_id": session,
        }
        self._server = server
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self._connection.request(
            "POST", "/v1/chat/completions", json.dumps(asked), {"Content-Type": "application/json"}
        )
        self.local_port: int = self._connection.sock.getsockname()[1]
        self._response = self._connection.getresponse()
        assert self._response.status == 200, self._response.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()
        self._connection.close()

    @property
    def pid(self) -> int:
        """The frontend of the stream."""
        [found] = [
            pid
            for pid in self._server.frontend_pids()
            for connection in psutil.Process(pid).net_connections("tcp")
            if connection.raddr and connection.raddr.port == self.local_port
        ]
        return found

    def until(self, name: str) -> dict[str, Any]:
        """The data of the next event of a name, or with a key of this name."""
        seen = list[bytes]()
        while line := self._response.readline():
            seen.append(line)
            told, _, text = line.decode().strip().partition(": ")
            if told == "data" and text != "[DONE]":
                data: dict[str, Any] = json.loads(text)
                if data.get("type") == name or name in data:
                    return data
        raise AssertionError(f"the stream has ended without {name}: {b''.join(seen).decode()}")

    def asked(self) -> str:
        """The id of the next approval, once the run waits for a decision."""
        id_: str = self.until("agentic_tool_approval_required")["approval_id"]
        wait_until(lambda: (id_, 1) in approvals(self._server), what="the wait")
        return id_

    def result(self) -> dict[str, Any]:
        """What the next call has given."""
        data = self.until("agentic_tool_call_progress")
        while data["phase"] != "complete":
            data = self.until("agentic_tool_call_progress")
        found: dict[str, Any] = data["data"]
        return found

    def rest(self) -> bytes:
        """All that is left of the stream."""
        return self._response.read()


def approvals(server: Server) -> list[tuple[str, int]]:
    """Ids of calls that nobody has decided about, each with 1 once a run waits."""
    with closing(sqlite3.connect(server.run_dir / "state" / "approvals-1.db")) as connection:
        return connection.execute("SELECT id, waits FROM approvals").fetchall()


def decide(server: Server, id_: str, decision: str, **more: Any) -> Answer:
    """A decision about a call."""
    return server.post(f"/v1/agent/approvals/{id_}", {"decision": decision, **more})


def output(server: Server, command: str, session: str = "") -> str:
    """What a run of a session, else of a new one, reads of a command."""
    with Run(server, session or uuid4().hex, [command], permission="auto") as run:
        text: str = run.result().get("stdout", "")
        run.rest()
    return text
