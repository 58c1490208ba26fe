"""Runs with tools through the unmodified SDKs of OpenAI and Anthropic, sync and async; frontends take calls in turn."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.fakes.two_frontends import OURS, THEIRS, Pair, Sdk, emptied, two_frontends
from tests.harness.keys import bearer
from tests.harness.later import anthropic, openai
from tests.harness.sdks import of_anthropic, of_openai
from tests.unit.frontend.agent.test_agent_chat import EXECUTE, FINAL, SHELL, calls

HELLO: Any = {"model": "tiny/chat", "messages": [{"role": "user", "content": "6 times 7?"}]}
CODE_TOOL = {"type": "code_interpreter", "container": {"type": "auto"}}
LOGS = ["code_interpreter_call.outputs"]
CODE = calls((EXECUTE, '{"code":"6*7"}'), text="Wait. ")
LIST_COMMAND = calls((SHELL, '{"commands":["ls"]}'))
FOLDER = [("plot/SKILL.md", b"---\nname: plot\ndescription: Draws.\n---\n"), ("plot/a.py", b"print(1)")]
PROGRESS = "agentic_tool_call_progress"


def _zip() -> tuple[str, bytes]:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for path, data in FOLDER:
            archive.writestr(path, data)
    return "plot.zip", target.getvalue()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two frontends with one state directory, one host, one model."""
    with two_frontends(tmp_path_factory.mktemp("runs")) as found:
        yield found


@pytest.fixture
def pair(shared: Pair) -> Pair:
    """The frontends, whose host and model have done nothing."""
    shared.host.calls.clear()
    shared.host.mounted.clear()
    shared.host.files.clear()
    shared.server.engine.works.clear()
    return shared


ours = emptied(of_openai, "files")
"""OpenAI's SDK, which asks the frontends in turn."""
claude = emptied(of_anthropic, "beta.files")
"""Anthropic's SDK, which asks the frontends in turn."""


def test_openai_chats_with_an_uploaded_file_and_reads_what_code_has_made(ours: Sdk, pair: Pair) -> None:
    upload = ours.call("files.create", file=("in.csv", b"6,7"), purpose="user_data")
    pair.server.script(CODE, FINAL)
    pair.host.files.append({"out.csv": b"42\n"})
    parts = [{"type": "text", "text": "6 times 7?"}, {"type": "file", "file": {"file_id": upload.id}}]
    asked = {**HELLO, "messages": [{"role": "user", "content": parts}]}
    answer = ours.call("chat.completions.create", **asked, tools=[CODE_TOOL])
    assert answer.choices[0].message.content == "It is 42." and answer.usage.total_tokens == 49
    more = answer.model_extra
    [file], [record] = more["files"], more["agentic_tool_calls"]
    assert record["file_ids"] == [file["id"]] and more["session_id"]
    assert ours.content("files.content", file["id"]) == b"42\n"
    assert ours.call("files.retrieve", file["id"]).purpose == "agent_output"
    assert pair.host.mounted == [("in.csv", b"6,7")]


def test_openai_streams_named_events_as_chunks_without_choices(ours: Sdk, pair: Pair) -> None:
    pair.server.script(CODE, FINAL)
    pair.host.files.append({"out.csv": b"42\n"})
    chunks = ours.items(
        "chat.completions.create",
        **HELLO,
        tools=[CODE_TOOL],
        stream=True,
        extra_body={"session_id": uuid4().hex},
    )
    named = [chunk for chunk in chunks if chunk.choices is None]
    assert [chunk.model_extra.get("phase") for chunk in named] == ["calling", None, "complete"]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "Wait. It is 42."
    assert chunks[-1].model_extra["session_id"] and chunks[-1].usage.total_tokens == 49


def test_openais_helper_for_streams_passes_over_named_events(ours: Sdk, pair: Pair) -> None:
    pair.server.script(CODE, FINAL)
    events, last = ours.helped("chat.completions.stream", "get_final_completion", **HELLO, tools=[CODE_TOOL])
    assert last.choices[0].message.content == "Wait. It is 42."
    assert {event.type for event in events} >= {"chunk", "content.delta"}


def _response_tools(**environment: Any) -> list[Any]:
    return [CODE_TOOL, {"type": "shell", "environment": {"type": "container_auto", **environment}}]


