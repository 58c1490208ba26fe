"""The routes of skills: uploads as zip and as files, versions, paging, contents, both dialects, bad input."""

from __future__ import annotations

import io
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest

from frontend.protocols.skills import resources
from frontend.state import archives
from frontend.state.skills import CONTENTS
from tests.fakes.generation_server import RecordedServer
from tests.harness.multipart import END, FORM, part

ANTHROPIC = {"anthropic-version": "2026-10-21"}
GUIDE = b"---\nname: plot\ndescription: Draws plots.\n---\nRead me.\n"
FILES = part("files[]", GUIDE, "plot/SKILL.md") + part("files[]", b"print(1)", "plot/lib/a.py")


def zipped(files: dict[str, bytes], **modes: int) -> bytes:
    """A zip; `modes` are those of members that are no plain files, by name."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            info = zipfile.ZipInfo(path)
            info.external_attr = modes.get(path, stat.S_IFREG | 0o644) << 16
            archive.writestr(info, data, zipfile.ZIP_DEFLATED)
    return target.getvalue()


ZIP = zipped({"plot/SKILL.md": GUIDE, "plot/lib/a.py": b"print(1)"})


class Server(RecordedServer):
    """Uploads and asks for skills."""

    def upload(self, body: bytes = FILES + END, path: str = "", **headers: str) -> Any:
        """The answer to a body of multipart/form-data."""
        headers = {"Content-Type": FORM, **headers}
        return self.client.simulate_post(f"/v1/skills{path}", body=body, headers=headers)

    def add(self, body: bytes = FILES + END, **headers: str) -> str:
        """The id of an uploaded skill."""
        answer = self.upload(body, **headers)
        assert answer.status_code == 200, answer.text
        return str(answer.json["id"])

    def get(self, path: str = "", **options: Any) -> Any:
        """The answer to a GET below the skills."""
        return self.client.simulate_get(f"/v1/skills{path}", **options)

    def delete(self, path: str, **headers: str) -> Any:
        """The answer to a DELETE below the skills."""
        return self.client.simulate_delete(f"/v1/skills{path}", headers=headers)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    """Routes without a worker."""
    return Server(tmp_path, run__state_dir=str(tmp_path / "state"))


def _contents(root: Path) -> list[Path]:
    return list((root / "state" / CONTENTS).iterdir()) if (root / "state" / CONTENTS).exists() else []


def _unzipped(body: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize(
    "body",
    [
        FILES,
        FILES.replace(b"files[]", b"files"),
        part("file", ZIP, "plot.zip"),
        part("files", ZIP, "anything"),
        part("files[]", ZIP, "PLOT.ZIP"),
    ],
    ids=["files[]", "files", "zip by its ending", "zip by its first bytes", "zip as files[]"],
)
def test_a_skill_is_stored_from_each_form_of_upload(server: Server, body: bytes) -> None:
    skill = server.upload(part("more", "ignored") + body + END).json
    assert skill["id"].startswith("skill_") and len(skill["id"]) == 38
    assert skill.items() >= {
        "object": "skill", "name": "plot", "description": "Draws plots.", "latest_version": "1", "default_version": "1"
    }.items()  # fmt: skip
    assert server.get(f"/{skill['id']}").json == skill
    content = server.get(f"/{skill['id']}/content")
    assert content.headers["content-type"] == "application/zip"
    assert _unzipped(content.content) == {"plot/SKILL.md": GUIDE, "plot/lib/a.py": b"print(1)"}
    head = server.client.simulate_head(f"/v1/skills/{skill['id']}/content")
    assert (head.status_code, head.headers["content-length"]) == (200, content.headers["content-length"])


def test_a_skill_without_a_folder_is_stored(server: Server) -> None:
    id_ = server.add(part("files", GUIDE, "SKILL.md") + END)
    assert _unzipped(server.get(f"/{id_}/content").content) == {"skill/SKILL.md": GUIDE}
    assert server.get(f"/{id_}/versions/1", headers=ANTHROPIC).json["directory"] == ""


def test_versions_are_made_chosen_and_deleted(server: Server) -> None:
    id_ = server.add()
    renamed = FILES.replace(b"name: plot", b"name: chart")
    second = server.upload(renamed + END, f"/{id_}/versions").json
    assert second.items() >= {
        "id": f"{id_}_v2", "object": "skill.version", "skill_id": id_, "version": "2", "name": "chart"
    }.items()  # fmt: skip
    for named in ("2", f"{id_}_v2", "latest"):
        assert server.get(f"/{id_}/versions/{named}").json == second
    skill = server.get(f"/{id_}").json
    assert (skill["name"], skill["latest_version"], skill["default_version"]) == ("chart", "2", "1")
    third = server.upload(renamed + part("default", "true") + END, f"/{id_}/versions").json
    assert server.get(f"/{id_}").json["default_version"] == third["version"] == "3"
    for chosen in ("1", 1):
        assert server.post(f"/v1/skills/{id_}", {"default_version": chosen}).json["default_version"] == "1"
    assert server.delete(f"/{id_}/versions/1").json == {
        "id": f"{id_}_v1", "object": "skill.version.deleted", "version": "1", "deleted": True
    }  # fmt: skip
    assert server.get(f"/{id_}").json["default_version"] == "3"
    assert server.delete(f"/{id_}/versions/latest").json["version"] == "3"
    skill = server.get(f"/{id_}").json
    assert (skill["latest_version"], skill["default_version"]) == ("2", "2")
    server.delete(f"/{id_}/versions/2")
    assert server.get(f"/{id_}").status_code == 404


def test_a_deleted_skill_is_gone_with_its_bytes(server: Server, tmp_path: Path) -> None:
    id_ = server.add()
    server.upload(path=f"/{id_}/versions")
    answer = server.delete(f"/{id_}", **{"Content-Type": "application/json"})
    assert answer.json == {"id": id_, "object": "skill.deleted", "deleted": True}
    for path in ("", "/content", "/versions", "/versions/1", "/versions/1/content"):
        assert server.get(f"/{id_}{path}").status_code == 404
    assert not _contents(tmp_path)


def test_skills_and_versions_are_listed_in_pages_that_end(server: Server) -> None:
    ids = [server.add() for _ in range(3)]
    page = server.get(params={"limit": 2}).json
    ends = (page["object"], page["has_more"], page["next_page"], page["first_id"], page["last_id"])
    assert ends == ("list", True, ids[1], ids[0], ids[1])
    page = server.get(params={"after": ids[1], "limit": 2}).json
    assert ([one["id"] for one in page["data"]], page["has_more"], page["next_page"]) == (
        [ids[2]],
        False,
        None,
    )
    assert [one["id"] for one in server.get(params={"order": "desc"}).json["data"]] == ids[::-1]
    for _ in range(2):
        server.upload(path=f"/{ids[0]}/versions")
    page = server.get(f"/{ids[0]}/versions", params={"limit": 2}).json
    assert ([one["version"] for one in page["data"]], page["has_more"]) == (["1", "2"], True)
    page = server.get(f"/{ids[0]}/versions", params={"limit": 2, "after": page["last_id"]}).json
    assert ([one["version"] for one in page["data"]], page["has_more"]) == (["3"], False)
    newest = server.get(f"/{ids[0]}/versions", params={"order": "desc", "after": "3"}).json["data"]
    assert [one["version"] for one in newest] == ["2", "1"]
    for params in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"source": "elsewhere"}):
        assert server.get(params=params).status_code in (400, 422)
    for path, after in (("", "skill_0"), (f"/{ids[0]}/versions", "x"), ("/skill_0/versions", "1")):
        assert server.get(path, params={"after": after}).status_code == 404


def test_a_header_of_anthropic_or_a_source_switches_the_form(server: Server) -> None:
    skill = server.upload(part("display_name", "My plots") + FILES + END, **ANTHROPIC).json
    id_ = skill["id"]
    assert skill.items() >= {
        "type": "skill", "display_name": "My plots", "display_title": "My plots", "latest_version": "1",
        "latest_version_id": f"{id_}_v1", "source": "custom",
    }.items()  # fmt: skip
    assert skill["created_at"].endswith("Z") and "object" not in skill
    untitled = server.upload(**ANTHROPIC).json
    assert untitled["display_title"] == "plot"
    titled = server.upload(part("display_title", "Older") + FILES + END, **ANTHROPIC).json
    assert titled["display_name"] == "Older"
    page = server.get(params={"source": "custom", "limit": 2}).json
    assert page["data"] == [skill, untitled] and page["next_page"] == untitled["id"]
    assert server.get(params={"page": page["next_page"]}, headers=ANTHROPIC).json["data"] == [titled]
    assert server.get(params={"source": "anthropic"}).json["data"] == []
    version = server.get(f"/{id_}/versions/1", headers={"anthropic-beta": "x"}).json
    assert version.items() >= {"type": "skill_version", "directory": "plot", "version": "1"}.items()
    assert server.get(f"/{id_}/versions", headers=ANTHROPIC).json["data"] == [version]
    answer = server.delete(f"/{id_}/versions/{id_}_v1", **ANTHROPIC)
    assert answer.json == {"id": f"{id_}_v1", "type": "skill_version_deleted"}
    answer = server.delete(f"/{untitled['id']}", **ANTHROPIC)
    assert answer.json == {"id": untitled["id"], "type": "skill_deleted"}
    answer = server.get(f"/{id_}", headers=ANTHROPIC)
    assert (answer.status_code, answer.json["error"]["type"]) == (404, "not_found_error")


def _skill(*more: tuple[str, bytes], guide: bytes = GUIDE) -> bytes:
    parts = [part("files[]", guide, "plot/SKILL.md"), *(part("files[]", data, path) for path, data in more)]
    return b"".join(parts)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"", 400, "ends before its last boundary"),
        (part("purpose", "x") + END, 422, "files: is required"),
        (part("files", GUIDE) + END, 400, "files: the part has no file name"),
        (FILES, 400, "ends before its last boundary"),
        (_skill(*((f"plot/{n}", b"") for n in range(500))) + END, 422, "more than 500 files"),
        (_skill(("/etc/passwd", b"")) + END, 422, "is not a plain relative path"),
        (_skill(("plot/../../x", b"")) + END, 422, "is not a plain relative path"),
        (_skill(("plot/skill.md", b"")) + END, 422, "one path where case does not count"),
        (_skill(("other/a", b"")) + END, 422, "one top folder"),
        (_skill(guide=b"# A skill") + END, 422, "does not begin with a line of ---"),
        (_skill(guide=b"---\nname: a\n---\n") + END, 422, "description is required"),
        (_skill(guide=b"---\nname: &a a\ndescription: *a\n---\n") + END, 422, "may not have aliases"),
        (part("files", b"no zip", "a.zip") + END, 422, "the zip cannot be read"),
        (
            part("files", zipped({"SKILL.md": GUIDE, "a": b"/x"}, a=stat.S_IFLNK | 0o777), "a.zip") + END,
            422,
            "is a link or a special file",
        ),
        (part("display_name", "x" * 256) + FILES + END, 422, "display_name: 256 characters"),
    ],
)
def test_a_bad_upload_is_told_in_both_forms_and_stores_nothing(
    server: Server, tmp_path: Path, body: bytes, status: int, text: str
) -> None:
    answer = server.upload(body)
    assert (answer.status_code, answer.json["error"]["type"]) == (status, "invalid_request_error")
    assert text in answer.json["message"] == answer.json["error"]["message"]
    answer = server.upload(body, **ANTHROPIC)
    assert (answer.status_code, answer.json["type"]) == (400, "error")
    assert text in answer.json["error"]["message"]
    assert server.get().json["data"] == [] and not _contents(tmp_path)
    assert server.services.bodies.held_nbytes == 0


def test_bytes_count_while_they_are_inflated(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_NBYTES", 1 << 20)
    bomb = zipped({"SKILL.md": GUIDE, "a": bytes(2 << 20)})
    assert len(bomb) < 10_000
    answer = server.upload(part("files", bomb, "a.zip") + END)
    assert (answer.status_code, "more than 1048576 bytes" in answer.json["message"]) == (422, True)
    assert not _contents(tmp_path)


def test_a_body_above_the_limit_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "MAX_NBYTES", 0)
    answer = server.upload(_skill(("plot/a", bytes(2 << 20))) + END)
    assert (answer.status_code, answer.json["message"]) == (413, "request body too large")
    server.add()


def test_what_a_zip_may_inflate_to_counts_in_the_budget_of_bodies(tmp_path: Path) -> None:
    server = Server(
        tmp_path, run__state_dir=str(tmp_path / "state"), limits__max_buffered_bytes=str(len(ZIP) * 500)
    )
    answer = server.upload(part("files", ZIP, "a.zip") + END)
    assert (answer.status_code, answer.json["error"]["code"]) == (503, "server_overloaded")
    server.add()
    assert server.services.bodies.held_nbytes == 0


@pytest.mark.parametrize(
    ("body", "status"),
    [({}, 422), ({"default_version": None}, 422), ({"default_version": "2"}, 404), (b"{", 400)],
)
def test_a_bad_choice_of_the_default_version_changes_nothing(server: Server, body: Any, status: int) -> None:
    id_ = server.add()
    assert server.post(f"/v1/skills/{id_}", body).status_code == status
    assert server.get(f"/{id_}").json["default_version"] == "1"


def test_a_bad_new_version_is_refused(server: Server) -> None:
    id_ = server.add()
    answer = server.upload(part("default", "perhaps") + FILES + END, f"/{id_}/versions")
    assert (answer.status_code, "default: 'perhaps'" in answer.json["message"]) == (422, True)
    assert server.upload(path="/skill_0/versions").status_code == 404
    assert server.upload(END, f"/{id_}/versions").status_code == 422
    assert len(server.get(f"/{id_}/versions").json["data"]) == 1
    for version in ("0", "2", "x", "-1", "1e3", "9" * 30):
        assert server.get(f"/{id_}/versions/{version}").status_code == 404


def test_a_skill_above_a_bound_is_told(tmp_path: Path) -> None:
    server = Server(tmp_path, run__state_dir=str(tmp_path / "state"), state__max_skills="1")
    server.add()
    answer = server.upload()
    assert (answer.status_code, "state.max_skills" in answer.json["message"]) == (507, True)
    assert server.upload(**ANTHROPIC).json["error"]["type"] == "api_error"
