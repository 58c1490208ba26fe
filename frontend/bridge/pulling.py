"""How a bridge takes items from the queue: standing requests of as many items as its workers have room for.

1. `want` is how many more items this box could take. The next request leaves when half of that is not asked for.
2. A request ends when it has its items, after `EXPIRES_S`, or by a word of the broker. Meanwhile the broker says each
   `HEARTBEAT_S` that it knows the request. A request about which `MISSED` of these are missing is forgotten, and so are
   all requests at a reconnect: client libraries have waited here for ever.
3. A broker that knows no stream or consumer makes this bridge make them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from nats.aio.msg import Msg

from ipc.wire.cluster_names import INBOX

EXPIRES_S = 5.0
HEARTBEAT_S = 0.5
MISSED = 2
MOST_ASKED = 256


class Request(msgspec.Struct):
    """One standing request: items that it still waits for, and when it was heard of (CLOCK_MONOTONIC nanoseconds)."""

    left: int
    heard_ns: int


class Puller:
    """All standing requests of one life."""

    def __init__(
        self,
        life: str,
        next_subject: str,
        send: Callable[[str, bytes, str], None],
        want: Callable[[], int],
        take: Callable[[Msg], None],
        gone: Callable[[], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`send` publishes (subject, data, reply); `gone`: the broker knows no stream or consumer."""
        self._inbox, self._next = f"{INBOX}.bridge-{life}", next_subject
        self._send, self._want, self._take, self._gone = send, want, take, gone
        self._now_ns, self._number = now_ns, 0
        self.requests: dict[str, Request] = {}

    @property
    def subject(self) -> str:
        """Where items and words of the broker arrive."""
        return f"{self._inbox}.*"

    @property
    def asked(self) -> int:
        """Items that standing requests may still bring."""
        return sum(request.left for request in self.requests.values())

    def aim(self, next_subject: str) -> None:
        """Ask another queue from now on; what was asked before may still bring items until it expires."""
        self._next = next_subject
        self.forget()

    def forget(self) -> None:
        """Nobody knows what became of the requests."""
        self.requests.clear()

    def pull(self) -> None:
        """Ask for more where there is room; call often. Raises `QueueUnavailable` without a broker."""
        want, asked = min(self._want(), MOST_ASKED), self.asked
        if want <= 0 or asked > want // 2:
            return
        self._number += 1
        name = f"{self._inbox}.{self._number}"
        self.requests[name] = Request(want - asked, self._now_ns())
        body = {
            "batch": want - asked,
            "expires": int(EXPIRES_S * 1e9),
            "idle_heartbeat": int(HEARTBEAT_S * 1e9),
        }
        self._send(self._next, msgspec.json.encode(body), name)

    def heard(self, message: Msg) -> None:
        """An item, or a word of the broker about a request."""
        status, description = "", ""
        if message.headers:
            status, description = message.headers.get("Status", ""), message.headers.get("Description", "")
        if not status:
            self._delivered()
            self._take(message)
            return
        request = self.requests.get(message.subject)
        if status == "100":
            if request is not None:
                request.heard_ns = self._now_ns()
            return
        self.requests.pop(message.subject, None)
        if status == "503" or "Consumer Deleted" in description:
            self.forget()
            self._gone()

    def _delivered(self) -> None:
        """An item has come, by the oldest request: nothing in it names its request."""
        name = next(iter(self.requests), None)
        if name is not None:
            request = self.requests[name]
            request.left -= 1
            request.heard_ns = self._now_ns()
            if not request.left:
                del self.requests[name]

    def tick(self) -> None:
        """Some time has passed: forget requests that the broker does not speak of any more."""
        before_ns = self._now_ns() - int((MISSED + 0.5) * HEARTBEAT_S * 1e9)
        for name, request in list(self.requests.items()):
            if request.heard_ns < before_ns:
                del self.requests[name]
