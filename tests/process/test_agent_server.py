"""Tools of the server from end to end: tiny models that a grammar forces to call, real stores, both SDKs."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import zipfile
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer

from tests.conformance.required_tool import required_tool
from tests.harness.agent_runs import MODEL, Run, agent_server, approvals, decide, output
from tests.harness.later import anthropic, openai
from tests.harness.server import Server, stopped, wait_until
from tests.harness.status import frame_when, watching

COMMANDS = json.dumps({"commands": ["echo by a tool > made.txt", "echo done"]})
NOTES = base64.b64encode(b"the secret is seven").decode()
PART = {"type": "file", "file": {"filename": "notes.txt", "file_data": NOTES}}
FILE_TOOLS = {"mistralrs_read_file", "mistralrs_list_files"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with agent_server(tmp_path_factory.mktemp("agent"), graceful_timeout_s=4) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def closing_marks(server: Server) -> dict[str, int]:
    """A bias for the marks that end strings and objects, so that a random model ends each argument at once."""
    tokenizer = Tokenizer.from_file(str(server.run_dir.parent / "chatml" / "tokenizer.json"))
    return {str(tokenizer.token_to_id(mark)): 100 for mark in ('"', "}")}


def _ask(client: openai.OpenAI, bias: dict[str, int], **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "Read."}, PART]}]
    return client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=400, tool_choice="required", logit_bias=bias, **more
    )


def test_a_forced_model_reads_the_files_of_a_message(
    client: openai.OpenAI, closing_marks: dict[str, int]
) -> None:
    listed = wait_until(
        lambda: client.models.retrieve(MODEL).to_dict().get("tools_available"), what="the load"
    )
    assert listed is True
    answer = _ask(client, closing_marks, extra_body={"max_tool_rounds": 1})
    more = answer.model_extra
    assert more["session_id"] and {record["name"] for record in more["agentic_tool_calls"]} <= FILE_TOOLS
    [first, *_] = more["agentic_tool_calls"]
    assert first["round"] == 0 and isinstance(json.loads(first["result_content"]), dict)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_has_named_events_and_the_session_on_its_last_chunk(
    client: openai.OpenAI, closing_marks: dict[str, int]
) -> None:
    session = "a session"
    chunks = list(
        _ask(client, closing_marks, stream=True, extra_body={"max_tool_rounds": 1, "session_id": session})
    )
    named = [chunk for chunk in chunks if chunk.choices is None]
    assert [event.model_extra["phase"] for event in named[:2]] == ["calling", "complete"]
    assert chunks[-1].model_extra["session_id"] == session and chunks[-1].usage.total_tokens > 0


def test_a_response_with_an_input_file(client: openai.OpenAI) -> None:
    part = {"type": "input_file", "filename": "notes.txt", "file_data": NOTES}
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Read."}, part]}]
    response = client.responses.create(model=MODEL, input=items, max_output_tokens=8)
    assert response.status in ("completed", "incomplete") and response.model_extra is not None
    assert response.model_extra["session_id"]
    more = client.responses.create(
        model=MODEL, input="More.", previous_response_id=response.id, max_output_tokens=8
    )
    assert more.usage is not None and more.usage.input_tokens > 0


def test_a_message_with_a_document(server: Server) -> None:
    block: Any = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "seven"}}
    plain: Any = {"type": "text", "text": "Read."}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        told, bare = (
            claude.messages.create(model=MODEL, max_tokens=8, messages=[{"role": "user", "content": content}])
            for content in ([block, plain], [plain])
        )
    assert told.usage.input_tokens > bare.usage.input_tokens
    assert told.model_extra is not None and told.model_extra["session_id"]


def test_an_uploaded_file_is_an_input_of_every_frontend(client: openai.OpenAI) -> None:
    file = client.files.create(file=("table.csv", b"1,2,3"), purpose="user_data")
    part = {"type": "file", "file": {"file_id": file.id}}
    messages: Any = [{"role": "user", "content": [part]}]
    for _ in range(4):
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
        assert answer.model_extra is not None and answer.model_extra["session_id"]
    client.files.delete(file.id)
    with pytest.raises(openai.UnprocessableEntityError, match="no file with the id"):
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)


def test_a_call_that_waits_for_the_server_runs_and_its_file_is_stored(client: openai.OpenAI) -> None:
    required_tool("bwrap")
    call = {
        "type": "function",
        "id": "call-1",
        "function": {"name": "mistralrs_shell", "arguments": COMMANDS},
    }
    messages: Any = [{"role": "user", "content": "Go."}, {"role": "assistant", "tool_calls": [call]}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=4, extra_body={"enable_shell": True, "session_id": "shell"}
    )
    more = answer.model_extra
    assert more is not None
    [record] = more["agentic_tool_calls"]
    result = json.loads(record["result_content"])
    assert (result["status"], result["exit_code"], result["stdout"]) == ("success", 0, "done\n")
    [file] = more["files"]
    assert (file["name"], file["text"], record["file_ids"]) == ("made.txt", "by a tool\n", [file["id"]])
    assert client.files.content(file["id"]).read() == b"by a tool\n"


FOLDER = [
    ("plot/SKILL.md", b"---\nname: Plot\ndescription: Draws.\n---\n"),
    ("plot/draw.sh", b"echo drawn > plot.txt\n"),
]


def _zipped() -> tuple[str, bytes]:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for path, data in FOLDER:
            archive.writestr(path, data)
    return "plot.zip", target.getvalue()


@pytest.fixture(
    scope="module",
    params=[(kind, form) for kind in ("openai", "anthropic") for form in ("folder", "zip")],
    ids="-".join,
)
def skill(server: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    """The id of a skill that an SDK has uploaded, as a folder or as a zip."""
    kind, form = request.param
    files: Any = FOLDER if form == "folder" else [_zipped()]
    options: Any = {"api_key": "none", "max_retries": 0}
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", **options) as gpt,
        anthropic.Anthropic(base_url=server.url, **options) as claude,
    ):
        skills: Any = gpt.skills if kind == "openai" else claude.beta.skills
        made = skills.create(files=files if kind == "anthropic" or form == "folder" else files[0])
        yield made.id
        skills.delete(made.id)


DRAWS = json.dumps({"commands": ["sh skills/Plot/draw.sh"]})


def test_a_skill_of_a_response_makes_a_file_that_is_cited_and_lies_in_its_container(
    server: Server, skill: str
) -> None:
    required_tool("bwrap")
    called = {"type": "function_call", "call_id": "call-1", "name": "mistralrs_shell", "arguments": DRAWS}
    items: Any = [{"role": "user", "content": "Draw."}, called]
    use = {"type": "skill_reference", "skill_id": skill, "version": "1"}
    tools: Any = [{"type": "shell", "environment": {"type": "container_auto", "skills": [use]}}]

    async def act() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.responses.create(
                model=MODEL, input=items, tools=tools, max_output_tokens=4, stream=True
            )
            *_, last = [event async for event in stream]
            parts = [part for item in last.response.output if item.type == "message" for part in item.content]
            [cited] = [note for part in parts for note in part.annotations]
            assert (cited.type, cited.filename) == ("container_file_citation", "plot.txt")
            place = client.containers.files
            [listed] = [file async for file in place.list(cited.container_id)]
            content = await place.content.retrieve(cited.file_id, container_id=cited.container_id)
            assert (listed.id, content.content) == (cited.file_id, b"drawn\n")

    asyncio.run(act())


def test_a_skill_of_a_message_runs(server: Server, skill: str) -> None:
    required_tool("bwrap")
    look = {"type": "tool_use", "id": "call-0", "name": "look", "input": {}}
    draw = {"type": "tool_use", "id": "call-1", "name": "mistralrs_shell", "input": json.loads(DRAWS)}
    looked = {"type": "tool_result", "tool_use_id": "call-0", "content": "a page"}
    messages: Any = [
        {"role": "user", "content": "Draw."},
        {"role": "assistant", "content": [look, draw]},
        {"role": "user", "content": [looked]},
    ]
    container = {"skills": [{"type": "custom", "skill_id": skill}]}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        answer = claude.messages.create(
            model=MODEL, max_tokens=4, messages=messages, extra_body={"container": container}
        )
    assert answer.model_extra is not None
    [file] = answer.model_extra["files"]
    assert (file["name"], file["text"]) == ("plot.txt", "drawn\n")


def test_calls_are_decided_about_at_the_other_frontend(server: Server) -> None:
    required_tool("bwrap")
    with Run(server, "asks", ["echo one", "echo two", "echo three"]) as run:
        first = run.asked()
        with stopped(run.pid):
            denied = decide(server, first, "deny", message="Not this one.")
        assert (denied.status, denied.json()) == (200, {"status": "resolved"})
        told = run.result()
        assert (told["status"], told["stderr"]) == ("denied", "Not this one.")
        second = run.asked()
        assert decide(server, first, "approve").status == 404
        with stopped(run.pid):
            assert decide(server, second, "approve", remember_for_session=True).json() == {
                "status": "resolved"
            }
        assert [run.result()["stdout"] for _ in range(2)] == ["two\n", "three\n"]
        assert run.rest().endswith(b"data: [DONE]\n\n")
    assert approvals(server) == []
    for outcome in ("denied", "approved"):
        assert server.metric("penstock_agent_approval_seconds_count", outcome=outcome) == 1
    wait_until(lambda: server.metric("penstock_agent_calls_total", outcome="denied") == 1, what="the count")


def test_the_live_page_of_another_frontend_shows_a_run_that_waits_and_then_its_end(server: Server) -> None:
    required_tool("bwrap")
    with Run(server, "watched", ["echo one"]) as run:
        id_ = run.asked()
        with stopped(run.pid), watching(server) as viewer:
            waits = frame_when(
                viewer,
                lambda frame: [shown["approval_id"] for shown in frame["runs"]] == [id_],
                what="the run",
            )
            [shown] = waits["runs"]
            assert (shown["doing"], shown["tool"], shown["model"]) == ("approval", "Shell command", MODEL)
            assert shown["arguments"] == "echo one"
            host = waits["agent"]["host"]
            assert host["alive"] and host["layers"] and waits["health"]["problems"] == []
            assert decide(server, id_, "approve").json() == {"status": "resolved"}
        with watching(server) as viewer:
            assert run.result()["stdout"] == "one\n" and run.rest().endswith(b"data: [DONE]\n\n")
            frame_when(viewer, lambda frame: not frame["runs"], what="the end of the run on the page")
    wait_until(lambda: server.metric("penstock_agent_runs_total", outcome="finished") > 0, what="the count")
    wait_until(lambda: server.metric("penstock_agent_runs_in_flight") == 0, what="the gauge")
    wait_until(lambda: server.metric("penstock_tool_host_up", host="tools-0") == 1, what="the host")
    assert server.get("/readyz").body == b"ok"


def test_a_client_that_leaves_while_a_call_waits_leaves_nothing(server: Server) -> None:
    with Run(server, "leaves", ["echo one"]) as run:
        id_ = run.asked()
    wait_until(lambda: not approvals(server), what="the end of the wait")
    assert decide(server, id_, "approve").status == 404
    wait_until(lambda: server.metric("penstock_requests_in_flight") == 0, what="the end of the run")


def test_a_tool_host_that_dies_in_a_call_fails_the_call_once_and_the_run_goes_on(server: Server) -> None:
    required_tool("bwrap")
    with Run(server, "dies", ["sleep 4321"], permission="auto") as run:
        host = psutil.Process(server.tool_host_pid())
        wait_until(lambda: ["sleep", "4321"] in map(psutil.Process.cmdline, below(host)), what="the call")
        sandbox = below(host)
        host.kill()
        told = run.result()
        assert told["status"] == "error" and "the call is not repeated" in told["stderr"]
        rest = run.rest()
        assert rest.endswith(b"data: [DONE]\n\n") and b"agentic_tool_call_progress" not in rest
    psutil.wait_procs(sandbox, timeout=60)
    assert not any(map(psutil.Process.is_running, sandbox))
    wait_until(lambda: server.tool_host_pid() not in (None, host.pid), what="a new host")
    wait_until(lambda: output(server, "echo again") == "again\n", what="a call of the new host")


def below(process: psutil.Process) -> list[psutil.Process]:
    """All processes below a process that are no zombies."""
    found = process.children(recursive=True)
    return [each for each in found if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def test_a_drain_ends_a_wait_with_one_error_that_names_the_session(server: Server) -> None:
    with Run(server, "outlasts", ["echo one"]) as run:
        id_ = run.asked()
        os.kill(run.pid, signal.SIGTERM)
        message = run.until("error")["error"]["message"]
        assert "continue session outlasts" in message and run.rest().count(b"error") == 0
        wait_until(lambda: not approvals(server), what="the end of the wait")
        assert decide(server, id_, "approve").status == 404
