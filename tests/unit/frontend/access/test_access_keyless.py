"""A server without keys: hosts, callers on its own machine, and pages of other sites."""

from __future__ import annotations

from typing import Any

import pytest

from frontend.access.gate import ANONYMOUS, Gate
from frontend.grpc.rpc import head_of
from frontend.protocols.registry import protocols
from ipc.errors import Forbidden
from ipc.settings import Server

ADMIN, INFER, OPEN = "/v1/admin/load/m", "/v1/encode/m", "/healthz"
HERE = ("127.0.0.1", 1)
FORM = (b"content-type", b"application/x-www-form-urlencoded")
Headers = list[tuple[bytes, bytes]]


def refusal(
    path: str,
    headers: Headers | None = None,
    client: Any = HERE,
    method: str = "POST",
    setting: Server | None = None,
    host: bytes | None = b"localhost:8080",
    **scope: Any,
) -> str:
    """Why a request is not let in; "" when it is."""
    fields = [*([] if host is None else [(b"host", host)]), *(headers or [])]
    asked = {"type": "http", "path": path, "headers": fields, "client": client, "method": method, **scope}
    try:
        gate = Gate.of(setting or Server())
        gate.grant_for(asked, protocols().need_of(path, gate.open_metrics))
    except Forbidden as error:
        return error.message
    return ""


KNOWN = (
    None, b"", b"localhost", b"LOCALHOST:80", b"localhost.:8080", b"127.0.0.1", b"10.1.2.3:9000", b"[::1]:8080",
    b"[fe80::1]", b"0.0.0.0:8080",
)  # fmt: skip
STRANGE = (
    b"evil.example", b"evil.example:8080", b"localhost.evil.example", b"127.0.0.1.evil.example", b"127.1", b"::1",
    b"2130706433", b":8080", b"localhost@evil.example", b"[evil.example]", b"\xff", b"x" * 5000, b"gpu.example",
)  # fmt: skip


@pytest.mark.parametrize(
    "path", [OPEN, INFER, "/metrics", "/", "/ws/status", "/v2", "/api/status", "/nowhere"]
)
def test_every_path_is_refused_under_the_name_of_another_host(path: str) -> None:
    for kind in ("http", "websocket"):
        for host in KNOWN:
            assert not refusal(path, host=host, type=kind), host
        for host in STRANGE:
            assert "server.allowed_hosts" in refusal(path, host=host, type=kind), host


def test_listed_hosts_and_the_one_of_the_address_are_answered() -> None:
    listed = Server(allowed_hosts=("GPU.example", "penstock"), bind="inside.example:8080")
    for host in (b"gpu.example", b"gpu.EXAMPLE.:443", b"penstock:8080", b"inside.example:1", b"localhost"):
        assert not refusal(INFER, host=host, setting=listed)
    assert refusal(INFER, host=b"x.gpu.example", setting=listed)
    assert refusal(INFER, [(b"host", b"evil.example")], setting=listed), "each of several fields counts"
    assert not refusal(INFER, host=b"evil.example", setting=Server(allowed_hosts=("*",)))
    assert refusal(ADMIN, host=b"gpu.example", setting=listed), "that name may lead to a proxy"
    assert refusal(INFER, host=b"fd", setting=Server(bind="fd://3")), "an inherited socket names no host"


