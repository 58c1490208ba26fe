"""The routes of files and containers: uploads piece by piece, listing, ranges, both dialects, bad input, two keys."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from frontend.state import content
from frontend.state import files as stored
from frontend.state.files import CONTENTS, File, Origin, Placeholder
from tests.fakes.generation_server import RecordedServer
from tests.harness.multipart import BOUNDARY, END, FORM, part

ANTHROPIC = {"anthropic-version": "2026-10-21"}
MIB = 1 << 20


PURPOSE = part("purpose", "user_data")
FILE = part("file", "hello", "a.txt")


class Server(RecordedServer):
    """Uploads and asks for files."""

    def upload(self, body: bytes, headers: dict[str, str] | None = None, media: str = "") -> Any:
        """The answer to a body of multipart/form-data."""
        media = media or FORM
        return self.client.simulate_post(
            "/v1/files", body=body, headers={"Content-Type": media, **(headers or {})}
        )

    def add(self, data: bytes = b"hello", name: str = "a.txt", **headers: str) -> str:
        """The id of an uploaded file."""
        answer = self.upload(PURPOSE + part("file", data, name) + END, headers)
        assert answer.status_code == 200, answer.text
        return str(answer.json["id"])

    def get(self, path: str = "", **options: Any) -> Any:
        """The answer to a GET below the files."""
        return self.client.simulate_get(f"/v1/files{path}", **options)

    def made(self, content: bytes | None, **fields: Any) -> File:
        """A file that an agent made."""
        known = {"name": "plot.png", "purpose": "agent_output", "origin": Origin("execute_python", 1, 0)}
        return run(self.services.state.files.add("", content, **known | fields))


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine."""
    return asyncio.run(work)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    """Routes without a worker."""
    return Server(tmp_path, run__state_dir=str(tmp_path / "state"), state__max_file_bytes="3MiB")


def _contents(root: Path) -> list[str]:
    return [path.name for path in (root / "state" / CONTENTS).iterdir()]


@pytest.mark.parametrize("order", ["purpose first", "file first"])
def test_an_upload_is_stored_and_read_back_whatever_the_order_of_parts(server: Server, order: str) -> None:
    parts = [PURPOSE, FILE] if order == "purpose first" else [FILE, PURPOSE]
    began = int(time.time())
    answer = server.upload(part("more", "ignored" * 20_000) + b"".join(parts) + END)
    file = answer.json
    assert answer.status_code == 200
    assert file["id"].startswith("file-") and len(file["id"]) == 37
    assert file["source"] == {"tool": "user_upload", "round": 0, "turn": 0}
    assert began <= file["created_at"] <= time.time() and file["expires_at"] - file["created_at"] in (
        1800,
        1801,
    )
    known = {"object": "file", "bytes": 5, "filename": "a.txt", "purpose": "user_data", "format": "txt"}
    assert file.items() >= (known | {"mime_type": "text/plain", "status": "processed"}).items()
    assert server.get(f"/{file['id']}").json == file
    content = server.get(f"/{file['id']}/content", headers={"Accept": "application/binary"})
    assert (content.status_code, content.content, content.headers["content-type"]) == (
        200,
        b"hello",
        "text/plain",
    )
    assert content.headers["x-content-type-options"] == "nosniff"
    assert content.headers["content-length"] == "5"


def test_a_large_upload_is_whole_where_its_pieces_cut_boundaries(server: Server) -> None:
    data = (b"\r\n--" + BOUNDARY[:-1].encode()) * 90_000
    id_ = server.add(data)
    assert server.get(f"/{id_}/content").content == data


