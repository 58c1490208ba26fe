"""Runs with pictures: each round sees them, sessions keep them, and the budget of bodies holds them meanwhile."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from falcon.util import async_to_sync

from frontend.state.places import OnDisk
from frontend.state.sessions import SessionStore
from ipc.settings import State
from tests.fakes.generation_server import CHAT
from tests.tiny.pictures import encoded, picture
from tests.unit.frontend.agent.test_agent_chat import EXECUTE, FINAL, AgentServer, calls

EYE = "tiny/eye"
PNG, OTHER = encoded(picture(1)), encoded(picture(2))
SEEN = {"type": "image"}
TEXT = {"type": "text", "text": "What is this?"}


def shown(data: bytes = PNG) -> dict[str, Any]:
    """A message of a user with a picture."""
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, TEXT]}


@pytest.fixture
def server(tmp_path: Path) -> AgentServer:
    """A model that sees and runs code once."""
    return AgentServer(tmp_path, calls((EXECUTE, '{"code":"1"}')), FINAL, seeing=(EYE,))


def test_every_round_sees_the_pictures_and_the_budget_holds_them_once(server: AgentServer) -> None:
    answer = server.chat(model=EYE, messages=[shown()])
    assert answer.status_code == 200, answer.text
    first, second = server.engine.calls
    assert first.images == second.images == [PNG]
    assert first.messages[0]["content"] == second.messages[0]["content"] == [SEEN, TEXT]
    assert [each["role"] for each in second.messages] == ["user", "assistant", "tool"]
    assert server.services.bodies.held_nbytes == 0


def test_a_session_keeps_its_pictures_and_knows_them_again(server: AgentServer, tmp_path: Path) -> None:
    server.parts.sessions = SessionStore(OnDisk(tmp_path / "state"), State(match_sessions="all"))
    server.offers(server.parts.offer)
    said = server.chat(model=EYE, messages=[shown()]).json
    kept = async_to_sync(server.parts.sessions.get, "", said["session_id"])
    assert kept.messages[0]["content"][0] == {"type": "image", "data": base64.b64encode(PNG).decode()}
    answered = {"role": "assistant", "content": said["choices"][0]["message"]["content"]}
    server.script(FINAL)
    again = server.chat(model=EYE, messages=[shown(), answered, {"role": "user", "content": "Sure?"}]).json
    assert again["session_id"] == said["session_id"]
    call = server.engine.calls[-1]
    assert [each["role"] for each in call.messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert call.images == [PNG]
    other = server.chat(
        model=EYE, messages=[shown(OTHER), answered, {"role": "user", "content": "Sure?"}]
    ).json
    assert other["session_id"] != said["session_id"]
    assert server.engine.calls[-1].images == [OTHER]


def test_a_session_with_other_pictures_differs_there(server: AgentServer) -> None:
    said = server.chat(model=EYE, messages=[shown()]).json
    server.script(FINAL)
    server.chat(model=EYE, messages=[shown(OTHER)], session_id=said["session_id"])
    call = server.engine.calls[-1]
    assert [each["role"] for each in call.messages] == ["user"] and call.images == [OTHER]


def test_a_run_on_a_model_that_does_not_see_is_refused_before_it_begins(server: AgentServer) -> None:
    answer = server.chat(model=CHAT, messages=[shown()])
    assert answer.status_code == 422 and "takes text only" in answer.json["message"]
    assert server.engine.calls == [] and server.parts.host.calls == []
