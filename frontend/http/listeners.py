"""Which requests are served at all: the form of a path, and the addresses with the paths that each of them serves.

`normalize` decodes a path and brings the path into one form before ports, keys and routes look at it.

1. Percent-encoding is decoded once, as UTF-8; slashes may be encoded too, since names of models have slashes.
2. Slashes at the start become one. Further ones stay: keys of shared memory in paths begin with a slash.
3. A path that a proxy could read in another way is refused: a segment `.` or `..`, a backslash, a control character,
   percent signs that encode nothing.

Gunicorn listens on `addresses`; every frontend accepts on all of them.

1. `Listeners.serves` decides by the port of a request whether its path is served there. `server.bind` serves all paths,
   except /mcp, and /metrics if the settings want metrics elsewhere only.
2. Other requests are refused like an unknown path (`refuse`), before keys are looked at. WebSocket handshakes are
   refused with an HTTP answer (`deny`, ASGI extension `websocket.http.response`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, unquote

import orjson
from falcon.asgi import Request, WebSocket

from frontend.route_rows import MCP, METRICS
from frontend.scope import common_headers, scope_of_ids
from ipc import logs
from ipc.addresses import parse, port_of
from ipc.errors import ConfigError, InvalidInput
from ipc.settings import Server, Settings

_ERROR_KEY = "penstock.path_error"
_NO_ENCODING = re.compile(r"%(?![0-9A-Fa-f]{2})")
_REFUSED = re.compile(r"[\x00-\x1f\x7f\\]|(?:^|/)\.\.?(?:/|$)")
SEND_KEY = "penstock.send"
"""Where the application leaves the server's `send` in the scope of a WebSocket."""
HANDSHAKE_ANSWER = "websocket.http.response"
"""The ASGI extension."""
_IDS = (b"x-request-id", b"traceparent")


def normalized(raw: bytes) -> str:
    """The path of a request target. Raises `InvalidInput` for a path with two readings."""
    try:
        path = raw.decode("ascii")
        if "%" in path:
            if _NO_ENCODING.search(path):
                raise InvalidInput("path: every percent sign must begin an encoded byte such as %2F")
            path = unquote(path, errors="strict")
    except UnicodeDecodeError:
        raise InvalidInput("path: expected percent-encoded UTF-8") from None
    if _REFUSED.search(path):
        raise InvalidInput("path: the segments '.' and '..', backslashes and control characters are refused")
    return path if path == "*" else "/" + path.lstrip("/")


def normalize(scope: dict[str, Any]) -> bool:
    """Put the normalized path into an ASGI scope, or keep the reason for `check_path`; returns whether it has one."""
    try:
        scope["path"] = normalized(scope.get("raw_path") or quote(scope["path"]).encode())
    except InvalidInput as error:
        scope[_ERROR_KEY] = error
        return False
    return True


def check_path(scope: dict[str, Any]) -> None:
    """Raise the `InvalidInput` that `normalize` met."""
    error = scope.get(_ERROR_KEY)
    if error is not None:
        raise error


async def deny(
    req: Request, ws: WebSocket, status: int, body: Mapping[str, Any], headers: Mapping[str, str]
) -> None:
    """Answer a handshake with `status` and a JSON body; where the server cannot do that, it becomes a bare 403."""
    send = req.scope.get(SEND_KEY)
    if not ws.unaccepted or send is None or HANDSHAKE_ANSWER not in (req.scope.get("extensions") or {}):
        await ws.close()
        return
    fields = [(b"content-type", b"application/json"), (b"connection", b"close")]
    fields += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "websocket.http.response.start", "status": status, "headers": fields})
    await send({"type": "websocket.http.response.body", "body": orjson.dumps(body)})


def addresses(server: Server) -> list[str]:
    """All addresses, each once."""
    apart = server.metrics_bind, server.health_bind, server.mcp_bind
    return list(dict.fromkeys(filter(None, (server.bind, *apart))))


