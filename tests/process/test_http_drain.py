"""The end of a frontend's life: reload, stop and fast stop of a real Gunicorn with clients connected."""

from __future__ import annotations

import asyncio
import signal
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from frontend.server.state import accept_waiting
from tests.fakes.holding import holding
from tests.process.gunicorn_server import Client, Server, request, serving, wait_until

_CLIENTS = 16
_LIMITS = {"drain_s": 5.0, "linger_s": 0.3}
_LONG = {"drain_s": 100.0}
_PROMPT_S = 40.0
"""Less than a long drain; only a failure takes so long."""
_PAUSE_S = 0.05
"""What a client waits between two requests: the cores have time for the processes that start meanwhile."""


@dataclass
class Load:
    """What clients that keep their connections saw."""

    answered: int = 0
    refused: int = 0
    failed: list[str] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)

    async def run(self, port: int, until: asyncio.Event) -> None:
        """Send requests one after the other; connect again when told to."""
        while not until.is_set():
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except (ConnectionRefusedError, ConnectionResetError):
                self.refused += 1
                await asyncio.sleep(0.01)
                continue
            try:
                await self._use(reader, writer, until)
            except (OSError, EOFError) as error:
                self.failed.append(repr(error))
            finally:
                writer.close()

    async def _use(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, until: asyncio.Event
    ) -> None:
        while not until.is_set():
            writer.write(request("/pid"))
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            assert head.startswith("http/1.1 200"), head
            nbytes = int(head.split("content-length: ")[1].split("\r\n")[0])
            body = (await reader.readexactly(nbytes)).decode()
            self.pids.add(int(body.split('"pid": ')[1].rstrip("}")))
            self.answered += 1
            if "connection: close" in head:
                return
            await asyncio.sleep(_PAUSE_S)


async def _wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def _reload(server: Server, load: Load) -> None:
    """Reload after some more answers, and wait for a new process' answer after the end of the old ones."""
    known, answered = len(load.pids), load.answered
    await _wait_until(lambda: load.answered >= answered + 200)
    before = {process.pid for process in server.frontends()}
    server.signal(signal.SIGHUP)
    await _wait_until(lambda: not before & {process.pid for process in server.frontends()})
    await _wait_until(lambda: len(load.pids) > known)


@pytest.mark.parametrize("reloads", [2, pytest.param(8, marks=pytest.mark.long)])
def test_reloads_under_keep_alive_load_lose_nothing(tmp_path: Path, reloads: int) -> None:
    async def scenario() -> Load:
        load, until = Load(), asyncio.Event()
        clients = [asyncio.create_task(load.run(server.port, until)) for _ in range(_CLIENTS)]
        for _ in range(reloads):
            await _reload(server, load)
        until.set()
        await asyncio.gather(*clients)
        return load

    with serving(tmp_path, _LIMITS, workers=2) as server:
        load = asyncio.run(scenario())
        assert load.failed == []
        assert load.refused == 0
        assert load.answered > 200 * reloads
        assert len(load.pids) > reloads


def test_stop_under_keep_alive_load_answers_every_request_sent(tmp_path: Path) -> None:
    async def scenario() -> Load:
        load, until = Load(), asyncio.Event()
        clients = [asyncio.create_task(load.run(server.port, until)) for _ in range(_CLIENTS)]
        await _wait_until(lambda: load.answered >= 200)
        server.signal(signal.SIGTERM)
        await _wait_until(lambda: server.process.poll() is not None)
        until.set()
        await asyncio.gather(*clients)
        return load

    with serving(tmp_path, _LIMITS, workers=2) as server:
        load = asyncio.run(scenario())
        assert load.failed == []
        assert load.refused > 0
        assert server.process.returncode == 0
        assert "ERROR" not in server.log.read_text()


def test_stop_without_connections_is_immediate_and_silent(tmp_path: Path) -> None:
    with serving(tmp_path, _LONG, graceful_timeout=120) as server:
        server.signal(signal.SIGTERM)
        assert server.seconds_to_exit() < _PROMPT_S
        assert server.process.returncode == 0
        log = server.log.read_text()
        assert "was sent" not in log and "exited with code" not in log and "Traceback" not in log
        assert server.events() == ["drain", "shutdown"]


