"""A thread that turns ended requests into spans and sends them, and a bounded queue in front of it.

A full queue drops the newest and counts it. A collector that does not answer costs the spans of that attempt; requests
never wait for any of it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from frontend.tracing.tracer import Ended
from frontend.tracing.tree import Span, spans_of

log = logging.getLogger(__name__)

MAX_WAITING = 2048
"""Requests that wait for export."""
MAX_SENT = 128
"""Requests whose spans go into one export."""
GATHER_S = 0.5
CLOSE_S = 2.0

Send = Callable[[list[Span]], bool]


class Exporter:
    """Sends in a thread of its own; `count(outcome, requests)` with exported, failed or dropped."""

    def __init__(self, connect: Callable[[], Send], count: Callable[[str, int], Any]) -> None:
        """`connect` makes the sending function; it is called in the thread, since it imports a lot."""
        self._connect, self._count = connect, count
        self._waiting: deque[Ended] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="span-exporter", daemon=True)
        self._thread.start()

    def put(self, ended: Ended) -> None:
        """Take one ended request; with `MAX_WAITING` of them waiting it is dropped and counted."""
        if len(self._waiting) >= MAX_WAITING:
            self._count("dropped", 1)
            return
        self._waiting.append(ended)
        if len(self._waiting) >= MAX_SENT:
            self._wake.set()

    def close(self) -> None:
        """Send what waits, for at most `CLOSE_S`."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        send = self._connect()
        while True:
            self._wake.wait(GATHER_S)
            self._wake.clear()
            while self._waiting:
                self._export(send)
            if self._closing:
                return

    def _export(self, send: Send) -> None:
        ended = [self._waiting.popleft() for _ in range(min(MAX_SENT, len(self._waiting)))]
        try:
            sent = send([span for request in ended for span in spans_of(request)])
        except Exception:
            log.exception("%d traced requests could not be exported", len(ended))
            sent = False
        self._count("exported" if sent else "failed", len(ended))
        if sent is self._failing:
            self._failing = not sent
            log.warning(
                "spans are %s", "exported again" if sent else "not exported: the collector does not take them"
            )