def test_a_file_at_the_limit_is_stored_and_one_byte_more_is_refused(server: Server, tmp_path: Path) -> None:
    limit = 3 * MIB
    assert server.get(f"/{server.add(b'x' * limit)}").json["bytes"] == limit
    answer = server.upload(PURPOSE + part("file", b"x" * (limit + 1), "a.txt") + END)
    assert answer.status_code == 413
    assert answer.json["message"] == "request body too large"
    assert len(_contents(tmp_path)) == 1
    answer = server.upload(PURPOSE + part("file", b"x" * (limit + 2 * MIB), "a.txt") + END)
    assert answer.status_code == 413
    assert len(_contents(tmp_path)) == 1


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (FILE + END, 400, "purpose: is required"),
        (FILE + part("purpose", "  ") + END, 400, "purpose: is required"),
        (FILE + part("purpose", "x" * 65) + END, 400, "purpose: 65 characters"),
        (FILE + part("purpose", b"\xff") + END, 400, "purpose: the value is not UTF-8"),
        (FILE + part("purpose", "x" * 70_000) + END, 400, "purpose: more than 65536 bytes"),
        (PURPOSE + END, 400, "file: is required"),
        (PURPOSE + part("file", "hello") + END, 400, "file: the part has no file name"),
        (PURPOSE + FILE + FILE + END, 400, "file: given twice"),
        (PURPOSE + FILE, 400, "ends before its last boundary"),
        (PURPOSE + FILE[:-4], 400, "ends before its last boundary"),
        (b"", 400, "ends before its last boundary"),
        (b"not multipart at all", 400, "malformed multipart"),
        (
            f"--{BOUNDARY}\r\nContent-Type: text/plain\r\n\r\nx\r\n".encode() + END,
            400,
            "no Content-Disposition",
        ),
        (part("x" * 9000, "1") + END, 400, "malformed multipart"),
        (part("other", "1") * 1025 + END, 400, "more than 1024 parts"),
        (PURPOSE + FILE + part("expires_after[seconds]", "-1") + END, 400, "no whole number above 0"),
        (PURPOSE + FILE + part("expires_after[seconds]", "1e3") + END, 400, "no whole number above 0"),
        (PURPOSE + FILE + part("expires_after[anchor]", "now") + END, 400, "'now' is not created_at"),
    ],
)
def test_a_bad_upload_is_told_and_stores_nothing(
    server: Server, tmp_path: Path, body: bytes, status: int, text: str
) -> None:
    answer = server.upload(body)
    assert answer.status_code == status
    assert text in answer.json["error"]["message"] and answer.json["error"]["type"] == "invalid_request_error"
    assert server.get().json["data"] == [] and not _contents(tmp_path)
    answer = server.upload(body, ANTHROPIC)
    if "is required" not in text or not text.startswith("purpose"):
        assert answer.status_code == status
        assert answer.json["type"] == "error" and text in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("media", "status", "text"),
    [
        ("application/json", 415, "expected multipart/form-data, got 'application/json'"),
        ("multipart/form-data", 400, "a boundary has 1 to 70 characters"),
        (f"multipart/form-data; boundary={'x' * 71}", 400, "a boundary has 1 to 70 characters"),
    ],
)
def test_an_upload_of_another_type_is_refused(server: Server, media: str, status: int, text: str) -> None:
    answer = server.upload(PURPOSE + FILE + END, media=media)
    assert (answer.status_code, text in answer.json["message"]) == (status, True)


def test_an_upload_may_shorten_its_life_and_not_lengthen_it(server: Server) -> None:
    for seconds, life_s in ((60, 60), (86_400, 1_800)):
        fields = part("expires_after[anchor]", "created_at") + part("expires_after[seconds]", str(seconds))
        file = server.upload(fields + PURPOSE + FILE + END).json
        assert life_s <= file["expires_at"] - file["created_at"] <= life_s + 1


def test_files_are_listed_in_pages_that_end(server: Server) -> None:
    ids = [server.add() for _ in range(5)]
    first = server.get(params={"limit": 2}).json
    assert [file["id"] for file in first["data"]] == ids[:2]
    assert (first["object"], first["has_more"], first["first_id"], first["last_id"]) == (
        "list",
        True,
        *ids[:2],
    )
    last = server.get(params={"after": ids[2], "limit": 2}).json
    assert ([file["id"] for file in last["data"]], last["has_more"]) == (ids[3:], False)
    assert [file["id"] for file in server.get(params={"order": "desc"}).json["data"]] == ids[::-1]
    assert server.get(params={"purpose": "assistants"}).json == {
        "object": "list",
        "data": [],
        "has_more": False,
        "first_id": None,
        "last_id": None,
    }
    answer = server.get(params={"after": "file-nothing"})
    assert (answer.status_code, answer.json["error"]["code"]) == (404, "file_not_found")
    for params in ({"limit": "0"}, {"limit": "10001"}, {"limit": "x"}, {"order": "up"}):
        assert server.get(params=params).status_code == 422


