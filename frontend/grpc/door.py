"""Lets calls in by their heads, before any byte of a request is read, and bounds the calls of each caller.

1. With keys set, a call without a valid key of the method's scope ends on its head and holds no place.
2. A call that is let in holds a place of `grpc.max_rpcs` until its end: on account of its key, and without keys on
   account of the address that it came from (`places`).
3. Methods that are open to all, such as health checks, have a few places of their own, by address.
"""

from __future__ import annotations

from frontend.access.gate import Gate
from frontend.access.scopes import Need
from frontend.grpc.connections import CallsByConnection
from frontend.grpc.rpc import Rpc
from frontend.http.places import Places
from ipc.errors import AccessRefused, PenstockError, QueueFull
from ipc.settings import Settings

OPEN_RPCS = 256
"""Calls at a time of methods that need no key."""


class Door:
    """The door of a frontend."""

    def __init__(self, access: Gate, settings: Settings) -> None:
        self.calls = CallsByConnection()
        """Calls that were let in, by connection."""
        self._access, self._settings = access, settings
        self._places, self._open_places = Places(settings.grpc.max_rpcs), Places(OPEN_RPCS)

    def message_within_s(self, need: Need | None) -> float:
        """Seconds for the message of a call: of methods open to all those of a head, else those of a request."""
        settings = self._settings
        return settings.server.header_deadline_s if need == "" else settings.limits.request_timeout_s

    def enter(self, rpc: Rpc, need: Need | None, spend: bool) -> PenstockError | None:
        """Decide on a call by its head; None if it is let in. Then its end must call `leave`.

        `need` None: a valid key of any scope. With `spend` the call counts against the rate of its key.
        """
        access = self._access
        try:
            head = rpc.head()
            rpc.grant = access.caller(head) if need is None else access.grant_for(head, need, spend)
        except AccessRefused as error:
            return error
        rpc.account = rpc.grant.caller or rpc.host
        places = self._open_places if need == "" else self._places
        if not places.take(rpc.account):
            return _no_place(places.limit, need == "")
        rpc.places = places
        self.calls.begin(rpc.peer)
        return None

    def leave(self, rpc: Rpc) -> None:
        """A call has ended; a refused call holds nothing."""
        places, rpc.places = rpc.places, None
        if places is not None:
            places.give(rpc.account)
            self.calls.end(rpc.peer)


def _no_place(limit: int, is_open: bool) -> QueueFull:
    what = "calls that need no key" if is_open else "rpcs (grpc.max_rpcs)"
    return QueueFull(
        f"this server takes {limit} {what} at a time, and of one caller no more than others leave free",
        retry_after_s=1,
    )