def test_openai_responds_with_shell_code_citations_and_a_container(ours: Sdk, pair: Pair) -> None:
    pair.server.script(CODE, LIST_COMMAND, FINAL)
    pair.host.files.extend([{"plot.png": b"\x89PNG\xff"}, {}])
    asked = {"model": "tiny/chat", "input": "Plot.", "tools": _response_tools(), "include": LOGS}
    response = ours.call("responses.create", **asked)
    assert response.output_text == "Wait. It is 42." and response.status == "completed"
    _, code, shell, output, message = response.output
    assert (code.type, code.code, code.outputs[0].logs) == ("code_interpreter_call", "6*7", "ran 6*7\n")
    assert (shell.type, shell.action.commands, shell.status) == ("shell_call", ["ls"], "completed")
    assert output.type == "shell_call_output" and output.call_id == shell.call_id
    assert "".join(entry.stdout for entry in output.output) == "ran ls\n"
    assert output.output[0].outcome.exit_code == 0
    [citation] = message.content[0].annotations
    assert (citation.type, citation.filename) == ("container_file_citation", "plot.png")
    [listed] = ours.items("containers.files.list", citation.container_id)
    assert (listed.id, listed.path) == (citation.file_id, "/mnt/data/plot.png")
    found = ours.call("containers.files.retrieve", listed.id, container_id=citation.container_id)
    assert found.bytes == 5
    content = ours.content("containers.files.content.retrieve", listed.id, container_id=citation.container_id)
    assert content == b"\x89PNG\xff"
    assert ours.call("responses.retrieve", response.id, include=LOGS).output == response.output
    assert ours.call("responses.retrieve", response.id).output[1].outputs is None
    assert [item.role for item in ours.items("responses.input_items.list", response.id)] == ["user"]


def test_openai_goes_on_from_items_of_tools_by_id_and_as_input(ours: Sdk, pair: Pair) -> None:
    pair.server.script(CODE, LIST_COMMAND, FINAL)
    asked = {"model": "tiny/chat", "input": "Plot.", "tools": _response_tools(), "include": LOGS}
    first = ours.call("responses.create", **asked)
    pair.server.script(FINAL)
    ours.call("responses.create", model="tiny/chat", input="Sure?", previous_response_id=first.id)
    items = [{"role": "user", "content": "Plot."}, *(item.to_dict() for item in first.output)]
    ours.call("responses.create", model="tiny/chat", input=[*items, {"role": "user", "content": "Sure?"}])
    by_id, by_items = (call.messages or [] for call in pair.server.engine.calls[-2:])
    assert [message["role"] for message in by_id] == [message["role"] for message in by_items]
    results = [message["content"] for message in by_items if message["role"] == "tool"]
    assert results[0] == "ran 6*7\n" and json.loads(results[1])["stdout"] == "ran ls\n"