def test_idle_connections_live_for_the_drain_and_no_longer(tmp_path: Path) -> None:
    with (
        serving(tmp_path, {"drain_s": 1.0}) as server,
        Client(server.port) as used,
        Client(server.port) as fresh,
    ):
        used.ask()
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        assert fresh.seconds_to_end() <= 1.0 + _PROMPT_S
        assert time.monotonic() - began >= 0.9
        assert used.seconds_to_end() < _PROMPT_S
        assert server.seconds_to_exit() < _PROMPT_S


def test_request_on_a_kept_connection_during_the_drain_is_answered_with_close(tmp_path: Path) -> None:
    with (
        serving(tmp_path, _LONG, graceful_timeout=120) as server,
        Client(server.port) as used,
        Client(server.port) as fresh,
    ):
        assert "connection" not in used.ask().headers
        server.signal(signal.SIGTERM)
        wait_until(lambda: "drain" in server.events())
        for client in (used, fresh):
            reply = client.ask(body=b"x" * 100_000)
            assert (reply.status, reply.headers["connection"], reply.json["nbytes"]) == (
                200,
                "close",
                100_000,
            )
        assert server.seconds_to_exit() < _PROMPT_S
        with pytest.raises(ConnectionRefusedError):
            Client(server.port)


def test_request_that_comes_as_its_connection_expires_is_answered(tmp_path: Path) -> None:
    with serving(tmp_path, {"keepalive_s": 2.0}) as server, Client(server.port) as client:
        (frontend,) = server.frontends()
        client.ask()
        frontend.suspend()
        client.send(request())
        expired_at = time.monotonic() + 3.0
        wait_until(lambda: time.monotonic() > expired_at)
        frontend.resume()
        assert client.reply().status == 200


def test_request_in_work_is_finished_after_the_drain(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with serving(tmp_path, {"drain_s": 0.2}) as server, Client(server.port) as client:
        client.send(request(f"/unread?gate={gate}"))
        wait_until(lambda: server.ask().status == 200)
        server.signal(signal.SIGTERM)
        wait_until(lambda: "drain" in server.events())
        drained_at = time.monotonic() + 0.3
        wait_until(lambda: time.monotonic() > drained_at)
        gate.touch()
        reply = client.reply()
        assert (reply.json, reply.headers["connection"]) == ({"unread": True}, "close")
        assert server.seconds_to_exit() < _PROMPT_S
        assert server.process.returncode == 0


def test_request_that_outlasts_the_graceful_timeout_gets_503(tmp_path: Path) -> None:
    with serving(tmp_path, {"drain_s": 0.2}, graceful_timeout=6) as server, Client(server.port) as client:
        client.send(request("/unread?s=60"))
        wait_until(lambda: server.ask().status == 200)
        server.signal(signal.SIGTERM)
        reply = client.reply()
        assert (reply.status, reply.error_code, reply.headers["retry-after"]) == (503, "DRAINING", "5")
        assert server.seconds_to_exit() < _PROMPT_S
        assert server.process.returncode == 0
        assert "SIGKILL" not in server.log.read_text()
        assert server.events() == ["drain", "shutdown"]


def test_connections_in_the_accept_queue_at_the_stop_are_served(tmp_path: Path) -> None:
    with serving(tmp_path, {"drain_s": 2.0}) as server:
        (frontend,) = server.frontends()
        frontend.suspend()
        waiting = [Client(server.port) for _ in range(8)]
        for client in waiting:
            client.send(request())
        server.signal(signal.SIGTERM)
        wait_until(lambda: "Handling signal: term" in server.log.read_text())
        frontend.resume()
        assert [client.reply().status for client in waiting] == [200] * 8
        assert server.seconds_to_exit() < 2.0 + _PROMPT_S


def test_accept_waiting_takes_all_that_wait_and_does_not_block() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        clients = [socket.create_connection(listener.getsockname()) for _ in range(5)]
        taken = accept_waiting(listener)
        assert {one.getpeername() for one in taken} == {one.getsockname() for one in clients}
        assert accept_waiting(listener) == []
        for one in [*clients, *taken]:
            one.close()


@pytest.mark.long
def test_heartbeat_goes_on_during_a_long_drain(tmp_path: Path) -> None:
    with serving(tmp_path, {"drain_s": 0.2}, timeout=1, workers=1) as server, Client(server.port) as client:
        client.send(request("/unread?s=4"))
        wait_until(lambda: server.ask().status == 200)
        server.frontends()[0].terminate()
        assert client.reply().json == {"unread": True}
        assert "TIMEOUT" not in server.log.read_text()


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGQUIT])
def test_fast_stop_cuts_requests_off_but_shuts_the_application_down(
    tmp_path: Path, sig: signal.Signals
) -> None:
    with serving(tmp_path, _LONG, graceful_timeout=120) as server, Client(server.port) as client:
        client.send(request("/unread?s=60"))
        wait_until(lambda: server.ask().status == 200)
        server.signal(sig)
        assert client.seconds_to_end() < _PROMPT_S
        assert server.seconds_to_exit() < 2 * _PROMPT_S
        assert server.process.returncode == 0
        assert "shutdown" in server.events()


