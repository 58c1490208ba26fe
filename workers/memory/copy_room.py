"""Room for private copies of clients' memory: bounded, so that small requests that name large regions take no more."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

from ipc.errors import InvalidInput


class Place:
    """Room for the copies of one request, until nobody holds this."""

    __slots__ = ("__weakref__",)


class CopyRoom:
    """Bytes that the copies of all requests may take. One thread reserves, any thread may let go of a `Place`."""

    def __init__(self, most_nbytes: int, on_room: Callable[[], None]) -> None:
        """`on_room` is called, by any thread, when a place ended after one was refused."""
        self._most_nbytes, self._on_room = most_nbytes, on_room
        self._used_nbytes = 0
        self._given: deque[int] = deque()
        self._wanted = False

    def check(self, nbytes: int) -> None:
        """Raise `InvalidInput` for a request whose copies never fit."""
        if nbytes > self._most_nbytes:
            raise InvalidInput(
                f"inputs in shared memory regions: {nbytes} bytes have to be copied, "
                f"shared_memory.max_copy_bytes allows {self._most_nbytes}"
            )

    def reserve(self, nbytes: int) -> Place | None:
        """Room for so many bytes; None when there is none now."""
        # NOTE: wanted before the look: a place that ends in between is seen here, or wakes who waits.
        self._wanted = True
        while self._given:
            self._used_nbytes -= self._given.popleft()
        if self._used_nbytes + nbytes > self._most_nbytes:
            return None
        self._wanted = False
        self._used_nbytes += nbytes
        place = Place()
        weakref.finalize(place, self._give, nbytes).atexit = False
        return place

    def _give(self, nbytes: int) -> None:
        # NOTE: without a lock, since it may run wherever the last hold ends, also inside of `reserve`.
        self._given.append(nbytes)
        if self._wanted:
            self._wanted = False
            self._on_room()
