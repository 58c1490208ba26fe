"""Tools of the server from end to end: tiny models that a grammar forces to call, real stores, both SDKs."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from frontend.state.archives import GUIDE, from_parts
from frontend.state.skills import SkillStore
from ipc.settings import State
from tests.conformance.required_tool import required_tool
from tests.harness.later import anthropic, openai
from tests.harness.server import Server, serving
from tests.tiny import chat_models

MODEL = "tiny/chatml"
COMMANDS = json.dumps({"commands": ["echo by a tool > made.txt", "echo done"]})
NOTES = base64.b64encode(b"the secret is seven").decode()
PART = {"type": "file", "file": {"filename": "notes.txt", "file_data": NOTES}}
FILE_TOOLS = {"mistralrs_read_file", "mistralrs_list_files"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("agent")
    catalog = root / "catalog"
    catalog.mkdir()
    chat_models.write_entry(catalog, MODEL, chat_models.save("chatml", root / "chatml", context=4096))
    settings = {"server.frontends": 2, "agent.code_execution": "true", "agent.shell": "true"}
    with serving(root, (MODEL,), settings, catalog=catalog) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def _ask(client: openai.OpenAI, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "Read."}, PART]}]
    return client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=400, tool_choice="required", **more
    )


def test_a_forced_model_reads_the_files_of_a_message(client: openai.OpenAI) -> None:
    answer = _ask(client, extra_body={"max_tool_rounds": 1})
    more = answer.model_extra
    assert more["session_id"] and {record["name"] for record in more["agentic_tool_calls"]} <= FILE_TOOLS
    [first, *_] = more["agentic_tool_calls"]
    assert first["round"] == 0 and isinstance(json.loads(first["result_content"]), dict)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_has_named_events_and_the_session_on_its_last_chunk(client: openai.OpenAI) -> None:
    session = "a session"
    chunks = list(_ask(client, stream=True, extra_body={"max_tool_rounds": 1, "session_id": session}))
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


@pytest.fixture(scope="module")
def skill(server: Server) -> str:
    """The id of a skill that the server keeps."""
    guide = b"---\nname: Plot\ndescription: Draws.\n---\n"
    files = from_parts([(f"plot/{GUIDE}", guide), ("plot/draw.sh", b"echo drawn > plot.txt\n")])
    return asyncio.run(SkillStore(server.run_dir / "state", State()).add("", files)).id


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
