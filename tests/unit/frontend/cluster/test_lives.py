"""Lives of gateways, as one of them hears of the others; clocks are moved by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from frontend.cluster import lives as module
from frontend.cluster.lives import GatewayLives
from ipc.settings import Cluster
from ipc.wire.cluster import VERSION, GatewayBeat, encode
from ipc.wire.cluster_names import Names
from tests.fakes.streams import StreamClient, Streams

NAMES = Names()


class Heard:
    """The lives that one gateway knows, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.client: Any = StreamClient(Streams())
        self.lives = GatewayLives(self.client, NAMES, Cluster(urls=("nats://x",)), "own")

    def beat(self, router: str, subject: str = "") -> None:
        data = encode(GatewayBeat(VERSION, router, 1, ""))
        self.hear(subject or NAMES.gateway_beat(router), data)

    def hear(self, subject: str, data: bytes) -> None:
        self.lives._beat(SimpleNamespace(subject=subject, data=data))  # type: ignore[arg-type]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    return Heard(monkeypatch)


def test_a_gateway_is_dead_after_its_silence_and_lives_again_with_a_sign(heard: Heard) -> None:
    silence_s = Cluster(urls=("nats://x",)).gateway_silence_s
    assert heard.lives.is_running("other"), "too early to tell"
    heard.now += 2 * silence_s
    assert not heard.lives.is_running("other")
    heard.beat("other")
    assert heard.lives.is_running("other")
    heard.now += silence_s + 0.1
    assert not heard.lives.is_running("other")
    assert heard.lives.is_running("own") and heard.lives.is_running(heard.lives.server())


def test_nobody_is_dead_for_a_gateway_that_has_no_broker_or_has_had_one_for_too_short_a_time(
    heard: Heard,
) -> None:
    heard.beat("other")
    heard.now += 60
    heard.client.up = False
    assert heard.lives.is_running("other")
    heard.client.up = True
    for joined in heard.client.on_up:
        joined()
    assert heard.lives.is_running("other")
    heard.now += 60
    assert not heard.lives.is_running("other")


def test_signs_that_are_none_or_of_another_are_dropped(heard: Heard) -> None:
    heard.now += 60
    heard.beat("other", NAMES.gateway_beat("third"))
    heard.beat("a.b>*")
    heard.hear(NAMES.gateway_beat("other"), b"\xc1")
    assert not any(map(heard.lives.is_running, ("other", "third", "a.b>*", "")))


def test_the_gateways_that_are_remembered_are_bounded(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_HEARD", 3)
    heard.now += 60
    for number in range(5):
        heard.beat(f"g{number}")
    assert [heard.lives.is_running(f"g{number}") for number in range(5)] == [False, False, True, True, True]
