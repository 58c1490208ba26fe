"""The shipped HAProxy and nginx samples in front of a real server: what they deny, forward and hold back."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from frontend.protocols.grpc_services import grpc_services
from frontend.protocols.registry import protocols
from ipc.protos import kserve_v2_pb2 as kserve
from ipc.protos import trtis_v1_pb2 as trtis
from tests.conformance.required_tool import required_tool
from tests.fakes.tensors import services_of
from tests.harness.keys import bearer, write_keys
from tests.harness.load import Load
from tests.harness.proxies import SAMPLES, Proxy, proxied
from tests.harness.rpc import Rpc, address_of, grpc_settings
from tests.harness.server import PATIENCE_S, Server, alive, serving, wait_until

Trick = Callable[[str], str]
REFUSED = (400, 403, 404, 405)
"""Nothing was done. 405: the path became the name of a model, which can only be read."""
CLIENTS = 6


@dataclass(frozen=True)
class Edge:
    """A server with both proxies in front; `admin` is a key that may do everything."""

    server: Server
    proxies: dict[str, Proxy]
    admin: str
    model: str = "fake/echo"


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    """One server for all tests; with an admin key, whatever passes a proxy is done."""
    for tool in (*SAMPLES, "openssl"):
        required_tool(tool)
    place = tmp_path_factory.mktemp("edge")
    made = write_keys(place / "keys.json", {"admin": {"scopes": ["infer", "admin"]}})
    settings = {
        "server.keys_file": place / "keys.json",
        "server.open_metrics": "false",
        "server.frontends": 2,
        # A busy machine starts a worker in more than the ten seconds of the default.
        "limits.restart_wait_s": 60,
        "limits.load_wait_s": 60,
        **grpc_settings(),
    }
    with serving(place, models=("fake/echo", "fake/wide"), settings=settings) as server, ExitStack() as stack:
        proxies = {}
        for name in SAMPLES:
            (place / name).mkdir()
            proxies[name] = stack.enter_context(proxied(name, server.port, address_of(server), place / name))
        yield Edge(server, proxies, made["admin"])


def status_of(edge: Edge, port: int, method: str, target: str, host: str = "") -> int:
    """Status of one request with the admin key, its target sent as it is; 0 when there is no answer."""
    host = host or f"127.0.0.1:{port}"
    head = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: 2\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in bearer(edge.admin).items())
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(head.encode("latin-1") + b"\r\n{}")
        answer = connection.makefile("rb").readline()
    return int(answer.split()[1]) if answer else 0


CLOSED = (
    ("GET", "/metrics"),
    ("POST", "/v1/admin/unload/fake/wide"),
    ("POST", "/v1/admin/load/fake/wide"),
    ("POST", "/v1/config/reload"),
    ("POST", "/v1/models/unload"),
    ("GET", "/v1/system/info"),
    ("GET", "/v2/logging"),
    ("GET", "/v2/trace/setting"),
    ("GET", "/v2/models/fake/echo/trace/setting"),
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/fake/wide/unload"),
    ("POST", "/v2/systemsharedmemory/region/r/register"),
    ("POST", "/v2/cudasharedmemory/unregister"),
    ("POST", "/api/modelcontrol/unload/wide"),
    ("POST", "/api/sharedmemorycontrol/register/r//key/0/4"),
    ("POST", "/api/sharedmemorycontrol/unregister/all"),
)
READABLE = ("/metrics", "/v2/logging", "/v2/trace/setting", "/v2/repository/index")
"""Those of `CLOSED` that the server itself answers 200 here without an effect."""


def _last(path: str, change: Callable[[str], str]) -> str:
    """`path` with its last letter but one changed."""
    return path[:-2] + change(path[-2]) + path[-1]


TRICKS: dict[str, Trick] = {
    "plain": lambda path: path,
    "first letter encoded": lambda path: f"/%{ord(path[1]):02x}{path[2:]}",
    "late letter encoded": lambda path: _last(path, lambda letter: f"%{ord(letter):02X}"),
    "all encoded": lambda path: "/" + "".join(f"%{ord(letter):02x}" for letter in path[1:]),
    "every slash encoded": lambda path: "/" + path[1:].replace("/", "%2F"),
    "encoded twice": lambda path: _last(path, lambda letter: f"%25{ord(letter):02x}"),
    "two slashes": lambda path: "/" + path,
    "three slashes": lambda path: "//" + path,
    "an encoded slash before": lambda path: "/%2f" + path[1:],
    "two slashes inside": lambda path: path[0] + path[1:].replace("/", "//"),
    "an encoded slash inside": lambda path: path[0] + path[1:].replace("/", "/%2F"),
    "a dot": lambda path: "/." + path,
    "a dot inside": lambda path: path[0] + path[1:].replace("/", "/./", 1),
    "up": lambda path: "/x/.." + path,
    "up from an open path": lambda path: "/v1/encode/fake/echo/../../../.." + path,
    "encoded up": lambda path: "/x/%2e%2E" + path,
    "up with encoded slashes": lambda path: "/x%2f..%2f" + path[1:],
    "up twice encoded": lambda path: "/x/%252e%252e" + path,
    "backslashes": lambda path: path.replace("/", "\\"),
    "encoded backslashes": lambda path: "/" + path[1:].replace("/", "%5C"),
    "parameters": lambda path: path[0] + path[1:].replace("/", ";a=b/", 1),
    "parameters behind": lambda path: path + ";a=b",
    "capitals": str.upper,
    "a slash behind": lambda path: path + "/",
    "an encoded slash behind": lambda path: path + "%2f",
    "a dot behind": lambda path: path + "/.",
    "a query": lambda path: path + "?a=/v1/encode/fake/echo",
    "an encoded query": lambda path: path + "%3fa=b",
    "a fragment": lambda path: path + "#a",
    "a fragment before": lambda path: "/#/.." + path,
    "a zero byte": lambda path: path + "%00",
    "a line end": lambda path: path + "%0a",
    "a broken byte": lambda path: path + "%zz",
    "a lone percent sign": lambda path: path + "%",
    "an overlong dot": lambda path: "/x/%c0%ae%c0%ae" + path,
    "half a character": lambda path: path + "%ff",
    "a space": lambda path: path + "%20",
    "absolute": lambda path: "http://127.0.0.1" + path,
    "absolute with two slashes": lambda path: "http://127.0.0.1/" + path,
    "absolute and encoded": lambda path: f"http://127.0.0.1/%{ord(path[1]):02x}{path[2:]}",
    "absolute of another host": lambda path: "http://evil.example" + path,
    "absolute in capitals": lambda path: "HTTP://127.0.0.1" + path,
    "without a slash": lambda path: path[1:],
}


@pytest.mark.parametrize("name", SAMPLES)
def test_no_trick_with_a_path_passes(edge: Edge, name: str) -> None:
    passed = [
        (trick, method, path, status)
        for trick, change in TRICKS.items()
        for method, path in CLOSED
        if (status := status_of(edge, edge.proxies[name].port, method, change(path))) not in (*REFUSED, 0)
    ]
    assert not passed, f"{len(passed)} of {len(TRICKS) * len(CLOSED)} passed: {passed[:10]}"
    assert status_of(edge, edge.proxies[name].port, "GET", "/v1/models") == 200


def test_the_server_itself_answers_what_the_proxies_deny(edge: Edge) -> None:
    for method, path in CLOSED:
        if path in READABLE:
            assert status_of(edge, edge.server.port, method, path) == 200, path
        else:
            assert protocols().need_of(path) == "admin", path


@pytest.mark.parametrize("name", SAMPLES)
def test_every_operation_that_needs_the_scope_admin_is_denied(edge: Edge, name: str) -> None:
    closed = [
        (route.method.upper(), re.sub(r"\{[^}]*\}", "x", route.path))
        for route in protocols().routes
        if route.need == "admin"
    ]
    assert len(closed) > 8
    for method, path in closed:
        assert status_of(edge, edge.proxies[name].port, method, path) == 404, path


def channel(proxy: Proxy, secure: bool) -> tuple[str, grpc.ChannelCredentials | None]:
    """Address and credentials for gRPC."""
    if not secure:
        return f"127.0.0.1:{proxy.grpc}", None
    return f"127.0.0.1:{proxy.tls}", grpc.ssl_channel_credentials(proxy.certificate.read_bytes())


ADMIN_RPCS = tuple(
    [(f"/inference.GRPCInferenceService/{name}", getattr(kserve, f"{name}Request")()) for name in (
        "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister", "TraceSetting",
        "LogSettings",
    )]
    + [(f"/nvidia.inferenceserver.GRPCService/{name}", getattr(trtis, f"{name}Request")()) for name in (
        "ModelControl", "SharedMemoryControl",
    )]
)  # fmt: skip


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("name", SAMPLES)
def test_grpc_passes_but_for_administration(edge: Edge, name: str, secure: bool) -> None:
    address, credentials = channel(edge.proxies[name], secure)
    own = [("grpc.use_local_subchannel_pool", 1)]
    opened = (
        grpc.insecure_channel(address, own)
        if credentials is None
        else grpc.secure_channel(address, credentials, own)
    )
    key = [("authorization", f"Bearer {edge.admin}")]
    with opened:
        ready = opened.unary_unary(
            "/inference.GRPCInferenceService/ModelReady",
            kserve.ModelReadyRequest.SerializeToString,
            kserve.ModelReadyResponse.FromString,
        )
        assert ready(kserve.ModelReadyRequest(name=edge.model), metadata=key, timeout=PATIENCE_S).ready
        for path, request in ADMIN_RPCS:
            with pytest.raises(grpc.RpcError) as caught:
                opened.unary_unary(path)(request.SerializeToString(), metadata=key, timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, path
    with Rpc(address_of(edge.server)) as direct:
        assert direct.call("LogSettings", kserve.LogSettingsRequest(), metadata=key).settings


def test_every_rpc_that_needs_the_scope_admin_is_among_them(tmp_path: Path) -> None:
    services = services_of(tmp_path, [], [])
    needing = {
        f"/{service.descriptor.full_name}/{name}"
        for service in grpc_services(services)
        for name, method in service.methods.items()
        if method.need not in ("", "infer")
    }
    assert needing <= {path for path, _ in ADMIN_RPCS}
    assert len(needing) == 10


@pytest.mark.parametrize("name", SAMPLES)
def test_tls_and_the_stream_of_the_live_page_pass_on_every_port(edge: Edge, name: str) -> None:
    proxy = edge.proxies[name]
    trusted = ssl.create_default_context(cafile=str(proxy.certificate))
    body = json.dumps({"items": [{"text": "a"}]}).encode()
    sent = urllib.request.Request(
        f"https://127.0.0.1:{proxy.tls}/v1/encode/{edge.model}",
        body,
        {"Content-Type": "application/json", "Accept": "application/json", **bearer(edge.admin)},
    )
    with urllib.request.urlopen(sent, timeout=PATIENCE_S, context=trusted) as answer:
        assert answer.status == 200 and len(json.load(answer)["items"]) == 1
    for port, scheme in ((proxy.port, "http"), (proxy.tls, "https")):
        lines = [
            "GET /ws/status HTTP/1.1",
            f"Host: localhost:{port}",
            f"Origin: {scheme}://localhost:{port}",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            *(f"{header}: {value}" for header, value in bearer(edge.admin).items()),
        ]
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as plain:
            connection = (
                trusted.wrap_socket(plain, server_hostname="localhost") if scheme == "https" else plain
            )
            connection.sendall("\r\n".join([*lines, "", ""]).encode())
            assert b" 101 " in connection.makefile("rb").readline()
            connection.close()


def kill_worker(edge: Edge) -> None:
    """kill -9, and wait for the next life."""
    server, starts = edge.server, edge.server.starts(0)
    os.kill(wait_until(server.worker_pid, what="a worker"), signal.SIGKILL)
    wait_until(lambda: server.starts(0) > starts, what="the next worker")


def kill_frontend(edge: Edge) -> None:
    """kill -9 to one of two, and wait for another."""
    server = edge.server
    before = set(wait_until(lambda: len(pids := server.frontend_pids()) == 2 and pids, what="two frontends"))
    os.kill(min(before), signal.SIGKILL)
    wait_until(lambda: len(set(server.frontend_pids()) - {min(before)}) == 2, what="a new frontend")


def reload(edge: Edge) -> None:
    """SIGHUP, and wait until all frontends are new ones."""
    server = edge.server
    before = wait_until(lambda: len(pids := server.frontend_pids()) == 2 and pids, what="two frontends")
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: not any(alive(pid) for pid in before), what="the end of the old frontends")
    wait_until(lambda: len(server.frontend_pids()) == 2, what="two new frontends")


EVENTS = (reload, kill_worker, kill_frontend)


def run_events(edge: Edge, rounds: int) -> None:
    """Every event `rounds` times under keep-alive load through both proxies; no request may fail."""
    with ExitStack() as stack:
        loads = {
            name: stack.enter_context(Load(proxy.port, CLIENTS, headers=bearer(edge.admin)))
            for name, proxy in edge.proxies.items()
        }
        for _ in range(rounds):
            for event in EVENTS:
                event(edge)
                seen = {name: load.done for name, load in loads.items()}
                wait_until(
                    lambda seen=seen: all(load.done >= seen[name] + 50 for name, load in loads.items()),
                    what="traffic",
                )
        for name, load in loads.items():
            outcome = load.stop()
            print(
                f"{name}: {load.done} requests, {outcome.failed} failed, {outcome.refused_connections} refused"
            )
            assert outcome.failed == 0, (
                name,
                outcome.statuses,
                outcome.wrong,
                outcome.broken[:5],
                outcome.bodies[:3],
            )
            assert outcome.refused_connections == 0
            assert outcome.statuses[200] > 100


@pytest.mark.long
def test_no_request_fails_through_reload_and_kills(edge: Edge) -> None:
    run_events(edge, 1)


@pytest.mark.long
def test_no_request_fails_through_many_reloads_and_kills(edge: Edge) -> None:
    run_events(edge, 6)
