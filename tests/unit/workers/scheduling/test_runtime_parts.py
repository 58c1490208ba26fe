"""What a worker says to requests whose model answers in another way than they are asked, and to room that is there."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ipc.errors import Unsupported
from ipc.memory.arena import BLOCKS_OFFSET, Arena, ArenaView, LeaseTable
from ipc.processes.starting import Listener, Notifier
from ipc.settings import Settings
from ipc.wire.messages import Call, EncodeCall, InferCall, InputItem, Submit, Work
from tests.fakes.adapter import FakeAdapter
from tests.fakes.jobs import adapter, make_job
from tests.fakes.pipeline import placing
from workers.adapters.base import Prepared
from workers.runtime import Runtime
from workers.scheduling.job_table import JobTable
from workers.scheduling.queue import Reason, WorkQueue
from workers.strategies import named_outputs
from workers.strategies.named_outputs import Placer


@pytest.mark.parametrize(("streams", "words"), [(True, "any number of responses"), (False, "one response")])
def test_a_request_for_another_kind_of_answer_is_refused(streams: bool, words: str, tmp_path: Path) -> None:
    work = Work("m", InferCall([], []), time.monotonic_ns() + 10**12, 16, "req", parts=0 if streams else 8)
    served = SimpleNamespace(adapter=SimpleNamespace(streams=streams, config=None, engine=None))
    session: Any = SimpleNamespace(key=b"s", tag=1)
    with (
        placing(tmp_path, Settings(), 1 << 20, models={"find": lambda model: served}) as pipeline,
        pytest.raises(Unsupported, match=f"'m' gives {words}"),
    ):
        pipeline.intake.submit(session, Submit(1, work), memoryview(b""))


@pytest.mark.parametrize("refuses", [False, True])
def test_the_flight_record_names_a_request_while_code_of_its_model_looks_at_it(
    refuses: bool, tmp_path: Path
) -> None:
    named: list[set[tuple[int, int]]] = []

    class Looking(FakeAdapter):
        def refuse_unsupported(self, call: Call) -> None:
            named.append(view.flight())
            if refuses:
                raise Unsupported("not this")

        def group(self, call: Call) -> None:
            named.append(view.flight())

    work = Work("m", EncodeCall([InputItem("a")], ["dense"]), time.monotonic_ns() + 10**12, 16, "req")
    served = SimpleNamespace(adapter=Looking({}, 512), instance=SimpleNamespace(serial=1))
    session: Any = SimpleNamespace(key=b"s", tag=5)
    with placing(tmp_path, Settings(), 1 << 20, models={"find": lambda model: served}) as pipeline:
        view = ArenaView(pipeline.context.arena.path, "e" * 16)
        with suppress(Unsupported):
            pipeline.intake.submit(session, Submit(7, work), memoryview(b""))
        assert named == [{(5, 7)}] * (1 if refuses else 2) and view.flight() == set()
        assert pipeline.placed == ([] if refuses else [7])
        for job in pipeline.jobs.jobs():
            pipeline.jobs.cancel(job)


def test_streams_without_room_try_again_when_a_lease_ends(tmp_path: Path) -> None:
    with placing(tmp_path, Settings(), 1 << 20) as pipeline:
        job = make_job(strategy=pipeline.kinds.streams, of=adapter(streams=True), parts=8)
        pipeline.queue.admit(job)
        pipeline.kinds.streams.admit(job)
        pipeline.jobs.enter(job)
        with pipeline.jobs.lock:
            pipeline.jobs.rest(job)
        pipeline.line.add(job, Reason.PART)
        assert pipeline.queue.admitted == 0
        job.prepared = [Prepared(None, 16)]
        pipeline.released()
        assert pipeline.queue.admitted == 16 and len(pipeline.queue.take(100, 10)) == 1


def test_a_drain_is_told_again_until_the_listener_has_room_for_it(tmp_path: Path) -> None:
    listener, runtime = Listener(tmp_path / "notify.sock"), Runtime.__new__(Runtime)
    runtime.notifier = Notifier(str(listener.path))
    while runtime.notifier.send(watchdog=1):
        pass
    leases = SimpleNamespace(leases=0)
    stubs: Any = SimpleNamespace(leases=leases, preloaded=False, broadcast=lambda message: None, jobs=[])
    runtime.models = runtime.endpoint = runtime._context = stubs
    runtime._settings = Settings()
    runtime._draining_until, runtime._ready_sent, runtime._stopping_sent = 0.0, True, False
    try:
        runtime.drain()
        runtime._notify()
        assert listener.receive() == {"WATCHDOG": "1"}
        runtime._notify()
        assert listener.receive() == {"STOPPING": "1", "STATUS": "draining", "WATCHDOG": "1"}
        runtime._notify()
        assert listener.receive() == {"WATCHDOG": "1"}
    finally:
        listener.close()


def test_a_drain_waits_for_answers_that_are_posted_and_have_not_left() -> None:
    runtime, stops = Runtime.__new__(Runtime), list[str]()
    runtime.pipeline = cast("Any", SimpleNamespace(idle=True))
    leases = SimpleNamespace(leases=0)
    endpoint = SimpleNamespace(has_posted=True, stop=lambda: stops.append("stop"), leases=leases)
    runtime.endpoint, runtime._stopping_sent = cast("Any", endpoint), True
    runtime._draining_until = time.monotonic() + 1000
    runtime._finish_drain()
    assert not stops, "the device is idle, and its last answers wait for the endpoint"
    endpoint.has_posted = False
    runtime._finish_drain()
    assert stops == ["stop"]


def test_a_part_that_cannot_be_copied_leaves_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(tmp_path / "arena", BLOCKS_OFFSET + (1 << 20), "e" * 16)
    try:
        leases = LeaseTable(arena)
        endpoint: Any = SimpleNamespace(leases=leases)
        placer = Placer(JobTable(WorkQueue(Settings()), endpoint), 1024)

        def failing(*_: Any) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(named_outputs, "_copy", failing)
        with pytest.raises(RuntimeError):
            placer._placed([("O", np.zeros(5000, np.int32))])
        assert leases.used_nbytes == 0
        leases.verify()
    finally:
        arena.close()
