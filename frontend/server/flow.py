"""Flow control of one connection that also measures how long it reads and whether the client takes what is written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sized

from uvicorn.protocols.http.flow_control import FlowControl


class MeteredFlow(FlowControl):
    """uvicorn's flow control with a clock that stands still while reading is paused.

    `waiting` holds the requests that wait behind the one in work: while there are any, reading stays paused, so that a
    client which never stops sending requests cannot fill memory with them.
    """

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        super().__init__(transport)
        self.write_resumed = False
        self._waiting = waiting
        self._read_s = 0.0
        self._reading_since = time.monotonic()

    def reading_s(self, now: float) -> float:
        """Seconds in which the transport was reading, up to `now` (monotonic)."""
        return self._read_s if self.read_paused else self._read_s + now - self._reading_since

    def pause_reading(self) -> None:
        """Stop reading and the clock."""
        if not self.read_paused:
            self._read_s += time.monotonic() - self._reading_since
            super().pause_reading()

    def resume_reading(self) -> None:
        """Start reading and the clock, unless requests are waiting."""
        if self.read_paused and not self._waiting:
            self._reading_since = time.monotonic()
            super().resume_reading()

    def resume_writing(self) -> None:
        """Note that the client took enough of the response for the application to go on."""
        self.write_resumed = True
        super().resume_writing()
