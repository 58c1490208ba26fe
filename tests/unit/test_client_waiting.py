"""How long a call waits for its turn: until its deadline, or for as long as it says itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from ipc import deadline
from ipc.channel import Channel
from ipc.client import Client, Request
from ipc.errors import DeadlineExceeded, WorkerLost
from ipc.messages import InferCall
from ipc.retry import Attempts
from ipc.settings import Settings, load


def settings(tmp_path: Path) -> Settings:
    """Of a server whose workers may take an hour to come back."""
    (tmp_path / "run").mkdir()
    return load(None, {"run.dir": str(tmp_path / "run"), "limits.restart_wait_s": "3600"}, {})


def request(start_by_s: float | None, deadline_s: float = 3600.0) -> Request:
    """A call that waits `start_by_s` for its turn."""
    made = Request("m", InferCall([], []), deadline.after(deadline_s), 16, "req")
    if start_by_s is not None:
        made.start_by_ns = deadline.after(start_by_s)
    return made


async def with_client(tmp_path: Path, work: Callable[[Client], Awaitable[None]]) -> None:
    """Do `work` with a client that has no workers."""
    chosen = settings(tmp_path)
    client = Client(chosen.paths, chosen, "frontend-0")
    try:
        await asyncio.wait_for(work(client), 60)
    finally:
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

    async def route(client: Client, made: Request, attempts: Attempts) -> Channel:
        return cast(Channel, type("Place", (), {"slot": 0}))

    async def send(channel: Channel, made: Request, solo: bool) -> str:
        sent.append((made.start_by_ns, made.waits_until_ns))
        if len(sent) == 1:
            raise WorkerLost("died", suspect=suspect)
        return "done"

    async def work(client: Client) -> None:
        made = request(1800)
        both = made.start_by_ns, made.start_by_ns
        answer: Any = await client._run(made, send)
        assert answer == "done"
        assert sent == [both, (0, made.deadline_ns) if suspect else both]

    monkeypatch.setattr(Client, "_route", route)
    asyncio.run(with_client(tmp_path, work))