@pytest.mark.parametrize(
    ("client", "scope", "local"),
    [
        (HERE, {}, True),
        (("127.8.9.1", 1), {}, True),
        (("::1", 1), {}, True),
        (("::ffff:127.0.0.1", 1), {}, True),
        (None, {}, True),
        (("", 0), {}, True),
        (None, {"server": ("/run/penstock.sock", None)}, True),
        (None, {"server": ("10.0.0.2", 8080)}, False),
        (("10.0.0.1", 1), {}, False),
        (("::ffff:10.0.0.1", 1), {}, False),
        (("localhost.evil.example", 1), {}, False),
        (head_of("/a.B/C", {}, "ipv4:127.0.0.1:5000")["client"], {}, True),
        (head_of("/a.B/C", {}, "ipv6:%5B::1%5D:5000")["client"], {}, True),
        (head_of("/a.B/C", {}, "unix:/run/x")["client"], {}, True),
        (head_of("/a.B/C", {}, "ipv4:10.0.0.1:5000")["client"], {}, False),
        (head_of("/a.B/C", {}, "unknown")["client"], {}, False),
        (head_of("/a.B/C", {}, "")["client"], {}, False),
    ],
)
def test_only_the_connection_shows_that_a_caller_is_on_this_machine(
    client: Any, scope: dict[str, Any], local: bool
) -> None:
    assert bool(refusal(ADMIN, client=client, **scope)) is not local
    assert not refusal(INFER, client=client, **scope), "all else is open"
    assert refusal(ADMIN, client=client, setting=Server(behind_proxy=True), **scope)


@pytest.mark.parametrize(
    "name",
    [
        "forwarded", "via", "x-forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip",
        "cf-connecting-ip", "true-client-ip", "client-ip", "x-client-ip", "x-cluster-client-ip", "cdn-loop",
        "fastly-client-ip", "x-envoy-external-address", "x-amzn-trace-id", "x-original-forwarded-for",
    ],
)  # fmt: skip
def test_a_field_of_any_proxy_shows_that_a_caller_is_not(name: str) -> None:
    assert refusal(ADMIN, [(name.encode(), b"127.0.0.1")])
    rpc = head_of(
        "/inference.GRPCInferenceService/RepositoryModelLoad", {name: "127.0.0.1"}, "ipv4:127.0.0.1:5"
    )
    with pytest.raises(Forbidden):
        Gate().grant_for(rpc, "admin")
    assert Gate().grant_for(rpc, "infer") is ANONYMOUS
    assert not refusal(INFER, [(name.encode(), b"127.0.0.1")])


@pytest.mark.parametrize(
    ("headers", "foreign"),
    [
        ([], False),
        ([(b"sec-fetch-site", b"none")], False),
        ([(b"sec-fetch-site", b"same-origin"), (b"origin", b"http://localhost:8080")], False),
        ([(b"referer", b"http://localhost:8080/docs")], False),
        ([(b"sec-fetch-site", b"cross-site")], True),
        ([(b"sec-fetch-site", b"same-site")], True),
        ([(b"sec-fetch-site", b"")], True),
        ([(b"sec-fetch-site", b"same-origin"), (b"origin", b"http://evil.example")], True),
        ([(b"origin", b"http://localhost:9000")], True),
        ([(b"origin", b"null")], True),
        ([(b"origin", b"")], True),
        ([(b"referer", b"https://evil.example/page")], True),
    ],
)
def test_pages_of_other_sites_change_nothing_and_send_no_forms(headers: Headers, foreign: bool) -> None:
    assert ("other sites" in refusal(ADMIN, headers)) is foreign
    assert ("other sites" in refusal(ADMIN, headers, method="GET")) is foreign
    for kind in (b"text/plain;charset=UTF-8", FORM[1], b"Multipart/Form-Data; boundary=x", b""):
        assert ("Content-Type" in refusal(INFER, [*headers, (b"content-type", kind)])) is foreign, kind
    assert ("Content-Type" in refusal(INFER, headers)) is foreign
    for kind in (
        b"application/json",
        b"application/msgpack",
        b"application/octet-stream",
        b"application/grpc",
    ):
        assert not refusal(INFER, [*headers, (b"content-type", kind)]), "a browser asks before it sends that"
    assert not refusal(INFER, headers, method="GET")
    assert not refusal("/ws/status", headers, type="websocket"), "server.status_origins decides"


def test_types_of_forms_are_taken_from_all_others() -> None:
    for kind in (FORM, (b"content-type", b"text/plain")):
        assert not refusal(INFER, [kind])


def test_a_form_type_beside_another_is_a_form() -> None:
    sent = [(b"origin", b"http://evil.example"), (b"content-type", b"application/json"), FORM]
    assert refusal(INFER, sent)
