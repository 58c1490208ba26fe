"""Answers in parts through a real worker: order, sizes, slow readers, the end by whoever ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from frontend.engine.local.client import Client
from ipc.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InvalidInput,
    QueueFull,
    ShmExhausted,
    UnexpectedOutput,
    Unsupported,
)
from ipc.wire.messages import Region, TensorOutput
from ipc.wire.streams import WINDOW
from tests.harness.server import PATIENCE_S
from tests.harness.streams import all_of, asking, in_use, record_of, rest_of
from tests.harness.tensors import call_of, infer, read, request_of
from tests.harness.worker import ADD_SUB, Workers, parts, workers

MIB = 1 << 20
LARGE = MIB // 4
"""Elements of a part of one MiB."""
Work = Callable[[Client], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """One worker with a decoupled program that notes its steps, and one that is not."""
    directory = tmp_path_factory.mktemp("streams")
    models = {"parts": parts(record=str(directory / "steps")), "add": ADD_SUB}
    with workers(directory, models, arena__bytes=16 * MIB, arena__lease_copy_after_s=0.3) as found:
        yield found


@pytest.fixture
def steps(running: Workers) -> Callable[[], list[str]]:
    """What the program noted since the test began."""
    read_all = record_of(running.log_path.parent / "steps")
    before = len(read_all())
    return lambda: read_all()[before:]


def use(running: Workers, work: Work) -> None:
    """Do `work` with a client; at the end nothing of its own arena is in use, and nothing of the worker's."""

    async def run() -> None:
        async with running.client() as client:
            await work(client)
            await until(lambda: client.inputs.used_nbytes == 0, "inputs given back")
            await until(lambda: in_use(running) == (0, 0), "the arena given back")
            assert all(not channel.streams for channel in client.channels)

    asyncio.run(run())


def test_a_client_watches_the_thread_of_its_worker_that_ends_first(running: Workers) -> None:
    def look(pidfd: int) -> None:
        told = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
        watched = int(told.partition("Pid:")[2].split()[0])
        assert Path(f"/proc/{running.processes[0].pid}/task/{watched}").exists()
        with contextlib.suppress(OSError):
            os.close(os.pidfd_open(os.getpid(), os.O_EXCL))
            assert watched != running.processes[0].pid, "a kernel that has descriptors of threads"

    async def watch(client: Client) -> None:
        [channel] = client.channels
        look(channel._pidfd)

    use(running, watch)


