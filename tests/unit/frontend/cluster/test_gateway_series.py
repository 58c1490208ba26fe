"""Series of a gateway that plain traffic does not move, each moved by what it counts, without a broker."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.bridge.results import Results
from frontend.cluster.engine import ClusterEngine
from frontend.cluster.gateway import Gateway
from frontend.cluster.items import Sent
from frontend.cluster.queue import ADVISORY
from frontend.cluster.transfer_http import LEAF_NBYTES
from frontend.cluster.transfers import Transfers
from frontend.engine.boxes import GatewayMeter
from frontend.server.drain import Drain
from ipc.catalog.entries import Catalog
from ipc.errors import DeadlineExceeded, PenstockError
from ipc.metrics.cluster import RESENT, GatewayMetrics
from ipc.settings import Cluster, Settings
from ipc.wire.cluster import MOST_NBYTES, RUN, VERSION, BoxBeat, encode
from ipc.wire.cluster_names import inbox
from ipc.wire.messages import EncodeCall, Work
from tests.unit.frontend.cluster.test_wiring import Post, item, post

__all__ = ["post"]

CLUSTER = Cluster(urls=("nats://127.0.0.1:1",), transfer_bind="127.0.0.1:0")
BEAT = BoxBeat(VERSION, "a", "a1", "default", 1, False, 1.0, 0.0)


class Stage:
    """A gateway, and the families that it feeds."""

    def __init__(self, post: Post) -> None:
        self.post, self.gateway = post, Gateway(Settings(cluster=CLUSTER), Catalog(()))
        self.metrics = GatewayMetrics()
        gateway = self.gateway
        self.meter = GatewayMeter(self.metrics, gateway.models, gateway.counts, times=gateway.times)

    def value(self, family: str, **labels: str) -> float:
        """Count of a family of `GatewayMetrics`, of all labels or of these."""
        self.meter.report()
        samples = [sample for each in getattr(self.metrics, family).collect() for sample in each.samples]
        return sum(
            sample.value
            for sample in samples
            if sample.name.endswith(("_total", "_count")) and labels.items() <= sample.labels.items()
        )

    def hear(self, kind: str, data: bytes) -> None:
        """A message for this gateway arrives."""
        listens_on = inbox(self.gateway.router)
        message = SimpleNamespace(subject=f"{listens_on[:-1]}{kind}", data=data, reply="", headers=None)
        self.post.handlers[listens_on](message)

    def sent(self, nbytes: int) -> Sent:
        """An item whose work has so many bytes."""
        plan, future = Work("m", EncodeCall([], []), 0, 0, ""), asyncio.get_running_loop().create_future()
        return Sent(
            id=f"{self.gateway.router}.1",
            model="m",
            deadline_ns=0,
            future=future,
            kind=RUN,
            plan=plan,
            work=bytes(nbytes),
            work_nbytes=nbytes,
            payload=b"",
            others=[],
            start_by_ns=0,
        )


def play(post: Post, scene: Callable[[Stage], Awaitable[None]]) -> None:
    async def whole() -> None:
        stage = Stage(post)
        try:
            await scene(stage)
        finally:
            stage.gateway.queues.close()
            await stage.gateway.transfers.close()

    asyncio.run(whole())


def test_an_item_whose_inputs_are_too_large_for_a_message_is_an_offload(post: Post) -> None:
    async def scene(stage: Stage) -> None:
        small, large = stage.sent(1), stage.sent(stage.gateway.broker.inline_nbytes)
        await stage.gateway.offer(small)
        assert stage.value("offloads") == 0 and small.large is None and small.work
        await stage.gateway.offer(large)
        assert stage.value("offloads") == 1 and large.large is not None and not large.work

    play(post, scene)


def test_an_answer_that_nobody_waits_for_or_nobody_can_read_is_a_skip(post: Post) -> None:
    async def scene(stage: Stage) -> None:
        late = encode(Results("a", "a1").failed(item(), 1, PenstockError("too late")))
        stage.hear("results", late)
        assert stage.value("skips") == stage.value("dropped", reason="unknown box") == 1
        post.bring("penstock.beat.box.*", BEAT, "penstock.beat.box.a")
        stage.hear("results", late)
        assert stage.value("skips") == 2 and stage.value("duplicates") == 1
        stage.hear("results", encode(BEAT))
        assert stage.value("skips") == 3

    play(post, scene)


@pytest.mark.parametrize("answer", [b'{"error": {"code": 503}}', b'{"stream": "W", "seq": 1}'])
def test_an_item_that_the_queue_refuses_is_a_failed_ack(post: Post, answer: bytes) -> None:
    async def scene(stage: Stage) -> None:
        stage.gateway.queues.lane("default", "default").published("item")
        stage.hear("queued.default.item", answer)
        assert stage.value("unconfirmed") == (b"error" in answer)
        assert stage.value("publish") == (b"error" not in answer)

    play(post, scene)


ADVICE = b'{"stream": "WORK_POOL_bench", "consumer": "default_bench", "stream_seq": 7, "deliveries": 20}'
QUEUE = {"stream": "WORK_POOL_bench", "consumer": "default_bench"}


def test_an_item_that_a_queue_gave_up_has_a_letter_that_one_gateway_counts(post: Post) -> None:
    async def scene(stage: Stage) -> None:
        post.handlers[ADVISORY](SimpleNamespace(data=ADVICE))
        ((subject, data),) = post.sent
        assert subject == "sie.dlq.unknown"
        letter = json.loads(data)
        assert letter["reason"] == "deliveries" and "WORK_POOL_bench 7: 20 deliveries" in letter["error"]
        place = "dead.WORK_POOL_bench.default_bench"
        stage.hear(place, b'{"stream": "DEAD_LETTERS", "seq": 1}')
        assert stage.value("dead", **QUEUE) == 1 and stage.value("dead_failures") == 0
        stage.hear(place, b'{"stream": "DEAD_LETTERS", "seq": 1, "duplicate": true}')
        assert stage.value("dead") == 1
        for answer in (b"", b"x", b'{"error": {"code": 503, "description": "no space"}}'):
            stage.hear(place, answer)
        assert stage.value("dead_failures", **QUEUE) == 3 and stage.value("dead") == 1

    play(post, scene)


@pytest.mark.parametrize(
    "advice",
    [
        b"",
        b"{",
        b"[]",
        ADVICE.replace(b"WORK_POOL_bench", b"KV_x"),
        ADVICE.replace(b"WORK_POOL_bench", b"other_WORK_POOL_a"),
        ADVICE.replace(b"default_bench", b"a b"),
        ADVICE.replace(b"default_bench", b"a.b"),
        ADVICE.replace(b"7", b'"7"'),
    ],
)
def test_advice_about_other_streams_and_nonsense_write_no_letter(post: Post, advice: bytes) -> None:
    async def scene(stage: Stage) -> None:
        post.handlers[ADVISORY](SimpleNamespace(data=advice))
        stage.hear("dead.x", b""), stage.hear("dead.WORK_POOL_a.b c", b"")
        assert post.sent == [] and stage.value("dead_failures") == 0

    play(post, scene)


@pytest.mark.parametrize("kind", ["queued.x", "queued.", "sent.x", "sent.", "x", "results.x"])
def test_a_subject_of_anybody_that_is_none_of_ours_is_passed_over(post: Post, kind: str) -> None:
    async def scene(stage: Stage) -> None:
        stage.hear(kind, b"")
        assert stage.value("unconfirmed") == 0

    play(post, scene)


def test_every_reason_of_sending_again_is_a_series_from_the_first_scrape(post: Post) -> None:
    async def scene(stage: Stage) -> None:
        stage.metrics.touch()
        shown = {
            sample.labels["reason"] for each in stage.metrics.resent.collect() for sample in each.samples
        }
        assert shown == set(RESENT) >= {"old", "transfer", "no stream", "refused", "lost", "unconfirmed"}

    play(post, scene)


def test_configurations_that_cannot_be_read_are_a_failure_of_the_start(post: Post) -> None:
    async def scene(stage: Stage) -> None:
        assert stage.value("config_failures") == 0
        stage.gateway.broker.client.discard()
        assert not await stage.gateway.configs._followed._look()
        assert stage.value("config_failures") == 1

    play(post, scene)


def test_large_inputs_are_offered_until_the_deadline_and_no_longer(post: Post) -> None:
    async def scene(stage: Stage) -> None:
        free, one = threading.Event(), ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(one)
        one.submit(free.wait)
        late = stage.sent(2 * LEAF_NBYTES)
        try:
            async with asyncio.timeout(30):
                with pytest.raises(DeadlineExceeded, match="before a box answered"):
                    await stage.gateway.post(late)
            assert not stage.gateway.transfers.offered and not stage.gateway.dispatch.items
        finally:
            free.set()

    play(post, scene)


def test_large_bytes_are_counted_each_way_and_timed_on_their_way_here(post: Post) -> None:
    async def scene(stage: Stage) -> None:
        gateway, box = stage.gateway, Transfers(CLUSTER, "a1", "bridge a")
        await gateway.transfers._listener.start()
        await box._listener.start()
        try:
            there = stage.sent(gateway.broker.inline_nbytes)
            await gateway.offer(there)
            assert there.large is not None
            assert len(await box.get(there.large, gateway.router, MOST_NBYTES)) == there.work_nbytes
            assert stage.value("transferred", way="out") == there.work_nbytes
            assert stage.value("transferred", way="in") == stage.value("transfers") == 0
            offer = await box.offer([b"answer"], gateway.router)
            outcome: Any = SimpleNamespace(life="a1")
            assert await ClusterEngine(gateway, Drain())._got(there, outcome, offer) == b"answer"
            assert stage.value("transferred", way="in") == 6 and stage.value("transfers") == 1
        finally:
            await box.close()

    play(post, scene)
