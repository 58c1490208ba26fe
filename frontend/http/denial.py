"""HTTP answers to WebSocket handshakes that are refused (ASGI extension `websocket.http.response`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from falcon.asgi import Request, WebSocket

SEND_KEY = "penstock.send"
"""Where the application leaves the server's `send` in the scope of a WebSocket."""
HANDSHAKE_ANSWER = "websocket.http.response"
"""The ASGI extension."""


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
