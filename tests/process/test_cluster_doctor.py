"""`penstock doctor` and `penstock status` beside brokers, gateways and bridges."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.js.api import StreamConfig

from frontend.cluster import examining
from ipc.settings import load
from ipc.wire.cluster import VERSION, BoxHealth, GatewayBeat, encode
from ipc.wire.cluster_names import Names
from penstock import processes
from tests.harness.broker import PATIENCE_S, Broker, broker
from tests.harness.cluster import box, gateway
from tests.harness.server import wait_until


def findings(urls: str, **more: str) -> list[tuple[bool, str]]:
    """What the look tells of brokers."""
    flags = {"cluster.urls": urls} | {f"cluster.{name}": value for name, value in more.items()}
    return list(examining.look(load(flags=flags, environ={}).cluster))


def test_a_broker_with_all_that_is_needed_is_fine(tmp_path: Path) -> None:
    with broker(tmp_path) as one:
        [(fine, text), ports] = findings(one.url)
    assert fine and one.url in text and "max_payload 1MiB" in text, text
    assert ports[0] and "no gateway and no box tells one" in ports[1], ports


@pytest.mark.parametrize(
    ("more", "jetstream", "expected"),
    [
        ("", False, "JetStream is off"),
        ("max_payload: 4096", True, "max_payload is below 64KiB"),
    ],
)
def test_what_a_broker_lacks_is_told(tmp_path: Path, more: str, jetstream: bool, expected: str) -> None:
    with broker(tmp_path, jetstream=jetstream, more=more) as one:
        [(fine, text)] = findings(one.url)
    assert not fine and expected in text, text


def test_a_wrong_password_is_told_without_the_password(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("not this one\n")
    with broker(tmp_path / "b", more='authorization {user: "u", password: "right"}') as one:
        [(fine, text)] = findings(one.url, user="u", password_file=str(secret))
    assert not fine and "cannot be joined" in text and "uthorization" in text, text
    assert "not this one" not in text


def test_a_broker_that_is_not_there_is_told(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        [(fine, text)] = findings(f"nats://127.0.0.1:{unused.getsockname()[1]}")
    assert not fine and "cannot be joined" in text, text


def in_cluster(one: Broker, do: Callable[[Client], Awaitable[Any]]) -> Any:
    """Something that a client of the broker does."""

    async def run() -> Any:
        client = await nats.connect(one.url)
        try:
            return await do(client)
        finally:
            await client.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("ahead_s", "expected"), [(300, "300.0 s behind"), (-300, "300.0 s ahead of"), (0, "")]
)
def test_a_clock_that_is_far_from_that_of_a_broker_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: int, expected: str
) -> None:
    monkeypatch.setattr(examining, "LISTEN_S", 0)
    with broker(tmp_path) as one:
        stream = StreamConfig(name=f"KV_{Names().models}", subjects=["x"])
        in_cluster(one, lambda client: client.jetstream(timeout=PATIENCE_S).add_stream(stream))
        monkeypatch.setattr(examining, "_wall_s", lambda: time.time() + ahead_s)
        fine, text = findings(one.url)[0]
    assert fine == (not expected) and expected in text, text


def test_transfer_ports_that_this_host_reaches_and_does_not_reach_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names()
    with broker(tmp_path) as one, socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        reached, lacking = (f"127.0.0.1:{each.getsockname()[1]}" for each in (there, unused))

        async def tell(client: Client) -> None:
            await client.publish(names.gateway_beat("r"), encode(GatewayBeat(VERSION, "r", 1, reached)))
            await client.publish(names.box_health("a"), encode(BoxHealth(VERSION, "a", "l", {}, lacking)))
            await client.publish(names.box_health("b"), b"no message")
            await client.flush()

        async def listening(found: dict[str, str]) -> None:
            while len(found) < 2:
                await asyncio.to_thread(in_cluster, one, tell)

        monkeypatch.setattr(examining, "_listening", listening)
        told = {text: fine for fine, text in findings(one.url)[1:]}
    assert told.pop(f"transfer port {reached} of a gateway: can be reached from this host")
    [(text, fine)] = told.items()
    assert not fine and text.startswith(f"transfer port {lacking} of box a: cannot be reached"), text


def test_ports_are_tried_at_once_and_an_address_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that nobody can ask for is an answer, beside ports that all wait for one another."""
    peers = 8
    all_wait = asyncio.Barrier(peers)
    connect = asyncio.open_connection

    async def wait(host: str, port: int, **more: Any) -> Any:
        await all_wait.wait()
        return await connect("a" * 64 + ".example" if port == 1 else "127.0.0.1", port, **more)

    monkeypatch.setattr(asyncio, "open_connection", wait)
    cluster = load(flags={"cluster.urls": "nats://127.0.0.1:1"}, environ={}).cluster
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        found = {f"host{number}:{port}": f"box b{number}" for number in range(peers - 1)} | {
            "odd:1": "box odd"
        }
        told = asyncio.run(examining._tried(found, cluster))
    assert [fine for fine, _ in told] == [True] * (peers - 1) + [False]
    assert told[-1][1].startswith("transfer port odd:1 of box odd: cannot be reached from this host: ")


@pytest.mark.long
def test_status_shows_the_bridge_of_a_box_and_a_gateway_without_workers(tmp_path: Path) -> None:
    with broker(tmp_path / "broker") as one:
        with box(tmp_path / "a", "a", [one.url]) as a:
            paths = load(environ=a.server.environment).paths
            assert a.bridge is not None
            wait_until(lambda: processes.look(paths, 1, 5.0).bridge, what="the bridge")
            view = processes.look(paths, 1, 5.0)
            assert view.bridge is not None and view.bridge.pid == a.bridge.pid and not view.gateway
        with gateway(tmp_path / "near", [one.url]) as near:
            settings = load(environ=near.environment)
            view = processes.look(settings.paths, settings.worker_count, 5.0)
            assert view.gateway and view.sound and view.workers == []
