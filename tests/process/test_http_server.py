"""The HTTP server of a frontend, in a real Gunicorn, against slow, silent, greedy and malformed clients."""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.server import PATIENCE_S
from tests.process.gunicorn_server import Client, Server, request, serving, wait_until

_MIB = 1 << 20
_LIMITS = {
    "keepalive_s": 1.2,
    "header_deadline_s": 0.7,
    "body_floor_bytes_per_s": 1000,
    "body_floor_after_s": 0.7,
    "max_connections": 20,
    "write_stall_s": 0.7,
    "drain_s": 0.3,
    "linger_s": 0.5,
}
_TOLERANCE_S = 12.0
_GET = request()
_POST = b"POST /echo HTTP/1.1\r\nHost: t\r\n"
_POST_UNREAD = b"POST /unread?s=1.6 HTTP/1.1\r\nHost: t\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One frontend with short deadlines."""
    with serving(tmp_path_factory.mktemp("http"), _LIMITS, graceful_timeout=5) as running:
        yield running


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One frontend that gives clients more time, and reads for long what comes behind its last answer."""
    limits = {"linger_s": 30.0, "write_stall_s": 3.0, "body_floor_after_s": 2.0}
    with serving(tmp_path_factory.mktemp("patient"), limits) as running:
        yield running


def _prompt(server: Server, sent: bytes = _GET, receive_buffer_nbytes: int = 0) -> Client:
    """A connection that was opened and has sent these bytes well before the deadline of a head.

    A client that stood still in between gives way to another.
    """
    while True:
        client = Client(server.port, receive_buffer_nbytes)
        with contextlib.suppress(ConnectionError):
            client.send(sent)
            if time.monotonic() - client.began < 0.5:
                return client
        client.__exit__()


def _state(server: Server) -> Any:
    """The counters of the application behind a server with short deadlines."""
    with _prompt(server, request("/state")) as client:
        return client.reply().json


@pytest.mark.parametrize(
    "sent", [b"", b"\r\n\r\n", b"GET /echo HTTP/1.1\r\nHost: t", b"GET /echo HTTP/1.1\r\nA: b\r\n"]
)
def test_connection_without_a_complete_head_ends_at_the_deadline(server: Server, sent: bytes) -> None:
    with Client(server.port) as client:
        client.send(sent)
        assert client.seconds_to_end() <= 0.7 + _TOLERANCE_S
        assert time.monotonic() - client.began >= 0.6


def test_head_that_trickles_in_does_not_move_the_deadline(server: Server) -> None:
    with Client(server.port) as client:
        with pytest.raises(OSError):
            for byte in b"GET /echo HTTP/1.1\r\nHost: test\r\nX: " + b"y" * 1000:
                client.send(bytes([byte]))
                client.socket.settimeout(0.05)
                with pytest.raises(TimeoutError):
                    if client.socket.recv(1) == b"":
                        raise ConnectionError
        assert 0.6 <= time.monotonic() - client.began <= 0.7 + _TOLERANCE_S


def test_half_head_on_a_kept_connection_ends_at_the_deadline(server: Server) -> None:
    with _prompt(server) as client:
        assert client.reply().status == 200
        began = time.monotonic()
        client.send(b"GET /echo HTTP/1.1\r\nHos")
        assert client.seconds_to_end() <= 0.7 + _TOLERANCE_S
        assert time.monotonic() - began >= 0.6


def test_idle_kept_connection_ends_after_keepalive(server: Server) -> None:
    with _prompt(server) as client:
        assert client.reply().status == 200
        assert client.seconds_to_end() <= 1.2 + _TOLERANCE_S
        assert time.monotonic() - client.began >= 1.1


def test_request_longer_than_every_deadline_is_answered(server: Server) -> None:
    # The second request waits behind the first, so that no client has to send that request within `keepalive_s`.
    with _prompt(server, request("/unread?s=1.6") + request()) as client:
        assert client.reply().json == {"unread": True}
        assert client.reply().status == 200


def test_slow_body_gets_408_that_names_floor_and_rate(server: Server) -> None:
    disconnects = _state(server)["disconnects"]
    with _prompt(server, _POST + b"Content-Length: 100000\r\n\r\n" + b"x" * 200) as client:
        reply = client.reply()
        assert (reply.status, reply.error_code, reply.headers["connection"]) == (408, "TOO_SLOW", "close")
        assert "1000 bytes/s" in reply.json["detail"]["message"]
        assert client.seconds_to_end() <= 0.5 + _TOLERANCE_S
    wait_until(lambda: _state(server)["disconnects"] > disconnects)


def test_slow_body_above_the_floor_is_served(patient: Server) -> None:
    with Client(patient.port) as client:
        # The first half is ahead of the floor by seconds, which a client that stands still may use up.
        client.send(_POST + b"Content-Length: 15000\r\n\r\n" + b"x" * 9000)
        start = time.monotonic()
        for i in range(30):
            client.send(b"x" * 200)
            threading.Event().wait(max(0.0, start + (i + 1) * 0.1 - time.monotonic()))
        assert client.reply().json["nbytes"] == 15_000


def test_body_that_the_server_does_not_read_is_not_called_slow(server: Server) -> None:
    with _prompt(server, _POST_UNREAD + b"Content-Length: 99999999\r\n\r\n") as client:
        client.send(b"x" * _MIB)
        reply = client.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")


def test_unread_upload_stops_the_sender_and_costs_no_memory(patient: Server) -> None:
    (frontend,) = patient.frontends()
    before, sent = frontend.memory_info().rss, 0
    with Client(patient.port) as client:
        client.send(b"POST /unread?s=6 HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % (200 * _MIB))
        client.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            while sent < 200 * _MIB:
                sent += client.socket.send(b"x" * _MIB)
        assert sent < 20 * _MIB
        assert frontend.memory_info().rss - before < 8 * _MIB
        client.socket.settimeout(15)
        assert client.reply().json == {"unread": True}


def test_early_answer_reaches_a_client_that_is_still_sending(patient: Server) -> None:
    with Client(patient.port) as client:
        reply = client.ask("/unread", b"x" * (64 * _MIB))
        assert (reply.json, reply.headers["connection"]) == ({"unread": True}, "close")
        assert client.seconds_to_end() <= _TOLERANCE_S


def test_connection_above_the_cap_gets_503_and_one_below_it_is_served(tmp_path: Path) -> None:
    with serving(tmp_path, {"max_connections": 3, "linger_s": 0.2}) as server:
        clients = [Client(server.port) for _ in range(3)]
        assert all(client.ask().status == 200 for client in clients)
        with Client(server.port) as extra:
            reply = extra.ask()
            assert (reply.status, reply.headers["retry-after"], reply.headers["connection"]) == (
                503,
                "1",
                "close",
            )
            assert reply.error_code == "QUEUE_FULL"
            assert extra.seconds_to_end() <= 0.2 + _TOLERANCE_S
        clients.pop().__exit__()
        wait_until(lambda: server.ask().status == 200)
        for client in clients:
            client.__exit__()


def test_reader_that_takes_nothing_is_cut_off_and_the_application_learns_it(server: Server) -> None:
    disconnects = _state(server)["disconnects"]
    with _prompt(server, request("/stream"), receive_buffer_nbytes=65536):
        wait_until(lambda: _state(server)["disconnects"] > disconnects)
        assert _state(server)["waiting_nbytes"] == 0


def test_slow_reader_that_makes_progress_is_not_cut_off(patient: Server) -> None:
    with Client(patient.port, receive_buffer_nbytes=65536) as client:
        client.send(request(f"/large?n={16 * _MIB}"))
        start = time.monotonic()
        while time.monotonic() - start < 4.0:
            client.socket.recv(200_000)
            threading.Event().wait(0.1)
        assert patient.state()["sending"] == 1
        client.socket.settimeout(60)
        while client.socket.recv(_MIB):
            if patient.state()["sending"] == 0:
                break


def test_large_response_waits_in_the_application_and_not_in_the_transport(patient: Server) -> None:
    nbytes = 64 * _MIB
    with Client(patient.port, receive_buffer_nbytes=65536) as client:
        client.send(request(f"/large?n={nbytes}"))
        wait_until(lambda: patient.state()["waiting_nbytes"] > 0)
        state = patient.state()
        assert state["sending"] == 1
        assert state["waiting_nbytes"] <= _MIB
        reply = client.reply()
        assert len(reply.body) == nbytes
        assert set(reply.body) == {ord("x")}
    wait_until(lambda: patient.state()["sending"] == 0)


def test_response_in_several_writes_does_not_wait_for_acknowledgements(patient: Server) -> None:
    once_s, thrice_s = [], []
    with Client(patient.port) as client:
        for _ in range(40):
            start = time.monotonic()
            client.send(b"HEAD /two HTTP/1.1\r\nHost: t\r\n\r\n")
            assert client.socket.recv(_MIB).endswith(b"\r\n\r\n")
            once_s.append(time.monotonic() - start)
            start = time.monotonic()
            assert client.ask("/two").body == b"halfhalf"
            thrice_s.append(time.monotonic() - start)
    assert statistics.median(thrice_s) < statistics.median(once_s) + 0.03


def _head(nbytes: int) -> bytes:
    """A request whose target and fields, as the server counts them, have `nbytes`."""
    counted = len("/echo") + len("Host: t\r\n") + len("X: \r\n")
    return b"GET /echo HTTP/1.1\r\nHost: t\r\nX: " + b"x" * (nbytes - counted) + b"\r\n\r\n"


@pytest.mark.parametrize(("nbytes", "status"), [(65535, 200), (65536, 200), (65537, 431), (200_000, 431)])
def test_head_is_limited_to_64_kib(patient: Server, nbytes: int, status: int) -> None:
    with Client(patient.port) as client:
        client.send(_head(nbytes))
        reply = client.reply()
        assert reply.status == status
        if status == 431:
            assert (reply.error_code, reply.headers["connection"]) == ("HEADERS_TOO_LARGE", "close")


def test_head_without_end_is_refused_before_it_fills_memory(patient: Server) -> None:
    with Client(patient.port) as client:
        client.send(b"GET / HTTP/1.1\r\nHost: t\r\nX: " + b"x" * 100_000)
        assert client.reply().status == 431


def test_trailers_are_limited_and_do_not_reach_the_application(patient: Server) -> None:
    chunked = b"POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
    with Client(patient.port) as client:
        client.send(chunked + b"X-Late: 1\r\n\r\n")
        reply = client.reply().json
        assert (reply["nbytes"], reply["names"]) == (3, ["host", "transfer-encoding"])
        client.send(chunked)
        client.send(b"X-Late: " + b"x" * 600_000)
        assert client.reply().status == 431


_MALFORMED = {
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
    "unknown method": b"BREW /echo HTTP/1.1\r\nHost: t\r\n\r\n",
    "unknown version": b"GET /echo HTTP/7.0\r\nHost: t\r\n\r\n",
    "no host": b"GET /echo HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /echo HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "length and chunked": _POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": _POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": _POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "list of lengths": _POST + b"Content-Length: 3, 3\r\n\r\nabc",
    "negative length": _POST + b"Content-Length: -1\r\n\r\n",
    "huge length": _POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "chunked not last": _POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "odd chunked": _POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "bad chunk size": _POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "space before colon": b"GET /echo HTTP/1.1\r\nHost : t\r\n\r\n",
    "folded field": b"GET /echo HTTP/1.1\r\nHost: t\r\nX: a\r\n b\r\n\r\n",
    "bare line feeds": b"GET /echo HTTP/1.1\nHost: t\n\n",
    "zero byte": b"GET /echo HTTP/1.1\r\nHost: t\r\nX: a\x00b\r\n\r\n",
    "version 0.9": b"GET /echo HTTP/0.9\r\nHost: t\r\n\r\n",
    "version 2.0": b"GET /echo HTTP/2.0\r\nHost: t\r\n\r\n",
    "fragment": b"GET /echo#x HTTP/1.1\r\nHost: t\r\n\r\n",
    "connect": b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n",
}


@pytest.mark.parametrize("sent", _MALFORMED.values(), ids=_MALFORMED.keys())
def test_malformed_request_gets_400_as_json_and_the_connection_ends(patient: Server, sent: bytes) -> None:
    with Client(patient.port) as client:
        client.send(sent)
        reply = client.reply()
        assert (reply.status, reply.error_code, reply.headers["connection"]) == (
            400,
            "INVALID_INPUT",
            "close",
        )
        assert client.seconds_to_end() <= _TOLERANCE_S


def test_garbage_behind_a_request_does_not_take_its_answer(patient: Server) -> None:
    with Client(patient.port) as client:
        client.send(request("/unread?s=0.3") + request("/echo") + b"garbage\r\n\r\n")
        assert client.reply().json == {"unread": True}
        assert client.reply().json["path"] == "/echo"
        assert client.reply().status == 400
        assert client.seconds_to_end() <= _TOLERANCE_S


def test_pipelined_requests_are_answered_in_order_up_to_a_number(patient: Server) -> None:
    with Client(patient.port) as client:
        client.send(request("/unread?s=0.2") + b"".join(request(f"/echo/{i}") for i in range(64)))
        assert client.reply().json == {"unread": True}
        assert [client.reply().json["path"] for _ in range(64)] == [f"/echo/{i}" for i in range(64)]
        client.send(request("/unread?s=0.2") + request() * 65)
        assert [client.reply().status for _ in range(66)] == [200] * 65 + [400]


def test_expect_100_continue(patient: Server) -> None:
    with Client(patient.port) as client:
        client.send(b"POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert client.reply().status == 100
        client.send(b"abc")
        assert client.reply().json["nbytes"] == 3
        assert client.ask().status == 200


def test_head_and_body_leave_in_one_write(patient: Server) -> None:
    with socket.create_connection(("127.0.0.1", patient.port), timeout=PATIENCE_S) as connection:
        for _ in range(30):
            connection.sendall(request("/echo"))
            head, _, body = connection.recv(65536).partition(b"\r\n\r\n")
            assert b"content-length: %d" % len(body) in head and body


def test_offer_of_another_protocol_is_served_as_http_1(patient: Server) -> None:
    offer = (
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
    )
    with Client(patient.port) as client:
        assert client.ask(body=b"abc", fields=offer).json["nbytes"] == 3
        client.send(request(fields=offer) + request("/echo/next"))
        assert client.reply().json["path"] == "/echo"
        assert client.reply().json["path"] == "/echo/next"


@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        ("http://other/echo/a%20b?x=1", "/echo/a b", "other"),
        ("http://[::1]:80", "/", "[::1]:80"),
        ("/echo", "/echo", "test"),
        ("*", "*", "test"),
    ],
)
def test_forms_of_the_target_of_which_an_absolute_one_names_the_host(
    patient: Server, target: str, path: str, host: str
) -> None:
    reply = patient.ask(target)
    assert (reply.json["path"], reply.json["hosts"]) == (path, [host])


def test_no_access_log_no_server_field_and_no_descriptor_left(server: Server) -> None:
    (frontend,) = server.frontends()
    with _prompt(server) as client:
        assert "server" not in client.reply().headers
    assert "/echo" not in (server.log.parent / "out").read_text() + server.log.read_text()
    wait_until(lambda: len(_connections(frontend)) == 0)


def _connections(frontend: psutil.Process) -> list[int]:
    return [one.fd for one in frontend.net_connections("tcp") if one.status != psutil.CONN_LISTEN]


def _processor_s(server: Server, frontend: psutil.Process) -> float:
    """Processor time of 200 requests, each on a connection of its own."""
    before = frontend.cpu_times()
    for _ in range(200):
        assert server.ask().status == 200
    after = frontend.cpu_times()
    return float(after.user + after.system - before.user - before.system)


def test_thousand_silent_connections_do_not_slow_others_down(tmp_path: Path) -> None:
    with serving(tmp_path, {"max_connections": 2000, "header_deadline_s": 300.0}) as server:
        (frontend,) = server.frontends()
        alone_s = _processor_s(server, frontend)
        before = frontend.memory_info().rss
        silent = [Client(server.port) for _ in range(1000)]
        wait_until(lambda: len(_connections(frontend)) == len(silent), what="all connections")
        assert _processor_s(server, frontend) < 2 * alone_s + 0.5
        assert frontend.memory_info().rss - before < 1000 * 30_000
        for client in silent:
            client.__exit__()


def test_native_asgi_worker_serves_the_same_application(tmp_path: Path) -> None:
    with serving(tmp_path, worker_class="asgi") as server, Client(server.port) as client:
        assert client.ask(body=b"abc").json["nbytes"] == 3
        assert client.ask("/two").status == 200