def test_a_deleted_file_is_gone(server: Server, tmp_path: Path) -> None:
    id_ = server.add()
    answer = server.client.simulate_delete(f"/v1/files/{id_}", headers={"Content-Type": "application/json"})
    assert answer.json == {"id": id_, "object": "file", "deleted": True}
    for path in (f"/{id_}", f"/{id_}/content"):
        answer = server.get(path)
        assert (answer.status_code, answer.json["error"]["code"]) == (404, "file_not_found")
    assert server.client.simulate_delete(f"/v1/files/{id_}").status_code == 404
    assert not _contents(tmp_path)


def test_an_expired_file_is_gone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    id_, now = server.add(), time.time()
    monkeypatch.setattr(stored.time, "time", lambda: now + 1_801)
    assert server.get(f"/{id_}").status_code == server.get(f"/{id_}/content").status_code == 404
    assert server.get().json["data"] == []


def test_the_status_of_a_content_tells_why_there_are_no_bytes(server: Server) -> None:
    server.made(None, id="file_lost", placeholder=Placeholder("not_produced", "no such file"))
    server.made(None, id="file_elided", nbytes=9_000_000)
    assert server.get("/file_lost/content").status_code == 422
    assert server.get("/file_elided/content").status_code == 410
    lost, elided = server.get("/file_lost").json, server.get("/file_elided").json
    assert (lost["status"], lost["bytes"], "truncated" in lost) == ("error", 0, False)
    assert (elided["status"], elided["bytes"], elided["truncated"]) == ("processed", 9_000_000, True)
    assert server.get("/file_elided", headers=ANTHROPIC).json["downloadable"] is False


@pytest.mark.parametrize(
    ("asked", "status", "found", "shown"),
    [
        ("bytes=0-3", 206, b"0123", "bytes 0-3/10"),
        ("bytes=7-", 206, b"789", "bytes 7-9/10"),
        ("bytes=-2", 206, b"89", "bytes 8-9/10"),
        ("bytes=8-99", 206, b"89", "bytes 8-9/10"),
        ("bytes=0-9", 200, b"0123456789", None),
        ("bytes=0-1,3-4", 200, b"0123456789", None),
        ("bytes=5-4", 200, b"0123456789", None),
        ("items=0-1", 200, b"0123456789", None),
        ("bytes=-", 200, b"0123456789", None),
        ("bytes=10-", 416, None, None),
        ("bytes=-0", 416, None, None),
    ],
)
def test_one_range_of_bytes_can_be_asked_for(
    server: Server, asked: str, status: int, found: bytes | None, shown: str | None
) -> None:
    id_ = server.add(b"0123456789")
    answer = server.get(f"/{id_}/content", headers={"Range": asked})
    assert answer.status_code == status
    assert answer.headers.get("content-range") == shown
    if found is not None:
        assert (answer.content, answer.headers["content-length"]) == (found, str(len(found)))
    if status == 206:
        conditional = server.get(f"/{id_}/content", headers={"Range": asked, "If-Range": '"x"'})
        assert (conditional.status_code, conditional.content) == (200, b"0123456789")


def test_the_head_of_a_content_can_be_asked_for(server: Server) -> None:
    id_ = server.add(b"0123456789")
    answer = server.client.simulate_head(f"/v1/files/{id_}/content")
    assert (answer.status_code, answer.content, answer.headers["content-length"]) == (200, b"", "10")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.html", "attachment"),
        ("a.svg", "attachment"),
        ("a.xml", "attachment"),
        ("a.js", "attachment"),
        ("a.png", "inline"),
        ("a.unknown", "inline"),
    ],
)
def test_types_that_a_browser_runs_leave_as_attachments(server: Server, name: str, kind: str) -> None:
    answer = server.get(f"/{server.add(name=name)}/content")
    assert answer.headers["content-disposition"].startswith(f"{kind}; ")


def test_a_name_of_any_script_leaves_in_both_forms(server: Server) -> None:
    id_ = server.add(name="dir/Grüße 1.png")
    assert server.get(f"/{id_}").json["filename"] == "Grüße 1.png"
    shown = server.get(f"/{id_}/content").headers["content-disposition"]
    assert shown == "inline; filename=\"Gr__e 1.png\"; filename*=UTF-8''Gr%C3%BC%C3%9Fe%201.png"


