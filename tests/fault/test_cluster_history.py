"""Random deaths and standstills of boxes, gateways and the broker: each request is answered once, by its own result.

A schedule is drawn from a seed, which `TEST_CLUSTER_SEED` names, and has every kind of fault once before any kind comes
again. One fault ends before the next begins, as the promises are about one death at a time.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import nats
import pytest

from tests.fault import rounds
from tests.harness.broker import PATIENCE_S, Broker, broker
from tests.harness.cluster import Box, box, gateway, serves
from tests.harness.history import Call, Clients, History, Span, digest_of_input
from tests.harness.server import Server, wait_until

STREAM = "WORK_POOL_default"
STILL_S = (0.2, 3.0)
LANES = {"near": "auto", "far": "direct"}


class Cluster:
    """A broker, two boxes or three in many rounds, two gateways, and the faults that they get."""

    def __init__(
        self, broker: Broker, boxes: dict[str, Box], gateways: dict[str, Server], chance: random.Random
    ) -> None:
        self.broker, self.boxes, self.gateways = broker, boxes, gateways
        self._chance, self.history = chance, History()

    @property
    def faults(self) -> dict[str, Callable[[], None]]:
        """Every kind of fault by its name."""
        return {
            "a box is killed": lambda: self._end_box(signal.SIGKILL),
            "a box leaves": lambda: self._end_box(signal.SIGTERM),
            "a box stands still": self._still_box,
            "the broker is killed": self._kill_broker,
            "the broker stands still": self._still_broker,
            "a gateway is killed": self._kill_gateway,
            "a gateway stands still": self._still_gateway,
        }

    def _pause(self) -> None:
        # The length of a standstill is the fault itself.
        time.sleep(self._chance.uniform(*STILL_S))

    def _box(self) -> Box:
        return self.boxes[self._chance.choice(sorted(self.boxes))]

    def _gateway(self) -> str:
        return self._chance.choice(sorted(self.gateways))

    def _end_box(self, number: signal.Signals) -> None:
        one = self._box()
        one.end(number)
        one.start_bridge()

    def _still_box(self) -> None:
        one = self._box()
        one.tell(signal.SIGSTOP)
        self._pause()
        one.tell(signal.SIGCONT)

    def _kill_broker(self) -> None:
        with self.history.fault("broker"):
            self.broker.kill()
            self._pause()
            self.broker.start()
            wait_until(self.is_whole, what="the cluster after its broker")

    def _still_broker(self) -> None:
        with self.history.fault("broker"):
            self.broker.stand_still()
            self._pause()
            self.broker.go_on()
            wait_until(self.is_whole, what="the cluster after its broker")

    def _kill_gateway(self) -> None:
        name = self._gateway()
        with self.history.fault(f"gateway {name}"):
            self.gateways[name].kill_all_processes()
            self.gateways[name].start()
            self.gateways[name].wait_ready()
            wait_until(self.is_whole, what="the gateway again")

    def _still_gateway(self) -> None:
        pids = self.gateways[self._gateway()].frontend_pids()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            if number == signal.SIGSTOP:
                self._pause()

    def is_whole(self) -> bool:
        """Whether every gateway hears every box and is answered."""
        for server in self.gateways.values():
            answer = server.request("GET", "/health", headers={"Accept": "application/json"}).json()
            living = {worker["name"] for worker in answer["workers"] if worker["healthy"]}
            if living != set(self.boxes) or not serves(server):
                return False
        return True

    def waiting(self) -> int:
        """Items in the stream of the queue."""

        async def ask() -> int:
            client = await nats.connect(self.broker.url)
            try:
                return (await client.jetstream(timeout=PATIENCE_S).stream_info(STREAM)).state.messages
            finally:
                await client.close()

        return asyncio.run(ask())


@pytest.fixture
def seed() -> int:
    return int(os.environ.get("TEST_CLUSTER_SEED", "29"))


@pytest.fixture
def cluster(tmp_path: Path, seed: int) -> Iterator[Cluster]:
    with ExitStack() as stack:
        one = stack.enter_context(broker(tmp_path / "broker"))
        urls, keeps = [one.url], {"cluster.keep_results_s": 5}
        boxes = {
            name: stack.enter_context(box(tmp_path / name, name, urls, settings=keeps))
            for name in "abc"[: rounds(short=2, long=3)]
        }
        gateways = {
            name: stack.enter_context(gateway(tmp_path / name, urls, {"cluster.lane": lane}))
            for name, lane in LANES.items()
        }
        found = Cluster(one, boxes, gateways, random.Random(seed))
        wait_until(found.is_whole, what="the whole cluster")
        yield found


def schedule(kinds: list[str], count: int, seed: int) -> list[str]:
    """So many kinds in random order, all kinds once before any comes again."""
    chance, drawn = random.Random(seed), list[str]()
    while len(drawn) < count:
        drawn += chance.sample(kinds, len(kinds))
    return drawn[:count]


def test_random_faults_leave_a_history_without_violations_and_nothing_behind(
    cluster: Cluster, seed: int
) -> None:
    faults = cluster.faults
    drawn = schedule(list(faults), rounds(short=4, long=200), seed)
    ports = {name: server.port for name, server in cluster.gateways.items()}
    with Clients(cluster.history, ports, each=3, seed=seed) as clients:
        for fault in drawn:
            before = {name: clients.answered(name) for name in ports}
            for name, seen in before.items():
                wait_until(lambda at=name, n=seen: clients.answered(at) > n + 10, what="traffic")  # type: ignore[misc]
            faults[fault]()
            wait_until(cluster.is_whole, what=f"the whole cluster after: {fault}")
    assert not cluster.history.violations(), (seed, drawn, cluster.history.violations()[:20])
    assert sum(call.status == 200 for call in cluster.history.calls) > 20 * len(drawn)
    for server in cluster.gateways.values():
        wait_until(lambda at=server: at.metric("penstock_requests_in_flight") == 0, what="no request")  # type: ignore[misc]
    for one in cluster.boxes.values():
        wait_until(lambda at=one: at.status.endswith(" 0 items, 0 answers kept"), what="an empty box")  # type: ignore[misc]
    wait_until(lambda: cluster.waiting() == 0, what="an empty queue")


def _call(at: int, **more: object) -> Call:
    values = {"ended_s": at + 1.0, "status": 200, "right": True, "answer": f"{at}"} | more
    return Call("near", digest_of_input(f"{at}"), float(at), **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"right": False}, "another input"),
        ({"answer": "1"}, "same answer"),
        ({"ended_s": 0.0}, "never ended"),
        ({"ended_s": 90.0}, "took longer"),
        ({"status": 0, "answer": "", "error": "broken"}, "no answer: broken"),
        ({"status": 503, "answer": "", "code": "QUEUE_UNAVAILABLE", "retry_after": "1"}, "QUEUE_UNAVAILABLE"),
        ({"status": 500, "answer": "", "code": "WORKER_CRASHED"}, "WORKER_CRASHED"),
    ],
)
def test_a_history_tells_each_violation(call: dict[str, object], says: str) -> None:
    history = History([_call(1), _call(2)])
    assert not history.violations()
    history.calls.append(_call(3, **call))
    (found,) = history.violations()
    assert says in found


def test_a_history_excuses_what_a_fault_may_do_while_the_fault_lasts() -> None:
    refused = _call(10, status=503, answer="", code="QUEUE_UNAVAILABLE", retry_after="1")
    broken = _call(20, status=0, answer="", error="broken")
    history = History([refused, broken], [Span("broker", 9.0, 10.5), Span("gateway near", 19.0, 21.0)])
    assert not history.violations()
    history.spans = [Span("broker", 19.0, 21.0), Span("gateway far", 19.0, 21.0)]
    assert len(history.violations()) == 2
