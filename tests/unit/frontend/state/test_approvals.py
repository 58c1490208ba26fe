"""Decisions that come to another frontend, before the wait, twice, late, from others, and for a whole session."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from frontend.state import approvals as module
from frontend.state import places
from frontend.state.approvals import ApprovalStore, Decision
from ipc import settings
from tests.fakes.places import in_both_places, place_at
from tests.harness.server import eventually

T = TypeVar("T")
YES, NO = Decision(True), Decision(False, "not on my machine")


def _run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def _made(root: Path) -> ApprovalStore:
    return ApprovalStore(place_at(root), settings.State())


async def _waiting(
    kept: ApprovalStore, id_: str, owner: str = "a", session: str = "s"
) -> asyncio.Task[Decision]:
    """A wait whose row says that somebody waits."""
    await kept.announce(owner, session, id_)
    task = asyncio.ensure_future(kept.wait(id_, 300))
    query = "SELECT waits FROM approvals WHERE id = ?"

    async def waits() -> bool:
        return await kept._rows.read(lambda each: each.execute(query, (id_,)).fetchone()) == (1,)

    await eventually(waits, "a wait")
    return task


async def _rows(kept: ApprovalStore) -> int:
    (count,) = await kept._rows.read(lambda each: each.execute("SELECT count(*) FROM approvals").fetchone())
    return int(count)


@in_both_places
def test_a_decision_at_another_frontend_releases_the_wait(tmp_path: Path) -> None:
    async def act() -> None:
        here, there = _made(tmp_path), _made(tmp_path)
        first, second = await _waiting(here, "appr_1"), await _waiting(here, "appr_2")
        assert await there.decide("a", "appr_2", NO) == "resolved"
        assert await second == NO
        assert not first.done()
        assert await there.decide("a", "appr_1", YES) == "resolved"
        assert await first == YES
        assert await there.decide("a", "appr_1", YES) == "not_found"
        assert await _rows(here) == 0
        assert not here._waiting
        await asyncio.wait_for(here._looking or asyncio.sleep(0), 60)

    _run(act())


@in_both_places
def test_a_decision_wakes_a_wait_that_looks_at_long_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 3600.0)

    async def act() -> None:
        here, there = _made(tmp_path), _made(tmp_path)
        first, second = await _waiting(here, "appr_1"), await _waiting(here, "appr_2", session="t")
        looking = here._looking
        assert await there.decide("a", "appr_1", YES) == "resolved"
        assert await asyncio.wait_for(first, 60) == YES
        await there.forget("a", "t")
        assert not (await asyncio.wait_for(second, 60)).approve
        assert looking is not None
        await asyncio.wait_for(looking, 60)

    _run(act())


def test_a_decision_whose_ring_is_lost_is_found_by_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.05)

    async def act() -> None:
        here, there = _made(tmp_path), _made(tmp_path)
        task = await _waiting(here, "appr_1")
        (tmp_path / module.BELL).unlink()
        assert await there.decide("a", "appr_1", YES) == "resolved"
        assert await asyncio.wait_for(task, 60) == YES

    _run(act())


def test_a_wait_that_cannot_hear_looks_at_short_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 3600.0)
    monkeypatch.setattr(places, "_LIBC", SimpleNamespace(inotify_init1=lambda _: -1))

    async def act() -> None:
        here, there = _made(tmp_path), _made(tmp_path)
        task = await _waiting(here, "appr_1")
        assert await there.decide("a", "appr_1", YES) == "resolved"
        assert await asyncio.wait_for(task, 60) == YES

    _run(act())


@in_both_places
def test_a_decision_before_the_wait_is_queued_and_the_second_finds_nothing(tmp_path: Path) -> None:
    async def act() -> None:
        here, there = _made(tmp_path), _made(tmp_path)
        await here.announce("a", "s", "appr_1")
        assert await there.decide("a", "appr_1", YES) == "queued"
        assert await there.decide("a", "appr_1", NO) == "not_found"
        assert await here.wait("appr_1", 300) == YES

    _run(act())


@in_both_places
def test_a_wait_ends_as_refused_when_its_time_is_over_and_a_late_decision_finds_nothing(
    tmp_path: Path,
) -> None:
    async def act() -> None:
        here = _made(tmp_path)
        await here.announce("a", "s", "appr_1")
        assert await here.wait("appr_1", 0) == Decision(False, None, timed_out=True)
        assert await here.decide("a", "appr_1", YES) == "not_found"
        assert await here.decide("a", "appr_unknown", YES) == "not_found"

    _run(act())


@in_both_places
def test_another_key_decides_nothing_and_an_operator_decides_for_all(tmp_path: Path) -> None:
    async def act() -> None:
        here = _made(tmp_path)
        task = await _waiting(here, "appr_1")
        assert await here.decide("b", "appr_1", YES) == "not_found"
        assert await here.decide("", "appr_1", YES) == "not_found"
        assert await here.decide(None, "appr_1", YES) == "resolved"
        assert await task == YES

    _run(act())


@in_both_places
def test_a_remembered_approval_holds_for_its_owner_and_session_and_releases_other_waits(
    tmp_path: Path,
) -> None:
    async def act() -> None:
        here, there = _made(tmp_path), _made(tmp_path)
        asked, same = await _waiting(here, "appr_1"), await _waiting(there, "appr_2")
        other, stranger = (
            await _waiting(here, "appr_3", session="t"),
            await _waiting(here, "appr_4", owner="b"),
        )
        assert not await here.is_remembered("a", "s")
        assert await there.decide("a", "appr_1", YES, remember=True) == "resolved"
        assert [await asked, await same] == [YES, YES]
        assert await here.is_remembered("a", "s") and await there.is_remembered("a", "s")
        assert not await here.is_remembered("a", "t") and not await here.is_remembered("b", "s")
        assert not other.done() and not stranger.done()
        await there.forget("a", "s")
        assert not await here.is_remembered("a", "s")
        await there.forget("a", "t")
        assert await other == Decision(False, "the session was deleted")
        stranger.cancel()
        await asyncio.gather(stranger, return_exceptions=True)
        assert await _rows(here) == 0

    _run(act())


@pytest.mark.parametrize(("decision", "session"), [(NO, "s"), (YES, "")])
@in_both_places
def test_a_refusal_and_an_approval_without_session_are_not_remembered(
    tmp_path: Path, decision: Decision, session: str
) -> None:
    async def act() -> None:
        here = _made(tmp_path)
        await here.announce("a", session, "appr_1")
        await here.decide("a", "appr_1", decision, remember=True)
        assert not await here.is_remembered("a", session)

    _run(act())


@in_both_places
def test_a_remembered_approval_is_forgotten_after_its_last_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act() -> None:
        here, began = _made(tmp_path), time.time()
        await here.announce("a", "s", "appr_1")
        await here.decide("a", "appr_1", YES, remember=True)
        for later, holds in ((1_700, True), (3_400, True), (5_300, False)):
            monkeypatch.setattr(module.time, "time", lambda later=later: began + later)
            assert await here.is_remembered("a", "s") is holds
        await here.sweep()
        assert await _rows(here) == 0
        remembered = "SELECT count(*) FROM remembered"
        assert await here._rows.read(lambda each: each.execute(remembered).fetchone()) == (0,)

    _run(act())


def test_a_decision_for_a_process_that_has_died_finds_nothing_and_its_row_is_swept(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom frontend.state.approvals import ApprovalStore\n"
        "from frontend.state.places import OnDisk\nfrom ipc import settings\n"
        "kept = ApprovalStore(OnDisk(Path(sys.argv[1])), settings.State())\n"
        "asyncio.run(kept.announce('a', 's', 'appr_1'))"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)

    async def act() -> None:
        here = _made(tmp_path)
        assert await _rows(here) == 1
        assert await here.decide("a", "appr_1", YES) == "not_found"
        await here.sweep()
        assert await _rows(here) == 0

    _run(act())


@in_both_places
def test_a_cancelled_wait_leaves_no_row_and_nothing_looks_when_nobody_waits(tmp_path: Path) -> None:
    async def act() -> None:
        here = _made(tmp_path)
        task = await _waiting(here, "appr_1")
        looking = here._looking
        assert looking is not None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert await _rows(here) == 0
        await asyncio.wait_for(looking, 60)
        task = await _waiting(here, "appr_2")
        await here.decide("a", "appr_2", YES)
        assert await task == YES

    _run(act())


@in_both_places
def test_three_hundred_waits_share_one_look_and_all_are_released(tmp_path: Path) -> None:
    async def act() -> None:
        here, there = _made(tmp_path), _made(tmp_path)
        ids = [f"appr_{number}" for number in range(300)]
        for id_ in ids:
            await here.announce("a", id_, id_)
        tasks = [asyncio.ensure_future(here.wait(id_, 300)) for id_ in ids]
        for id_ in ids:
            assert await there.decide("a", id_, YES) in ("resolved", "queued")
        assert await asyncio.gather(*tasks) == [YES] * 300
        assert await _rows(here) == 0

    _run(act())
