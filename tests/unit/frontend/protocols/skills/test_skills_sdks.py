"""Skills through the unmodified SDKs of OpenAI and Anthropic, sync and async, and by two keys over two frontends."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.fakes.two_frontends import OURS, THEIRS, Pair, Sdk, emptied, sdk_of, two_frontends
from tests.harness.later import anthropic, openai
from tests.harness.sdks import of_anthropic, of_openai

GUIDE = b"---\nname: plot\ndescription: Draws plots.\n---\n"
FOLDER = [("plot/SKILL.md", GUIDE), ("plot/a.py", b"print(1)")]


def _zipped() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for path, data in FOLDER:
            archive.writestr(path, data)
    return target.getvalue()


ZIP = ("plot.zip", _zipped())


def _files(body: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two frontends that share a state directory and ask for a key."""
    with two_frontends(tmp_path_factory.mktemp("skills")) as found:
        yield found


ours = emptied(of_openai, "skills")
"""OpenAI's SDK, which asks the frontends in turn."""
claude = emptied(of_anthropic, "beta.skills")
"""Anthropic's SDK, which asks the frontends in turn."""


@pytest.mark.sample
@pytest.mark.parametrize("files", [FOLDER, ZIP], ids=["folder", "zip"])
def test_openai_makes_reads_and_deletes_skills(ours: Sdk, files: Any) -> None:
    skill = ours.call("skills.create", files=files)
    assert (skill.object, skill.name, skill.description) == ("skill", "plot", "Draws plots.")
    assert (skill.default_version, skill.latest_version) == ("1", "1")
    assert ours.call("skills.retrieve", skill.id) == skill
    assert _files(ours.content("skills.content.retrieve", skill.id)) == dict(FOLDER)
    deleted = ours.call("skills.delete", skill.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (skill.id, "skill.deleted", True)
    with pytest.raises(openai.NotFoundError):
        ours.call("skills.retrieve", skill.id)


def test_openai_makes_chooses_and_deletes_versions(ours: Sdk) -> None:
    id_ = ours.call("skills.create", files=FOLDER).id
    second = ours.call("skills.versions.create", id_, files=ZIP)
    assert (second.object, second.skill_id, second.version) == ("skill.version", id_, "2")
    third = ours.call("skills.versions.create", id_, files=FOLDER, default=True)
    assert ours.call("skills.retrieve", id_).default_version == third.version == "3"
    assert ours.call("skills.update", id_, default_version="2").default_version == "2"
    assert ours.call("skills.versions.retrieve", "2", skill_id=id_) == second
    assert _files(ours.content("skills.versions.content.retrieve", "2", skill_id=id_)) == dict(FOLDER)
    listed = ours.items("skills.versions.list", id_, limit=2, order="asc")
    assert [version.version for version in listed] == ["1", "2", "3"]
    deleted = ours.call("skills.versions.delete", "2", skill_id=id_)
    assert (deleted.object, deleted.version, deleted.deleted) == ("skill.version.deleted", "2", True)
    assert ours.call("skills.retrieve", id_).default_version == "3"


def test_openai_lists_all_pages_and_ends(ours: Sdk) -> None:
    ids = [ours.call("skills.create", files=FOLDER).id for _ in range(5)]
    assert [skill.id for skill in ours.items("skills.list", limit=2, order="asc")] == ids
    assert [skill.id for skill in ours.items("skills.list", limit=2, order="desc")] == ids[::-1]


def test_openai_is_told_about_a_bad_skill(ours: Sdk) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match=r"SKILL\.md is not in the top folder"):
        ours.call("skills.create", files=[("plot/a.py", b""), ("plot/b.py", b"")])


@pytest.mark.sample
@pytest.mark.parametrize("files", [FOLDER, [ZIP]], ids=["folder", "zip"])
def test_anthropic_makes_reads_and_deletes_skills(claude: Sdk, files: Any) -> None:
    skill = claude.call("beta.skills.create", files=files, display_name="My plots")
    assert (skill.type, skill.display_name, skill.latest_version_id) == (
        "skill",
        "My plots",
        f"{skill.id}_v1",
    )
    assert skill.created_at.tzinfo is not None and skill.updated_at >= skill.created_at
    assert claude.call("beta.skills.retrieve", skill.id) == skill
    version = claude.call("beta.skills.versions.create", skill.id, files=files)
    assert (version.type, version.skill_id, version.name) == ("skill_version", skill.id, "plot")
    assert claude.call("beta.skills.versions.retrieve", version.id, skill_id=skill.id) == version
    listed = claude.items("beta.skills.versions.list", skill.id, limit=1)
    assert [one.id for one in listed] == [skill.latest_version_id, version.id]
    content = claude.content("beta.skills.versions.download", version.id, skill_id=skill.id)
    assert _files(content) == dict(FOLDER)
    deleted = claude.call("beta.skills.versions.delete", version.id, skill_id=skill.id)
    assert (deleted.id, deleted.type) == (version.id, "skill_version_deleted")
    deleted = claude.call("beta.skills.delete", skill.id)
    assert (deleted.id, deleted.type) == (skill.id, "skill_deleted")
    with pytest.raises(anthropic.NotFoundError):
        claude.call("beta.skills.retrieve", skill.id)


def test_anthropic_lists_all_pages_and_ends(claude: Sdk) -> None:
    ids = [claude.call("beta.skills.create", files=FOLDER).id for _ in range(3)]
    assert [skill.id for skill in claude.items("beta.skills.list", limit=2, source="custom")] == ids
    assert claude.items("beta.skills.list", source="anthropic") == []
    with pytest.raises(anthropic.BadRequestError, match=r"SKILL\.md"):
        claude.call("beta.skills.create", files=[("plot/a.py", b"")])


def test_skills_of_one_key_do_not_exist_for_another(pair: Pair) -> None:
    with ExitStack() as stack:
        ours = sdk_of(stack, pair, of_openai, OURS)
        theirs = sdk_of(stack, pair, of_openai, THEIRS)
        id_ = ours.call("skills.create", files=FOLDER).id
        assert theirs.items("skills.list") == []
        for method in ("retrieve", "delete", "content.retrieve", "versions.list"):
            with pytest.raises(openai.NotFoundError):
                theirs.call(f"skills.{method}", id_)
        for method in ("retrieve", "delete", "content.retrieve"):
            with pytest.raises(openai.NotFoundError):
                theirs.call(f"skills.versions.{method}", "1", skill_id=id_)
        with pytest.raises(openai.NotFoundError):
            theirs.call("skills.update", id_, default_version="1")
        with pytest.raises(openai.NotFoundError):
            theirs.call("skills.versions.create", id_, files=FOLDER)
        with pytest.raises(openai.NotFoundError):
            theirs.items("skills.list", after=id_)
        assert ours.call("skills.retrieve", id_).latest_version == "1"
