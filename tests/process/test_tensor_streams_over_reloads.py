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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The last test stops the server."""
    place = tmp_path_factory.mktemp("streams")
    settings = grpc_settings(
        **{
            "repository.dirs": write_repository(place / "models", [MODEL], SCRIPTED),
            "repository.allow_python": "true",
            "server.graceful_timeout_s": GRACEFUL_S,
        }
    )
    with serving(place, ("fake/echo",), settings, supervised=False) as running:
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


@pytest.mark.long
def test_events_and_rpcs_that_outlast_a_reload_go_on_and_end_whole(server: Server, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with Events(server, 3, gate_at=1, gate=gate) as events, Rpc(address_of(server)) as rpc:
        told, stream = iter(events), Asking(rpc)
        stream.ask(message(3, gate_at=1, gate=gate))
        assert next(told)["OUTPUT"] == 0 and number_of(next(stream.answers)) == 0
        old = outlast_a_reload(server)
        gate.touch()
        assert [each["OUTPUT"] for each in told] == [1, 2]
        assert [number_of(next(stream.answers)) for _ in range(2)] == [1, 2]
        stream.ask(message(1))
        assert number_of(next(stream.answers)) == 0
        stream.ask(None)
        assert list(stream.answers) == []
    wait_until(lambda: not old & set(server.frontend_pids()), what="the end of the old frontends")


def test_at_a_stop_events_end_with_their_error_and_rpcs_as_unavailable(
    server: Server, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with Events(server, 3, gate_at=1, gate=gate) as events, Rpc(address_of(server)) as rpc:
        told, stream = iter(events), Asking(rpc)
        stream.ask(message(3, gate_at=1, gate=gate))
        assert next(told)["OUTPUT"] == 0 and number_of(next(stream.answers)) == 0
        server.process.send_signal(signal.SIGTERM)
        assert ["error" in event for event in told] == [True]
        with pytest.raises(grpc.RpcError) as caught:
            list(stream.answers)
        gate.touch()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert server.stop() == 0