async def until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait for a condition."""
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, what
        await asyncio.sleep(0.01)


async def sums(client: Client, value: int = 1) -> None:
    """Another model answers."""
    ones = np.full((1, 16), value, np.int32)
    found = await infer(client, "add", {"INPUT0": ("INT32", ones), "INPUT1": ("INT32", ones)}, ["OUTPUT0"])
    assert (found["OUTPUT0"] == 2 * value).all()


@pytest.mark.sample(4)
@pytest.mark.parametrize("count", [0, 1, 2, WINDOW, 5 * WINDOW + 3, 2000])
def test_all_parts_come_in_order_and_then_the_end(running: Workers, count: int) -> None:
    async def work(client: Client) -> None:
        with await client.stream(*asking("parts", count)) as stream:
            assert await rest_of(stream) == list(range(count))
            assert stream.result is not None
            timing = stream.result.timing
            assert timing.batches >= 1 and timing.queue_ns > 0 and timing.device_ns > 0
            assert await rest_of(stream) == [], "an end comes once"

    use(running, work)


def test_parts_in_blocks_come_whole_though_all_together_are_larger_than_the_arena(running: Workers) -> None:
    async def work(client: Client) -> None:
        assert await all_of(client, asking("parts", 40, width=LARGE)) == list(range(40))

    use(running, work)


def test_inputs_in_a_block_are_held_until_the_stream_has_ended(running: Workers) -> None:
    async def work(client: Client) -> None:
        asked, payload = asking("parts", 3 * WINDOW)
        block = await client.inputs.reserve(4)
        assert block is not None
        with block:
            block.buffer[:] = payload
            with await client.stream(asked, block) as stream:
                await anext(stream)
        assert client.inputs.used_nbytes > 0, "the worker may still read it"

    use(running, work)


def test_many_streams_at_once_keep_their_parts_apart_and_let_others_pass(running: Workers) -> None:
    async def work(client: Client) -> None:
        asked = [asking("parts", 10 + number, sleep_ms=5) for number in range(12)]
        streams = [asyncio.create_task(all_of(client, request)) for request in asked]
        with await client.stream(*asking("parts", 1_000_000, sleep_ms=5)) as endless:
            reading = asyncio.create_task(rest_of(endless))
            for value in range(5):
                await sums(client, value)
            assert not reading.done(), "the stream had ended before others could pass"
            reading.cancel()
        assert await asyncio.gather(*streams) == [list(range(10 + number)) for number in range(12)]

    use(running, work)


def test_the_worker_is_no_more_than_the_window_ahead_of_who_does_not_read(
    running: Workers, steps: Callable[[], list[str]]
) -> None:
    async def work(client: Client) -> None:
        with await client.stream(*asking("parts", 1000)) as stream:
            await until(lambda: len(steps()) == WINDOW, "a full window")
            for value in range(20):
                await sums(client, value)
            assert len(steps()) == WINDOW, "it went on by itself"
            for _ in range(WINDOW):
                read(await anext(stream))
            await until(lambda: len(steps()) > WINDOW, "more, once some were taken")
            assert len(steps()) <= 2 * WINDOW
            assert await rest_of(stream) == list(range(WINDOW, 1000))

    use(running, work)


def test_who_does_not_read_holds_one_block_for_a_while_and_then_none(
    running: Workers, steps: Callable[[], list[str]]
) -> None:
    async def work(client: Client) -> None:
        free = client._copies.free_nbytes
        with await client.stream(*asking("parts", 6, width=LARGE)) as stream:
            await until(lambda: client._copies.free_nbytes == free - MIB, "a private copy")
            await until(lambda: in_use(running) == (0, 0), "the lease's end")
            assert len(steps()) == 1, "it went on though nobody had taken the first block"
            assert await rest_of(stream) == list(range(6))
        assert client._copies.free_nbytes == free

    use(running, work)


def test_a_slow_reader_for_whom_no_copy_can_be_kept_is_told_so(running: Workers) -> None:
    async def work(client: Client) -> None:
        client._copies.free_nbytes = MIB
        with await client.stream(*asking("parts", 6, width=LARGE + 1)) as stream:
            await until(lambda: stream._failure is not None, "the end of the time for its block")
            with pytest.raises(ShmExhausted, match="too slow and no copy could be kept"):
                await anext(stream)
            assert await rest_of(stream) == []
        assert client._copies.free_nbytes == MIB

    use(running, work)


def test_a_stream_that_finds_the_arena_full_goes_on_when_there_is_room(running: Workers) -> None:
    async def work(client: Client) -> None:
        streams = [await client.stream(*asking("parts", 2, width=3 * LARGE)) for _ in range(4)]
        late = asyncio.create_task(all_of(client, asking("parts", 5, width=6 * LARGE)))
        await asyncio.sleep(0)
        for stream in streams:
            with stream:
                assert await rest_of(stream) == [0, 1]
        assert await late == [0, 1, 2, 3, 4]

    use(running, work)


def test_leaving_a_stream_closes_the_model_s_generator(
    running: Workers, steps: Callable[[], list[str]]
) -> None:
    async def work(client: Client) -> None:
        with await client.stream(*asking("parts", 1_000_000)) as stream:
            for _ in range(3):
                read(await anext(stream))
        await until(lambda: "closed" in steps(), "the end of the generator")
        done = len(steps())
        await sums(client)
        assert len(steps()) == done and done < 3 * WINDOW

    use(running, work)


def test_cancelling_whoever_waits_for_a_part_ends_the_stream(
    running: Workers, steps: Callable[[], list[str]]
) -> None:
    async def work(client: Client) -> None:
        waiting = asyncio.create_task(all_of(client, asking("parts", 100, sleep_ms=100)))
        await until(lambda: len(steps()) > 1, "a beginning")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: "closed" in steps(), "the end of the generator")

    use(running, work)


def test_a_session_that_ends_ends_its_streams(running: Workers, steps: Callable[[], list[str]]) -> None:
    async def work(client: Client) -> None:
        async with running.client(1) as other:
            await other.stream(*asking("parts", 100_000, width=LARGE))
        await until(lambda: "closed" in steps(), "the end of the generator")

    use(running, work)


@pytest.mark.parametrize("read_on", [True, False])
def test_a_stream_ends_with_its_deadline_read_or_not(
    running: Workers, steps: Callable[[], list[str]], read_on: bool
) -> None:
    async def work(client: Client) -> None:
        with await client.stream(*asking("parts", 1_000_000, timeout_s=3.0, sleep_ms=5)) as stream:
            if not read_on:
                await until(lambda: "closed" in steps(), "the end of the generator")
            with pytest.raises(DeadlineExceeded):
                await rest_of(stream)
            assert await rest_of(stream) == []
        await until(lambda: "closed" in steps(), "the end of the generator")

    use(running, work)


@pytest.mark.parametrize(
    ("do", "error", "words"),
    [
        ("raise", InferenceFailed, "the model failed on this input"),
        ("refuse", InvalidInput, "the fake model refuses this"),
        ("wrong", UnexpectedOutput, "not a dictionary of outputs"),
        ("missing", UnexpectedOutput, "the model gave no tensor for output 'OUTPUT0'"),
    ],
)
@pytest.mark.parametrize("at", [0, 3])
def test_what_a_model_raises_comes_after_the_parts_before_it(
    running: Workers, do: str, at: int, error: type[Exception], words: str
) -> None:
    async def work(client: Client) -> None:
        request = asking("parts", 10, do=do, at=at)
        if at == 0:
            with pytest.raises(error, match=words):
                await client.stream(*request)
            return
        with await client.stream(*request) as stream:
            numbers = [int(read(await anext(stream))["OUTPUT0"][0]) for _ in range(at)]
            assert numbers == list(range(at))
            with pytest.raises(error, match=words):
                await anext(stream)
            assert await rest_of(stream) == []

    use(running, work)


def test_calls_and_streams_of_the_wrong_kind_of_model(running: Workers) -> None:
    async def work(client: Client) -> None:
        asked, payload = asking("parts", 1)
        with pytest.raises(Unsupported, match="any number of responses"):
            await client.call(msgspec.structs.replace(asked, parts=0), payload)
        ones = {name: ("INT32", np.ones((1, 16), np.int32)) for name in ("INPUT0", "INPUT1")}
        with pytest.raises(Unsupported, match="gives one response"):
            await client.stream(*request_of("add", *call_of(ones, ["OUTPUT0"]), parts=WINDOW))

    use(running, work)


def test_outputs_of_a_stream_cannot_be_written_to_a_region(running: Workers) -> None:
    async def work(client: Client) -> None:
        asked, payload = asking("parts", 2)
        region = TensorOutput("OUTPUT0", Region("system", "/client_none", 0, 4))
        call = msgspec.structs.replace(asked.call, outputs=[region])
        with pytest.raises(InvalidInput, match="cannot be written to shared memory"):
            await client.stream(msgspec.structs.replace(asked, call=call), payload)

    use(running, work)


def test_unread_streams_fill_no_lane_of_the_queue(tmp_path: Path) -> None:
    """Of any model; and of themselves there is a bounded number."""
    bounds = {"queue__min_tokens": 32, "queue__max_wait_s": 0.001, "queue__max_resting_streams": 4}
    record = tmp_path / "steps"
    models = {"parts": parts(record=str(record)), "add": ADD_SUB}
    with workers(tmp_path, models, **bounds) as running:

        async def work(client: Client) -> None:
            unread = []
            for count in range(4):
                unread.append(await client.stream(*asking("parts", 1000)))
                wanted = (count + 1) * WINDOW
                await until(lambda wanted=wanted: len(record_of(record)()) == wanted, "a rest")
                await until(lambda: client.channels[0].cost == 0, "credits")
            await sums(client)
            with pytest.raises(QueueFull, match="max_resting_streams"):
                await client.stream(*asking("parts", 3))
            assert await rest_of(unread[0]) == list(range(1000))
            assert await all_of(client, asking("parts", 3)) == [0, 1, 2]
            for stream in unread:
                stream.close()
            assert client.channels[0].cost == 0

        use(running, work)


def test_a_drain_that_runs_out_of_time_closes_the_generators(tmp_path: Path) -> None:
    record = tmp_path / "steps"
    with workers(tmp_path, {"parts": parts(record=str(record))}, worker__drain_timeout_s=0.3) as running:

        async def work() -> None:
            async with running.client() as client:
                with await client.stream(*asking("parts", 1000)):
                    await until(lambda: len(record_of(record)()) == WINDOW, "a rest")
                    running.processes[0].terminate()
                    assert await asyncio.to_thread(running.processes[0].wait, 20) == 0
                    assert record_of(record)()[-1] == "closed"

        asyncio.run(work())