def test_second_sigterm_does_not_end_the_drain(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with serving(tmp_path, _LIMITS) as server, Client(server.port) as client:
        (frontend,) = server.frontends()
        client.send(request(f"/unread?gate={gate}"))
        wait_until(lambda: server.ask().status == 200)
        for _ in range(3):
            frontend.terminate()
            wait_until(lambda: "drain" in server.events())
        gate.touch()
        assert client.reply().json == {"unread": True}
        wait_until(lambda: not frontend.is_running())
        assert "was sent" not in server.log.read_text()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGQUIT])
def test_a_stop_ends_a_frontend_that_was_just_forked(tmp_path: Path, sig: signal.Signals) -> None:
    with serving(tmp_path) as server:
        (first,) = server.frontends()
        with holding(tmp_path):
            first.kill()
            (forked,) = wait_until(lambda: [one for one in server.frontends() if one != first])
            server.signal(sig)
            wait_until(lambda: _has_pending(forked.pid, sig))
        server.seconds_to_exit()
        log = server.log.read_text().split("Handling signal", 1)[1]
        # A process that SIGQUIT ends by default leaves its memory in a core file.
        assert "was sent SIGKILL" not in log and "was sent SIGQUIT" not in log


def test_a_reload_ends_a_frontend_that_was_just_forked(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        (first,) = server.frontends()
        with holding(tmp_path):
            server.signal(signal.SIGHUP)
            (forked,) = wait_until(lambda: [one for one in server.frontends() if one != first])
            server.signal(signal.SIGHUP)
            wait_until(lambda: _has_pending(forked.pid, signal.SIGTERM))
        wait_until(lambda: not {first, forked} & set(server.frontends()))
        assert server.ask().status == 200


def _has_pending(pid: int, sig: signal.Signals) -> bool:
    """Whether a process has been sent a signal that the process blocks."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (sig - 1) & 1 for mask in masks)


def test_process_whose_request_count_is_used_up_is_replaced_without_loss(tmp_path: Path) -> None:
    async def scenario() -> Load:
        load, until = Load(), asyncio.Event()
        clients = [asyncio.create_task(load.run(server.port, until)) for _ in range(_CLIENTS)]
        await _wait_until(lambda: len(load.pids) >= 4)
        until.set()
        await asyncio.gather(*clients)
        return load

    with serving(tmp_path, _LIMITS, workers=2, max_requests=100) as server:
        load = asyncio.run(scenario())
        assert load.failed == []
        assert load.refused == 0


def test_client_that_resets_its_connection_leaves_nothing_behind(tmp_path: Path) -> None:
    with serving(tmp_path, _LIMITS) as server:
        for count in range(1, 6):
            streamed = server.state()["stream_nbytes"]
            client = Client(server.port)
            client.send(request("/stream"))
            wait_until(lambda streamed=streamed: server.state()["stream_nbytes"] > streamed)
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.__exit__()
            wait_until(lambda count=count: server.state()["disconnects"] == count)
        server.signal(signal.SIGTERM)
        assert server.seconds_to_exit() < _PROMPT_S
        assert server.process.returncode == 0
