"""What a run with tools of the server does, on chat, Responses and Messages, as a stream and whole.

The tests follow the contract: when the loop runs and what is refused; sessions; the choice of tools, the cap, sums;
calls in order and ids of files; calls of the client; tools, models and stores that fail; permissions; input files.

The bodies of events and answers are compared byte by byte in `test_recorded_runs.py`. Bounds on times, clients that
leave and deadlines are in `test_agent_ends.py`, where no protocol takes part.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from frontend.generation.hosted import NOTHING
from frontend.state.errors import StateUnavailable
from ipc.errors import InferenceFailed, ToolHostLost
from ipc.wire.tools import PythonCall, PythonResult, ShellCall
from tests.fakes.generation_server import CHAT
from tests.unit.frontend.agent.test_agent_chat import EXECUTE, FINAL, SHELL, AgentServer, calls

SCHEMA = {"type": "object", "properties": {}}
READ = "mistralrs_read_file"
WEATHER = "weather"
Message = dict[str, Any]


@dataclass
class Told:
    """What an answer tells, of whichever protocol; `returned` are the calls that the client has to run."""

    status: int
    error: str = ""
    text: str = ""
    returned: list[tuple[str, str]] = field(default_factory=list)
    session: str = ""
    files: list[str] = field(default_factory=list)
    tokens: tuple[int, int] = (0, 0)
    errors: int = 0


def _events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [orjson.loads(line) for line in lines if line != "[DONE]"]


def _chat(body: Any, events: list[Any]) -> Told:
    if body is not None:
        [choice] = body["choices"]
        message = choice["message"]
        calls_, text, last = message["tool_calls"] or [], message["content"] or "", body
        files = [file["id"] for file in body.get("files", ())]
    else:
        chunks = [event for event in events if "choices" in event]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        calls_ = [call for delta in deltas for call in delta["tool_calls"] or () if "id" in call]
        text, last = "".join(delta["content"] or "" for delta in deltas), chunks[-1]
        files = [event["id"] for event in events if "mime_type" in event]
    usage = last["usage"]
    return Told(
        200,
        text=text,
        returned=[(call["id"], call["function"]["name"]) for call in calls_],
        session=last.get("session_id", ""),
        files=files,
        tokens=(usage["prompt_tokens"], usage["completion_tokens"]),
    )


def _response(body: Any, events: list[Any]) -> Told:
    whole = body if body is not None else events[-1]["response"]
    cited = [
        note["file_id"]
        for item in whole["output"]
        for part in item.get("content", ())
        for note in part["annotations"]
    ]
    usage = whole["usage"]
    return Told(
        200,
        text=whole["output_text"],
        returned=[
            (item["call_id"], item["name"]) for item in whole["output"] if item["type"] == "function_call"
        ],
        session=whole.get("session_id", ""),
        files=cited,
        tokens=(usage["input_tokens"], usage["output_tokens"]),
    )


def _message(body: Any, events: list[Any]) -> Told:
    if body is not None:
        blocks, last = body["content"], body
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        files = [file["id"] for file in body.get("files", ())]
    else:
        blocks = [event["content_block"] for event in events if event.get("type") == "content_block_start"]
        deltas = [event["delta"] for event in events if event.get("type") == "content_block_delta"]
        text = "".join(delta.get("text", "") for delta in deltas)
        [last] = [event for event in events if event.get("type") == "message_delta"]
        files = [event["id"] for event in events if "mime_type" in event]
    usage = last["usage"]
    return Told(
        200,
        text=text,
        returned=[(block["id"], block["name"]) for block in blocks if block["type"] == "tool_use"],
        session=last.get("session_id", ""),
        files=files,
        tokens=(usage["input_tokens"], usage["output_tokens"]),
    )


def _chat_messages(messages: Sequence[Message]) -> dict[str, Any]:
    return {"messages": list(messages)}


def _items(messages: Sequence[Message]) -> dict[str, Any]:
    items: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            given = {"call_id": message["tool_call_id"], "output": message["content"]}
            items.append({"type": "function_call_output", **given})
            continue
        if message["content"]:
            items.append({"role": message["role"], "content": message["content"]})
        items += [
            {"type": "function_call", "call_id": call["id"], **call["function"]}
            for call in message.get("tool_calls", ())
        ]
    return {"input": items}


def _blocks(messages: Sequence[Message]) -> dict[str, Any]:
    found: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            result = {"tool_use_id": message["tool_call_id"], "content": message["content"]}
            found.append({"role": "user", "content": [{"type": "tool_result", **result}]})
            continue
        called = [
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": orjson.loads(call["function"]["arguments"]),
            }
            for call in message.get("tool_calls", ())
        ]
        found.append({"role": message["role"], "content": called or message["content"]})
    return {"messages": found}


@dataclass(frozen=True)
class Manner:
    """A protocol, as a stream or whole; conversations and tools are given in the form of chat."""

    name: str
    path: str
    streams: bool
    code: dict[str, Any]
    shell: dict[str, Any]
    conversation: Callable[[Sequence[Message]], dict[str, Any]]
    function: Callable[[str], dict[str, Any]]
    required: Any
    file: Callable[[str], dict[str, Any]]
    read: Callable[[Any, list[Any]], Told]
    bad: int

    def ask(
        self,
        server: AgentServer,
        *functions: str,
        tools: Sequence[str] = ("code", "shell"),
        messages: Sequence[Message] = ({"role": "user", "content": "6 times 7?"},),
        **fields: Any,
    ) -> Told:
        """The answer of a server."""
        given = {"code": self.code, "shell": self.shell}
        listed = [tool for name in tools for tool in given[name].get("tools", ())]
        listed += [self.function(name) for name in functions]
        flags = {key: value for name in tools for key, value in given[name].items() if key != "tools"}
        body = {"model": CHAT, "tools": listed, "stream": self.streams, **flags}
        answer = server.post(self.path, {**body, **self.conversation(messages), **fields})
        if answer.status_code != 200:
            return Told(answer.status_code, answer.json["error"]["message"])
        events = _events(answer.text) if self.streams else []
        errors = [event for event in events if event.get("error") or event.get("type") == "response.failed"]
        if errors:
            inner = errors[0].get("response", errors[0])["error"]
            return Told(200, inner["message"], errors=len(errors))
        return self.read(None if self.streams else answer.json, events)


CODE_TOOL = {"type": "code_interpreter", "container": {"type": "auto"}}
SHELL_TOOL = {"type": "shell", "environment": {"type": "container_auto"}}
CLAUDES_CODE = {"type": "code_execution_20250825", "name": "code_execution"}


def _data(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _manners() -> list[Any]:
    made = []
    for streams in (False, True):
        chat = Manner(
            "chat",
            "/v1/chat/completions",
            streams,
            {"tools": [CODE_TOOL]},
            {"enable_shell": True},
            _chat_messages,
            lambda name: {"type": "function", "function": {"name": name, "parameters": SCHEMA}},
            "required",
            lambda text: {"type": "file", "file": {"filename": "a.txt", "file_data": _data(text)}},
            _chat,
            422,
        )
        responses = Manner(
            "responses",
            "/v1/responses",
            streams,
            {"tools": [CODE_TOOL]},
            {"tools": [SHELL_TOOL]},
            _items,
            lambda name: {"type": "function", "name": name, "parameters": SCHEMA},
            "required",
            lambda text: {"type": "input_file", "filename": "a.txt", "file_data": _data(text)},
            _response,
            422,
        )
        messages = Manner(
            "messages",
            "/v1/messages",
            streams,
            {"tools": [CLAUDES_CODE]},
            {"enable_shell": True},
            _blocks,
            lambda name: {"name": name, "input_schema": SCHEMA},
            {"type": "any"},
            lambda text: {
                "type": "document",
                "title": "a.txt",
                "source": {"type": "base64", "data": _data(text)},
            },
            _message,
            400,
        )
        made += [
            pytest.param(each, id=f"{each.name}-{'stream' if streams else 'whole'}")
            for each in (chat, responses, messages)
        ]
    return made


@pytest.fixture(params=_manners())
def manner(request: pytest.FixtureRequest) -> Manner:
    """Each protocol, whole and as a stream."""
    found: Manner = request.param
    return found


@pytest.fixture
def server(tmp_path: Path) -> AgentServer:
    """A model that runs code, then answers."""
    return AgentServer(tmp_path, calls((EXECUTE, '{"code":"6*7"}')), FINAL)


def _codes(server: AgentServer) -> list[str]:
    """The code and the commands that the host was given, in order."""
    given = [call for _, call in server.parts.host.calls]
    return [
        call.code if isinstance(call, PythonCall) else call.commands[0]
        for call in given
        if isinstance(call, PythonCall | ShellCall)
    ]


@pytest.mark.parametrize("tools", [("code",), ("shell",)])
def test_a_run_begins_where_a_tool_of_the_server_is_asked_for(
    server: AgentServer, manner: Manner, tools: tuple[str, ...]
) -> None:
    server.script(FINAL)
    told = manner.ask(server, tools=tools)
    assert (told.text, len(told.session)) == ("It is 42.", 36)
    offered = server.engine.calls[0].tools
    assert offered is not None and set(offered.strict) >= {EXECUTE if tools == ("code",) else SHELL}


def test_a_request_without_tools_of_the_server_gets_its_calls_back(
    server: AgentServer, manner: Manner
) -> None:
    server.script(calls((WEATHER, "{}")))
    told = manner.ask(server, WEATHER, tools=())
    assert told.returned == [("call-0", WEATHER)] and told.session == ""
    assert server.parts.sessions.saved == [] and server.parts.counts.rounds == []


def test_files_without_a_tool_that_could_write_them_are_refused(server: AgentServer, manner: Manner) -> None:
    told = manner.ask(server, tools=(), files=[{"name": "a.csv"}])
    assert told.status == manner.bad and told.error.startswith("files: ") and server.engine.works == []


@pytest.mark.parametrize(("tool", "flag"), [("code", "--enable-code-execution"), ("shell", "--enable-shell")])
def test_a_tool_that_is_off_is_refused_with_its_flag(
    server: AgentServer, manner: Manner, tool: str, flag: str
) -> None:
    server.offers(NOTHING)
    told = manner.ask(server, tools=(tool,))
    assert told.status == manner.bad and flag in told.error and server.engine.works == []


def test_a_function_with_our_name_is_refused(server: AgentServer, manner: Manner) -> None:
    told = manner.ask(server, SHELL)
    assert told.status == manner.bad and SHELL in told.error and server.engine.works == []


@pytest.mark.parametrize("id_", ["", "x" * 257])
def test_ids_of_sessions_have_a_length(server: AgentServer, manner: Manner, id_: str) -> None:
    told = manner.ask(server, session_id=id_)
    assert told.status == manner.bad
    assert f"session_id: {len(id_)} characters given, 1 to 256 are needed" in told.error


def test_a_session_goes_on_with_its_turns_of_tools(server: AgentServer, manner: Manner) -> None:
    first = manner.ask(server, session_id="s")
    server.script(FINAL)
    more: list[Message] = [
        {"role": "user", "content": "6 times 7?"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "Sure?"},
    ]
    again = manner.ask(server, session_id=first.session, messages=more)
    asked = server.engine.calls[-1].messages or []
    assert [message["role"] for message in asked] == ["user", "assistant", "tool", "assistant", "user"]
    assert again.session == first.session == "s"


def test_a_first_message_that_differs_replaces_the_visible_history_and_keeps_the_files(
    server: AgentServer, manner: Manner
) -> None:
    server.parts.host.files.append({"a.csv": b"1"})
    first = manner.ask(server, session_id="s")
    server.script(FINAL)
    manner.ask(server, session_id="s", messages=[{"role": "user", "content": "Another."}])
    assert [message["content"] for message in server.engine.calls[-1].messages or []] == ["Another."]
    kept = server.parts.sessions.saved[-1]
    assert kept.files == first.files and len(kept.messages) == 2


def test_the_session_is_saved_after_each_round_with_the_last_reply_and_without_notes(
    server: AgentServer, manner: Manner
) -> None:
    part = manner.file("secret")
    manner.ask(server, session_id="s", messages=[{"role": "user", "content": [part]}])
    first, last = server.parts.sessions.saved
    assert [message["role"] for message in first.messages] == ["user", "assistant", "tool"]
    assert last.messages[-1] == {"role": "assistant", "content": "It is 42."}
    assert "secret" in (server.engine.calls[0].messages or [])[0]["content"]
    assert "secret" not in repr(last.messages)


def test_a_forced_choice_holds_until_a_call_has_run(server: AgentServer, manner: Manner) -> None:
    manner.ask(server, tool_choice=manner.required)
    choices = [call.tools.choice for call in server.engine.calls if call.tools is not None]
    assert choices == ["required", "auto"]


def test_without_a_choice_the_model_chooses(server: AgentServer, manner: Manner) -> None:
    manner.ask(server)
    assert [call.tools.choice for call in server.engine.calls if call.tools is not None] == ["auto"] * 2


@pytest.mark.parametrize("most", [0, 1, 2])
def test_the_cap_returns_calls_that_have_not_run(server: AgentServer, manner: Manner, most: int) -> None:
    server.script(calls((EXECUTE, '{"code":"1"}')))
    told = manner.ask(server, max_tool_rounds=most)
    assert told.returned == [("call-0", EXECUTE)] and len(_codes(server)) == most


def test_the_cap_of_the_server_holds_where_a_request_names_none(server: AgentServer, manner: Manner) -> None:
    server.offers(replace(server.parts.offer, max_rounds=1))
    server.script(calls((EXECUTE, '{"code":"1"}')))
    assert manner.ask(server).returned == [("call-0", EXECUTE)] and len(_codes(server)) == 1


def test_counts_are_sums_over_the_rounds(server: AgentServer, manner: Manner) -> None:
    assert manner.ask(server).tokens == (40, 9)


def test_calls_of_a_turn_run_in_order_and_share_one_turn_of_the_model(
    server: AgentServer, manner: Manner
) -> None:
    server.script(
        calls((EXECUTE, '{"code":"1"}'), (SHELL, '{"commands":["2"]}'), (EXECUTE, '{"code":"3"}')), FINAL
    )
    manner.ask(server)
    assert _codes(server) == ["1", "2", "3"]
    said, *results = (server.engine.calls[-1].messages or [])[1:]
    assert [call["id"] for call in said["tool_calls"]] == ["call-0", "call-1", "call-2"]
    assert [each["tool_call_id"] for each in results] == ["call-0", "call-1", "call-2"]
    assert {each["role"] for each in results} == {"tool"}


@pytest.mark.sample(2)
def test_a_thousand_calls_of_a_turn_run_in_order_under_the_cap_of_rounds(
    server: AgentServer, manner: Manner
) -> None:
    script = calls(*[("mistralrs_list_files", "{}")] * 1000)
    server.script(script, script, FINAL)
    told = manner.ask(server, max_tool_rounds=1)
    assert [name for _, name in told.returned] == ["mistralrs_list_files"] * 1000
    results = [message["tool_call_id"] for message in (server.engine.calls[-1].messages or [])[2:]]
    assert results == [f"call-{number}" for number in range(1000)]


@pytest.mark.parametrize("name", ["mistralrs_nothing", "web_search", "a" * 64])
def test_a_call_of_a_tool_that_nobody_offers_goes_back_to_the_client(
    server: AgentServer, manner: Manner, name: str
) -> None:
    server.script(calls((name, "{}"), (EXECUTE, '{"code":"1"}')))
    told = manner.ask(server)
    assert told.returned == [("call-0", name), ("call-1", EXECUTE)] and _codes(server) == []


def test_files_are_numbered_through_all_calls_of_a_round(server: AgentServer, manner: Manner) -> None:
    server.script(
        calls((EXECUTE, '{"code":"1"}'), (EXECUTE, '{"code":"2"}')), calls((EXECUTE, '{"code":"3"}')), FINAL
    )
    server.parts.host.files.extend([{"a.csv": b"1", "b.csv": b"2"}, {"c.csv": b"3"}, {"d.csv": b"4"}])
    told = manner.ask(server)
    run = told.files[0].split("_")[1]
    assert told.files == [f"file_{run}_{place}" for place in ("r0_0", "r0_1", "r0_2", "r1_0")]


def test_calls_behind_a_call_of_the_client_run_when_the_client_comes_back(
    server: AgentServer, manner: Manner
) -> None:
    script = calls((EXECUTE, '{"code":"1"}'), (WEATHER, "{}"), (SHELL, '{"commands":["2"]}'))
    server.script(script)
    told = manner.ask(server, WEATHER, session_id="s")
    assert told.returned == [("call-1", WEATHER), ("call-2", SHELL)] and _codes(server) == ["1"]
    server.script(FINAL)
    back: list[Message] = [
        {"role": "user", "content": "6 times 7?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call-1", "type": "function", "function": {"name": WEATHER, "arguments": "{}"}},
                {
                    "id": "call-2",
                    "type": "function",
                    "function": {"name": SHELL, "arguments": '{"commands":["2"]}'},
                },
            ],
        },
        {"role": "tool", "tool_call_id": "call-1", "content": "sun"},
    ]
    again = manner.ask(server, WEATHER, session_id="s", messages=back)
    assert again.text == "It is 42." and _codes(server) == ["1", "2"]
    read = server.engine.calls[-1].messages or []
    assert [each.get("tool_call_id") for each in read] == [None, None, "call-0", None, "call-1", "call-2"]


@pytest.mark.parametrize(
    ("arguments", "result", "said"),
    [
        ('{"code":', None, "no JSON"),
        ("{}", None, "missing required field"),
        ('{"code":"1"}', ToolHostLost("the tool host ended"), "the tool host ended"),
        ('{"code":"1"}', PythonResult("error", 1, "/w", exception="boom"), "boom"),
        ('{"code":"1"}', PythonResult("timeout", 1, "/w"), '"status":"timeout"'),
    ],
)
def test_tools_that_fail_are_read_by_the_model_and_the_run_goes_on(
    server: AgentServer, manner: Manner, arguments: str, result: Any, said: str
) -> None:
    server.script(calls((EXECUTE, arguments)), FINAL)
    if result is not None:
        server.parts.host.results.append(result)
    assert manner.ask(server).text == "It is 42."
    assert said in (server.engine.calls[-1].messages or [])[-1]["content"]
    assert len(_codes(server)) == (result is not None)


@pytest.mark.parametrize(("tool", "permission"), [(EXECUTE, "auto"), (READ, "deny")])
def test_arguments_of_more_levels_than_an_event_may_have_are_told_as_text_and_the_run_goes_on(
    server: AgentServer, manner: Manner, tool: str, permission: str
) -> None:
    server.script(calls((tool, '{"code":' + "[" * 600 + "]" * 600 + "}")), FINAL)
    assert manner.ask(server, agent_permission=permission).text == "It is 42."
    result = (server.engine.calls[-1].messages or [])[-1]["content"]
    status = "denied" if permission == "deny" else "error"
    assert orjson.loads(result)["status"] == status and _codes(server) == []


def test_a_model_that_fails_behind_a_tool_ends_the_run_with_one_error_and_no_replay(
    server: AgentServer, manner: Manner
) -> None:
    server.script(calls((EXECUTE, '{"code":"1"}')), [InferenceFailed("the model failed")])
    told = manner.ask(server, session_id="s")
    assert told.error == "the model failed" and (not manner.streams or told.errors == 1)
    assert _codes(server) == ["1"] and len(server.engine.works) == 2
    assert len(server.parts.sessions.saved) == 1


def test_a_store_that_breaks_behind_a_tool_ends_the_run_with_one_error_and_no_replay(
    server: AgentServer, manner: Manner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def save(*_: object) -> None:
        raise StateUnavailable("stored objects cannot be reached: locked")

    monkeypatch.setattr(server.parts.sessions, "save", save)
    told = manner.ask(server, session_id="s")
    assert told.error == "stored objects cannot be reached: locked"
    assert (told.status, told.errors) == ((200, 1) if manner.streams else (503, 0))
    assert _codes(server) == ["6*7"] and len(server.engine.works) == 1


def test_denied_calls_do_not_run_and_the_model_learns_why(server: AgentServer, manner: Manner) -> None:
    assert manner.ask(server, agent_permission="deny").text == "It is 42."
    read = (server.engine.calls[-1].messages or [])[-1]["content"]
    assert orjson.loads(read) == {"status": "denied", "exception": "Python code was denied by policy."}
    assert _codes(server) == []
    assert EXECUTE in {each["function"]["name"] for each in server.engine.calls[0].tools.functions}  # type: ignore[union-attr]


@pytest.mark.sample
@pytest.mark.parametrize(
    ("floor", "wish", "code", "runs"),
    [
        ("deny", "auto", None, False),
        ("auto", "deny", None, False),
        ("auto", None, "deny", False),
        ("auto", "auto", "deny", True),
    ],
)
def test_the_strictest_permission_holds(
    server: AgentServer, manner: Manner, floor: str, wish: str | None, code: str | None, runs: bool
) -> None:
    server.offers(replace(server.parts.offer, permission=floor))
    manner.ask(server, agent_permission=wish, code_execution_permission=code)
    assert _codes(server) == (["6*7"] if runs else [])


@pytest.mark.parametrize(("floor", "wish"), [("ask", "auto"), ("auto", "ask"), ("ask", None)])
def test_ask_needs_a_stream(server: AgentServer, manner: Manner, floor: str, wish: str | None) -> None:
    server.offers(replace(server.parts.offer, permission=floor))
    server.parts.approvals.remembered.add(("", "s"))
    told = manner.ask(server, session_id="s", agent_permission=wish)
    if manner.streams:
        assert told.text == "It is 42." and _codes(server) == ["6*7"]
    else:
        assert (told.status, told.error) == (manner.bad, "agent_permission: 'ask' needs stream: true")


def test_remembering_never_loosens_deny(server: AgentServer, manner: Manner) -> None:
    server.parts.approvals.remembered.add(("", "s"))
    manner.ask(server, session_id="s", agent_permission="deny")
    assert _codes(server) == []


def test_an_input_file_begins_a_run_and_is_read(server: AgentServer, manner: Manner) -> None:
    server.script(calls(("mistralrs_list_files", "{}")), FINAL)
    asked = [{"role": "user", "content": [manner.file("the secret is seven")]}]
    told = manner.ask(server, tools=(), messages=asked)
    assert told.text == "It is 42." and told.session
    note = (server.engine.calls[0].messages or [])[0]
    assert note["role"] == "system" and "the secret is seven" in note["content"]
    listed = orjson.loads((server.engine.calls[1].messages or [])[-1]["content"])
    assert [(file["name"], file["source"]) for file in listed["files"]] == [("a.txt", "input_file")]
