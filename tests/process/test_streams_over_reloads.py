"""Streams of a real Gunicorn that go on while their frontend is replaced, and end in order when the server stops."""

from __future__ import annotations

import http.client
import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.process.gunicorn_server import Server, serving, wait_until

GRACEFUL_S = 2
"""All that a frontend had for its streams, when the server stops."""
STREAMS = 20
END, ERROR = "end", "error"


class Stream:
    """One stream of `/gated`; its first line is the process that sends the stream."""

    def __init__(self, server: Server, gate: Path) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self._connection.request("GET", f"/gated?gate={gate}")
        self._response = self._connection.getresponse()
        self.pid = int(self._response.readline())

    def rest(self) -> str:
        """What is left; raises `http.client.IncompleteRead` for a body that is cut."""
        return self._response.read().decode().strip()

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def opened(server: Server, gate: Path, old: Collection[int]) -> Stream:
    """A stream of another process than `old`: these take connections for a while after a new frontend answers."""
    while (stream := Stream(server, gate)).pid in old:
        stream.close()
    return stream


@contextmanager
def streaming(
    server: Server, gate: Path, count: int = 1, old: Collection[int] = ()
) -> Iterator[list[Stream]]:
    """Streams that are open."""
    streams = [opened(server, gate, old) for _ in range(count)]
    try:
        yield streams
    finally:
        for stream in streams:
            stream.close()


def reload(server: Server) -> None:
    """SIGHUP, and wait until a new frontend answers."""
    before = {process.pid for process in server.frontends()}
    server.signal(signal.SIGHUP)
    wait_until(lambda: server.state()["pid"] not in before, what="a new frontend")


@pytest.mark.sample(1)
@pytest.mark.parametrize("reloads", [1, 3])
def test_streams_that_outlast_reloads_end_whole(tmp_path: Path, reloads: int) -> None:
    gate = tmp_path / "gate"
    with (
        serving(tmp_path, {"drain_s": 0.2}, graceful_timeout=GRACEFUL_S) as server,
        streaming(server, gate, STREAMS) as streams,
    ):
        old = {stream.pid for stream in streams}
        for _ in range(reloads):
            reload(server)
        over = time.monotonic() + GRACEFUL_S + 1
        wait_until(lambda: time.monotonic() > over, what="the time of a stop")
        assert old < {process.pid for process in server.frontends()}, "old frontends are still there"
        with streaming(server, gate) as [fresh]:
            assert fresh.pid not in old
            gate.touch()
            assert [stream.rest() for stream in (*streams, fresh)] == [END] * (STREAMS + 1)
        wait_until(lambda: not old & {each.pid for each in server.frontends()}, what="the end of the old")


@pytest.mark.parametrize("reloads", [0, 2])
def test_at_a_stop_each_stream_of_every_generation_ends_with_its_error(tmp_path: Path, reloads: int) -> None:
    gate = tmp_path / "gate"
    with serving(tmp_path, {"drain_s": 0.2}, graceful_timeout=GRACEFUL_S, workers=2) as server:
        with streaming(server, gate, STREAMS) as old:
            for _ in range(reloads):
                reload(server)
            with streaming(server, gate, STREAMS) as fresh:
                server.signal(signal.SIGTERM)
                assert [stream.rest() for stream in (*old, *fresh)] == [ERROR] * 2 * STREAMS
        assert server.seconds_to_exit() < 30
        assert server.process.returncode == 0
        assert "SIGKILL" not in server.log.read_text()


def test_past_its_bound_a_stream_ends_with_its_error_after_a_reload(tmp_path: Path) -> None:
    limits = {"drain_s": 0.2, "stream_drain_s": 0.5}
    with (
        serving(tmp_path, limits, graceful_timeout=GRACEFUL_S) as server,
        streaming(server, tmp_path / "gate") as [stream],
    ):
        reload(server)
        assert stream.rest() == ERROR
        wait_until(lambda: stream.pid not in {each.pid for each in server.frontends()}, what="its end")


def test_the_oldest_of_too_many_generations_ends_and_the_others_go_on(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with (
        serving(tmp_path, {"drain_s": 0.2}, max_draining=2, graceful_timeout=30) as server,
        streaming(server, gate) as [first],
    ):
        reload(server)
        with streaming(server, gate, old=[first.pid]) as [second]:
            reload(server)
            with streaming(server, gate, old=[first.pid, second.pid]) as [third]:
                reload(server)
                assert first.rest() == ERROR
                wait_until(lambda: len(server.frontends()) == 3, what="two old frontends and a new one")
                gate.touch()
                assert [second.rest(), third.rest()] == [END, END]


def test_a_frontend_that_dies_is_replaced_while_old_ones_drain(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with (
        serving(tmp_path, {"drain_s": 0.2}, graceful_timeout=GRACEFUL_S) as server,
        streaming(server, gate) as [stream],
    ):
        reload(server)
        # For a while the old frontend answers as well.
        dead = wait_until(
            lambda: {server.state()["pid"]} - {stream.pid}, what="an answer of the new one"
        ).pop()
        os.kill(dead, signal.SIGKILL)
        wait_until(lambda: server.state()["pid"] not in (dead, stream.pid), what="its successor")
        gate.touch()
        assert stream.rest() == END


def test_the_death_of_the_arbiter_ends_streams_with_their_error(tmp_path: Path) -> None:
    with (
        serving(tmp_path, {"drain_s": 0.2}, graceful_timeout=GRACEFUL_S) as server,
        streaming(server, tmp_path / "gate") as [stream],
    ):
        reload(server)
        left = server.frontends()
        server.process.kill()
        assert stream.rest() == ERROR
        wait_until(lambda: not any(each.is_running() for each in left), what="the end of the frontends")
