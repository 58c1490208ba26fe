"""The list of inputs that crashed workers, as several frontends share it."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from frontend.engine import poison as poison_module
from frontend.engine.poison import PoisonList
from ipc.errors import InputRefused
from ipc.processes.paths import RunPaths, prepare_run_dir
from ipc.store.store import Store, Table
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import EncodeCall, GenerateCall, Grammar, InferCall, InputItem, Step

CALL = EncodeCall([InputItem("boom")], ["dense"])
OTHER = EncodeCall([InputItem("fine")], ["dense"])


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run directory."""
    found = RunPaths(tmp_path, "t")
    prepare_run_dir(found)
    return found


def test_a_poison_is_refused_at_once_here_and_after_a_look_elsewhere(paths: RunPaths) -> None:
    here, elsewhere = PoisonList(Store(paths), 600), PoisonList(Store(paths), 600)
    here.add("m", CALL)
    assert here.holds("m", CALL)
    assert not here.holds("m", OTHER) and not here.holds("other model", CALL)
    assert not elsewhere.holds("m", CALL)
    elsewhere.refresh()
    assert elsewhere.holds("m", CALL)


def test_a_poison_is_one_by_whatever_route_it_comes(paths: RunPaths) -> None:
    poison = PoisonList(Store(paths), 600)
    poison.add("m", CALL)
    assert poison.holds("m", EncodeCall([InputItem("boom")], ["dense"], names=FieldNames(text="input")))
    poison.add("m", GenerateCall(text="boom", grammar=Grammar("json_object", field="response_format")))
    assert poison.holds("m", GenerateCall(text="boom", grammar=Grammar("json_object", field="text.format")))


