"""Lets a request in or not, by its head alone: the key, its scope, its rate.

| | no key | wrong key | scope missing | rate used up |
|---|---|---|---|---|
| open paths | in | in | in | in |
| admin paths | 401 | 403 | 403 | 429 |
| all others | 401 | 401 | 403 | 429 |

1. The key is in the head: `Authorization: Bearer KEY`, `X-API-Key: KEY`, or a WebSocket subprotocol. A page cannot set
   headers on a WebSocket, and a key in an address ends up in logs and histories. So a WebSocket may offer the key as a
   subprotocol, `penstock.key.<KEY>`, beside its real subprotocol; the offer of the key is never selected.
2. Each key has a rate over all frontends (`RateMeter`). Without a keys file `Keyless` decides.
3. `Gate.admit` decides once, before a body is read, and keeps the decision in the ASGI scope. `AccessMiddleware` raises
   the refusal later, when the request has its ids.

`Keyless` is the access to a server without keys: a caller is known by the connection, the head and two settings only.

| | refused |
|---|---|
| any request | a `Host` that is no address, not `localhost`, and not in `server.allowed_hosts` |
| what changes the server | callers on other machines, behind proxies, and pages of other sites |
| a body in a form that HTML forms send | pages of other sites |

The first row ends DNS rebinding: a page of `evil.example` whose name now leads here still sends that name. Browsers ask
before a page sends JSON to another site, and get leave by `server.cors_origins`; they do not ask before a form.

`Restrictions` are groups of endpoints that answer only to requests with a secret header, whatever key a request has:
the file that `kserve.restricted_file` names.

    - apis: [model-repository, shared-memory]
      header: x-penstock-admin
      value: at least sixteen characters
"""

from __future__ import annotations

import hmac
import ipaddress
import math
import mmap
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import msgspec
import numpy as np

from frontend.access import api_keys
from frontend.route_rows import Need
from ipc.addresses import is_loopback
from ipc.errors import AccessRefused, ConfigError, Forbidden, RateLimited, Unauthenticated
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
SUBPROTOCOL = "penstock.key."
MAX_NBYTES = 256
_OFFER = b"sec-websocket-protocol"
_PREFLIGHT = b"access-control-request-method"


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
            return is_loopback(client[0])
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
    types = [
        value.partition(b";")[0].strip().lower() for name, value in headers if name == b"content-type"
    ] or [b""]
    return next((one for one in types if one in _FORM_TYPES), types[0])


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
    if name == "localhost" or is_loopback(name):
        return "loopback"
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "name"
    return "address"


def presented_key(scope: dict[str, Any]) -> str:
    """The key in the head, "" without a key. Raises `Unauthenticated` for two keys, or an impossible key."""
    sent = set(_sent_keys(scope["headers"], scope["type"] == "websocket"))
    if not sent:
        return ""
    if len(sent) > 1:
        raise Unauthenticated("more than one key was sent", presented=True)
    value = sent.pop()
    if len(value) > MAX_NBYTES or not value.isascii():
        raise Unauthenticated("the key that was sent is not valid", presented=True)
    return value.decode("ascii")


def _sent_keys(headers: Iterable[tuple[bytes, bytes]], websocket: bool) -> Iterator[bytes]:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() != b"bearer":
                raise Unauthenticated("header Authorization: expected the form 'Bearer KEY'", presented=True)
            yield key.strip()
        elif name == b"x-api-key":
            yield value.strip()
    if websocket:
        mark = SUBPROTOCOL.encode()
        yield from (offer.removeprefix(mark) for offer in _offers(headers) if offer.startswith(mark))


