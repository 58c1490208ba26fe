"""Room for copies of clients' memory: what is copied at a time is bounded, and who waits gets it in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ipc.catalog.model_config import ModelConfig
from ipc.errors import InvalidInput, PenstockError
from ipc.settings import load
from ipc.wire.messages import InferCall, Region, TensorInput, TensorOutput
from tests.fakes.jobs import make_job, replan
from tests.fakes.pipeline import Placed, ask, placing
from tests.fakes.program import FakeProgram
from tests.fakes.tensors import tensor
from workers.inputs import NOTHING, ClientMemory, CopyRoom, Payload
from workers.scheduling.job import Job

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
            assert turn.wait(60), "a place ended and nobody was woken"
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
def pipeline(tmp_path: Path) -> Iterator[Placed]:
    """With an arena of one MiB."""
    settings = load(None, {"run.dir": str(tmp_path / "run")}, {})
    with placing(tmp_path, settings, MIB) as found:
        yield found


def request(pipeline: Placed, of: ClientMemory, nbytes: int, result_nbytes: int = 1) -> int:
    """A request that names so many bytes is taken in; returns its id."""
    sides = {"inputs": (tensor("A", "UINT8", -1),), "outputs": (tensor("O", "UINT8", result_nbytes),)}
    adapter = FakeProgram(ModelConfig("m", max_batch_size=1, **sides), "echo")
    job = make_job(call(nbytes), number=next(_ids), of=adapter, strategy=pipeline.kinds.of(adapter))
    job.payload = Payload(memoryview(b""), of)
    return ask(pipeline, job).id


def end(pipeline: Placed, number: int) -> None:
    """Its caller has gone."""
    job = pipeline.jobs.find(b"s", number)
    assert job is not None
    pipeline.jobs.cancel(job)


def test_jobs_wait_for_room_in_order_and_small_ones_pass(pipeline: Placed, tmp_path: Path) -> None:
    of = memory(tmp_path)
    first, second, third = (request(pipeline, of, nbytes) for nbytes in (MIB - 9, 20, 5))
    small = request(pipeline, of, 0)
    assert pipeline.placed == [first, small]
    pipeline.released()
    assert pipeline.placed == [first, small]
    end(pipeline, first)
    pipeline.released()
    assert pipeline.placed == [first, small, second, third]


def test_who_waits_for_copies_is_passed_by_who_only_needs_the_arena(pipeline: Placed, tmp_path: Path) -> None:
    of = memory(tmp_path)
    copying = request(pipeline, of, MIB)
    both, after = request(pipeline, of, 20, LARGE), request(pipeline, of, 5)
    large = request(pipeline, of, 0, LARGE)
    assert pipeline.placed == [copying, large], "the copies have no room, the arena has"
    larger = request(pipeline, of, 0, LARGE)
    end(pipeline, copying)
    pipeline.released()
    assert pipeline.placed == [copying, large, after], "the arena has no room, the copies have"
    for ended, begun in ((large, larger), (larger, both)):
        end(pipeline, ended)
        pipeline.released()
        assert pipeline.placed[-1] == begun
    assert not len(pipeline.line)
    end(pipeline, both)


def test_a_job_that_cannot_be_sent_on_is_not_kept(pipeline: Placed, tmp_path: Path) -> None:
    def failing(job: Job) -> None:
        raise RuntimeError("strange options")

    pipeline.intake.preparer = SimpleNamespace(put=failing, prepare_now=failing)  # type: ignore[assignment]
    with pytest.raises(RuntimeError):
        request(pipeline, memory(tmp_path), 0, LARGE)
    assert not pipeline.jobs.jobs() and pipeline.queue.admitted == 0 and pipeline.leases.used_nbytes == 0


def test_a_job_that_gets_no_room_in_time_says_what_was_short(pipeline: Placed, tmp_path: Path) -> None:
    of, told = memory(tmp_path), []
    request(pipeline, of, MIB)
    late = pipeline.jobs.find(b"s", request(pipeline, of, 7))
    assert late is not None
    replan(late, deadline_ns=1)
    pipeline.jobs.fail = lambda job, error: told.append((job, error.code, error.message))  # type: ignore[method-assign]
    pipeline.released()
    text = "no room for copies of 7 bytes of shared memory regions (shared_memory.max_copy_bytes)"
    assert told == [(late, "SHM_EXHAUSTED", text)]


def test_a_job_whose_time_ran_out_between_two_ticks_says_what_was_short(
    pipeline: Placed, tmp_path: Path
) -> None:
    request(pipeline, memory(tmp_path), 0, LARGE)
    late = pipeline.jobs.find(b"s", request(pipeline, memory(tmp_path), 0, LARGE))
    assert late is not None
    replan(late, deadline_ns=1)
    told, fail = [], pipeline.jobs.fail

    def failing(job: Job, error: PenstockError) -> None:
        told.append((job, error.code))
        fail(job, error)

    pipeline.jobs.fail = failing  # type: ignore[method-assign]
    pipeline.tick()
    assert told == [(late, "SHM_EXHAUSTED")]


def test_a_job_whose_copies_never_fit_is_refused_at_once(pipeline: Placed, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="max_copy_bytes"):
        request(pipeline, memory(tmp_path), MIB + 1)
    assert not pipeline.jobs.jobs() and pipeline.queue.admitted == 0