def test_openai_streams_a_response_with_tools(ours: Sdk, pair: Pair) -> None:
    pair.server.script(CODE, LIST_COMMAND, FINAL)
    events, last = ours.helped(
        "responses.stream",
        "get_final_response",
        model="tiny/chat",
        input="Plot.",
        tools=_response_tools(),
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds.count(PROGRESS) == 2 and kinds[0] == "response.created"
    assert kinds[-1] == "response.completed" and last.output_text == "Wait. It is 42."
    assert [item.type for item in last.output][1:4] == [
        "code_interpreter_call",
        "shell_call",
        "shell_call_output",
    ]


@pytest.mark.parametrize("by_id", [True, False], ids=["file_id", "file_data"])
def test_openai_responds_to_input_files(ours: Sdk, pair: Pair, by_id: bool) -> None:
    pair.server.script(FINAL)
    part: dict[str, Any] = {"filename": "in.csv", "file_data": "data:text/csv;base64,Niw3"}
    if by_id:
        part = {"file_id": ours.call("files.create", file=("in.csv", b"6,7"), purpose="user_data").id}
    items = [{"role": "user", "content": [{"type": "input_file", **part}]}]
    response = ours.call("responses.create", model="tiny/chat", input=items)
    assert response.output_text == "It is 42." and response.model_extra["session_id"]
    [note, *_] = pair.server.engine.calls[-1].messages or []
    assert "in.csv" in note["content"] and "6,7" in note["content"]


@pytest.mark.parametrize("files", [FOLDER, _zip()], ids=["folder", "zip"])
def test_a_skill_that_openai_uploads_runs_by_reference(ours: Sdk, pair: Pair, files: Any) -> None:
    skill = ours.call("skills.create", files=files)
    pair.server.script(LIST_COMMAND, FINAL)
    use = {"type": "skill_reference", "skill_id": skill.id, "version": "1"}
    ours.call("responses.create", model="tiny/chat", input="Plot.", tools=_response_tools(skills=[use]))
    assert pair.host.mounted == [(f"skills/{path}", data) for path, data in FOLDER]
    ours.call("skills.delete", skill.id)
    with pytest.raises(openai.UnprocessableEntityError, match=skill.id) as refused:
        ours.call("responses.create", model="tiny/chat", input="Plot.", tools=_response_tools(skills=[use]))
    assert refused.value.param == "tools[1].environment.skills[0].skill_id"


CLAUDES: Any = {**HELLO, "max_tokens": 64}
CLAUDES_CODE = {"type": "code_execution_20250825", "name": "code_execution"}


@pytest.mark.parametrize("files", [FOLDER, _zip()], ids=["folder", "zip"])
def test_a_skill_that_anthropic_uploads_runs_in_its_container_with_an_uploaded_file(
    claude: Sdk, pair: Pair, files: Any
) -> None:
    skill = claude.call("beta.skills.create", files=files if isinstance(files, list) else [files])
    upload = claude.call("beta.files.upload", file=("in.csv", b"6,7"))
    pair.server.script(CODE, FINAL)
    pair.host.files.append({"out.csv": b"42\n"})
    block = {"type": "container_upload", "file_id": upload.id}
    asked = {**CLAUDES, "messages": [{"role": "user", "content": [block, {"type": "text", "text": "Go."}]}]}
    container = {"skills": [{"type": "custom", "skill_id": skill.id, "version": "latest"}]}
    answer = claude.call("beta.messages.create", **asked, tools=[CLAUDES_CODE], container=container)
    assert (answer.content[0].text, answer.stop_reason) == ("It is 42.", "end_turn")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (40, 9)
    assert pair.host.mounted == [("in.csv", b"6,7"), *((f"skills/{path}", data) for path, data in FOLDER)]
    [file] = answer.model_extra["files"]
    assert claude.content("beta.files.download", file["id"]) == b"42\n"
    claude.call("beta.skills.delete", skill.id)


def test_anthropics_helper_for_streams_sums_up_around_named_events(claude: Sdk, pair: Pair) -> None:
    pair.server.script(CODE, FINAL)
    events, last = claude.helped("messages.stream", "get_final_message", **CLAUDES, tools=[CLAUDES_CODE])
    assert [event.type for event in events].count(PROGRESS) == 2
    assert [block.text for block in last.content] == ["Wait. ", "It is 42."]
    assert (last.stop_reason, last.usage.output_tokens) == ("end_turn", 9)


def test_anthropics_runner_of_tools_runs_the_clients_tools_between_those_of_the_server(
    claude: Sdk, pair: Pair
) -> None:
    mixed = calls((EXECUTE, '{"code":"6*7"}'), ("weather", '{"city":"Oslo"}'))
    pair.server.script(mixed, calls((SHELL, '{"commands":["ls"]}')), FINAL)
    session = uuid4().hex
    is_async = claude.is_async

    def weather(city: str) -> str:
        return f"cold in {city}"

    async def later(city: str) -> str:
        return weather(city)

    made = anthropic.beta_async_tool if is_async else anthropic.beta_tool
    tool = made(later if is_async else weather, name="weather", description="Weather.")  # type: ignore[operator]
    last = claude.call(
        "beta.messages.tool_runner",
        **CLAUDES,
        tools=[tool, CLAUDES_CODE],
        extra_body={"session_id": session, "enable_shell": True},
        then="until_done",
    )
    assert last.content[0].text == "It is 42."
    read = pair.server.engine.calls[-1].messages or []
    results = [message["content"] for message in read if message["role"] == "tool"]
    assert "ran 6*7" in results[0] and results[1] == "cold in Oslo" and "ran ls" in results[2]
    assert len(pair.host.calls) == 2


def test_a_stream_of_one_frontend_is_decided_about_at_the_other(pair: Pair) -> None:
    script = calls((EXECUTE, '{"code":"1"}'), (EXECUTE, '{"code":"2"}'))
    pair.server.script(script, FINAL)
    body = {
        **HELLO,
        "tools": [CODE_TOOL],
        "stream": True,
        "agent_permission": "ask",
        "session_id": uuid4().hex,
    }
    here, there = pair.urls

    def decide(id_: str, key: str, **decision: Any) -> tuple[int, Any]:
        answer = httpx.post(
            f"{there}/v1/agent/approvals/{id_}", headers=bearer(key), json=decision, timeout=60
        )
        return answer.status_code, answer.json()

    gone = (404, {"status": "not_found"})
    asked, completed = [], []
    with httpx.stream(
        "POST", f"{here}/v1/chat/completions", headers=bearer(OURS), json=body, timeout=60
    ) as stream:
        for line in stream.iter_lines():
            data = json.loads(line[6:]) if line.startswith("data: {") else {}
            if data.get("type") == "agentic_tool_approval_required":
                id_ = data["approval_id"]
                asked.append(id_)
                assert decide(id_, THEIRS, decision="approve") == gone
                approves = len(asked) == 2
                decision = {"decision": "approve" if approves else "deny", "message": "Not this one."}
                status, answer = decide(id_, OURS, **decision)
                assert status == 200 and answer["status"] in ("resolved", "queued")
                assert decide(id_, OURS, decision="approve") == gone
            elif data.get("phase") == "complete":
                completed.append(data["data"])
    assert [each.get("exception") for each in completed] == ["Not this one.", None]
    assert [call.code for _, call in pair.host.calls] == ["2"]
    assert decide(asked[0], OURS, decision="approve") == decide("appr_0", OURS, decision="deny") == gone


@pytest.mark.parametrize("form", ["tagged", "plain"])
def test_a_session_of_one_frontend_is_imported_at_the_other_and_gone_on_with(pair: Pair, form: str) -> None:
    here, there = pair.urls
    old, new = uuid4().hex, f"copy/{uuid4().hex}"
    with httpx.Client(headers=bearer(OURS), timeout=60) as http:
        pair.server.script(CODE, FINAL)
        pair.host.files.append({"out.csv": b"42\n"})
        answer = http.post(
            f"{here}/v1/chat/completions", json={**HELLO, "tools": [CODE_TOOL], "session_id": old}
        )
        export = http.get(f"{there}/v1/sessions/{old}").json()
        given = (
            export if form == "tagged" else {**export, "messages": [_untagged(m) for m in export["messages"]]}
        )
        assert http.put(f"{there}/v1/sessions/{new}", json=given).status_code == 200
        again = http.get(f"{here}/v1/sessions/{new}").json()
        assert again["messages"] == export["messages"]
        assert [file["id"] for file in again["files"]] == [file["id"] for file in answer.json()["files"]]
        pair.server.script(FINAL)
        more = [*HELLO["messages"], {"role": "assistant", "content": "It is 42."}, *HELLO["messages"]]
        asked = {**HELLO, "messages": more, "tools": [CODE_TOOL], "session_id": new}
        assert http.post(f"{here}/v1/chat/completions", json=asked).json()["session_id"] == new
        roles = [message["role"] for message in pair.server.engine.calls[-1].messages or []]
        assert roles == ["user", "assistant", "tool", "assistant", "user"]
        assert http.delete(f"{there}/v1/sessions/{new}").status_code == 200
        assert http.get(f"{here}/v1/sessions/{new}").status_code == 404
        assert http.get(f"{here}/v1/sessions/{old}", headers=bearer(THEIRS)).status_code == 404


def _untagged(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value.get("Left", value.get("Right")) for name, value in message.items()}


def test_a_conversation_of_a_key_finds_its_session_by_its_messages_and_that_of_another_key_does_not(
    pair: Pair,
) -> None:
    here, there = pair.urls
    begin = [{"role": "user", "content": f"6 times 7, {uuid4().hex}?"}]
    more = [*begin, {"role": "assistant", "content": "It is 42."}, {"role": "user", "content": "Sure?"}]

    def ask(url: str, key: str, messages: list[Any], *scripts: Any) -> str:
        pair.server.script(*scripts)
        body = {**HELLO, "messages": messages, "tools": [CODE_TOOL]}
        answer = httpx.post(f"{url}/v1/chat/completions", headers=bearer(key), json=body, timeout=60)
        return str(answer.json()["session_id"])

    first = ask(here, OURS, begin, CODE, FINAL)
    assert ask(there, THEIRS, more, FINAL) != first
    assert ask(there, OURS, more, FINAL) == first


def test_many_runs_at_both_frontends_have_their_own_sessions(pair: Pair) -> None:
    pair.server.script(*[CODE] * 8, FINAL)

    def ask(number: int) -> str:
        body = {**HELLO, "messages": [{"role": "user", "content": uuid4().hex}], "tools": [CODE_TOOL]}
        url = pair.urls[number % 2]
        answer = httpx.post(f"{url}/v1/chat/completions", headers=bearer(OURS), json=body, timeout=60)
        return str(answer.json()["session_id"])

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(ask, range(8)))) == 8
