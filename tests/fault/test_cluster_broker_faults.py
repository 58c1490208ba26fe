"""A broker that was never there, refuses, has no room, takes small messages only, or is old: what boxes still answer.

One broker begins anew for each fault, on its port and with nothing stored. A gateway and a box live through all.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conformance.required_tool import lacking
from tests.fakes.adapter import vector_of
from tests.harness.broker import Broker
from tests.harness.cluster import Box, box, gateway, is_cut_off, living, serves
from tests.harness.load import Load
from tests.harness.server import Answer, Server, wait_until

OLD = "/usr/sbin/nats-server"
"""Where Debian's package has the program, 2.9.10 in Debian 12."""
FAULTS: dict[str, dict[str, Any]] = {
    "JetStream off": {"jetstream": False},
    "no memory for streams": {"limits": "max_memory_store: 1KB, max_file_store: 256MB"},
    "no disk for buckets": {"limits": "max_memory_store: 256MB, max_file_store: 1KB"},
    "small messages": {"more": "max_payload: 65536"},
}


class Cluster:
    """A box and a gateway that were there before their broker; `first` is what the gateway answered then."""

    def __init__(self, one: Broker, a: Box, near: Server, first: Answer, ready: Answer) -> None:
        self.broker, self.box, self.near, self.first, self.ready = one, a, near, first, ready

    def is_whole(self) -> bool:
        """Whether the gateway hears the box and is answered."""
        return living(self.near) == {"a"} and serves(self.near)

    def serves_all(self) -> None:
        """Wait for the box, and ask for small and for large things."""
        wait_until(self.is_whole, what="an answer of the box")
        with Load(self.near.port, 3) as load:
            wait_until(lambda: load.done > 30, what="traffic")
            outcome = load.stop()
        assert not outcome.failed, (outcome.statuses, outcome.broken, outcome.bodies, outcome.wrong)
        texts = [f"{at} " + "w" * 20_000 for at in range(30)]
        answer = self.near.encode("fake/echo", texts)
        assert answer.status == 200, answer.body[:500]
        for text, item in zip(texts, answer.json()["items"], strict=True):
            assert np.allclose(item["dense"]["values"], vector_of(text, 16), atol=1e-6)
        rows = self.near.encode("fake/tokens", ["word " * 100] * 2, output_types=["multivector"])
        assert rows.status == 200 and len(rows.json()["items"][0]["multivector"]["values"]) > 99


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    place = tmp_path_factory.mktemp("faults")
    one = Broker(place / "broker")
    with ExitStack() as stack:
        stack.callback(one.kill)
        a = stack.enter_context(box(place / "a", "a", [one.url], models=("fake/echo", "fake/tokens")))
        near = stack.enter_context(gateway(place / "near", [one.url]))
        first, ready = near.encode("fake/echo", ["x"]), near.get("/readyz")
        one.start()
        yield Cluster(one, a, near, first, ready)


def test_a_gateway_and_a_box_that_begin_without_a_broker_join_it_later(cluster: Cluster) -> None:
    assert (cluster.ready.status, cluster.first.status) == (200, 503)
    assert cluster.first.json()["detail"]["code"] == "QUEUE_UNAVAILABLE", cluster.first.body
    cluster.serves_all()


@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broker_without_what_the_queue_needs_serves_all_the_same(cluster: Cluster, fault: str) -> None:
    cluster.broker.begin_again(**FAULTS[fault])
    cluster.serves_all()


def test_a_broker_that_refuses_the_password_is_joined_once_it_takes_it(cluster: Cluster) -> None:
    cluster.broker.begin_again('authorization {user: "u", password: "another"}')
    wait_until(lambda: is_cut_off(cluster.near), what="the refusal of the gateway")
    wait_until(lambda: "uthorization" in cluster.box.log, what="the word of the broker in the log of the box")
    cluster.broker.begin_again()
    cluster.serves_all()


def test_an_old_broker_serves(cluster: Cluster) -> None:
    old = OLD if Path(OLD).is_file() else shutil.which("nats-server")
    if not old:
        lacking("Debian's nats-server is not installed here")
    cluster.broker.begin_again(program=old)
    cluster.serves_all()
