"""What the shipped HAProxy and nginx samples send again after a lost connection, and over which connection."""

from __future__ import annotations

import contextlib
import http.client
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import grpc
import pytest

from ipc.protos import kserve_v2_pb2 as kserve
from tests.conformance.required_tool import required_tool
from tests.fuzz.http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    RST_STREAM,
    SETTINGS,
    block,
    frame,
    opening,
)
from tests.harness.ports import free_port
from tests.harness.proxies import SAMPLES, Proxy, proxied
from tests.harness.rpc import Rpc
from tests.harness.server import PATIENCE_S

CLIENTS = 6


class Upstream(socketserver.StreamRequestHandler):
    """One connection of a server that a proxy sends requests to; `answers` says which are lost."""

    def handle(self) -> None:
        """The requests of the connection, until one is lost with it."""
        with contextlib.suppress(ConnectionError):
            while line := self.rfile.readline():
                method, target, _ = line.decode().split()
                fields = dict(
                    iter(
                        lambda: self.rfile.readline().decode().lower().rstrip().partition(": ")[::2], ("", "")
                    )
                )
                self.rfile.read(int(fields.get("content-length", "0")))
                if not self.answers(method, target, fields):
                    return
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    def answers(self, method: str, target: str, fields: dict[str, str]) -> bool:
        """Whether a request is answered; otherwise its connection ends."""
        raise NotImplementedError


@contextlib.contextmanager
def upstream_of(handler: type[Upstream]) -> Iterator[int]:
    """The port of a server of such connections."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


class Losing(Upstream):
    """A server that answers every GET, and loses the connection of every POST that it has read."""

    posts: ClassVar[list[str]] = []
    heads: ClassVar[list[dict[str, str]]] = []

    def answers(self, method: str, target: str, fields: dict[str, str]) -> bool:
        """GET alone."""
        if method == "POST":
            self.posts.append(target)
            self.heads.append(fields)
        return method == "GET"


class Dying(Upstream):
    """A server of two lives: answers POST to `CLIENTS` at once in its first, whose connections lose all later POSTs."""

    first: ClassVar[threading.Barrier | None] = None

    def setup(self) -> None:
        """The connection belongs to the life of now."""
        super().setup()
        self.life = Dying.first

    def answers(self, method: str, target: str, fields: dict[str, str]) -> bool:
        """In the life of the connection alone."""
        is_alive = self.life is Dying.first or method == "GET"
        if is_alive and method == "POST" and self.life is not None:
            self.life.wait(PATIENCE_S)
        return is_alive


class Streams:
    """A client whose requests are streams of one connection with HTTP/2."""

    def __init__(self, proxy: Proxy) -> None:
        trusted = ssl.create_default_context(cafile=str(proxy.certificate))
        trusted.set_alpn_protocols(["h2"])
        plain = socket.create_connection(("127.0.0.1", proxy.tls), timeout=PATIENCE_S)
        self._socket = trusted.wrap_socket(plain, server_hostname="127.0.0.1")
        self._incoming = self._socket.makefile("rb")
        self._next = 1
        self._socket.sendall(b"".join(opening()))

    def post(self, path: str, body: bytes, count: int) -> list[bytes]:
        """The bodies of the answers to so many requests at once; nothing for a stream that the proxy resets."""
        head = {":method": "POST", ":scheme": "https", ":path": path, ":authority": "127.0.0.1"}
        bodies: dict[int, bytes] = {}
        for _ in range(count):
            self._socket.sendall(
                frame(HEADERS, END_HEADERS, self._next, block({**head, "content-length": f"{len(body)}"}))
                + frame(DATA, END_STREAM, self._next, body)
            )
            bodies[self._next] = b""
            self._next += 2
        left = set(bodies)
        while left:
            kind, flags, stream, payload = self._frame()
            if kind == SETTINGS and not flags & ACK:
                self._socket.sendall(frame(SETTINGS, ACK))
            if kind == DATA:
                bodies[stream] += payload
            if kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & END_STREAM):
                left.discard(stream)
        return list(bodies.values())

    def close(self) -> None:
        """Leave."""
        self._incoming.close()
        self._socket.close()

    def _frame(self) -> tuple[int, int, int, bytes]:
        head = self._incoming.read(9)
        assert len(head) == 9, "the connection ended"
        return (
            head[3],
            head[4],
            int.from_bytes(head[5:], "big"),
            self._incoming.read(int.from_bytes(head[:3], "big")),
        )


class Hearing(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers every rpc with nothing and keeps its metadata."""

    def __init__(self) -> None:
        self.heard: list[dict[str, str]] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """One rpc."""
        self.heard.append(dict(handler_call_details.invocation_metadata))
        return grpc.unary_unary_rpc_method_handler(lambda request, rpc: b"")


