"""Three brokers: one is killed, two are, all are, the streams have no quorum; and what a gateway says meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.holding import holding
from tests.harness.broker import Broker, three_brokers
from tests.harness.cluster import Box, box, gateway_over, held, in_flight, is_cut_off, living, serves
from tests.harness.load import Load
from tests.harness.server import Server, wait_until


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
    with gateway_over(place / "near", urls, {"a", "b"}, {"cluster.lane": "auto"}) as server:
        yield server


def is_whole(server: Server) -> bool:
    """Whether the gateway hears both boxes and is answered."""
    return living(server) == {"a", "b"} and serves(server)


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


def test_all_brokers_go_and_come_back(near: Server, brokers: Sequence[Broker], tmp_path: Path) -> None:
    """New requests are refused; requests under way are answered once brokers are there again."""
    wait_until(lambda: is_whole(near), what="the whole cluster")
    with holding(tmp_path) as hold, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(near.post, "/v1/encode/fake/echo", held(hold, f"{at}")) for at in range(2)]
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
        for each in brokers:
            each.start()
        assert [each.result().status for each in asked] == [200, 200]
    wait_until(lambda: is_whole(near), what="the whole cluster again")
