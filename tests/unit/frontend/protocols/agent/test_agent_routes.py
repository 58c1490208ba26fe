"""The routes of sessions and approvals: export, import, both forms of messages, bad bodies, decisions, two keys."""

from __future__ import annotations

import asyncio
import base64
import http.client
from collections.abc import Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from frontend.access import api_keys
from frontend.access.api_keys import KeyEntry
from frontend.access.gate import Gate
from frontend.agent.workplace import sandbox_of
from frontend.protocols.agent import serialized
from frontend.state.approvals import Decision
from frontend.state.files import Origin, Placeholder
from frontend.state.sessions import Session
from tests.conformance.hostile_images import vast_png
from tests.fakes.generation_server import RecordedServer
from tests.harness.keys import bearer
from tests.tiny.pictures import encoded, picture

USER = {"role": "user", "content": "list files"}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call-1", "type": "function", "function": {"name": "shell", "arguments": {"n": 1}}}
    ],
}
RESULT = {"role": "tool", "content": "a.txt", "name": "shell", "tool_call_id": "call-1"}
FINAL = {"role": "assistant", "content": "one file"}
SEEN = {"type": "image"}
SHOWN = {"role": "user", "content": [SEEN, {"type": "text", "text": "see"}]}
LINKED = {"role": "user", "content": [{"type": "image_url", "image_url": "https://a.example/a.png"}]}
PNG = base64.b64encode(encoded(picture(1))).decode()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine."""
    return asyncio.run(work)


class Server(RecordedServer):
    """Asks for sessions and decides."""

    def get(self, id_: str) -> Any:
        """An export."""
        return self.client.simulate_get(f"/v1/sessions/{id_}")

    def put(self, id_: str, body: Any) -> Any:
        """The answer to an import."""
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        return self.client.simulate_put(f"/v1/sessions/{id_}", body=raw)

    def delete(self, id_: str) -> Any:
        """The answer to a DELETE."""
        return self.client.simulate_delete(f"/v1/sessions/{id_}")

    def decide(self, id_: str, **body: Any) -> Any:
        """The answer to a decision."""
        return self.post(f"/v1/agent/approvals/{id_}", body)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    """Routes without a worker."""
    return Server(tmp_path, run__state_dir=str(tmp_path / "state"), state__max_file_bytes="1MiB")


def test_an_export_has_tagged_messages_and_files_with_bodies_and_is_imported_again(server: Server) -> None:
    async def make() -> None:
        state = server.services.state
        for id_, content in (("file_a", b"text"), ("file_b", b"\xff\x00")):
            await state.files.add(
                "", content, id=id_, name="x.txt", purpose="agent_output", origin=Origin("shell", 1, 2)
            )
        lost = Placeholder("not_produced", "no such file")
        await state.files.add(
            "",
            None,
            id="file_c",
            name="y.csv",
            purpose="agent_output",
            origin=Origin("shell"),
            placeholder=lost,
        )
        files = ["file_a", "file_b", "file_c", "file_gone"]
        await state.sessions.save("", "s", [USER, CALL, RESULT, FINAL], files)

    run(make())
    answer = server.get("s")
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    export = answer.json
    assert (export["images"], export["videos"]) == ([], [])
    assert export["messages"][0] == {"role": {"Left": "user"}, "content": {"Left": "list files"}}
    assert export["messages"][1]["tool_calls"] == {"Right": CALL["tool_calls"]}
    assert [file["id"] for file in export["files"]] == ["file_a", "file_b", "file_c"]
    assert export["files"][0]["text"] == "text" and export["files"][1]["data_base64"] == "/wA="
    assert export["files"][2]["code"] == "not_produced"
    for file in ("file_a", "file_b", "file_c"):
        run(server.services.state.files.delete("", file))
    answer = server.put("copy/of s", export)
    assert (answer.status_code, answer.content) == (200, b"")
    again = server.get("copy/of s").json
    assert again["messages"] == export["messages"]
    for old, new in zip(export["files"], again["files"], strict=True):
        assert {**old, "created_at": 0} == {**new, "created_at": 0}
    assert server.client.simulate_get("/v1/files/file_b/content").content == b"\xff\x00"
    assert server.client.simulate_get("/v1/files/file_c/content").status_code == 422


def test_an_import_takes_plain_messages_and_keeps_arguments_as_objects(server: Server) -> None:
    call = {**CALL, "tool_calls": [{**CALL["tool_calls"][0]}]}
    call["tool_calls"][0]["function"] = {"name": "shell", "arguments": '{"n":1}'}
    parts = {"role": "user", "content": [{"type": "text", "text": "list"}, {"type": "text", "text": "files"}]}
    assert server.put("s", {"messages": [parts, call, RESULT, FINAL]}).status_code == 200
    found = run(server.services.state.sessions.get("", "s"))
    assert found == Session([USER, CALL, RESULT, FINAL], [])
    assert server.put("s", {"messages": []}).status_code == 200
    assert server.get("s").json == {"messages": [], "images": [], "videos": [], "files": []}


def test_pictures_of_a_session_are_exported_in_their_order_and_imported_again(server: Server) -> None:
    given = {"messages": [SHOWN, FINAL, SHOWN], "images": [PNG, base64.b64encode(vast_png(9, 9)).decode()]}
    assert server.put("s", given).status_code == 200
    export = server.get("s").json
    assert export["images"] == given["images"]
    assert export["messages"][0]["content"] == {"Right": [SEEN, {"type": "text", "text": "see"}]}
    assert server.put("t", export).status_code == 200
    assert server.get("t").json == export
    plain = {**SHOWN, "content": [{"type": "image_url", "image_url": f"data:image/png;base64,{PNG}"}]}
    assert server.put("u", {"messages": [plain]}).status_code == 200
    assert server.get("u").json["images"] == [PNG]


def test_files_of_an_export_have_bodies_up_to_a_bound(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.protocols.agent.resources.MAX_BODIES_NBYTES", 10)
    files = [
        {"id": f"file_{n}", "name": "a.txt", "text": text}
        for n, text in enumerate(("sixsix", "seven77", "four"))
    ]
    assert server.put("s", {"messages": [USER], "files": files}).status_code == 200
    assert ["text" in file for file in server.get("s").json["files"]] == [True, False, False]
    server.put("t", server.get("s").json)
    assert server.client.simulate_get("/v1/files/file_1/content").status_code == 410


def test_an_unknown_session_is_told_in_plain_text_and_forgetting_it_is_fine(server: Server) -> None:
    answer = server.get("nothing")
    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/plain")
    assert answer.text == "no session with the id 'nothing' is stored"
    for _ in range(2):
        answer = server.delete("nothing")
        assert (answer.status_code, answer.content) == (200, b"")


def test_forgetting_a_session_forgets_its_approvals_and_ends_its_sandbox(server: Server) -> None:
    ended = []

    class Host:
        """Notes the sandboxes that end."""

        async def end(self, sandbox: str) -> None:
            """End a sandbox."""
            ended.append(sandbox)

    class Parts:
        """What tools need."""

        host = Host()

    server.services.agent = Parts()
    approvals = server.services.state.approvals

    async def remember() -> None:
        await approvals.announce("", "s", "appr_1")
        await approvals.decide("", "appr_1", Decision(True), remember=True)

    run(remember())
    assert run(approvals.is_remembered("", "s"))
    assert server.delete("s").status_code == 200
    assert not run(approvals.is_remembered("", "s"))
    assert ended == [sandbox_of("", "s")]
    server.put("s", {"messages": [USER]})
    assert len(ended) == 2


def test_ids_are_any_text_and_no_paths(server: Server, tmp_path: Path) -> None:
    """Over a socket: clients and servers of tests bring paths into one form."""

    def asked(method: str, id_: str) -> int:
        body = b'{"messages":[]}' if method == "PUT" else None
        connection = http.client.HTTPConnection(*address, timeout=60)
        with closing(connection):
            connection.request(method, f"/v1/sessions/{id_}", body, {"Content-Type": "application/json"})
            return connection.getresponse().status

    plain = ("a/b", "a%2Fb", "a//b", "/x", "x/", "x" * 256, "%C3%BC", "..a", "%20", "a%25b")
    refused = (
        "..",
        "a/../b",
        "%2e%2e",
        "%2e%2e%2f%2e%2e%2fetc",
        ".",
        "%00",
        "a%00b",
        "a%0ab",
        "a%5Cb",
        "%ff",
    )
    with server.listening() as url:
        address = url.removeprefix("http://").split(":")
        for id_ in plain:
            statuses = [asked(method, id_) for method in ("PUT", "GET", "DELETE", "GET")]
            assert (id_, statuses) == (id_, [200, 200, 200, 404])
        for id_ in refused:
            assert (id_, [asked(method, id_) for method in ("PUT", "GET", "DELETE")]) == (
                id_,
                [400, 422, 422],
            )
    known = {"files-1.db", "sessions-2.db", "approvals-1.db", "approvals.bell", "files"}
    assert {
        path.name.partition("-wal")[0].partition("-shm")[0] for path in (tmp_path / "state").iterdir()
    } <= known


def test_an_id_that_is_too_long_is_refused(server: Server) -> None:
    id_ = "x" * 257
    assert server.put(id_, {"messages": []}).status_code == 400
    assert server.get(id_).status_code == server.delete(id_).status_code == 422


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "body: empty"),
        (b"{", "malformed JSON"),
        (b"[]", "expected"),
        ({}, "messages: is required"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{}]}, "messages[0]"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": {"Left": "user"}, "content": {"Middle": "x"}}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a\0b"}]}, "NUL"),
        ({"messages": [{"role": "user", "content": "x" * ((1 << 20) + 1)}]}, "more than 1048576 bytes"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "image",
        ),
        ({"messages": [USER], "images": ["iVBORw0KGgo="]}, "images: 1 more than the messages show"),
        ({"messages": [SHOWN], "images": []}, "images: fewer than the messages show"),
        ({"messages": [SHOWN], "images": [{}]}, "images[0]: expected str"),
        ({"messages": [SHOWN], "images": ["?"]}, "no valid base64"),
        ({"messages": [SHOWN], "images": ["aGk="]}, "not an image in one of"),
        (
            {"messages": [SHOWN], "images": [base64.b64encode(vast_png(50_000, 50_000)).decode()]},
            "50000 pixels",
        ),
        ({"messages": [{**SHOWN, "content": [SEEN] * 17}], "images": [PNG] * 17}, "limits.max_images"),
        ({"messages": [LINKED]}, "images, or as data URLs"),
        ({"messages": [USER], "videos": [{"fps": 1}]}, "videos: 1 given"),
        (
            {"messages": [{**CALL, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "arguments",
        ),
        ({"messages": [], "files": [{"id": "../x", "name": "a"}]}, "files[0].id"),
        ({"messages": [], "files": [{"name": "a"}]}, "files[0]"),
        ({"messages": [], "files": [{"id": "x", "name": "a", "data_base64": "###"}]}, "is no base64"),
        ({"messages": [], "files": [{"id": "x", "name": "a", "text": "", "data_base64": ""}]}, "has both"),
        ({"messages": [], "files": [{"id": "x", "name": "a" * 5000}]}, "5000 characters"),
        ({"messages": [], "files": [{"id": "x", "name": "a"}] * 2}, "two files have the same id"),
        ({"messages": [], "files": [{"id": "x", "name": "a"}] * 4097}, "4097 files, the limit is 4096"),
        (
            {"messages": [], "files": [{"id": "x", "name": "a", "text": "x" * ((1 << 20) + 1)}]},
            "state.max_file_bytes",
        ),
        ({"messages": [], "files": [{"id": "x", "name": "a", "bytes": -1}]}, "files[0]"),
    ],
)
def test_a_bad_import_is_told_in_plain_text_and_changes_nothing(server: Server, body: Any, text: str) -> None:
    server.put("s", {"messages": [FINAL]})
    answer = server.put("s", body)
    assert (answer.status_code, answer.headers["content-type"]) == (400, "text/plain")
    assert text in answer.text
    assert server.get("s").json["messages"] == serialized.exported([FINAL], []).messages
    assert server.client.simulate_get("/v1/files").json["data"] == []


def test_an_import_that_is_too_large_is_refused(server: Server) -> None:
    files = [
        {"id": f"file_{n}", "name": "a", "data_base64": base64.b64encode(bytes(700_000)).decode()}
        for n in range(3)
    ]
    assert server.put("s", {"messages": [], "files": files}).status_code == 413


def test_a_decision_is_told_as_queued_then_not_found(server: Server) -> None:
    run(server.services.state.approvals.announce("", "s", "appr_1"))
    answer = server.decide("appr_1", decision="deny", message="no")
    assert (answer.status_code, answer.json) == (200, {"status": "queued"})
    answer = server.decide("appr_1", decision="approve")
    assert (answer.status_code, answer.json) == (404, {"status": "not_found"})
    assert run(server.services.state.approvals.wait("appr_1", 300)) == Decision(False, "no")


@pytest.mark.parametrize("id_", ["appr_0", "..", "%00", "x" * 5000])
def test_an_id_that_waits_for_nobody_is_not_found(server: Server, id_: str) -> None:
    answer = server.decide(id_, decision="approve")
    assert (answer.status_code, answer.json) == (404, {"status": "not_found"})


def test_the_message_of_an_approval_is_ignored(server: Server) -> None:
    run(server.services.state.approvals.announce("", "s", "appr_1"))
    assert (
        server.decide("appr_1", decision="approve", message="sure", remember_for_session=True).status_code
        == 200
    )
    assert run(server.services.state.approvals.wait("appr_1", 300)) == Decision(True)
    assert run(server.services.state.approvals.is_remembered("", "s"))


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"decision": "maybe"},
        {"decision": None},
        {"decision": "deny", "message": 1},
        {"decision": "deny", "remember_for_session": "x"},
    ],
)
def test_a_decision_that_is_none_is_refused_and_decides_nothing(server: Server, body: dict[str, Any]) -> None:
    run(server.services.state.approvals.announce("", "s", "appr_1"))
    answer = server.decide("appr_1", **body)
    assert (answer.status_code, answer.json["error"]["type"]) == (422, "invalid_request_error")
    assert server.decide("appr_1", decision="approve").json == {"status": "queued"}


def test_sessions_and_approvals_belong_to_their_key(tmp_path: Path) -> None:
    keys = {name: api_keys.fresh() for name in ("a", "b", "operator")}
    scopes = {"operator": ("infer", "admin")}
    entries = tuple(
        KeyEntry(name, api_keys.hashed(key), **({"scopes": scopes[name]} if name in scopes else {}))
        for name, key in keys.items()
    )
    server = Server(tmp_path, Gate(entries), run__state_dir=str(tmp_path / "state"))
    owner = entries[0].id
    ours, theirs, operator = (bearer(key) for key in keys.values())
    with server.listening() as url, httpx.Client(base_url=url, timeout=60) as client:

        def ask(method: str, path: str, headers: dict[str, str], body: Any = None) -> Any:
            return client.request(method, f"/v1/{path}", headers=headers, json=body)

        assert ask("PUT", "sessions/s", ours, {"messages": [USER]}).status_code == 200
        assert ask("GET", "sessions/s", theirs).status_code == 404
        assert ask("DELETE", "sessions/s", theirs).status_code == 200
        assert ask("GET", "sessions/s", ours).status_code == 200
        assert ask("GET", "sessions/s", {}).status_code == 401
        for id_ in ("appr_1", "appr_2"):
            run(server.services.state.approvals.announce(owner, "t", id_))
        approve = {"decision": "approve"}
        assert ask("POST", "agent/approvals/appr_1", theirs, approve).status_code == 404
        assert ask("POST", "agent/approvals/appr_1", ours, approve).json() == {"status": "queued"}
        assert ask("POST", "agent/approvals/appr_2", operator, approve).json() == {"status": "queued"}
