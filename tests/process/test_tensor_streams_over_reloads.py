"""Streams of a decoupled model, as events and over gRPC, while their frontend is replaced and when the server stops."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from ipc.protos import kserve_v2_pb2 as pb
from tests.harness.decoupled import MODEL, Events, message, number_of
from tests.harness.rpc import Rpc, address_of, grpc_settings
from tests.harness.server import Server, serving, wait_until
from tests.tiny.programs import SCRIPTED, write_repository

GRACEFUL_S = 3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    settings = grpc_settings(
        **{
            "repository.dirs": write_repository(tmp_path / "models", [MODEL], SCRIPTED),
            "repository.allow_python": "true",
            "server.graceful_timeout_s": GRACEFUL_S,
        }
    )
    with serving(tmp_path, ("fake/echo",), settings) as running:
        yield running


class Asking:
    """A stream of ModelStreamInfer whose client asks again and again."""

    def __init__(self, rpc: Rpc) -> None:
        self._asked: queue.Queue[pb.ModelInferRequest | None] = queue.Queue()
        self.answers: Any = rpc.stream(iter(self._asked.get, None))

    def ask(self, asked: pb.ModelInferRequest | None) -> None:
        """Send a message; None: no more."""
        self._asked.put(asked)


def outlast_a_reload(server: Server) -> set[int]:
    """Reload, and wait longer than a stop may take; the old frontends, which are still there."""
    old = set(server.frontend_pids())
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: set(server.frontend_pids()) - old, what="a new frontend")
    over = time.monotonic() + GRACEFUL_S + 1
    wait_until(lambda: time.monotonic() > over, what="the time of a stop")
    assert old < set(server.frontend_pids())
    return old


def test_events_of_tensors_that_outlast_a_reload_end_whole(server: Server, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with Events(server, 3, gate_at=1, gate=gate) as events:
        told = iter(events)
        assert next(told)["OUTPUT"] == 0
        old = outlast_a_reload(server)
        gate.touch()
        assert [each["OUTPUT"] for each in told] == [1, 2]
    wait_until(lambda: not old & set(server.frontend_pids()), what="the end of the old frontends")


def test_a_stream_of_rpcs_that_outlasts_a_reload_goes_on(server: Server, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with Rpc(address_of(server)) as rpc:
        stream = Asking(rpc)
        stream.ask(message(3, gate_at=1, gate=gate))
        assert number_of(next(stream.answers)) == 0
        old = outlast_a_reload(server)
        gate.touch()
        assert [number_of(next(stream.answers)) for _ in range(2)] == [1, 2]
        stream.ask(message(1))
        assert number_of(next(stream.answers)) == 0
        stream.ask(None)
        assert list(stream.answers) == []
    wait_until(lambda: not old & set(server.frontend_pids()), what="the end of the old frontends")


def test_at_a_stop_events_of_tensors_end_with_their_error(server: Server, tmp_path: Path) -> None:
    with Events(server, 3, gate_at=1, gate=tmp_path / "gate") as events:
        told = iter(events)
        assert next(told)["OUTPUT"] == 0
        server.process.send_signal(signal.SIGTERM)
        assert ["error" in event for event in told] == [True]
        (tmp_path / "gate").touch()
    assert server.stop() == 0


def test_at_a_stop_a_stream_of_rpcs_ends_as_unavailable(server: Server, tmp_path: Path) -> None:
    with Rpc(address_of(server)) as rpc:
        stream = Asking(rpc)
        stream.ask(message(3, gate_at=1, gate=tmp_path / "gate"))
        assert number_of(next(stream.answers)) == 0
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as caught:
            list(stream.answers)
        (tmp_path / "gate").touch()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert server.stop() == 0