def test_a_poison_survives_a_restart_and_ages_out(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    PoisonList(Store(paths), 600).add("m", CALL)
    restarted = PoisonList(Store(paths), 600)
    restarted.refresh()
    assert restarted.holds("m", CALL)
    later = time.time() + 601
    monkeypatch.setattr(time, "time", lambda: later)
    restarted.refresh()
    assert not restarted.holds("m", CALL)
    restarted.add("m", OTHER)
    assert len(Table(Store(paths), "poison", dict).rows()) == 1, "the next row takes the place of old rows"


def test_rows_tell_nothing_about_the_text(paths: RunPaths) -> None:
    PoisonList(Store(paths), 600).add("m", CALL)
    assert not any(b"boom" in path.read_bytes() for path in paths.store().iterdir())


def test_a_poison_is_refused_even_when_it_cannot_be_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = PoisonList(Store(RunPaths(tmp_path / "missing", "t")), 600)
    alone.add("m", CALL)
    assert alone.holds("m", CALL)
    alone.refresh()
    assert alone.holds("m", CALL)
    assert "the other frontends do not know" in caplog.text


def test_the_event_loop_alone_changes_what_is_known(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that forgot a verdict would break the loop off in the middle of its look, or be overwritten by it."""
    forgot_in: list[threading.Thread] = []

    class Own(dict[str, object]):
        def pop(self, *key: object) -> None:  # type: ignore[override]
            forgot_in.append(threading.current_thread())
            done.set()

    async def suspected() -> None:
        poison = PoisonList(Store(paths), 600)
        name = poison_module.fingerprint("m", CALL)
        poison.suspect("m", CALL)
        poison._own = Own(poison._own)  # type: ignore[assignment]
        await asyncio.wait_for(done.wait(), 60)
        assert poison._known == {name: "suspect"}

    done = asyncio.Event()
    asyncio.run(suspected())
    assert forgot_in == [threading.main_thread()]


def test_the_newest_are_kept_where_there_are_too_many(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poison_module, "MOST", 3)
    listed, calls = (
        PoisonList(Store(paths), 600),
        [EncodeCall([InputItem(f"{n}")], ["dense"]) for n in range(5)],
    )
    for call in calls:
        listed.add("m", call)
    elsewhere = PoisonList(Store(paths), 600)
    for each in (listed, elsewhere):
        each.refresh()
        assert [each.holds("m", call) for call in calls] == [False, False, True, True, True]


def test_a_verdict_is_written_beside_the_loop(paths: RunPaths) -> None:
    async def judge() -> None:
        PoisonList(Store(paths), 600).add("m", CALL)
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(judge())
    elsewhere = PoisonList(Store(paths), 600)
    elsewhere.refresh()
    assert elsewhere.holds("m", CALL)


def step(name: int, **flags: bool) -> InferCall:
    """A request of a sequence."""
    return InferCall([], [], step=Step(name, **flags))


def test_what_begins_a_sequence_is_the_same_input_under_any_id(paths: RunPaths) -> None:
    listed = PoisonList(Store(paths), 600)
    listed.add("m", step(1, start=True), b"bad")
    assert listed.holds("m", step(2, start=True), b"bad")
    assert not listed.holds("m", step(2, start=True), b"good")
    assert not listed.holds("m", step(2, start=True, end=True), b"bad")
    listed.add("m", step(1), b"later")
    assert listed.holds("m", step(1), b"later")
    assert not listed.holds("m", step(2), b"later"), "the state of another sequence is another"


def test_only_a_death_alone_makes_a_suspect_poison(paths: RunPaths) -> None:
    listed = PoisonList(Store(paths), 600)
    assert not listed.is_suspect("m", step(1, start=True))
    for name in (1, 2):
        listed.suspect("m", step(name, start=True), alone=False)
        assert listed.is_suspect("m", step(9, start=True)) and not listed.holds("m", step(9, start=True))
    elsewhere = PoisonList(Store(paths), 600)
    elsewhere.refresh()
    assert elsewhere.is_suspect("m", step(9, start=True)) and not elsewhere.holds("m", step(9, start=True))
    listed.suspect("m", step(3, start=True), alone=True)
    assert listed.holds("m", step(4, start=True))


def test_a_verdict_never_gets_milder(paths: RunPaths) -> None:
    here, elsewhere = PoisonList(Store(paths), 600), PoisonList(Store(paths), 600)
    for _ in range(2):
        here.suspect("m", CALL, alone=False)
    elsewhere.suspect("m", CALL, alone=False)
    for each in (here, elsewhere):
        each.refresh()
        assert each.is_accused("m", CALL) and each.is_suspect("m", CALL) and not each.holds("m", CALL)
    here.suspect("m", CALL, alone=True)
    here.suspect("m", CALL, alone=False)
    elsewhere.refresh()
    for each in (here, elsewhere):
        assert each.holds("m", CALL) and not each.is_accused("m", CALL)


def test_an_operator_lets_an_input_through_again_by_deleting_its_row(paths: RunPaths) -> None:
    here, elsewhere = PoisonList(Store(paths), 600), PoisonList(Store(paths), 600)
    here.add("m", CALL)
    elsewhere.refresh()
    assert here.holds("m", CALL) and elsewhere.holds("m", CALL)
    with closing(sqlite3.connect(paths.store() / "current", isolation_level=None)) as operator:
        operator.execute("DELETE FROM state WHERE kind = 'poison'")
    here.refresh()
    elsewhere.refresh()
    assert not here.holds("m", CALL) and not elsewhere.holds("m", CALL)


def test_a_process_without_a_store_keeps_its_verdicts_until_their_time_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poison = PoisonList(None, 600)
    poison.add("m", CALL)
    poison.refresh()
    with pytest.raises(InputRefused):
        poison.check("m", CALL)
    poison.check("m", OTHER)
    later = time.time() + 601
    monkeypatch.setattr(time, "time", lambda: later)
    poison.refresh()
    poison.check("m", CALL)


def test_verdicts_of_other_hosts_count_from_when_they_were_heard_and_never_lessen_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poison, name, now = PoisonList(None, 600), poison_module.fingerprint("m", CALL), time.time()
    poison.learn({name: "suspect"})
    assert poison.is_suspect("m", CALL) and not poison.holds("m", CALL)
    poison.suspect("m", CALL, alone=True)
    assert poison.holds("m", CALL), "a death of its own on what another host suspects"
    poison.learn({name: "suspect"})
    assert poison.holds("m", CALL)
    elsewhere = PoisonList(None, 600)
    elsewhere.learn({name: "poison"})
    for passed_s, holds in ((599, True), (601, False), (602, False)):
        monkeypatch.setattr(time, "time", lambda at=now + passed_s: at)
        elsewhere.learn({name: "poison"})
        elsewhere.refresh()
        assert elsewhere.holds("m", CALL) == holds
    elsewhere.learn({})
    elsewhere.refresh()
    assert not elsewhere


def test_each_verdict_of_this_host_is_told_once_also_those_of_its_other_processes(paths: RunPaths) -> None:
    told: list[tuple[str, str]] = []
    here, elsewhere = PoisonList(Store(paths), 600), PoisonList(Store(paths), 600)
    here.on_verdict = lambda name, verdict: told.append((name, verdict))
    name, other = (poison_module.fingerprint("m", call) for call in (CALL, OTHER))
    here.suspect("m", CALL)
    here.learn({"0" * 32: "poison"})
    for _ in range(2):
        here.refresh()
    assert told == [(name, "suspect")]
    elsewhere.refresh()
    elsewhere.suspect("m", CALL)
    elsewhere.suspect("m", OTHER)
    for _ in range(2):
        here.refresh()
    assert sorted(told[1:]) == sorted([(name, "poison"), (other, "suspect")])
