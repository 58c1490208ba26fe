"""A state directory without room: what stores something gets 507, all else is served, and room ends the fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.agent_runs import MODEL
from tests.harness.multipart import END, FORM, part
from tests.harness.server import Answer, Server, serving, wait_until
from tests.harness.small_disk import small_disk
from tests.tiny import chat_models

MIB = 1 << 20
DISK_NBYTES = 8 * MIB
ANTHROPIC = {"anthropic-version": "2026-10-21"}
SKILL = "---\nname: sums\ndescription: Adds numbers.\n---\nAdd.\n"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The file system of the state directory."""
    with small_disk(tmp_path / "kept", DISK_NBYTES) as mount:
        yield mount


@pytest.fixture
def server(tmp_path: Path, disk: Path) -> Iterator[Server]:
    """Two frontends with a chat model."""
    catalog = tmp_path / "catalog"
    catalog.mkdir()
    chat_models.write_entry(catalog, MODEL, chat_models.save("chatml", tmp_path / "chatml", context=4096))
    settings = {
        "server.frontends": 2,
        "run.state_dir": disk / "state",
        "agent.tool_dispatch_url": "http://127.0.0.1:9/",
    }
    with serving(tmp_path, (MODEL,), settings, catalog=catalog, supervised=False) as running:
        yield running


def upload(server: Server, data: bytes, **headers: str) -> Answer:
    """A file of a client."""
    body = part("purpose", "user_data") + part("file", data, "a.bin") + END
    return server.request("POST", "/v1/files", body, {"Content-Type": FORM, **headers})


def with_loop(server: Server, session: str, **fields: Any) -> Answer:
    """A chat whose session is saved."""
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Go."}], "max_tokens": 2}
    return server.post(
        "/v1/chat/completions", {**asked, "max_tool_rounds": 1, "session_id": session, **fields}
    )


def contents(disk: Path) -> set[str]:
    """Names of the files with bytes of clients."""
    return {path.name for path in (disk / "state" / "files").iterdir()}


def fill(disk: Path) -> Path:
    """A file that takes all room that is left."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return filler
    raise AssertionError("the disk has no end")


def test_without_room_uploads_get_507_and_the_rest_serves(server: Server, disk: Path) -> None:
    wait_until(lambda: server.metric("penstock_state_full") > 0, what="the warning of little room")
    kept = upload(server, b"kept").json()["id"]
    assert with_loop(server, "s").status == 200
    before = contents(disk)

    large = upload(server, bytes(2 * DISK_NBYTES))
    assert (large.status, large.json()["error"]["type"]) == (507, "server_error"), large.body
    assert contents(disk) == before

    filler = fill(disk)
    for answer in (upload(server, bytes(MIB)), upload(server, b"small" * 4096)):
        assert answer.status == 507 and "no room" in answer.json()["message"], answer.body
    refused = upload(server, bytes(MIB), **ANTHROPIC)
    assert (refused.status, refused.json()["type"]) == (507, "error")
    skill = part("files[]", SKILL + "x" * MIB, "sums/SKILL.md") + END
    assert server.request("POST", "/v1/skills", skill, {"Content-Type": FORM}).status == 507
    long = "x" * MIB
    messages = {"messages": [{"role": "user", "content": long}]}
    put = server.request("PUT", "/v1/sessions/t", json.dumps(messages).encode())
    assert put.status == 507, put.body
    assert contents(disk) == before

    asked = [{"role": "user", "content": "word " * 1200}]
    run = with_loop(server, "s", messages=asked, stream=True)
    events = [line for line in run.body.decode().splitlines() if line.startswith("data:")]
    errors = [line for line in events if '"error"' in line]
    assert len(errors) == 1 and "no room" in errors[0] and events[-1] == "data: [DONE]", run.body

    assert server.get(f"/v1/files/{kept}/content").body == b"kept"
    assert [each["id"] for each in server.get("/v1/files").json()["data"]] == [kept]
    assert server.get("/v1/sessions/s").status == 200
    assert server.get("/v1/sessions/t").status == 404
    plain = {"model": MODEL, "messages": [{"role": "user", "content": "Go."}], "max_tokens": 2}
    assert server.post("/v1/chat/completions", plain).status == 200
    ready = server.get("/readyz")
    assert ready.status == 200 and "room" in ready.body.decode()

    filler.unlink()
    assert upload(server, bytes(MIB)).status == 200
    assert with_loop(server, "s", messages=asked).status == 200
    assert len(contents(disk)) == len(before) + 1