def test_a_header_of_anthropic_switches_the_form_and_needs_no_purpose(server: Server) -> None:
    file = server.upload(FILE + END, ANTHROPIC).json
    assert file.items() >= {
        "type": "file", "filename": "a.txt", "mime_type": "text/plain", "size_bytes": 5, "downloadable": True
    }.items()  # fmt: skip
    assert file["created_at"].endswith("Z")
    assert server.get(f"/{file['id']}").json["purpose"] == "user_data"
    ids = [file["id"], server.add(), server.add()]
    page = server.get(params={"limit": 2}, headers=ANTHROPIC).json
    assert (page["has_more"], page["next_page"]) == (True, ids[1])
    page = server.get(params={"limit": 2, "page": ids[1]}, headers={"anthropic-beta": "x"}).json
    assert ([one["id"] for one in page["data"]], page["has_more"], page["next_page"]) == (
        ids[2:],
        False,
        None,
    )
    page = server.get(params={"ids": f"{ids[2]},file-nothing,{ids[0]}"}, headers=ANTHROPIC).json
    assert [one["id"] for one in page["data"]] == [ids[2], ids[0]]
    assert server.get(params={"ids": ",".join(["x"] * 101)}, headers=ANTHROPIC).status_code == 400
    answer = server.client.simulate_delete(f"/v1/files/{ids[0]}", headers=ANTHROPIC)
    assert answer.json == {"id": ids[0], "type": "file_deleted"}
    answer = server.get(f"/{ids[0]}", headers=ANTHROPIC)
    assert (answer.status_code, answer.json["error"]["type"]) == (404, "not_found_error")


def test_a_container_lists_its_own_files_and_serves_any_file(server: Server) -> None:
    plots = [server.made(b"png", container="cntr_1"), server.made(b"2", container="cntr_1")]
    other = server.made(b"other", container="cntr_2")
    client = server.client
    page = client.simulate_get("/v1/containers/cntr_1/files", params={"limit": 1}).json
    assert (page["has_more"], page["first_id"], page["last_id"]) == (True, plots[0].id, plots[0].id)
    [shown] = page["data"]
    assert shown.items() >= {
        "object": "container.file", "container_id": "cntr_1", "path": "/mnt/data/plot.png", "bytes": 3
    }.items()  # fmt: skip
    assert shown["source"] == {"tool": "execute_python", "round": 1, "turn": 0} and "purpose" not in shown
    page = client.simulate_get("/v1/containers/cntr_1/files", params={"after": plots[0].id}).json
    assert ([file["id"] for file in page["data"]], page["has_more"]) == ([plots[1].id], False)
    anywhere = f"/v1/containers/whatever/files/{other.id}"
    assert client.simulate_get(anywhere).json["container_id"] == "whatever"
    assert client.simulate_get(f"{anywhere}/content").content == b"other"
    assert client.simulate_delete(anywhere).json["object"] == "container.file.deleted"
    assert client.simulate_get(anywhere).status_code == 404


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("GET", "/content"), ("DELETE", "")])
def test_an_unknown_file_of_a_container_is_told_in_both_forms(server: Server, method: str, path: str) -> None:
    place = f"/v1/containers/cntr_1/files/file-no{path}"
    answer = server.client.simulate_request(method, place)
    assert (answer.status_code, answer.json["error"]["code"]) == (404, "file_not_found")
    answer = server.client.simulate_request(method, place, headers=ANTHROPIC)
    assert (answer.status_code, answer.json["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", ""), ("GET", ""), ("GET", "/cntr_1"), ("DELETE", "/cntr_1"), ("POST", "/cntr_1/files")],
)
def test_the_life_of_containers_is_not_offered(server: Server, method: str, path: str) -> None:
    answer = server.client.simulate_request(method, f"/v1/containers{path}")
    assert answer.status_code == 501
    assert "containers belong to responses" in answer.json["message"]


def test_a_full_disk_is_told_and_the_rest_is_served(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    id_ = server.add()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(content.os, "fsync", full)
        answer = server.upload(PURPOSE + FILE + END)
        assert (answer.status_code, answer.json["error"]["type"]) == (507, "server_error")
        assert server.upload(PURPOSE + FILE + END, ANTHROPIC).json["error"]["type"] == "api_error"
        assert server.get(f"/{id_}/content").content == b"hello"
    assert [file["id"] for file in server.get().json["data"]] == [id_]
    server.add()
