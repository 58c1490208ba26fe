"""How long a call waits for its turn: until its deadline, or for as long as it says itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from frontend.engine.local.channel import Channel
from frontend.engine.local.client import Client
from frontend.engine.local.retry import MAX_LOSSES, Attempts
from frontend.engine.local.routing import Workers
from frontend.engine.streams import homes
from ipc import deadline
from ipc.errors import (
    DeadlineExceeded,
    ModelLoading,
    ModelNotFound,
    NoReplica,
    PenstockError,
    SequenceUnknown,
    WorkerLost,
)
from ipc.processes.liveness import SlotLock
from ipc.settings import Settings, load
from ipc.store.store import Store
from ipc.wire.messages import InferCall, ModelStatus, Step, Work
from tests.fakes.channel import FakeChannel


def settings(tmp_path: Path, **more: str) -> Settings:
    """Of a server whose workers may take an hour to come back; `more` as `section__field`."""
    (tmp_path / "run").mkdir()
    named = {"limits__restart_wait_s": "3600", **more, "run__dir": str(tmp_path / "run")}
    return load(None, {name.replace("__", ".", 1): value for name, value in named.items()}, {})


def request(start_by_s: float | None, deadline_s: float = 3600.0) -> Work:
    """A call that waits `start_by_s` for its turn."""
    start_by_ns = 0 if start_by_s is None else deadline.after(start_by_s)
    return Work("m", InferCall([], []), deadline.after(deadline_s), 16, "req", start_by_ns=start_by_ns)


async def with_client(tmp_path: Path, work: Callable[[Client], Awaitable[None]], **more: str) -> None:
    """Do `work` with a client that looks for no workers."""
    chosen = settings(tmp_path, **more)
    client = Client(chosen.paths, chosen, "frontend-0", Store(chosen.paths))
    try:
        await asyncio.wait_for(work(client), 60)
    finally:
        client.channels.clear()
        await client.close()


@pytest.mark.parametrize(("start_by_s", "deadline_s"), [(0.05, 3600), (None, 0.05), (3600, 0.05)])
def test_waiting_for_a_worker_ends_with_the_first_of_both_instants(
    start_by_s: float | None, deadline_s: float, tmp_path: Path
) -> None:
    async def work(client: Client) -> None:
        with pytest.raises(DeadlineExceeded):
            await client.call(request(start_by_s, deadline_s))

    asyncio.run(with_client(tmp_path, work))


@pytest.mark.parametrize("suspect", [True, False])
def test_what_a_device_had_begun_may_wait_again_after_the_loss_of_its_worker(
    suspect: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []

    class Place:
        """A worker that dies on the first request."""

        slot = 0

        def submit(self, work: Work, payload: Any, *, solo: bool) -> tuple[int, asyncio.Future[Any]]:
            sent.append((work.start_by_ns, work.waits_until_ns))
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            if len(sent) == 1:
                future.set_exception(WorkerLost("died", suspect=suspect))
            else:
                future.set_result(SimpleNamespace(answer=lambda channel: "done"))
            return len(sent), future

    def choose(client: Client, attempts: Attempts) -> Channel:
        return cast(Channel, Place())

    async def work(client: Client) -> None:
        made = request(1800)
        both = made.start_by_ns, made.start_by_ns
        answer: Any = await client.call(made)
        assert answer == "done"
        assert sent == [both, (0, made.deadline_ns) if suspect else both]

    monkeypatch.setattr(Client, "_choose", choose)
    asyncio.run(with_client(tmp_path, work))


def test_a_request_that_the_socket_of_a_dying_worker_does_not_take_has_lost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel closes the socket of a dying process before it says that the process has died."""
    refusals = [WorkerLost("the worker takes no requests", sent=False) for _ in range(4 * MAX_LOSSES)]

    class Place:
        slot = 0

        def submit(self, work: Work, payload: Any, *, solo: bool) -> tuple[int, asyncio.Future[Any]]:
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            if refusals:
                future.set_exception(refusals.pop())
            else:
                future.set_result(SimpleNamespace(answer=lambda channel: "done"))
            return 1, future

    async def news(workers: Workers, timeout_s: float) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(Client, "_choose", lambda client, attempts: cast(Channel, Place()))
    monkeypatch.setattr(Workers, "change", news)

    async def work(client: Client) -> None:
        answer: Any = await client.call(request(None))
        assert answer == "done" and not refusals

    asyncio.run(with_client(tmp_path, work))


