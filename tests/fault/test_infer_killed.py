"""Kills and cancellations while infer calls read blocks of a frontend's arena."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from frontend.engine.local.client import Client
from ipc import deadline
from ipc.errors import DeadlineExceeded, InputRefused, WorkerCrashed
from ipc.memory.arena import ArenaView
from ipc.memory.input_arena import InputBlock
from ipc.processes.liveness import SlotLock
from ipc.sweep import sweep
from ipc.wire.messages import InferCall
from tests.fakes.holding import holding, is_waited_for
from tests.harness.server import PATIENCE_S, ROOT, stopped, wait_until
from tests.harness.tensors import call_of, read, request_of
from tests.harness.worker import Workers, program, tensor, workers

ELEMENTS = 1 << 20
MODELS = {
    "large": program(
        "echo", [tensor("INPUT0", "FP32", -1)], [tensor("OUTPUT0", "FP32", -1)], rows=4, record=""
    )
}
SETTINGS = {"limits__restart_wait_s": "30", "worker__hang_timeout_s": "20"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """One worker, which each test finds running and leaves running."""
    with workers(tmp_path_factory.mktemp("lone"), MODELS, **SETTINGS) as found:
        yield found


def drawn(seed: int) -> np.ndarray:
    """FP32 [1, ELEMENTS]."""
    return np.random.default_rng(seed).standard_normal((1, ELEMENTS)).astype(np.float32)


async def filled(client: Client, array: np.ndarray, **parameters: Any) -> tuple[InferCall, InputBlock]:
    """A call and the block that holds its input."""
    call, payload = call_of({"INPUT0": ("FP32", array)}, ["OUTPUT0"], parameters=parameters)
    block = await client.inputs.reserve(len(payload))
    assert block is not None
    block.buffer[:] = payload
    return call, block


def run(running: Workers, work: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
    """Do `work` with a client; afterwards all bytes of its arena must come back, and all workers be there."""

    async def whole() -> None:
        async with running.client() as client:
            await work(client)
            await client.wait(lambda: not client.inputs.used_nbytes, deadline.after(PATIENCE_S))
            client.inputs.verify()
            await client.wait(lambda: running._all_loaded(client), deadline.after(PATIENCE_S))
        assert not client.inputs.used_nbytes

    asyncio.run(whole())
    assert not running.paths.arenas("f0"), "the arena of the frontend is left"


async def running_in(client: Client, slot: int) -> None:
    """Wait until the flight record of a worker names a request: it is on the device."""
    [path] = client.workers._paths.arenas(slot)
    view = ArenaView(path, path.name.rpartition(".")[2])
    until = deadline.after(PATIENCE_S)
    while not view.flight():
        deadline.check(until, "before the request ran")
        await asyncio.sleep(0.005)


def test_a_killed_worker_costs_no_request_and_the_retry_reads_the_same_bytes(tmp_path: Path) -> None:
    with workers(tmp_path, MODELS, count=2, **SETTINGS) as running:

        async def work(client: Client) -> None:
            arrays = [drawn(seed) for seed in range(3)]
            calls = [await filled(client, array, sleep_ms=1500) for array in arrays]
            tasks = [
                asyncio.create_task(client.call(*request_of("large", call, block))) for call, block in calls
            ]
            await running_in(client, 0)
            running.kill(0)
            running.start(0)
            for task, array in zip(tasks, arrays, strict=True):
                assert read(await task)["OUTPUT0"].tobytes() == array.tobytes()
            for _, block in calls:
                block.release()

        run(running, work)


def test_a_lone_worker_that_is_killed_answers_after_its_restart(running: Workers) -> None:
    async def work(client: Client) -> None:
        array = drawn(1)
        call, block = await filled(client, array, sleep_ms=1500)
        with block:
            task = asyncio.create_task(client.call(*request_of("large", call, block)))
            await running_in(client, 0)
            running.kill(0)
            running.start(0)
            assert read(await task)["OUTPUT0"].tobytes() == array.tobytes()

    run(running, work)


@pytest.mark.long
def test_an_input_that_kills_workers_is_refused_and_another_with_the_same_shape_is_not(
    tmp_path: Path,
) -> None:
    with workers(tmp_path, MODELS, count=2, **SETTINGS) as running:

        async def work(client: Client) -> None:
            call, block = await filled(client, drawn(1), do="crash")
            with block, pytest.raises(WorkerCrashed):
                await client.call(*request_of("large", call, block))
            for slot in (0, 1):
                running.processes[slot].wait(60)
                running.start(slot)
            call, block = await filled(client, drawn(1), do="crash")
            with block, pytest.raises(InputRefused):
                await client.call(*request_of("large", call, block))
            call, block = await filled(client, drawn(2))
            with block:
                found = read(await client.call(*request_of("large", call, block)))
            assert found["OUTPUT0"].tobytes() == drawn(2).tobytes()

        run(running, work)


def test_a_cancelled_call_keeps_its_block_until_the_worker_has_read_it(
    running: Workers, tmp_path: Path
) -> None:
    async def work(client: Client) -> None:
        with holding(tmp_path) as hold:
            call, block = await filled(client, drawn(1), hold=str(hold))
            queued_call, queued = await filled(client, drawn(2))
            on_device = asyncio.create_task(client.call(*request_of("large", call, block)))
            await asyncio.to_thread(wait_until, lambda: is_waited_for(hold), what="the call on the device")
            waiting = asyncio.create_task(client.call(*request_of("large", queued_call, queued)))
            await client.wait(
                lambda: client.channels[0].cost_of("large") == 2 * 16, deadline.after(PATIENCE_S)
            )
            with stopped(running.processes[0].pid):
                for task in (on_device, waiting):
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                before = client.inputs.used_nbytes
                queued.release()
                block.release()
                await asyncio.sleep(0)
                assert client.inputs.used_nbytes == before, "a block was freed before the worker said so"
            await client.wait(lambda: client.inputs.used_nbytes <= before // 2, deadline.after(PATIENCE_S))
            assert client.inputs.used_nbytes == before // 2, "what only waited is given back at once"

    run(running, work)


def test_a_call_that_runs_out_of_time_keeps_its_block_until_it_is_read(
    running: Workers, tmp_path: Path
) -> None:
    async def work(client: Client) -> None:
        with holding(tmp_path) as hold:
            call, block = await filled(client, drawn(1), hold=str(hold))
            with block, pytest.raises(DeadlineExceeded):
                await client.call(*request_of("large", call, block, timeout_s=1.0))
            assert client.inputs.used_nbytes
            queued_call, queued = await filled(client, drawn(2))
            with queued, pytest.raises(DeadlineExceeded):
                await client.call(*request_of("large", queued_call, queued, timeout_s=0.1))

    run(running, work)


FRONTEND = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    from frontend.engine.local.client import Client
    from ipc.settings import load
    from ipc.store.store import Store
    from tests.fault.test_infer_killed import drawn, filled, running_in
    from tests.harness.tensors import request_of

    async def main():
        settings = load()
        client = Client(settings.paths, settings, "frontend-5", Store(settings.paths))
        client.start()
        call, block = await filled(client, drawn(1), sleep_ms=int(sys.argv[1]))
        asyncio.create_task(client.call(*request_of("large", call, block)))
        await client.ready("large", 2**62)
        await running_in(client, 0)
        Path(sys.argv[2]).touch()
        await asyncio.sleep(60)

    asyncio.run(main())
    """
)


