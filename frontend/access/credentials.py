"""The key in the head of a request: `Authorization: Bearer KEY`, `X-API-Key: KEY`, or a WebSocket subprotocol.

A page cannot set headers on a WebSocket, and a key in an address ends up in logs and histories. So a WebSocket may
offer the key as a subprotocol, `penstock.key.<KEY>`, beside the one that it wants to speak; that is never selected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ipc.errors import Unauthenticated

SUBPROTOCOL = "penstock.key."
MAX_NBYTES = 256
_OFFER = b"sec-websocket-protocol"


def presented(scope: dict[str, Any]) -> str:
    """The one key that was sent, empty when there is none. Raises `Unauthenticated` for what cannot be a key."""
    found = set(_values(scope["headers"], scope["type"] == "websocket"))
    if not found:
        return ""
    if len(found) > 1:
        raise Unauthenticated("more than one key was sent", presented=True)
    value = found.pop()
    if len(value) > MAX_NBYTES or not value.isascii():
        raise Unauthenticated("the key that was sent is not valid", presented=True)
    return value.decode("ascii")


def _values(headers: Iterable[tuple[bytes, bytes]], websocket: bool) -> Iterator[bytes]:
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