@pytest.mark.parametrize("on_demand", ["true", "false"])
def test_a_model_that_was_taken_away_is_not_waited_for(on_demand: str, tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        client.channels.append(channel(0, ModelStatus("m", "unloading")))
        client.demand.known = lambda model: False
        for waiting in (client.call(request(None)), client.ready("m", deadline.after(3600))):
            with pytest.raises(ModelNotFound):
                await waiting

    asyncio.run(with_client(tmp_path, work, catalog__on_demand=on_demand))


def test_a_load_has_its_own_time_after_the_wait_for_a_worker(tmp_path: Path) -> None:
    """The worker was gone for nearly as long as may be waited for it; now it loads the model."""
    errors: list[PenstockError] = [NoReplica("no worker is up"), *[ModelLoading("it is loading")] * 2]

    def attempt() -> str:
        if errors:
            time.sleep(0.3)
            raise errors.pop(0)
        return "done"

    async def work(client: Client) -> None:
        assert await client.workers.until(attempt, deadline.after(3600)) == "done"

    asyncio.run(with_client(tmp_path, work, limits__restart_wait_s="0.2", limits__load_wait_s="60"))


def test_one_of_several_models_is_enough(tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        loading, has = ModelStatus("m@2", "loading"), ModelStatus("m@1", "loaded")
        client.channels.append(channel(0, loading, has))
        await client.ready("m@2", deadline.after(3600), ["m@1"])
        with pytest.raises(ModelLoading):
            await client.ready("m@2", deadline.after(3600))

    asyncio.run(with_client(tmp_path, work, limits__load_wait_s="0"))


def test_a_sequence_waits_for_its_own_worker_and_asks_no_other(tmp_path: Path) -> None:
    """A silent worker, then one that this new frontend has yet to join, then one that has the model to load."""
    asked: list[int] = []

    async def work(client: Client) -> None:
        client.workers.is_open = lambda slot: True  # type: ignore[method-assign]
        loaded, other = ModelStatus("m", "loaded"), ModelStatus("m", "available")
        slot = homes.home(range(2), "m", 5)
        stranger = channel(1 - slot, loaded)
        for home, joins in (
            (channel(slot, loaded, responsive=False), {"responsive": True}),
            (channel(slot, state="connecting"), {"state": "ready", "models": {"m": loaded}}),
            (channel(slot, other), {"models": {"m": loaded}}),
        ):
            client.channels[:] = sorted((stranger, home), key=lambda each: each.slot)
            for each in client.channels:
                answer_at(each, asked)
            answering = asyncio.ensure_future(client.call(step()))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not answering.done() and not asked
            if home.models.get("m") is other:
                assert home.loads == ["m"], "the worker was not asked to load the model"
            for name, value in joins.items():
                setattr(home, name, value)
            client.workers.changed()
            assert cast(Any, await answering) == "done" and asked == [slot]
            asked.clear()

    asyncio.run(with_client(tmp_path, work, worker__count="2"))


def test_a_worker_is_there_for_frontends_once_a_process_holds_the_slot_and_has_a_socket(
    tmp_path: Path,
) -> None:
    async def work(client: Client) -> None:
        paths, is_open = client.workers._paths, client.workers.is_open
        assert not is_open(0)
        with SlotLock(paths.lock("worker-0")):
            assert not is_open(0), "a process that only starts keeps no sequence"
            paths.worker_socket(0).touch()
            assert is_open(0) and not is_open(1)
        assert not is_open(0), "the socket is that of a process that has died"
        paths.lock("worker-1").mkdir()
        assert is_open(1), "a lock that cannot be looked at tells nothing"

    asyncio.run(with_client(tmp_path, work))


def test_a_sequence_that_its_worker_does_not_know_is_looked_for_nowhere_else(tmp_path: Path) -> None:
    asked: list[int] = []

    async def work(client: Client) -> None:
        loaded = ModelStatus("m", "loaded")
        client.channels.extend((channel(0, loaded), channel(1, loaded)))
        for each in client.channels:
            answer_at(each, asked, SequenceUnknown("sequence 5 is not known"))
        with pytest.raises(SequenceUnknown):
            await client.call(step())
        assert asked == [homes.home(range(2), "m", 5)]

    asyncio.run(with_client(tmp_path, work, worker__count="2"))


def answer_at(place: Any, asked: list[int], error: PenstockError | None = None) -> None:
    """Let a channel note each request in `asked`, and answer "done", or `error`."""

    def submit(work: Work, payload: Any, *, solo: bool) -> tuple[int, asyncio.Future[Any]]:
        asked.append(place.slot)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if error is None:
            future.set_result(SimpleNamespace(answer=lambda channel: "done"))
        else:
            future.set_exception(error)
        return len(asked), future

    place.submit = submit


def channel(slot: int, *statuses: ModelStatus, **state: Any) -> Any:
    """A channel whose worker has these models."""
    return FakeChannel(slot, {status.name: status for status in statuses}, **state)


def step() -> Work:
    """A later request of a sequence."""
    return Work("m", InferCall([], [], step=Step(5, False, False)), deadline.after(3600), 16, "req")
