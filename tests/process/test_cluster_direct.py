"""A gateway, a broker and a box as real processes: work goes directly to the box, and its answer comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.broker import Broker, broker
from tests.harness.cluster import Box, box, gateway, serves
from tests.harness.server import Server, wait_until


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def one_broker(place: Path) -> Iterator[Broker]:
    with broker(place / "broker") as one:
        yield one


@pytest.fixture(scope="module")
def box_a(place: Path, one_broker: Broker) -> Iterator[Box]:
    with box(place / "a", "a", [one_broker.url]) as one:
        yield one


@pytest.fixture(scope="module")
def near(place: Path, one_broker: Broker, box_a: Box) -> Iterator[Server]:
    with gateway(place / "near", [one_broker.url]) as server:
        wait_until(lambda: serves(server), what="the first answer of the box")
        yield server


def test_an_answer_of_a_box_is_that_of_a_server(near: Server) -> None:
    answer = near.encode("fake/echo", ["one", "two", "one"])
    assert answer.status == 200, answer.body
    rows = [item["dense"]["values"] for item in answer.json()["items"]]
    assert rows[0] == rows[2] != rows[1]
