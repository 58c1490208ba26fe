"""Room for copies of clients' memory: what is copied at a time is bounded, and who waits gets it in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ipc.catalog.model_config import ModelConfig
from ipc.errors import InvalidInput, PenstockError
from ipc.memory.arena import BLOCKS_OFFSET, Arena
from ipc.memory.leases import LeaseTable
from ipc.settings import load
from ipc.wire.messages import InferCall, Region, TensorInput, TensorOutput
from tests.fakes.program import FakeProgram
from tests.fakes.tensors import tensor
from workers.adapters.base import Prepared
from workers.memory.client_regions import ClientMemory
from workers.memory.copy_room import CopyRoom
from workers.memory.payload import NOTHING, Payload
from workers.runtime import Runtime
from workers.scheduling.job import Job
from workers.scheduling.jobs import JobBook
from workers.scheduling.queue import WorkQueue

MIB = 1 << 20
LARGE = 5 * MIB // 8
"""A result of which the arena holds one."""
_ids = count(1)


def test_room_comes_back_when_its_holder_goes_and_wakes_who_was_refused() -> None:
    woken: list[int] = []
    room = CopyRoom(100, lambda: woken.append(1))
    first, second = room.reserve(60), room.reserve(40)
    assert first is not None and second is not None and room.reserve(1) is None and not woken
    del first
    assert woken == [1]
    assert room.reserve(61) is None
    third = room.reserve(60)
    assert third is not None
    del second
    assert woken == [1], "nobody waits"
    assert room.reserve(40) is not None


def test_a_request_whose_copies_never_fit_is_refused_with_the_limit() -> None:
    room = CopyRoom(100, lambda: None)
    room.check(100)
    with pytest.raises(InvalidInput, match=r"101 bytes .* shared_memory\.max_copy_bytes allows 100"):
        room.check(101)


def test_nobody_is_forgotten_who_waits_while_holders_go_in_other_threads() -> None:
    turn = threading.Event()
    room = CopyRoom(1, turn.set)
    for _ in range(2000):
        place = room.reserve(1)
        while place is None:
            assert turn.wait(20), "a place ended and nobody was woken"
            turn.clear()
            place = room.reserve(1)
        held = [place]
        del place
        threading.Thread(target=held.clear).start()


def memory(tmp_path: Path, **named: str) -> ClientMemory:
    """That of a worker that may copy a mebibyte."""
    given = {
        "run.dir": str(tmp_path / "run"),
        "shared_memory.enabled": "true",
        "shared_memory.max_copy_bytes": str(MIB),
    }
    chosen = given | {f"shared_memory.{name}": value for name, value in named.items()}
    return ClientMemory(load(None, chosen, {}), torch.device("cpu"), tmp_path)


def call(*nbytes: int, datatype: str = "UINT8", kind: str = "system") -> InferCall:
    """One whose inputs are regions of these sizes."""
    sizes = [TensorInput("A", datatype, [n], 0, n, Region(kind, "client_a", 0, n)) for n in nbytes]
    return InferCall(sizes, [TensorOutput("O")])


@pytest.mark.parametrize(
    ("asked", "mapped", "lacks"),
    [
        (call(MIB), "false", True),
        (call(MIB), "true", False),
        (call(MIB, datatype="BYTES"), "true", True),
        (call(2 * MIB, kind="cuda"), "false", False),
        (call(0, 0), "false", False),
        (InferCall([TensorInput("A", "UINT8", [9], 0, 9)], []), "false", False),
    ],
)
def test_room_is_needed_for_what_is_copied_and_for_nothing_else(
    asked: InferCall, mapped: str, lacks: bool, tmp_path: Path
) -> None:
    payload = Payload(memoryview(b""), memory(tmp_path, map_inputs=mapped))
    payload.plan(asked)
    assert payload.lacks_room == lacks
    assert payload.reserve() and not payload.lacks_room


def test_the_inputs_of_a_request_count_together(tmp_path: Path) -> None:
    payload = Payload(memoryview(b""), memory(tmp_path))
    with pytest.raises(InvalidInput, match="1048577 bytes"):
        payload.plan(call(MIB, 1))
    NOTHING.plan(call(2 * MIB))
    assert NOTHING.reserve()


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    """Only the parts that place jobs, which are handed to `preparer`, a list."""
    arena = Arena(tmp_path / "arena", BLOCKS_OFFSET + MIB, "e" * 16)
    made = Runtime.__new__(Runtime)
    settings = load(None, {"run.dir": str(tmp_path / "run")}, {})
    made._settings, made._arena, made.leases = settings, arena, LeaseTable(arena)
    made.queue = WorkQueue(settings)
    endpoint: Any = SimpleNamespace(
        leases=made.leases, post=lambda work: None, fail=lambda *of: None, unread=lambda *of: None
    )
    made.book = JobBook(made.queue, lambda: endpoint)
    placed: list[int] = []
    preparer: Any = SimpleNamespace(put=lambda job: placed.append(job.id), placed=placed)
    made.preparer = preparer
    made.executor = SimpleNamespace(idle=False)  # type: ignore[assignment]
    made._parked, made._uncopied, made._slotless = [], [], []
    yield made
    arena.close()


def ask(runtime: Runtime, of: ClientMemory, nbytes: int, result_nbytes: int = 1) -> int:
    """A request that names so many bytes, taken in as `Runtime.submit` does; returns its id."""
    sides = {"inputs": (tensor("A", "UINT8", -1),), "outputs": (tensor("O", "UINT8", result_nbytes),)}
    adapter = FakeProgram(ModelConfig("m", max_batch_size=1, **sides), "echo")
    payload = Payload(memoryview(b""), of)
    job = Job(b"s", 1, next(_ids), "m", call(nbytes), 2**62, "req", False, 16, payload)
    job.adapter, job.prepared, job.open_items = adapter, [Prepared(None, 16)], 1
    runtime.queue.admit(job.cost)
    runtime.book.open(job)
    runtime._place(job)
    return job.id


def end(runtime: Runtime, number: int) -> None:
    """Its caller has gone."""
    job = runtime.book.find(b"s", number)
    assert job is not None
    runtime.book.cancel(job)


def test_jobs_wait_for_room_in_order_and_small_ones_pass(runtime: Runtime, tmp_path: Path) -> None:
    of, placed = memory(tmp_path), runtime.preparer.placed  # type: ignore[attr-defined]
    first, second, third = (ask(runtime, of, nbytes) for nbytes in (MIB - 9, 20, 5))
    small = ask(runtime, of, 0)
    assert placed == [first, small]
    runtime.released()
    assert placed == [first, small]
    end(runtime, first)
    runtime.released()
    assert placed == [first, small, second, third]


def test_who_waits_for_copies_is_passed_by_who_only_needs_the_arena(runtime: Runtime, tmp_path: Path) -> None:
    of, placed = memory(tmp_path), runtime.preparer.placed  # type: ignore[attr-defined]
    copying = ask(runtime, of, MIB)
    both, after = ask(runtime, of, 20, LARGE), ask(runtime, of, 5)
    large = ask(runtime, of, 0, LARGE)
    assert placed == [copying, large], "the copies have no room, the arena has"
    larger = ask(runtime, of, 0, LARGE)
    end(runtime, copying)
    runtime.released()
    assert placed == [copying, large, after], "the arena has no room, the copies have"
    for ended, begun in ((large, larger), (larger, both)):
        end(runtime, ended)
        runtime.released()
        assert placed[-1] == begun
    assert not (runtime._parked or runtime._uncopied)
    end(runtime, both)


def test_a_job_that_cannot_be_sent_on_is_not_kept(runtime: Runtime, tmp_path: Path) -> None:
    def failing(job: Job) -> None:
        raise RuntimeError("strange options")

    runtime.preparer.put = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        ask(runtime, memory(tmp_path), 0, LARGE)
    assert not runtime.book.jobs() and runtime.queue.admitted == 0 and runtime.leases.used_nbytes == 0


def test_a_job_that_gets_no_room_in_time_says_what_was_short(runtime: Runtime, tmp_path: Path) -> None:
    of, told = memory(tmp_path), []
    ask(runtime, of, MIB)
    late = runtime.book.find(b"s", ask(runtime, of, 7))
    assert late is not None
    late.deadline_ns = 1
    runtime.book.fail = lambda job, error: told.append((job, error.code, error.message))  # type: ignore[method-assign]
    runtime.released()
    text = "no room for copies of 7 bytes of shared memory regions (shared_memory.max_copy_bytes)"
    assert told == [(late, "SHM_EXHAUSTED", text)]


def test_a_job_whose_time_ran_out_between_two_ticks_says_what_was_short(
    runtime: Runtime, tmp_path: Path
) -> None:
    ask(runtime, memory(tmp_path), 0, LARGE)
    late = runtime.book.find(b"s", ask(runtime, memory(tmp_path), 0, LARGE))
    assert late is not None
    late.deadline_ns, told, fail = 1, [], runtime.book.fail

    def failing(job: Job, error: PenstockError) -> None:
        told.append((job, error.code))
        fail(job, error)

    runtime.book.fail = failing  # type: ignore[method-assign]
    idle: Any = SimpleNamespace(tick=lambda *of: None, overdue=lambda: False)
    runtime._reporter = runtime._statistics = runtime._client_memory = runtime.executor.activity = idle
    runtime._send_credits = runtime._notify = lambda: None  # type: ignore[method-assign]
    runtime._draining_until = 0.0
    runtime.tick()
    assert told == [(late, "SHM_EXHAUSTED")]


def test_a_job_whose_copies_never_fit_is_refused_at_once(runtime: Runtime, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="max_copy_bytes"):
        ask(runtime, memory(tmp_path), MIB + 1)
    assert not runtime.book.jobs() and runtime.queue.admitted == 0
