"""Stored objects over two gateways and a real broker: what one stores, the other has, also when the first has died."""

from __future__ import annotations

import io
import signal
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance.required_tool import required_tool
from tests.fakes.held_text import hold_of
from tests.harness import lives
from tests.harness.agent_runs import MODEL, Run
from tests.harness.broker import Broker
from tests.harness.cluster import Box, box, gateway, living
from tests.harness.server import Server, wait_until
from tests.tiny import chat_models

pytestmark = pytest.mark.long
SKILL = "---\nname: greeting\ndescription: Greets.\n---\nSay hello.\n"


@pytest.fixture(scope="module")
def one(place: Path, one_broker: Broker) -> Iterator[Box]:
    catalog = place / "catalog"
    catalog.mkdir()
    chat_models.write_entry(catalog, MODEL, chat_models.save("chatml", place / "chatml", context=4096))
    [entry] = catalog.glob("*.yaml")
    entry.write_text(entry.read_text().replace('"causal"', '"tests.fakes.held_text:HeldAdapter"'))
    with box(place / "a", "a", [one_broker.url], models=(MODEL,), catalog=catalog) as made:
        yield made


@pytest.fixture(scope="module")
def near(place: Path, one_broker: Broker, one: Box) -> Iterator[Server]:
    with gateway(place / "near", [one_broker.url], {"agent.shell": "true"}) as server:
        wait_until(lambda: living(server) == {"a"}, what="the box")
        yield server


@pytest.fixture(scope="module")
def far(place: Path, one_broker: Broker, near: Server) -> Iterator[Server]:
    with gateway(place / "far", [one_broker.url]) as server:
        wait_until(lambda: living(server) == {"a"}, what="the box at the other gateway")
        yield server


class Gone(Exception):
    """Ends the context of a gateway that was killed, which has no orderly end."""


def call(server: Server, method: str, path: str, **more: Any) -> httpx.Response:
    """A request of a client."""
    return httpx.request(method, f"{server.url}{path}", timeout=60, **more)


