"""Files that messages bring: one object for the same bytes of a session, sizes, files that have no bytes any more."""

from __future__ import annotations

import asyncio
import base64
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frontend.agent.tools import TOOLS
from frontend.agent.workplace import Workplace
from frontend.generation.hosted import CODE, AgentPlan, InputFile
from frontend.state import files as store
from frontend.state.files import Origin
from tests.fakes.agent import OFFER
from tests.unit.frontend.agent.test_agent_chat import EXECUTE, FINAL, AgentServer, calls

READ = "mistralrs_read_file"


@pytest.fixture
def server(tmp_path: Path) -> AgentServer:
    """A model that answers at once."""
    return AgentServer(tmp_path, FINAL)


def _part(data: bytes, name: str = "notes.txt") -> dict[str, Any]:
    return {"type": "file", "file": {"filename": name, "file_data": base64.b64encode(data).decode()}}


def _chat(server: AgentServer, data: bytes, session: str = "s", name: str = "notes.txt") -> Any:
    asked = [{"role": "user", "content": [{"type": "text", "text": "Read."}, _part(data, name)]}]
    return server.chat(messages=asked, tools=[], session_id=session)


def _message(server: AgentServer, data: bytes) -> Any:
    source = {"type": "base64", "data": base64.b64encode(data).decode()}
    asked = [{"role": "user", "content": [{"type": "document", "title": "a.txt", "source": source}]}]
    return server.post("/v1/messages", {"messages": asked, "session_id": "s"})


def _text(server: AgentServer, data: bytes) -> Any:
    source = {"type": "text", "media_type": "text/plain", "data": data.decode()}
    asked = [{"role": "user", "content": [{"type": "document", "title": "a.txt", "source": source}]}]
    return server.post("/v1/messages", {"messages": asked, "session_id": "s"})


def _response(server: AgentServer, data: bytes) -> Any:
    part = {"type": "input_file", "filename": "a.txt", "file_data": base64.b64encode(data).decode()}
    return server.post("/v1/responses", {"input": [{"role": "user", "content": [part]}], "session_id": "s"})


def _stored(server: AgentServer) -> list[str]:
    files, _ = asyncio.run(server.parts.files.page(""))
    return [file.id for file in files]


@pytest.mark.parametrize("ask", [_chat, _message, _text, _response])
def test_bytes_that_a_session_is_sent_again_are_one_file(server: AgentServer, ask: Any) -> None:
    for _ in range(3):
        assert ask(server, b"seven").status_code == 200
    [id_] = _stored(server)
    assert server.parts.sessions.saved[-1].files == [id_] and len(id_) == len("file-") + 32
    assert len(list((server.parts.root / store.CONTENTS).iterdir())) == 1


def test_other_bytes_names_and_sessions_have_files_of_their_own(server: AgentServer) -> None:
    asked = [
        (b"seven", "s", "a.txt"),
        (b"eight", "s", "a.txt"),
        (b"seven", "s", "b.txt"),
        (b"seven", "t", "a.txt"),
    ]
    for data, session, name in asked:
        _chat(server, data, session, name)
    assert len(set(_stored(server))) == len(asked)


