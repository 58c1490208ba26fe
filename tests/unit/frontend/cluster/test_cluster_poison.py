"""Verdicts on inputs that the hosts of a cluster share, over a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from frontend.cluster.broker import Broker
from frontend.cluster.poison import SharedPoison
from frontend.engine.poison import PoisonList, fingerprint
from ipc.settings import Cluster
from ipc.wire.cluster import VERSION, JudgedInput, encode, read_judged, read_work
from ipc.wire.cluster_names import Names
from ipc.wire.messages import Call, EncodeCall, GenerateCall, InputItem, ScoreCall, Work
from tests.harness.broker import Broker as Server
from tests.harness.broker import broker
from tests.harness.server import eventually

CALL, OTHER = (EncodeCall([InputItem(text)], ["dense"]) for text in ("boom", "fine"))
NAME = fingerprint("m", CALL)
TTL_S = 600.0


class Host:
    """A process of one host."""

    def __init__(self, url: str) -> None:
        self.broker, self.poison = Broker(Cluster(urls=(url,)), "test"), PoisonList(None, TTL_S)
        self.shared = SharedPoison(self.broker, Names(), self.poison)
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self.broker.start()
        self.tasks = [asyncio.create_task(run()) for run in self.shared.loops]  # type: ignore[arg-type]
        await until(lambda: self.shared._followed.is_read)

    async def stored(self, name: str = NAME) -> str | None:
        """The verdict that the brokers keep."""
        data, _ = await self.shared._kept.read(name)
        return None if data is None else read_judged(data).verdict


async def until(condition: Callable[[], bool]) -> None:
    async def now() -> bool:
        return condition()

    await eventually(now, "the condition")


def on_broker(root: Path, scene: Callable[[Host, Host, Server], Awaitable[None]]) -> None:
    async def whole(server: Server) -> None:
        one, two = Host(server.url), Host(server.url)
        try:
            await one.start(), await two.start()
            await scene(one, two, server)
        finally:
            for each in (one, two):
                for task in each.tasks:
                    task.cancel()
                await each.broker.close()

    with broker(root) as server:
        asyncio.run(whole(server))


def test_what_one_host_refuses_all_hosts_refuse_and_brokers_forget_it_in_time(tmp_path: Path) -> None:
    async def scene(one: Host, two: Host, server: Server) -> None:
        one.poison.add("m", CALL)
        await until(lambda: two.poison.holds("m", CALL))
        assert not two.poison.is_suspect("m", OTHER)
        info = await two.broker.client.jetstream().stream_info("KV_penstock_shared")
        assert info.config.max_age == TTL_S
        assert "boom" not in str(await one.shared._kept.read(NAME))

    on_broker(tmp_path, scene)


def test_a_lesser_verdict_never_takes_the_place_of_a_worse_one(tmp_path: Path) -> None:
    async def scene(one: Host, two: Host, server: Server) -> None:
        one.poison.suspect("m", CALL)
        await until(lambda: two.poison.is_suspect("m", CALL))
        two.poison.suspect("m", CALL)
        await until(lambda: one.poison.holds("m", CALL))
        # A host that has heard of nothing suspects the input.
        two.shared._judged(NAME, "suspect")
        await until(lambda: not two.shared._waiting)
        assert await one.stored() == "poison"

    on_broker(tmp_path, scene)


def test_a_verdict_without_a_broker_is_told_once_there_is_one(tmp_path: Path) -> None:
    async def scene(one: Host, two: Host, server: Server) -> None:
        server.kill()
        await until(lambda: not one.broker.up)
        one.poison.add("m", CALL)
        assert one.poison.holds("m", CALL)
        server.start()
        await until(lambda: two.poison.holds("m", CALL))

    on_broker(tmp_path, scene)


def test_values_of_anybody_are_passed_over_and_a_verdict_takes_their_place(tmp_path: Path) -> None:
    async def scene(one: Host, two: Host, server: Server) -> None:
        for key, value in (
            (NAME, b"no verdict"),
            ("x", encode(JudgedInput(VERSION, "poison"))),
            ("f" * 32, encode(JudgedInput(VERSION + 1, "poison"))),
            ("e" * 32, b"\x93\xa6judged\x01\xa5other"),
        ):
            await two.shared._kept.write(key, value, 0)
        await until(lambda: one.shared._followed.unreadable == 3)
        assert not one.poison
        one.poison.suspect("m", CALL)
        await until(lambda: two.poison.is_suspect("m", CALL))

    on_broker(tmp_path, scene)


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        ScoreCall([InputItem("a")], InputItem("q")),
        EncodeCall([InputItem("x", images=[b"123"])], ["dense"], options={"b": 1.5, "a": [None, True]}),
        GenerateCall(text="boom"),
    ],
)
def test_gateway_and_box_have_one_name_for_an_input(call: Call) -> None:
    work = Work("m", call, 0, 3, "req_1")
    payload = np.arange(3).tobytes()
    there = read_work(encode(work))
    assert fingerprint("m", there.call, memoryview(payload)) == fingerprint("m", work.call, payload)
