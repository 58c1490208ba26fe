"""The history of the last hour: bounded, true to the counters, kept by one frontend at a time."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from frontend.access.gate import Gate
from frontend.engine.interface import WorkerView
from frontend.records.recent import Recent, RecentWriter, ring_path
from frontend.services import Services
from frontend.status.history import (
    EVERY_S,
    KEPT,
    LOCK,
    Counted,
    History,
    HistoryFile,
    Keeper,
    Point,
    counted,
    extended,
)
from frontend.status.stream import Feed
from ipc.catalog.entries import Catalog
from ipc.metrics.files import Totals
from ipc.processes.liveness import SlotLock
from ipc.processes.paths import RunPaths, prepare_run_dir
from ipc.settings import load
from ipc.wire.messages import Credits


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path / "run", "test")
    prepare_run_dir(found)
    return found


def worker(slot: int, state: str = "ready") -> WorkerView:
    return WorkerView(
        f"worker-{slot}", slot, state, state == "ready", True, "cpu", 1, {}, Credits(1, 0, 1.0), None, 5.0
    )


def answer(at: float, milliseconds: float, status: int = 200) -> Recent:
    return Recent(at, "r", "", "sie", "encode", "a", status, "", {"total": milliseconds})


def test_a_point_has_the_rates_since_the_point_before_and_its_own_answers() -> None:
    begun = extended(History(), 100.0, Counted(requests=50.0, tokens=1000.0), [], [])
    assert begun.points == []
    answers = [answer(95.0, 999.0), answer(104.0, 1.0), answer(105.0, 3.0), answer(106.0, 7000.0, 500)]
    present = Counted(150.0, 5.0, 3000.0, 10.0, 4.0, 7.0, 2.0)
    point = extended(begun, 110.0, present, answers, [worker(0), worker(1, "absent")]).points[-1]
    assert point == Point(110.0, 10.0, 0.5, 200.0, 2.0, 2.98, 4.0, 7.0, 0.5, 1, 2)


def test_a_pause_and_counters_that_went_back_make_no_false_rates() -> None:
    begun = extended(History(), 100.0, Counted(requests=50.0), [], [])
    assert extended(begun, 500.0, Counted(requests=90.0), [], []).points == []
    assert extended(begun, 110.0, Counted(requests=1.0), [], []).points[-1].requests == 0.0


def test_a_timer_that_fires_a_moment_early_makes_no_second_point() -> None:
    begun = extended(History(), 99.999, Counted(requests=50.0), [], [])
    twice = extended(begun, 100.002, Counted(requests=51.0), [], [])
    assert twice is begun
    assert extended(twice, 110.0, Counted(requests=150.0), [], []).points[-1].requests == 9.999


def test_a_keeper_that_ends_late_takes_no_draft_of_the_next(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, following, put = History(at=1.0), History(at=2.0), Path.replace

    def interrupted(draft: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", put)
        with monkeypatch.context() as other:
            other.setattr("os.getpid", lambda: 1)
            HistoryFile(paths).write(following)
            assert HistoryFile(paths).read() == following
        return put(draft, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    HistoryFile(paths).write(late)
    assert HistoryFile(paths).read() == late


def test_the_history_keeps_an_hour_and_no_more_whatever_happens(paths: RunPaths) -> None:
    history, file = History(), HistoryFile(paths)
    for number in range(3 * KEPT):
        counts = Counted(*[1e15 * number] * 4, 1e15, 1e15, 9.0 * number)
        history = extended(history, EVERY_S * number, counts, [answer(EVERY_S * number, 1e9)], [worker(0)])
    assert len(history.points) == KEPT
    assert history.points[-1].at - history.points[0].at == EVERY_S * (KEPT - 1)
    file.write(history)
    assert file.read() == history
    assert sum(path.stat().st_size for path in paths.metrics().iterdir()) < 64 << 10


def test_counts_are_those_of_all_models_and_clients_that_went_away_are_no_errors() -> None:
    totals = Totals(
        by_model={
            "penstock_requests": {"a": 10.0, "b": 9.0},
            "penstock_tokens": {"a": 5.0},
            "penstock_queue_depth": {"b": 2.0},
        },
        codes={"penstock_requests": {"200": 12.0, "404": 3.0, "499": 1.0, "503": 3.0}},
        others={
            "penstock_device_busy_seconds": {(("worker", "worker-0"),): 1.5},
            "penstock_worker_restarts": {
                (("worker", "worker-0"), ("reason", "signal-9")): 3.0,
                (("worker", "worker-0"), ("reason", "drained")): 4.0,
            },
        },
    )
    assert counted(totals) == Counted(19.0, 6.0, 5.0, 1.5, 0.0, 2.0, 3.0), "a drained worker did not die"


def test_one_frontend_keeps_the_history_and_the_next_goes_on_after_its_end(paths: RunPaths) -> None:
    first, second = (Keeper(paths, list) for _ in range(2))
    for now in (100.0, 110.0):
        first.look(now, [])
        second.look(now + 1.0, [])
    file = HistoryFile(paths)
    assert [point.at for point in file.read().points] == [110.0]
    first.close()
    RecentWriter(ring_path(paths, "frontend-0")).add(answer(115.0, 4.0))
    second.look(120.0, [])
    assert [(point.at, point.p50_ms) for point in file.read().points] == [(110.0, None), (120.0, 4.0)]
    second.close()
    SlotLock(paths.lock(LOCK)).release()


def test_a_point_of_an_older_version_has_no_deaths(paths: RunPaths) -> None:
    (paths.metrics() / "history.json").write_text('{"points":[[9,1,0,0,null,null,0,0,0,0]]}')
    assert [point.deaths for point in HistoryFile(paths).read().points] == [0]


def test_a_broken_file_is_an_empty_history(paths: RunPaths) -> None:
    (paths.metrics() / "history.json").write_text('{"points": [[1')
    assert HistoryFile(paths).read() == History()


class PointFeed(Feed):
    """A feed that gets one more point with every frame."""

    async def _publish(self) -> None:
        self._number += 1
        self._frame = json.dumps({"number": self._number})
        self._points = [Point(float(n), 1.0, 0.0, 0.0, None, None, 0.0, 0.0, 0.0, 0) for n in range(1, 4)]
        self._wake()


def test_a_viewer_gets_the_history_with_its_first_frame_and_then_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.status.stream.EVERY_S", 0.004)
    services = Services(load(None, {"run.dir": str(tmp_path)}), Catalog([]), Gate())
    services.directory = type("Workers", (), {"watch": lambda self, on: True})()  # type: ignore[assignment]

    async def scenario() -> None:
        feed = PointFeed(services)
        with feed.viewer():
            frames = feed.frames()
            first = json.loads(await anext(frames))
            assert [point[0] for point in first["history"]["points"]] == [1.0, 2.0, 3.0]
            assert first["history"]["points"][0] == msgspec.to_builtins(feed._points[0])
            assert first["number"] >= 1
            assert "history" not in json.loads(await anext(frames))

    asyncio.run(scenario())