def test_a_file_is_stored_anew_behind_half_of_its_life_and_after_its_deletion(
    server: AgentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    ends = []
    for later_s in (0, 800, 1000):
        monkeypatch.setattr(time, "time", lambda later_s=later_s: now + later_s)
        _chat(server, b"seven")
        [id_] = _stored(server)
        ends.append(asyncio.run(server.parts.files.get("", id_)).expires - now)
    assert ends == [pytest.approx(end, abs=60) for end in (1800, 1800, 2800)]
    asyncio.run(server.parts.files.delete("", id_))
    _chat(server, b"seven")
    assert _stored(server) == [id_]


def test_a_run_reads_and_mounts_what_another_request_of_the_session_has_stored_anew(
    server: AgentServer,
) -> None:
    async def act() -> None:
        files, parts = server.parts.files, server.parts.parts
        plan = AgentPlan(
            OFFER, frozenset((CODE,)), "auto", 8, inputs=(InputFile("x", name="a.txt", data=b"seven"),)
        )
        place = Workplace(parts.host, files, parts.skills, "", plan, "sandbox", 0)
        await place.prepare()
        [file] = place.files
        await files.add(
            "", b"seven", name="a.txt", purpose="user_data", origin=Origin("input_file"), id=file.id
        )
        answer, _ = await place.run(TOOLS[READ], f'{{"file_id":"{file.id}"}}', 0)
        assert '"text":"seven"' in answer.text
        await place.run(TOOLS[EXECUTE], '{"code":"1"}', 0)
        assert server.parts.host.mounted == [("a.txt", b"seven")]

    asyncio.run(act())


def test_a_file_that_expires_within_a_run_cannot_be_read(
    server: AgentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = _stored_id(server)
    server.script(calls((READ, f'{{"file_id":"{id_}"}}')), FINAL)
    read = server.parts.files.get
    looks = []

    async def get(owner: str, id: str) -> Any:
        looks.append(id)
        if len(looks) == 3:
            now = time.time()
            monkeypatch.setattr(time, "time", lambda: now + 1801)
        return await read(owner, id)

    monkeypatch.setattr(server.parts.files, "get", get)
    [record] = _chat(server, b"seven").json["agentic_tool_calls"]
    assert "no file with the id" in record["result_content"] and "seven" not in record["result_content"]


def _stored_id(server: AgentServer) -> str:
    _chat(server, b"seven")
    [id_] = _stored(server)
    return id_


@pytest.mark.parametrize(
    ("ask", "status", "field"),
    [
        (_chat, 422, "messages[0].content[1].file.file_data"),
        (_response, 422, "input[0].content[0].file_data"),
        (_message, 400, "messages[0].content[0].source"),
        (_text, 400, "messages[0].content[0].source"),
    ],
)
def test_a_file_above_the_bound_is_refused_with_field_size_and_limit(
    server: AgentServer, ask: Any, status: int, field: str
) -> None:
    server.offers(replace(server.parts.offer, max_file_nbytes=5))
    assert ask(server, b"seven").status_code == 200
    answer = ask(server, b"eleven")
    assert answer.status_code == status
    message = answer.json["error"]["message"]
    assert field in message and "6 bytes, the limit is 5 (state.max_file_bytes)" in message, message
    assert len(_stored(server)) == 1


@pytest.mark.parametrize(
    "data", ["###", "YQ", "YQ==YQ==", "data:text/plain,a", "data:;base64", "", 5, None, {}]
)
def test_what_is_no_base64_is_refused_with_its_field(server: AgentServer, data: Any) -> None:
    part = {"type": "file", "file": {"filename": "a.txt", "file_data": data}}
    answer = server.chat(messages=[{"role": "user", "content": [part]}], tools=[])
    assert answer.status_code == 422 and "messages[0].content[0].file" in answer.json["message"]
    item = {"role": "user", "content": [{"type": "input_file", "filename": "a.txt", "file_data": data}]}
    answer = server.post("/v1/responses", {"input": [item]})
    assert answer.status_code == 422 and "input[0].content[0]" in answer.json["error"]["message"]
    block = {"type": "document", "title": "a.txt", "source": {"type": "base64", "data": data}}
    answer = server.post("/v1/messages", {"messages": [{"role": "user", "content": [block]}]})
    assert (answer.status_code, answer.json["type"]) == (400, "error")
    assert "messages[0].content[0].source" in answer.json["error"]["message"]
    assert _stored(server) == [] and server.engine.works == []


def test_a_file_that_came_without_its_bytes_is_no_input(server: AgentServer) -> None:
    async def add() -> str:
        origin = Origin("shell")
        file = await server.parts.files.add(
            "", None, name="a.txt", purpose="agent_output", origin=origin, nbytes=9
        )
        return file.id

    part = {"type": "file", "file": {"file_id": asyncio.run(add())}}
    answer = server.chat(messages=[{"role": "user", "content": [part]}], tools=[])
    assert (answer.status_code, answer.json["error"]["param"]) == (
        422,
        "messages[0].content[0].file.file_id",
    )
    assert "without its bytes" in answer.json["message"]
