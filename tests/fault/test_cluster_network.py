"""A slow, halting or half broken network between hosts: each request is answered once, by its own result.

Box `a` and the gateway each reach the broker over a relay of their own; box `b` reaches the broker straight.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.broker import Broker
from tests.harness.cluster import Box, box, gateway_over, is_cut_off, living, serves
from tests.harness.history import Clients, History
from tests.harness.relay import Relay, relay
from tests.harness.server import Server, wait_until

LATENCY_S = 0.05
WAYS = {
    "nothing arrives": {"there": False, "back": False},
    "its words are lost": {"there": False},
    "it hears nothing": {"back": False},
}


@pytest.fixture(scope="module")
def to_box(one_broker: Broker) -> Iterator[Relay]:
    with relay(one_broker.port) as one:
        yield one


@pytest.fixture(scope="module")
def to_gateway(one_broker: Broker) -> Iterator[Relay]:
    with relay(one_broker.port) as one:
        yield one


@pytest.fixture(scope="module")
def boxes(place: Path, one_broker: Broker, to_box: Relay) -> Iterator[tuple[Box, Box]]:
    with box(place / "a", "a", [to_box.url]) as a, box(place / "b", "b", [one_broker.url]) as b:
        yield a, b


@pytest.fixture(scope="module")
def near(place: Path, to_gateway: Relay, boxes: tuple[Box, Box]) -> Iterator[Server]:
    with gateway_over(place / "near", [to_gateway.url], {"a", "b"}, {"cluster.lane": "auto"}) as server:
        yield server


@pytest.fixture
def history(near: Server) -> Iterator[History]:
    """The calls of three clients during a test, which hold no violation afterwards."""
    wait_until(lambda: is_whole(near), what="the whole cluster")
    history = History()
    with Clients(history, {"near": near.port}, each=3, seed=next(_SEEDS)) as clients:
        wait_until(lambda: clients.answered("near") > 10, what="traffic")
        yield history
        before = clients.answered("near")
        wait_until(lambda: clients.answered("near") > before + 10, what="traffic to the end")
    assert not history.violations(), history.violations()[:20]


_SEEDS = iter(range(1, 100))


def is_whole(server: Server) -> bool:
    """Whether the gateway hears both boxes and is answered."""
    return living(server) == {"a", "b"} and serves(server)


def answered(history: History) -> int:
    """Calls that were answered so far."""
    return sum(call.status == 200 for call in list(history.calls))


def test_a_latency_between_hosts_changes_no_answer(
    near: Server, history: History, to_box: Relay, to_gateway: Relay
) -> None:
    to_box.delay_s = to_gateway.delay_s = LATENCY_S
    try:
        before = answered(history)
        wait_until(lambda: answered(history) > before + 40, what="traffic over a slow network")
        wait_until(lambda: living(near) == {"a", "b"}, what="both boxes over a slow network")
    finally:
        to_box.delay_s = to_gateway.delay_s = 0.0


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_box_that_is_cut_off_is_left_and_comes_back(
    near: Server, history: History, to_box: Relay, way: str
) -> None:
    to_box.set(**WAYS[way])
    try:
        if way != "it hears nothing":
            wait_until(lambda: living(near) == {"b"}, what="the silence of box a")
        before = answered(history)
        wait_until(lambda: answered(history) > before + 40, what="traffic at box b")
    finally:
        to_box.set()
    wait_until(lambda: is_whole(near), what="box a again")


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_gateway_that_is_cut_off_says_so_and_comes_back(
    near: Server, history: History, to_gateway: Relay, way: str
) -> None:
    with history.fault("broker"):
        to_gateway.set(**WAYS[way])
        try:
            wait_until(lambda: is_cut_off(near), what="503 of the gateway")
        finally:
            to_gateway.set()
        wait_until(lambda: is_whole(near), what="the gateway again")