def asked(server: Server, text: str, **fields: Any) -> dict[str, Any]:
    """A new response."""
    body = {"model": MODEL, "input": text, "max_output_tokens": 8, **fields}
    answer = call(server, "POST", "/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def status_of(server: Server, id_: str) -> str:
    """How far a response is, as a gateway tells."""
    return str(call(server, "GET", f"/v1/responses/{id_}").json().get("status"))


def test_a_response_of_one_gateway_goes_on_at_the_other_and_is_deleted_there(
    near: Server, far: Server
) -> None:
    first = asked(near, "hello")
    path = f"/v1/responses/{first['id']}"
    assert call(far, "GET", path).json() == call(near, "GET", path).json()
    second = asked(far, "go on", previous_response_id=first["id"])
    items = call(near, "GET", f"/v1/responses/{second['id']}/input_items").json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["go on"]
    third = asked(near, "and on", previous_response_id=second["id"])
    assert third["previous_response_id"] == second["id"]
    assert call(far, "DELETE", path).json()["deleted"]
    for server in (near, far):
        assert call(server, "GET", path).status_code == 404


def test_files_skills_and_sessions_of_one_gateway_are_those_of_the_other(near: Server, far: Server) -> None:
    data = bytes(range(256)) * 2000
    made = call(
        near, "POST", "/v1/files", files={"file": ("a.bin", data)}, data={"purpose": "user_data"}
    ).json()
    assert made["id"] in [each["id"] for each in call(far, "GET", "/v1/files").json()["data"]]
    assert call(far, "GET", f"/v1/files/{made['id']}/content").content == data
    assert call(far, "DELETE", f"/v1/files/{made['id']}").status_code == 200
    assert call(near, "GET", f"/v1/files/{made['id']}/content").status_code == 404

    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as written:
        written.writestr("greeting/SKILL.md", SKILL)
    skill = call(
        near, "POST", "/v1/skills", files={"files": ("s.zip", archive.getvalue(), "application/zip")}
    ).json()
    assert call(far, "GET", f"/v1/skills/{skill['id']}").json() == skill
    content = call(far, "GET", f"/v1/skills/{skill['id']}/content")
    assert zipfile.ZipFile(io.BytesIO(content.content)).namelist() == ["greeting/SKILL.md"]

    conversation = {"messages": [{"role": "user", "content": "x" * 700_000}]}
    assert call(near, "PUT", "/v1/sessions/one", json=conversation).status_code == 200
    assert len(call(far, "GET", "/v1/sessions/one").text) > 700_000
    assert call(far, "DELETE", "/v1/sessions/one").status_code == 200
    assert call(near, "GET", "/v1/sessions/one").status_code == 404


def test_a_run_of_one_gateway_is_cancelled_at_the_other(near: Server, far: Server, one: Box) -> None:
    hold = hold_of(one.server.run_dir)
    hold.touch()
    try:
        run = asked(near, "tell", background=True, max_output_tokens=60)
        wait_until(lambda: status_of(far, run["id"]) == "in_progress", what="the beginning of the run")
        assert call(far, "POST", f"/v1/responses/{run['id']}/cancel").json()["status"] == "cancelled"
        assert status_of(near, run["id"]) == "cancelled"
        wait_until(lambda: near.metric("penstock_requests_in_flight") == 0, what="the end of the run")
    finally:
        hold.unlink(missing_ok=True)


@pytest.fixture
def host(near: Server) -> Iterator[Server]:
    """A gateway with a tool host beside."""
    required_tool("bwrap")
    with (near.run_dir / "tools.log").open("wb") as log:
        process = lives.python("frontends", ("-m", "workers.tools"), near.environment, log.fileno())
    try:
        wait_until(lambda: near.metric("penstock_tool_host_up", host="tools-0") == 1, what="the tool host")
        yield near
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_call_of_a_tool_without_a_tool_host_beside_the_gateway_says_so(near: Server) -> None:
    with Run(near, "alone", ["echo"], permission="auto") as run:
        assert b"no tool host is running now" in run.rest()


def test_a_call_at_one_gateway_is_approved_at_the_other_which_has_its_session(
    host: Server, far: Server
) -> None:
    with Run(host, "both", ["echo one"]) as run:
        id_ = run.until("agentic_tool_approval_required")["approval_id"]
        answer = call(far, "POST", f"/v1/agent/approvals/{id_}", json={"decision": "approve"})
        assert answer.json()["status"] in ("resolved", "queued")
        assert run.result()["stdout"].strip() == "one"
        again = call(far, "POST", f"/v1/agent/approvals/{id_}", json={"decision": "deny"})
        assert (again.status_code, again.json()["status"]) == (404, "not_found")
        run.rest()
    session = call(far, "GET", "/v1/sessions/both").json()
    assert "tool" in [message["role"]["Left"] for message in session["messages"]], session


def test_another_gateway_goes_on_with_the_run_of_a_gateway_that_dies(
    place: Path, one_broker: Broker, far: Server, one: Box
) -> None:
    hold = hold_of(one.server.run_dir)
    with suppress(Gone), gateway(place / "dying", [one_broker.url]) as dying:
        wait_until(lambda: living(dying) == {"a"}, what="the box at the gateway that dies")
        hold.touch()
        try:
            run = asked(dying, "tell", background=True, max_output_tokens=60)
            wait_until(lambda: status_of(far, run["id"]) == "in_progress", what="the beginning of the run")
            dying.kill_everything()
        finally:
            hold.unlink(missing_ok=True)
        raise Gone
    wait_until(lambda: status_of(far, run["id"]) not in ("queued", "in_progress"), what="the end of the run")
    whole = call(far, "GET", f"/v1/responses/{run['id']}").json()
    assert whole["status"] == "incomplete" and whole["usage"]["output_tokens"] == 60, whole


def test_without_a_broker_stored_objects_are_away_and_then_all_there_again(
    near: Server, far: Server, one_broker: Broker
) -> None:
    first = asked(near, "hello")
    path = f"/v1/responses/{first['id']}"
    assert call(far, "GET", path).status_code == 200
    one_broker.kill()
    try:
        wait_until(lambda: call(far, "GET", f"{path}0").status_code == 503, what="the loss of the broker")
        answer = call(far, "DELETE", path)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1"), answer.text
        assert call(far, "GET", path).status_code == 200, "the copy has the response"
    finally:
        one_broker.start()
    wait_until(lambda: call(far, "DELETE", path).status_code == 200, what="the broker's return")
    assert call(near, "GET", path).status_code == 404
