"""Access to a server without keys: a caller is known by the connection, the head and two settings only.

| | refused |
|---|---|
| any request | a `Host` that is no address, not `localhost`, and not in `server.allowed_hosts` |
| what changes the server | callers on other machines, behind proxies, and pages of other sites |
| a body in a form that HTML forms send | pages of other sites |

The first row ends DNS rebinding: a page of `evil.example` whose name now leads here still sends that name. Browsers ask
before a page sends JSON to another site, and get leave by `server.cors_origins`; they do not ask before a form.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Any, Literal
from urllib.parse import urlsplit

from frontend.access.scopes import Need
from ipc.errors import Forbidden
from ipc.settings import Server

_DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_ANY = "*"
_MOST_NBYTES = 512
"""Bytes of a field that are looked at, more than any name of a host has."""
_FORWARDING = frozenset(
    (
        b"via",
        b"x-real-ip",
        b"x-client-ip",
        b"client-ip",
        b"true-client-ip",
        b"x-true-client-ip",
        b"x-cluster-client-ip",
        b"x-original-forwarded-for",
        b"x-original-host",
        b"x-original-url",
        b"x-rewrite-url",
        b"x-host",
        b"x-scheme",
        b"x-remote-ip",
        b"x-remote-addr",
        b"x-originating-ip",
        b"x-proxyuser-ip",
        b"proxy-client-ip",
        b"wl-proxy-client-ip",
        b"front-end-https",
        b"incap-client-ip",
    )
)
_FORWARDING_PREFIXES = (
    b"forwarded",
    b"x-forwarded",
    b"cf-",
    b"cdn-",
    b"fastly-",
    b"fly-",
    b"x-envoy-",
    b"x-azure-",
    b"x-appengine-",
    b"x-amzn-",
    b"x-arr-",
    b"x-vercel-",
    b"x-nf-",
)
"""Fields that proxies and content networks add. Any of them shows a proxy; their absence shows nothing."""
_FORM_TYPES = (b"", b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data")
"""Media types that a page may send to any site without asking; "" stands for a body without a type."""
_READING = ("GET", "HEAD", "OPTIONS")


class Keyless:
    """The rules of a server; `hosts` are the names that it answers to beside `localhost`, in lower case."""

    def __init__(self, hosts: Collection[str] = (), behind_proxy: bool = False) -> None:
        self._hosts, self._behind_proxy = frozenset(hosts), behind_proxy

    @classmethod
    def of(cls, server: Server) -> Keyless:
        """The rules of the settings."""
        binds = (server.bind, server.metrics_bind, server.health_bind)
        own = (bind.rpartition(":")[0] for bind in binds if not bind.startswith(("unix:", "fd:")))
        return cls({name.lower() for name in (*server.allowed_hosts, *own) if name}, server.behind_proxy)

    def refusal(self, scope: dict[str, Any], need: Need) -> Forbidden | None:
        """Why an ASGI scope is not let in, None if it is."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        hosts = [_text(value) for name, value in headers if name == b"host" and value.strip()]
        for host in hosts:
            if not self._knows(host):
                return Forbidden(
                    f"a server without keys does not answer to the host {host[:100]!r}: expected an address, "
                    "'localhost' or a name in the setting server.allowed_hosts"
                )
        foreign = _is_foreign(headers, hosts[0] if hosts else "")
        if foreign and need == "admin":
            return Forbidden("pages of other sites may not change this server")
        writes = scope["type"] == "http" and scope["method"] not in _READING
        if foreign and writes and _body_type(headers) in _FORM_TYPES:
            return Forbidden(
                "header Content-Type: a page of another site must send application/json to a server without keys"
            )
        if need == "admin" and not self._is_local(scope, hosts):
            return Forbidden(
                "without API keys this path answers only to callers on the server's own machine that use "
                "'localhost' or a loopback address, and to none while server.behind_proxy is set"
            )
        return None

    def _knows(self, host: str) -> bool:
        kind = _kind(host)
        return kind != "name" or _ANY in self._hosts or _name(host) in self._hosts

    def _is_local(self, scope: dict[str, Any], hosts: list[str]) -> bool:
        if self._behind_proxy or any(_kind(host) != "loopback" for host in hosts):
            return False
        if any(name in _FORWARDING or name.startswith(_FORWARDING_PREFIXES) for name, _ in scope["headers"]):
            return False
        client = scope.get("client")
        if client and client[0]:
            return _is_loopback(client[0])
        # NOTE: the peer of a TCP connection that was reset is unknown too, though its request can still be read.
        return not (scope.get("server") or ("", None))[1]


def same_origin(origin: str, host: str) -> bool:
    """Whether a page of `origin` came from `host`, by host and port.

    The scheme is taken from the page: behind a proxy that ends TLS the server does not know its own.
    """
    try:
        page = urlsplit(origin)
        own = urlsplit(f"{page.scheme}://{host}")
        default = _DEFAULT_PORTS.get(page.scheme)
        return bool(page.hostname) and (page.hostname, page.port or default) == (
            own.hostname,
            own.port or default,
        )
    except ValueError:
        return False


def _is_foreign(headers: Iterable[tuple[bytes, bytes]], host: str) -> bool:
    """Whether a page of another site made a browser send this request."""
    for name, value in headers:
        if name == b"sec-fetch-site" and value not in (b"same-origin", b"none"):
            return True
        if name in (b"origin", b"referer") and not same_origin(_text(value), host):
            return True
    return False


def _body_type(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The media type of the body without its parameters, "" for none; of several one that forms send."""
    found = [
        value.partition(b";")[0].strip().lower() for name, value in headers if name == b"content-type"
    ] or [b""]
    return next((one for one in found if one in _FORM_TYPES), found[0])


def _text(value: bytes) -> str:
    return value.strip()[:_MOST_NBYTES].decode("latin-1")


def _name(host: str) -> str:
    """The host of a `Host` field in lower case, without port, brackets and the dot of a full name."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


@lru_cache(maxsize=256)
def _kind(host: str) -> Literal["loopback", "address", "name"]:
    """The kind of host in a `Host` field; `localhost` counts as a loopback address."""
    name = _name(host)
    if name == "localhost" or _is_loopback(name):
        return "loopback"
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "name"
    return "address"


def _is_loopback(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
