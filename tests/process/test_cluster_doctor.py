"""`penstock doctor` and `penstock status` beside brokers, gateways and bridges."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from frontend.cluster import examining
from ipc.settings import load
from penstock import processes
from tests.harness.broker import broker
from tests.harness.cluster import box, gateway
from tests.harness.server import wait_until


def findings(urls: str, **more: str) -> list[tuple[bool, str]]:
    """What the look tells of brokers."""
    flags = {"cluster.urls": urls} | {f"cluster.{name}": value for name, value in more.items()}
    return list(examining.look(load(flags=flags, environ={}).cluster))


def test_a_broker_with_all_that_is_needed_is_fine(tmp_path: Path) -> None:
    with broker(tmp_path) as one:
        [(fine, text)] = findings(one.url)
    assert fine and one.url in text and "max_payload 1MiB" in text, text


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
