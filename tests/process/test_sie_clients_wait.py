"""The unmodified clients of SIE, both lines, wait by themselves for what is not there yet, and are served then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.adapter import vector_of
from tests.harness.broker import broker
from tests.harness.cluster import box, gateway, gateway_over, is_cut_off
from tests.harness.lifecycle import ON_DEMAND, Models
from tests.harness.server import Server, serving, wait_until
from tests.harness.sie_clients import Client, each_client, printed_by, refusals

pytestmark = pytest.mark.long

client = each_client
Way = Callable[[Path, dict[str, Any]], AbstractContextManager[Server]]


@contextlib.contextmanager
def local(place: Path, settings: dict[str, Any]) -> Iterator[Server]:
    """One server."""
    with serving(place, (), settings, supervised=False) as server:
        yield server


@contextlib.contextmanager
def behind(place: Path, settings: dict[str, Any]) -> Iterator[Server]:
    """A gateway over one box, both with these settings."""
    with (
        broker(place / "broker") as one,
        box(place / "a", "a", [one.url], models=(), settings=settings),
        gateway(place / "near", [one.url], settings) as server,
    ):
        yield server


WAYS = pytest.mark.parametrize("way", [local, behind])


@WAYS
def test_a_client_waits_for_a_load(client: Client, tmp_path: Path, way: Way) -> None:
    models, hold = Models(tmp_path / "catalog"), tmp_path / "hold"
    hold.touch()
    models.write("late", hold_file=str(hold))
    settings = {**ON_DEMAND, "catalog.dirs": models.directory, "limits.load_wait_s": 0.3}
    with way(tmp_path, settings) as server:
        wait_until(lambda: b"late" in server.get("/v1/models").body, what="the model's name")
        with client.encodes(server, "late", "x") as process:
            wait_until(lambda: refusals(server) >= 1, what="a refusal")
            hold.unlink()
            np.testing.assert_allclose(printed_by(process), vector_of("x", 16), atol=1e-6)


@WAYS
def test_a_client_asks_again_for_memory_as_often_as_it_may(client: Client, tmp_path: Path, way: Way) -> None:
    models = Models(tmp_path / "catalog")
    models.write("small", memory_tokens=64)
    with way(tmp_path, {**ON_DEMAND, "catalog.dirs": models.directory}) as server:
        wait_until(lambda: server.encode("small", ["x"]).status == 200, what="the load")
        began = refusals(server)
        with client.encodes(server, "small", "a" * 1000, max_oom_retries=1) as process:
            told = printed_by(process)
        assert (told["error"], told["code"]) == ("ResourceExhaustedError", "RESOURCE_EXHAUSTED")
        assert refusals(server) == began + 2


def test_a_client_waits_for_the_broker_of_a_gateway(client: Client, tmp_path: Path) -> None:
    with (
        broker(tmp_path / "broker") as one,
        box(tmp_path / "a", "a", [one.url]),
        gateway_over(tmp_path / "near", [one.url], {"a"}, {}) as server,
    ):
        one.kill()
        wait_until(lambda: is_cut_off(server), what="the loss of the broker")
        began = refusals(server)
        with client.encodes(server, "fake/echo", "x") as process:
            wait_until(lambda: refusals(server) > began, what="a refusal")
            one.start()
            np.testing.assert_allclose(printed_by(process), vector_of("x", 16), atol=1e-6)
