"""Three brokers: one is killed, two are, all are, the streams have no quorum; and what a gateway says meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nats
import pytest
from nats.js import JetStreamContext

from tests.fakes.holding import holding
from tests.harness.broker import PATIENCE_S, SYSTEM, Broker, three_brokers
from tests.harness.cluster import Box, box, gateway_over, held, in_flight, is_cut_off, living, serves
from tests.harness.load import Load
from tests.harness.server import Server, eventually, wait_until

BUCKETS = ("KV_penstock_models", "KV_penstock_pools")
DEADLINE_S = 240.0
"""Of a request: behind the longest absence of brokers, after which its answer still counts."""


@pytest.fixture(scope="module")
def brokers(place: Path) -> Iterator[Sequence[Broker]]:
    with three_brokers(place) as members:
        yield members


@pytest.fixture(scope="module")
def boxes(place: Path, brokers: Sequence[Broker]) -> Iterator[tuple[Box, Box]]:
    urls = [each.url for each in brokers]
    with box(place / "a", "a", urls) as a, box(place / "b", "b", urls) as b:
        yield a, b


@pytest.fixture(scope="module")
def near(place: Path, brokers: Sequence[Broker], boxes: tuple[Box, Box]) -> Iterator[Server]:
    urls = [each.url for each in brokers]
    settings = {"cluster.lane": "auto", "limits.request_timeout_s": DEADLINE_S}
    with gateway_over(place / "near", urls, {"a", "b"}, settings) as server:
        yield server


def is_whole(server: Server) -> bool:
    """Whether the gateway hears both boxes and is answered."""
    return living(server) == {"a", "b"} and serves(server)


def pooled(server: Server, name: str) -> bool:
    """Have a pool made or renewed, which is a change of a bucket; returns whether brokers have kept the change."""
    return server.post("/v1/pools", {"name": name, "gpus": {"other": 1}}).status in (200, 201)


async def leaders_step_down(urls: Sequence[str]) -> None:
    """Have the leader of each of `BUCKETS` step down, until another broker leads the bucket."""
    client = await nats.connect(list(urls))
    try:
        stream = client.jetstream(timeout=PATIENCE_S)
        for name in BUCKETS:
            before = await leader_of(stream, name)

            async def is_moved(name: str = name, before: str = before) -> bool:
                leader = await leader_of(stream, name)
                if leader == before:
                    # The others may have elected the same broker again.
                    await client.request(f"$JS.API.STREAM.LEADER.STEPDOWN.{name}", b"", timeout=PATIENCE_S)
                return leader not in ("", before)

            await eventually(is_moved, f"another leader of {name}")
    finally:
        await client.close()


async def leader_of(stream: JetStreamContext, name: str) -> str:
    """The broker that leads a stream, empty during an election."""
    try:
        found = (await stream.stream_info(name)).cluster
    except (nats.errors.Error, TimeoutError):
        return ""
    return (found.leader or "") if found is not None else ""


@pytest.mark.long
def test_the_death_of_any_broker_of_three_fails_no_request(near: Server, brokers: Sequence[Broker]) -> None:
    """One of the three has the connection of the gateway, one that of each box, one leads the stream of the queue."""
    with Load(near.port, 4) as load:
        for each in brokers:
            before = load.done
            wait_until(lambda n=before: load.done > n + 20, what="traffic")  # type: ignore[misc]
            each.kill()
            before = load.done
            wait_until(lambda n=before: load.done > n + 40, what="traffic over the other two")  # type: ignore[misc]
            wait_until(lambda: is_whole(near), what="both boxes over the other two")
            each.start()
        outcome = load.stop()
    assert not outcome.failed, (outcome.statuses, outcome.broken, outcome.bodies, outcome.wrong)


@pytest.mark.long
def test_streams_whose_leader_steps_down_cost_no_request_and_are_changed_as_before(
    near: Server, brokers: Sequence[Broker]
) -> None:
    wait_until(lambda: is_whole(near) and pooled(near, "before"), what="a cluster that keeps changes")
    with Load(near.port, 4) as load:
        wait_until(lambda: load.done > 20, what="traffic")
        asyncio.run(leaders_step_down([each.url for each in brokers]))
        before = load.done
        wait_until(lambda: load.done > before + 40, what="traffic under other leaders")
        outcome = load.stop()
    assert not outcome.failed, (outcome.statuses, outcome.broken, outcome.bodies, outcome.wrong)
    wait_until(lambda: is_whole(near) and pooled(near, "after"), what="changes under other leaders")
    assert {"before", "after"} <= {pool["name"] for pool in near.get("/v1/pools").json()["pools"]}


async def meta_leader_steps_down(urls: Sequence[str]) -> None:
    """Have the broker step down that gives streams to brokers, until another one does."""
    client = await nats.connect(list(urls), **SYSTEM)
    before = ""

    async def leader() -> str:
        # Each broker answers; the one that leads says so for all.
        answer = await client.request("$SYS.REQ.SERVER.PING.JSZ", b"{}", timeout=PATIENCE_S)
        return str(json.loads(answer.data)["data"].get("meta_cluster", {}).get("leader", ""))

    async def is_moved() -> bool:
        nonlocal before
        found = await leader()
        before = before or found
        if found == before:
            await client.request("$JS.API.META.LEADER.STEPDOWN", b"", timeout=PATIENCE_S)
        return found not in ("", before)

    try:
        await eventually(is_moved, "another leader of the streams' places")
    finally:
        await client.close()


@pytest.mark.long
def test_a_meta_leader_that_steps_down_costs_no_request_and_queues_are_made_as_before(
    near: Server, boxes: tuple[Box, Box], brokers: Sequence[Broker]
) -> None:
    wait_until(lambda: is_whole(near), what="the whole cluster")
    with Load(near.port, 4) as load:
        wait_until(lambda: load.done > 20, what="traffic")
        asyncio.run(meta_leader_steps_down([each.url for each in brokers]))
        made = near.post("/v1/pools", {"name": "meta", "gpus": {"cpu": 1}})
        assert made.status == 201, made.body
        before = load.done
        wait_until(lambda: load.done > before + 40, what="traffic under another leader")
        outcome = load.stop()
    assert not outcome.failed, (outcome.statuses, outcome.broken, outcome.bodies, outcome.wrong)
    # The queue of the pool is a stream that the new leader has a place for.
    wait_until(lambda: serves_in(near, "meta"), what="an answer in the pool")
    assert near.request("DELETE", "/v1/pools/meta").status == 200
    wait_until(lambda: is_whole(near), what="the whole cluster again")


def serves_in(server: Server, pool: str) -> bool:
    """Whether a box of the pool answers."""
    body = {"items": [{"text": "x"}]}
    return server.post("/v1/encode/fake/echo", body, x_sie_pool=pool).status == 200


def test_without_a_quorum_of_brokers_work_goes_directly(near: Server, brokers: Sequence[Broker]) -> None:
    wait_until(lambda: is_whole(near), what="the whole cluster")
    for each in brokers[:2]:
        each.kill()
    wait_until(lambda: is_whole(near), what="both boxes over the one that is left")
    with Load(near.port, 4) as load:
        wait_until(lambda: load.done > 60, what="traffic over one broker")
        for each in brokers[:2]:
            each.start()
        before = load.done
        wait_until(lambda: load.done > before + 60, what="traffic with a quorum again")
        outcome = load.stop()
    assert not outcome.failed, (outcome.statuses, outcome.broken, outcome.bodies, outcome.wrong)


@pytest.mark.parametrize("away_s", [0.0, pytest.param(60.0, marks=pytest.mark.long)])
def test_all_brokers_go_and_come_back(
    near: Server, brokers: Sequence[Broker], tmp_path: Path, away_s: float
) -> None:
    """New requests are refused; requests under way are answered once brokers are there again."""
    wait_until(lambda: is_whole(near), what="the whole cluster")
    with holding(tmp_path) as hold, ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(near.post, "/v1/encode/fake/echo", held(hold, f"{at}"), DEADLINE_S) for at in range(2)
        ]
        wait_until(lambda: in_flight(near) >= 2, what="requests at boxes")
        for each in brokers:
            each.kill()
        wait_until(lambda: is_cut_off(near), what="the loss of all brokers")
        refused = near.encode("fake/echo", ["x"])
        assert (refused.status, refused.headers["retry-after"]) == (503, "1"), refused.body
        assert refused.json()["detail"]["code"] == "QUEUE_UNAVAILABLE"
        ready = near.get("/readyz")
        assert ready.status == 200, ready.body
        hold.unlink()
        # The length of the absence is the fault itself.
        time.sleep(away_s)
        for each in brokers:
            each.start()
        assert [each.result().status for each in asked] == [200, 200]
    wait_until(lambda: is_whole(near), what="the whole cluster again")
