"""Lets calls in by their heads, before any byte of a request is read, and bounds the calls of each caller.

1. With keys set, a call without a valid key of the method's scope ends on its head and holds no place.
2. A call that is let in holds a place of `grpc.max_rpcs` until its end: on account of its key, and without keys on
   account of the address that it came from (`places`).
3. Methods that are open to all, such as health checks, have a few places of their own, by address.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpc import aio

from frontend.access.gate import Gate
from frontend.access.scopes import Need
from frontend.grpc.call import head_of
from frontend.grpc.connections import CallsByConnection, Peer, host_of
from frontend.http.places import Places
from ipc.errors import AccessRefused, PenstockError, QueueFull
from ipc.settings import Settings

Rpc = aio.ServicerContext[Any, Any]

OPEN_RPCS = 256
"""Calls at a time of methods that need no key."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A call at the door. If it is let in (`refusal` is None), its end must call `leave`."""

    caller: str
    leave: Callable[[], None]
    refusal: PenstockError | None = None


class Door:
    """The door of a frontend. A method that `needs` does not name needs a valid key of any scope."""

    def __init__(self, access: Gate, settings: Settings) -> None:
        self.needs: dict[str, Need | None] = {}
        self.calls = CallsByConnection()
        """Calls that were let in, by connection."""
        self._access, self._settings = access, settings
        self._places, self._open_places = Places(settings.grpc.max_rpcs), Places(OPEN_RPCS)

    def message_within_s(self, path: str) -> float:
        """Seconds for the message of a call: of methods open to all those of a head, else those of a request."""
        settings = self._settings
        is_open = self.needs.get(path) == ""
        return settings.server.header_deadline_s if is_open else settings.limits.request_timeout_s

    def enter(self, path: str, rpc: Rpc) -> Entry:
        """Decide on a call by its head."""
        name = rpc.peer()
        peer = Peer.named(name)
        need = self.needs.get(path)
        try:
            caller = self._caller(path, need, rpc, name)
        except AccessRefused as error:
            return Entry("", _nothing, error)
        places = self._open_places if need == "" else self._places
        if not places.take(caller):
            return Entry(caller, _nothing, _no_place(places.limit, need == ""))
        self.calls.begin(peer)

        def leave() -> None:
            places.give(caller)
            self.calls.end(peer)

        return Entry(caller, leave)

    def _caller(self, path: str, need: Need | None, rpc: Rpc, peer: str) -> str:
        """The account of a call's place: the id of its key, or its address. Raises an `AccessRefused`."""
        if need != "":
            head = head_of(path, dict(rpc.invocation_metadata() or ()), peer)
            access = self._access
            grant = access.caller(head) if need is None else access.grant_for(head, need, spend=False)
            if grant.caller:
                return grant.caller
        return host_of(Peer.named(peer))


def _no_place(limit: int, is_open: bool) -> QueueFull:
    what = "calls that need no key" if is_open else "rpcs (grpc.max_rpcs)"
    return QueueFull(
        f"this server takes {limit} {what} at a time, and of one caller no more than others leave free",
        retry_after_s=1,
    )


def _nothing() -> None:
    """A refused call holds nothing."""