@pytest.mark.long
def test_a_killed_frontend_that_holds_blocks_leaves_nothing(running: Workers, tmp_path: Path) -> None:
    marker = tmp_path / "in-flight"
    frontend = subprocess.Popen(
        [sys.executable, "-c", FRONTEND, "3000", str(marker)], cwd=ROOT, env=running.environment
    )
    try:
        wait_until(marker.exists, what="the request on the device")
        pid = running.processes[0].pid
        wait_until(lambda: ".f5." in _maps(pid), what="the mapping")
    finally:
        frontend.send_signal(signal.SIGKILL)
        frontend.wait()
    assert len(running.paths.arenas("f5")) == 1
    with SlotLock(running.paths.lock("worker-9")):
        assert any(".f5." in name for name in sweep(running.paths))
    wait_until(lambda: ".f5." not in _maps(pid), what="the end of the worker's mapping")

    async def work(client: Client) -> None:
        call, block = await filled(client, drawn(3))
        with block:
            found = read(await client.call(*request_of("large", call, block)))
        assert found["OUTPUT0"].tobytes() == drawn(3).tobytes()

    run(running, work)


def test_the_arena_of_a_living_frontend_is_not_swept(running: Workers) -> None:
    async def work(client: Client) -> None:
        _, block = await filled(client, drawn(1))
        with block, SlotLock(running.paths.lock("frontend-0")):
            sweep(running.paths)
            assert len(running.paths.arenas("f0")) == 1

    run(running, work)


def _maps(pid: int) -> str:
    path = Path(f"/proc/{pid}/maps")
    return path.read_text() if path.exists() else ""


def test_without_room_for_the_arena_inputs_travel_as_bytes(running: Workers) -> None:
    settings = msgspec.structs.replace(
        running.settings, arena=msgspec.structs.replace(running.settings.arena, input_bytes=1 << 50)
    )

    async def work(client: Client) -> None:
        assert await client.inputs.reserve(1000) is None
        call, payload = call_of({"INPUT0": ("FP32", drawn(4))}, ["OUTPUT0"])
        found = read(await client.call(*request_of("large", call, payload)))
        assert found["OUTPUT0"].tobytes() == drawn(4).tobytes()

    run(dataclasses.replace(running, settings=settings), work)