SEQUENCE = {"NV-InferRequest": "batch_size: 1 correlation_id: 7"}
AGAIN: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("/v1/encode/org/name", "{}", {}),
    ("/v1/score/org/name", "{}", {}),
    ("/v1/extract/org/name", "{}", {}),
    ("/v1/embeddings", "{}", {}),
    ("/v1/rerank", "{}", {}),
    ("/api/infer/m", "x", {"NV-InferRequest": "batch_size: 1"}),
    ("/api/infer/m/1", "x", {"NV-InferRequest": "batch_size: 1"}),
)
AGAIN_AT_HAPROXY: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("/v2/models/org/name/infer", '{"inputs": []}', {}),
    ("/v2/models/m/versions/1/infer", '{"inputs": []}', {}),
)
ONCE: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("/v2/models/s/infer", '{"parameters": {"sequence_id": 1}, "inputs": []}', {}),
    ("/v2/models/z/infer", "compressed", {"Content-Encoding": "gzip"}),
    ("/api/infer/s", "x", SEQUENCE),
    ("/v2/models/m/generate_stream", "{}", {}),
    ("/v1/nothing", "{}", {}),
    ("/v1/encodes/x", "{}", {}),
)


@pytest.mark.parametrize("name", SAMPLES)
def test_what_has_no_effect_is_sent_again_and_nothing_else(tmp_path: Path, name: str) -> None:
    required_tool(name), required_tool("openssl")
    Losing.posts.clear(), Losing.heads.clear()
    with (
        upstream_of(Losing) as port,
        proxied(name, port, f"127.0.0.1:{free_port()}", tmp_path) as proxy,
    ):
        for path, body, headers in (*AGAIN, *AGAIN_AT_HAPROXY, *ONCE):
            client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=PATIENCE_S)
            client.request("POST", path, body, headers)
            with contextlib.suppress(http.client.RemoteDisconnected):
                assert client.getresponse().status == 502
            client.close()
    again = {path for path in Losing.posts if Losing.posts.count(path) > 1}
    assert again == {path for path, *_ in (*AGAIN, *(AGAIN_AT_HAPROXY if name == "haproxy" else ()))}
    assert {path for path, *_ in ONCE} <= set(Losing.posts)
    for head in Losing.heads:
        assert (head["host"], head["x-forwarded-for"]) == (f"127.0.0.1:{proxy.port}", "127.0.0.1")
        assert head["x-request-id"]


@pytest.mark.parametrize("name", SAMPLES)
def test_no_try_is_lost_on_the_kept_connections_of_a_dead_frontend(tmp_path: Path, name: str) -> None:
    """A frontend that dies takes many kept connections along; a proxy may hear so only when it uses them."""
    required_tool(name), required_tool("openssl")
    Dying.first = threading.Barrier(CLIENTS)
    with (
        upstream_of(Dying) as port,
        proxied(name, port, f"127.0.0.1:{free_port()}", tmp_path) as proxy,
        ExitStack() as stack,
    ):
        clients = [
            stack.enter_context(
                contextlib.closing(http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=PATIENCE_S))
            )
            for _ in range(CLIENTS)
        ]

        def ask(together: list[http.client.HTTPConnection]) -> None:
            for client in together:
                client.request("POST", "/v1/encode/org/name", "{}")
            for client in together:
                response = client.getresponse()
                assert (response.status, response.read()) == (200, b"ok")

        for _ in range(3):
            ask(clients)
        Dying.first = None
        for client in clients:
            ask([client])


@pytest.mark.parametrize("name", SAMPLES)
def test_no_try_of_a_client_over_http_2_is_lost_on_kept_connections(tmp_path: Path, name: str) -> None:
    """HAProxy keeps connections for each connection of a client, which may have many requests at once."""
    required_tool(name), required_tool("openssl")
    Dying.first = threading.Barrier(CLIENTS)
    with (
        upstream_of(Dying) as port,
        proxied(name, port, f"127.0.0.1:{free_port()}", tmp_path) as proxy,
        contextlib.closing(Streams(proxy)) as client,
    ):
        for _ in range(3):
            assert client.post("/v1/encode/org/name", b"{}", CLIENTS) == [b"ok"] * CLIENTS
        Dying.first = None
        for _ in range(CLIENTS):
            assert client.post("/v1/encode/org/name", b"{}", 1) == [b"ok"]


@pytest.mark.parametrize("name", SAMPLES)
def test_an_rpc_is_told_to_come_from_a_proxy(tmp_path: Path, name: str) -> None:
    required_tool(name), required_tool("openssl")
    upstream, hearing = grpc.server(ThreadPoolExecutor(1)), Hearing()
    upstream.add_generic_rpc_handlers((hearing,))
    address = f"127.0.0.1:{upstream.add_insecure_port('127.0.0.1:0')}"
    upstream.start()
    with (
        upstream_of(Losing) as port,
        proxied(name, port, address, tmp_path) as proxy,
        Rpc(f"127.0.0.1:{proxy.grpc}") as rpc,
    ):
        rpc.call("ModelReady", kserve.ModelReadyRequest(name="m"))
    upstream.stop(None).wait(10)
    assert [metadata["x-forwarded-for"] for metadata in hearing.heard] == ["127.0.0.1"]
