"""What a worker says to requests whose model answers in another way than they are asked, and to room that is there."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ipc.errors import Unsupported
from ipc.memory.arena import BLOCKS_OFFSET, Arena
from ipc.memory.leases import LeaseTable
from ipc.processes.notify import Listener, Notifier
from ipc.settings import Settings
from ipc.wire.messages import InferCall, Submit, Work
from workers.device.executor import Executor
from workers.device.watchdog import Activity
from workers.memory import named_outputs
from workers.memory.named_outputs import Placer
from workers.runtime import Runtime
from workers.scheduling.jobs import JobBook
from workers.scheduling.queue import WorkQueue
from workers.strategies.interlude import Interlude


@pytest.mark.parametrize(("streams", "words"), [(True, "any number of responses"), (False, "one response")])
def test_a_request_for_another_kind_of_answer_is_refused(streams: bool, words: str) -> None:
    runtime: Any = Runtime.__new__(Runtime)
    runtime._draining_until = 0.0
    host = SimpleNamespace(adapter=SimpleNamespace(streams=streams))
    runtime.models = SimpleNamespace(find=lambda model: host)
    work = Work("m", InferCall([], []), time.monotonic_ns() + 10**12, 16, "req", parts=0 if streams else 8)
    asked = Submit(1, work)
    with pytest.raises(Unsupported, match=f"'m' gives {words}"):
        runtime.submit(SimpleNamespace(key=b"s", tag=1), asked, memoryview(b""))


def test_streams_without_room_try_again_when_a_lease_ends() -> None:
    runtime: Any = Runtime.__new__(Runtime)
    runtime._parked, runtime._uncopied, runtime._slotless = [], [], []
    woken: list[int] = []
    runtime.book = SimpleNamespace(wake_roomless=lambda: woken.append(1))
    runtime.released()
    assert woken == [1]


def test_a_drain_is_told_again_until_the_listener_has_room_for_it(tmp_path: Path) -> None:
    listener, runtime = Listener(tmp_path / "notify.sock"), Runtime.__new__(Runtime)
    runtime.notifier = Notifier(str(listener.path))
    while runtime.notifier.send(watchdog=1):
        pass
    stubs: Any = SimpleNamespace(leases=0, preloaded=False, broadcast=lambda message: None)
    runtime.leases = runtime.models = runtime.endpoint = stubs
    runtime.book, runtime._settings = JobBook(WorkQueue(Settings()), lambda: stubs), Settings()
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


def test_a_part_that_cannot_be_copied_leaves_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(tmp_path / "arena", BLOCKS_OFFSET + (1 << 20), "e" * 16)
    try:
        leases = LeaseTable(arena)
        endpoint: Any = SimpleNamespace(leases=leases)
        placer = Placer(JobBook(WorkQueue(Settings()), lambda: endpoint), 1024)

        def failing(*_: Any) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(named_outputs, "_copy", failing)
        with pytest.raises(RuntimeError):
            placer._placed([("O", np.zeros(5000, np.int32))])
        assert leases.used_nbytes == 0
        leases.verify()
    finally:
        arena.close()


def test_streams_that_ended_during_a_long_batch_are_closed_between_its_steps() -> None:
    executor: Any = Executor.__new__(Executor)
    executor._interlude, executor.activity, executor._step_limit_s = Interlude(), Activity(), 10.0
    executor._former = SimpleNamespace(beside=lambda adapter, most_s: None)
    executor._recoveries = SimpleNamespace(fresh=lambda: None)
    executor._ran = 7
    closed: list[tuple[bool, float]] = []

    def close_ended(limit_s: float) -> None:
        closed.append((executor._interlude.playing, limit_s))
        executor.activity.end()

    executor._generations = SimpleNamespace(close_ended=close_ended)
    executor._book = SimpleNamespace(over=[])
    executor.activity.begin(60.0)
    piece = SimpleNamespace(job=SimpleNamespace(adapter=None, tag=1, id=2))
    executor._between_steps([piece])
    assert not closed
    executor._book.over.append("a stream")
    executor._between_steps([piece])
    assert closed == [(True, 10.0)]
    assert executor.activity.busy and executor.activity.limit_s == 60.0, "the long batch goes on"
    assert executor._ran == 7
