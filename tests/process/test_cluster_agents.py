"""Tools of runs at a gateway: MCP servers, code, the shell and the web beside the gateway, models at a box."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import fakes
from tests.conformance.required_tool import required_tool
from tests.fakes import mcp_program
from tests.fakes.web import HERE, Site, answer, serving_site
from tests.harness import lives
from tests.harness.agent_runs import MODEL
from tests.harness.broker import Broker
from tests.harness.cluster import Box, box, gateway, living
from tests.harness.server import Server, wait_until
from tests.process.test_mcp import WEATHER, config_of
from tests.tiny import chat_models

pytestmark = pytest.mark.long
RANKING = "fake/small"
PAGE = b"<html><title>Rome</title><body>Rome has hills.</body></html>"


@pytest.fixture(scope="module")
def one(place: Path, one_broker: Broker) -> Iterator[Box]:
    catalog = place / "catalog"
    catalog.mkdir()
    chat_models.write_entry(catalog, MODEL, chat_models.save("chatml", place / "chatml", context=16384))
    shutil.copy(Path(fakes.__file__).parent / "catalog" / "small.yaml", catalog)
    shutil.copytree(Path(fakes.__file__).parent / "weights", place / "weights")
    with box(place / "a", "a", [one_broker.url], models=(MODEL, RANKING), catalog=catalog) as made:
        yield made


@pytest.fixture(scope="module")
def near(place: Path, one_broker: Broker, one: Box) -> Iterator[Server]:
    """A gateway with a tool host beside."""
    required_tool("bwrap")
    settings: dict[str, Any] = {
        "agent.shell": "true",
        "agent.code_execution": "true",
        "agent.search": "true",
        "agent.search_timeout_s": 60,
        "agent.search_embedding_model": RANKING,
        "agent.mcp_config": str(config_of(place)),
        "fetch.file_urls": "true",
        "fetch.allowed_networks": HERE,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(fakes.__file__).parent / "extras"))
        with gateway(place / "near", [one_broker.url], settings) as server:
            with (server.run_dir / "tools.log").open("wb") as log:
                host = lives.python("frontends", ("-m", "workers.tools"), server.environment, log.fileno())
            try:
                wait_until(
                    lambda: server.metric("penstock_tool_host_up", host="tools-0") == 1, what="the tool host"
                )
                wait_until(lambda: living(server) == {"a"}, what="the box")
                yield server
            finally:
                host.send_signal(signal.SIGTERM)
                assert host.wait(60) == 0


@pytest.fixture(scope="module")
def far(place: Path, one_broker: Broker, near: Server) -> Iterator[Server]:
    with gateway(place / "far", [one_broker.url]) as server:
        wait_until(lambda: living(server) == {"a"}, what="the box at the other gateway")
        yield server


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    pages: dict[str, bytes | None] = {
        "/rome": answer(PAGE),
        "/cities.csv": answer(b"Rome,3", kind="text/csv"),
    }
    with serving_site(pages) as running:
        yield running


def run(server: Server, session: str, *calls: tuple[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A chat whose model has made these calls, which the server runs; the answer."""
    told = [
        {"type": "function", "id": f"call-{at}", "function": {"name": name, "arguments": json.dumps(values)}}
        for at, (name, values) in enumerate(calls)
    ]
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Go."}, {"role": "assistant", "tool_calls": told}],
        "max_tokens": 4,
        "session_id": session,
        **more,
    }
    found = server.post("/v1/chat/completions", asked)
    assert found.status == 200, found.body
    body: dict[str, Any] = found.json()
    return body


def test_tools_of_mcp_servers_beside_a_gateway_are_told_and_run(near: Server, far: Server) -> None:
    def model(server: Server) -> dict[str, Any]:
        found: dict[str, Any] = server.get(f"/v1/models/{MODEL}").json()
        return found

    wait_until(lambda: model(near).get("mcp_tools_count") == len(mcp_program.TOOLS), what="the tools")
    assert model(near)["mcp_servers_connected"] == 1 and model(near)["tools_available"] is True
    assert not model(far).get("mcp_tools_count")
    body = run(near, "mcp", ("p_echo", {"text": "hi"}), tools=[WEATHER], tool_choice="auto")
    [record, *_] = body["agentic_tool_calls"]
    assert (record["name"], record["result_content"]) == ("p_echo", "you said hi")
    assert near.metric("penstock_mcp_servers_connected") == 1


def test_code_and_commands_of_a_run_leave_files_that_the_other_gateway_has(near: Server, far: Server) -> None:
    body = run(
        near,
        "code",
        ("mistralrs_execute_python", {"code": "print(6 * 7)"}),
        ("mistralrs_shell", {"commands": ["echo by a tool > made.txt", "echo done"]}),
        enable_code_execution=True,
        enable_shell=True,
    )
    code, shell = body["agentic_tool_calls"]
    assert "42" in code["result_content"], code
    assert json.loads(shell["result_content"])["stdout"] == "done\n", shell
    [file] = body["files"]
    assert far.get(f"/v1/files/{file['id']}/content").body == b"by a tool\n"
    assert "tool" in [message["role"]["Left"] for message in far.get("/v1/sessions/code").json()["messages"]]


def test_a_gateway_searches_with_a_model_of_a_box_reads_pages_and_fetches_files(
    near: Server, far: Server, site: Site
) -> None:
    body = run(
        near,
        "web",
        ("mistralrs_search_the_web", {"query": "rome"}),
        ("mistralrs_website_content_extractor", {"url": site.url("/rome")}),
        ("mistralrs_website_content_extractor", {"url": "http://127.0.0.2/"}),
        web_search_options={},
    )
    found, page, refused = (record["result_content"] for record in body["agentic_tool_calls"])
    assert (found, page) == ("10 results\nsources: example.com", "1 results\nsources: 127.0.0.1")
    assert "not on the internet" in refused
    session = far.get("/v1/sessions/web").json()
    assert any("Rome has hills." in str(message.get("content")) for message in session["messages"])
    part = {"type": "input_file", "file_url": site.url("/cities.csv")}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Read."}, part]}]
    answered = near.post("/v1/responses", {"model": MODEL, "input": items, "max_output_tokens": 4})
    assert answered.status == 200, answered.body
    assert "cities.csv" in [file["filename"] for file in far.get("/v1/files").json()["data"]]


def test_a_tool_that_is_off_at_a_gateway_is_refused_with_its_flag(far: Server) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Go."}], "max_tokens": 4}
    for name, value, flag in (
        ("enable_shell", True, "--enable-shell"),
        ("enable_code_execution", True, "--enable-code-execution"),
        ("web_search_options", {}, "--enable-search"),
    ):
        refused = far.post("/v1/chat/completions", {**asked, name: value})
        assert refused.status == 422 and flag in refused.json()["error"]["message"], refused.body
