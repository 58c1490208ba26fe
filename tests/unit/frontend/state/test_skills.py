"""Skills as two frontends see them: owners, versions, bounds, files that stay readable, orphans."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from frontend.state.archives import GUIDE, SkillFiles, from_parts
from frontend.state.skills import CONTENTS, OpenSkill, SkillNotFound, SkillStore
from ipc import settings
from ipc.errors import StateFull
from tests.fakes.places import contents_at, in_both_places, place_at

T = TypeVar("T")


def _run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def _made(root: Path, **bounds: Any) -> SkillStore:
    return SkillStore(place_at(root), settings.State(**bounds))


def _files(name: str = "Plot", script: bytes = b"print(1)") -> SkillFiles:
    guide = f"---\nname: {name}\ndescription: Draws with {name}.\n---\n".encode()
    return from_parts([(f"plot/{GUIDE}", guide), ("plot/a.py", script)])


def _contents(root: Path) -> list[str]:
    return contents_at(root, CONTENTS)


def _read(skill: OpenSkill) -> dict[str, bytes]:
    """The files of an opened skill, which are closed."""
    found = {}
    for path, descriptor in skill.files:
        with os.fdopen(descriptor, "rb") as file:
            found[path] = file.read()
    return found


@in_both_places
def test_a_skill_is_opened_by_all_frontends_and_by_its_owner_only(tmp_path: Path) -> None:
    async def act() -> None:
        skill = await _made(tmp_path).add("a", _files(), title="My plots")
        assert (skill.title, skill.default, skill.latest, skill.name) == ("My plots", 1, 1, "Plot")
        other = _made(tmp_path)
        assert await other.get("a", skill.id) == skill
        opened = await other.open("a", skill.id)
        assert opened.description == "Draws with Plot."
        assert _read(opened)["a.py"] == b"print(1)"
        for refused in (other.get, other.open, other.delete, other.version):
            with pytest.raises(SkillNotFound):
                await refused("b", skill.id)
        with pytest.raises(SkillNotFound):
            await other.add_version("b", skill.id, _files())
        assert len(_contents(tmp_path)) == 1

    _run(act())


@in_both_places
def test_versions_count_and_the_default_stays_unless_a_version_takes_its_place(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        skill = await kept.add("", _files())
        second = await kept.add_version("", skill.id, _files("Chart", b"print(2)"))
        assert second.number == 2
        found = await kept.get("", skill.id)
        assert (found.default, found.latest, found.name, found.description) == (
            1,
            2,
            "Chart",
            "Draws with Chart.",
        )
        assert _read(await kept.open("", skill.id))["a.py"] == b"print(1)"
        assert _read(await kept.open("", skill.id, 2))["a.py"] == b"print(2)"
        third = await kept.add_version("", skill.id, _files("Third"), default=True)
        assert (await kept.version("", skill.id)).number == third.number == 3
        with pytest.raises(SkillNotFound, match="with the version 4"):
            await kept.open("", skill.id, 4)

    _run(act())


@in_both_places
def test_pages_of_skills_and_versions_end_in_both_orders(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        skills = [await kept.add("a", _files()) for _ in range(3)]
        await kept.add("b", _files())
        assert await kept.page("a", limit=3) == (skills, False)
        assert await kept.page("a", limit=2) == (skills[:2], True)
        assert await kept.page("a", after=skills[1].id, limit=2) == (skills[2:], False)
        assert await kept.page("a", after=skills[1].id, limit=2, order="desc") == (skills[:1], False)
        with pytest.raises(SkillNotFound):
            await kept.page("b", after=skills[1].id, limit=2)
        id_ = skills[0].id
        for _ in range(2):
            await kept.add_version("a", id_, _files())
        versions, has_more = await kept.versions("a", id_, limit=2)
        assert ([version.number for version in versions], has_more) == ([1, 2], True)
        versions, has_more = await kept.versions("a", id_, after=2, limit=2, order="desc")
        assert ([version.number for version in versions], has_more) == ([1], False)
        with pytest.raises(SkillNotFound):
            await kept.versions("b", id_, limit=2)

    _run(act())


@in_both_places
def test_the_default_version_is_chosen_and_moves_when_it_is_deleted(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        id_ = (await kept.add("", _files())).id
        for name in ("Second", "Third"):
            await kept.add_version("", id_, _files(name))
        assert (await kept.choose("", id_, 2)).default == 2
        for refused in (kept.choose, kept.delete_version):
            for owner, number in (("b", 2), ("", 4)):
                with pytest.raises(SkillNotFound):
                    await refused(owner, id_, number)
        await kept.delete_version("", id_, 2)
        found = await kept.get("", id_)
        assert (found.default, found.latest, len(_contents(tmp_path))) == (3, 3, 2)
        await kept.delete_version("", id_, 3)
        found = await kept.get("", id_)
        assert (found.default, found.latest, found.name) == (1, 1, "Plot")
        assert (await kept.add_version("", id_, _files())).number == 4
        for number in (1, 4):
            await kept.delete_version("", id_, number)
        assert await kept.page("", limit=1) == ([], False)
        assert not _contents(tmp_path)

    _run(act())


@in_both_places
def test_an_opened_skill_is_read_after_it_was_deleted(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        skill = await kept.add("", _files())
        await kept.add_version("", skill.id, _files())
        opened = await kept.open("", skill.id)
        await kept.delete("", skill.id)
        assert not _contents(tmp_path)
        assert _read(opened).keys() == {GUIDE, "a.py"}
        with pytest.raises(SkillNotFound):
            await kept.get("", skill.id)

    _run(act())


def test_what_exceeds_a_bound_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path, max_skills=1, max_skill_versions=2, max_skills_bytes=100_000)
        skill = await kept.add("a", _files())
        with pytest.raises(StateFull, match=r"state\.max_skills\)"):
            await kept.add("a", _files())
        await kept.add("b", _files())
        with pytest.raises(StateFull, match=r"state\.max_skills_bytes"):
            await kept.add_version("a", skill.id, _files(script=os.urandom(100_000)))
        await kept.add_version("a", skill.id, _files())
        with pytest.raises(StateFull, match=r"state\.max_skill_versions"):
            await kept.add_version("a", skill.id, _files())
        assert len(_contents(tmp_path)) == 3
        await kept.sweep()
        assert len(_contents(tmp_path)) == 3
        (tmp_path / CONTENTS / ("0" * 32)).write_bytes(b"orphan")
        await kept.sweep()
        assert len(_contents(tmp_path)) == 3

    _run(act())


def test_a_torn_zip_is_no_skill(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        skill = await kept.add("", _files())
        [name] = _contents(tmp_path)
        (tmp_path / CONTENTS / name).write_bytes(b"PK")
        with pytest.raises(SkillNotFound):
            await kept.open("", skill.id)

    _run(act())