def check_addresses(config: Settings) -> None:
    """Raise `ConfigError` for addresses with the same port."""
    server, grpc = config.server, config.grpc
    Listeners(server)
    for bind, setting in binds(config).items():
        if (
            grpc.enabled
            and setting != "grpc.bind"
            and port_of(bind, setting) == port_of(grpc.bind, "grpc.bind")
        ):
            raise ConfigError(f"grpc.bind = {grpc.bind}: needs another port than {setting}, which has {bind}")


def binds(config: Settings) -> dict[str, str]:
    """Every address that this server listens on, gRPC's too, with the setting that names it."""
    server, grpc = config.server, config.grpc
    named = {server.bind: "server.bind", server.metrics_bind: "server.metrics_bind"}
    named.setdefault(server.health_bind, "server.health_bind")
    named.setdefault(server.mcp_bind, "server.mcp_port")
    if grpc.enabled:
        named.setdefault(grpc.bind, "grpc.bind")
    return {bind: setting for bind, setting in named.items() if bind}


class Listeners:
    """The paths that each port serves."""

    def __init__(self, server: Server) -> None:
        """Raises `ConfigError` as `check_addresses`."""
        if not server.metrics_on_bind and not server.metrics_bind:
            raise ConfigError("server.metrics_on_bind: false needs server.metrics_bind")
        self._metrics_port = _port(server.metrics_bind, "server.metrics_bind")
        self._health_port = _port(server.health_bind, "server.health_bind")
        self._metrics_on_bind = server.metrics_on_bind
        self._mcp_port = server.mcp_port
        self._alone = {self._metrics_port, self._health_port, self._mcp_port} - {0}
        taken = port_of(server.bind, "server.bind")
        if taken in (self._metrics_port, self._health_port) and taken:
            raise ConfigError(
                f"server.metrics_bind and server.health_bind need another port than server.bind, which has {taken}"
            )
        if self._metrics_port == self._health_port and server.metrics_bind != server.health_bind:
            raise ConfigError("server.metrics_bind and server.health_bind: one port on two hosts")
        if self._mcp_port and not taken:
            raise ConfigError(f"server.mcp_port needs HOST:PORT as server.bind, which is {server.bind}")
        if self._mcp_port and self._mcp_port in (taken, self._metrics_port, self._health_port):
            raise ConfigError(
                f"server.mcp_port = {self._mcp_port}: another address of this server has the port"
            )

    def serves(self, scope: dict[str, Any], is_probe: Callable[[str], bool]) -> bool:
        """Whether the port of an ASGI scope serves its path; `is_probe` tells the paths for the port of probes."""
        if not self._alone:
            return True
        path: str = scope["path"]
        port = (scope.get("server") or ("", 0))[1]
        if self._mcp_port and port == self._mcp_port:
            return path == MCP
        if port not in self._alone:
            return path != MCP and (self._metrics_on_bind or path != METRICS)
        if port == self._metrics_port and path == METRICS:
            return True
        return port == self._health_port and is_probe(path)


def _port(bind: str, setting: str) -> int:
    """The port of an address, 0 for none."""
    return parse(bind, setting)[1] if bind else 0


async def refuse(
    scope: dict[str, Any],
    send: Any,
    settings: Settings,
    unknown: Callable[[], tuple[int, bytes, dict[str, str]]],
) -> None:
    """Answer a request or a WebSocket handshake as its protocol answers an unknown path: `unknown` makes the answer.

    A handshake that the server cannot answer so gets a bare 403.
    """
    handshake = scope["type"] == "websocket"
    if handshake and HANDSHAKE_ANSWER not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close"})
        return
    given = {name: value.decode("latin-1") for name, value in scope["headers"] if name in _IDS}
    ids = scope_of_ids(given.get(_IDS[0], ""), given.get(_IDS[1], ""), settings.limits)
    logs.request_id.set(ids.request_id)
    status, body, fields = unknown()
    fields = {**fields, "Content-Length": str(len(body)), **common_headers(ids, settings.server)}
    if handshake:
        fields["Connection"] = "close"
    headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in fields.items()]
    kind = HANDSHAKE_ANSWER if handshake else "http.response"
    await send({"type": f"{kind}.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.body", "body": b"" if scope.get("method") == "HEAD" else body})