def _offers(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    for name, value in headers:
        if name == _OFFER:
            yield from (offer.strip() for offer in value.split(b","))


ROWS = 64
"""Frontends with a row of their own, in a reload old and new. More frontends share rows, which costs accuracy only."""


class RateMeter:
    """Clocks of `keys` keys. `clock` gives CLOCK_MONOTONIC nanoseconds, the same in all processes of a host."""

    def __init__(self, keys: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._memory = mmap.mmap(-1, max(1, keys) * ROWS * 8)
        self._paid_until = np.frombuffer(self._memory, np.int64).reshape(-1, ROWS)
        self._clock, self._row = clock, 0

    def use_row(self, slot: int) -> None:
        """This process is the frontend of that slot."""
        self._row = slot % ROWS

    def spend(self, key: int, requests_per_s: float, burst: int) -> None:
        """Pay for a request of key number `key`. Raises `RateLimited` with the time until the next is let in."""
        now, step_ns = self._clock(), math.ceil(1e9 / requests_per_s)
        clocks = self._paid_until[key]
        start_ns = max(int(clocks.max()), now)
        early_ns = start_ns - now - step_ns * (burst - 1)
        if early_ns > 0:
            raise RateLimited(
                f"this key may send {requests_per_s:g} requests per second, {burst} at once",
                retry_after_s=max(1, math.ceil(early_ns / 1e9)),
            )
        clocks[self._row] = start_ns + step_ns


SCOPE_KEY = "penstock.access"
_NOBODY_DIGEST = api_keys.digest("")


@dataclass(frozen=True, slots=True)
class Grant:
    """A caller that was let in; `caller` is the public id of the key. Without a key all fields have their defaults.

    `admin`: the path needs the scope admin. `operates`: the key has that scope, whatever the path needs.
    """

    name: str = ""
    caller: str = ""
    share: float = 1.0
    admin: bool = False
    operates: bool = False


ANONYMOUS = Grant()


@dataclass(frozen=True, slots=True)
class Decision:
    """The caller, as far as known, and the reason of a refusal."""

    grant: Grant = ANONYMOUS
    refusal: AccessRefused | None = None


_LET_IN = Decision()
"""The decision of open paths, and of most requests to a server without keys."""


class Gate:
    """The keys of a server and the rules for its paths."""

    def __init__(
        self,
        entries: tuple[api_keys.KeyEntry, ...] = (),
        open_metrics: bool = True,
        keyless: Keyless | None = None,
    ) -> None:
        self.entries, self.open_metrics, self._keyless = entries, open_metrics, keyless or Keyless()
        self.meter = RateMeter(len(entries))
        self._by_id = {entry.id: (number, entry) for number, entry in enumerate(entries)}

    @classmethod
    def of(cls, server: Server) -> Gate:
        """The gate that the settings name. Raises `ConfigError` when the keys file is wrong."""
        entries = api_keys.read(Path(server.keys_file)) if server.keys_file else ()
        return cls(entries, server.open_metrics, Keyless.of(server))

    @property
    def closed(self) -> bool:
        """Whether keys are needed at all."""
        return bool(self.entries)

    def grant_for(self, scope: dict[str, Any], need: Need, spend: bool = True) -> Grant:
        """The caller of an ASGI scope. Raises an `AccessRefused`. With `spend` the call counts against the rate."""
        decision = self._decide(scope, need, spend)
        if decision.refusal is not None:
            raise decision.refusal
        return decision.grant

    def caller(self, scope: dict[str, Any]) -> Grant:
        """The owner of the key in the head, of any scope and rate. Raises `Unauthenticated` where keys are needed."""
        if not self.closed:
            return ANONYMOUS
        entry = self._find(presented_key(scope))[1]
        return Grant(entry.name, entry.id, entry.share)

    def spend(self, grant: Grant) -> None:
        """Count another request of a caller that was let in. Raises `RateLimited`."""
        if grant.caller:
            number, entry = self._by_id[grant.caller]
            if entry.requests_per_s:
                self.meter.spend(number, entry.requests_per_s, entry.allowed_burst)

    def admit(self, scope: dict[str, Any], need: Need) -> bool:
        """Decide once whether a request comes in, by the `need` of its path; keep the decision in the ASGI scope.

        Returns whether the request is let in.

        A preflight never carries a key, and its answer holds no data, so a preflight is let in as on an open path.
        """
        decision = scope[SCOPE_KEY] = self._decide(scope, "" if _is_preflight(scope) else need)
        return decision.refusal is None

    def _decide(self, scope: dict[str, Any], need: Need, spend: bool = True) -> Decision:
        if not self.closed:
            refused = self._keyless.refusal(scope, need)
            return _LET_IN if refused is None else Decision(refusal=refused)
        if not need:
            return _LET_IN
        try:
            number, entry = self._find(presented_key(scope))
        except Unauthenticated as error:
            wrong = need == "admin" and error.presented
            return Decision(refusal=Forbidden(error.message) if wrong else error)
        refusal = self._limit(number, entry, need, spend)
        operates = "admin" in entry.scopes
        return Decision(Grant(entry.name, entry.id, entry.share, need == "admin", operates), refusal)

    def _find(self, key: str) -> tuple[int, api_keys.KeyEntry]:
        if not key:
            raise Unauthenticated("an API key is needed: send the header 'Authorization: Bearer KEY'")
        numbered = self._by_id.get(api_keys.id_of(key) or "")
        # NOTE: an unknown id is compared as well, so that the time does not tell which ids exist.
        known = numbered[1].digest if numbered else _NOBODY_DIGEST
        if not hmac.compare_digest(api_keys.digest(key), known) or numbered is None:
            raise Unauthenticated("the key that was sent is not valid", presented=True)
        return numbered

    def _limit(self, number: int, entry: api_keys.KeyEntry, need: str, spend: bool) -> AccessRefused | None:
        if need not in entry.scopes:
            return Forbidden(f"this key lacks the scope '{need}'")
        if entry.requests_per_s and spend:
            try:
                self.meter.spend(number, entry.requests_per_s, entry.allowed_burst)
            except RateLimited as error:
                return error
        return None


def _is_preflight(scope: dict[str, Any]) -> bool:
    return scope.get("method") == "OPTIONS" and any(name == _PREFLIGHT for name, _ in scope["headers"])


def decision_of(scope: dict[str, Any]) -> Decision:
    """The decision that `Gate.admit` kept in the scope; a scope without an decision is refused."""
    return scope.get(SCOPE_KEY) or Decision(refusal=Unauthenticated("the request was not checked"))


Api = Literal[
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
]
APIS: tuple[str, ...] = get_args(Api)
SETTING = "kserve.restricted_file"


class Restriction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A secret, and the groups that it opens."""

    apis: Annotated[tuple[Api, ...], msgspec.Meta(min_length=1)]
    header: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9-]{1,64}\Z")]
    value: Annotated[str, msgspec.Meta(pattern=r"\A[!-~]{16,256}\Z")]


class Restrictions:
    """The restricted groups; none without a file."""

    def __init__(self, restrictions: tuple[Restriction, ...] = ()) -> None:
        self._by_api = {api: one for one in restrictions for api in one.apis}

    @classmethod
    def of(cls, file: str) -> Restrictions:
        """The restrictions of a file; none for "". Raises `ConfigError` for mistakes, or a file open to others."""
        return cls(_read(Path(file))) if file else cls()

    def require_secret(self, api: Api, header: Callable[[str], str | None]) -> None:
        """Raise `Forbidden` if the group has a secret and `header` does not give it."""
        restriction = self._by_api.get(api)
        if restriction is None:
            return
        given = header(restriction.header) or ""
        if not hmac.compare_digest(given.encode("utf-8", "replace"), restriction.value.encode()):
            raise Forbidden(f"this endpoint is restricted: '{api}' needs the header {restriction.header}")


def _read(path: Path) -> tuple[Restriction, ...]:
    try:
        restrictions = msgspec.yaml.decode(
            api_keys.read_private_file(path, SETTING), type=tuple[Restriction, ...]
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"{SETTING} {path}: {error}") from None
    except (msgspec.DecodeError, ValueError, RecursionError):
        # NOTE: the message of the parser would show the secrets of the line.
        raise ConfigError(f"{SETTING} {path}: neither YAML nor JSON") from None
    apis = [api for one in restrictions for api in one.apis]
    twice = next((api for api in apis if apis.count(api) > 1), None)
    if twice is not None:
        raise ConfigError(f"{SETTING} {path}: '{twice}' is restricted twice")
    return restrictions
