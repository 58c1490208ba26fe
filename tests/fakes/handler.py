"""A worker without a device: it answers at once, with bytes that a text decides or with the payload."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ipc.errors import ShmExhausted
from ipc.memory.arena import LeaseTable
from ipc.processes.liveness import start_ticks
from ipc.wire.catalogs import Entries
from ipc.wire.messages import (
    VERSION,
    Credits,
    InferCall,
    ModelStatus,
    Result,
    Submit,
    TensorRef,
    Timing,
    Welcome,
)
from workers.endpoint.endpoint import Endpoint, block_ref
from workers.endpoint.sessions import Session

MODEL = "fake/answers"
NBYTES = 10_000


def answer_of(text: str) -> bytes:
    """What a request with this text is answered with."""
    return (text.encode() + b"|") * (NBYTES // (len(text.encode()) + 1) + 1)


class AnsweringHandler:
    """The handler of an endpoint; results go through the arena, except those of texts that begin with `inline`."""

    draining = False
    models: Any = SimpleNamespace(all_entries=lambda: Entries(1, [], [], [], []))
    """A catalog without entries."""

    def __init__(self, arena: Path, epoch: str, leases: LeaseTable) -> None:
        self._arena, self._epoch, self._leases = arena, epoch, leases
        self.endpoint: Endpoint | None = None
        self.ignored: set[str] = set()

    def welcome(self) -> Welcome:
        """One loaded model and plenty of credit."""
        status = ModelStatus(MODEL, "loaded", dims={"dense": 1})
        pid = os.getpid()
        credits = Credits(1000, 0, 1000.0)
        ticks = start_ticks(pid)
        return Welcome(VERSION, self._epoch, pid, ticks, str(self._arena), "none", 1, [status], credits)

    def submit(self, session: Session, message: Submit, payload: memoryview) -> None:
        """Answer in a later turn of the loop, as a device thread would."""
        text = message.work.call.items[0].text or ""
        if text in self.ignored:
            return
        raw = bytes(payload) if isinstance(message.work.call, InferCall) else answer_of(text)[:NBYTES]
        endpoint = self.endpoint
        assert endpoint is not None
        refs = [TensorRef("dense", "uint8", [1, len(raw)], 0)]
        if text.startswith("inline"):
            result = Result(message.id, None, refs, [1], [], [], Timing())
            endpoint.post(lambda: endpoint.reply(session.key, result, None, raw))
            return
        block = self._leases.reserve(len(raw))
        if block is None:
            raise ShmExhausted("no room", retry_after_s=1)
        self._leases.data(block)[:] = raw
        result = Result(message.id, block_ref(block), refs, [1], [], [], Timing())
        endpoint.post(lambda: endpoint.reply(session.key, result, block, None))

    def cancel(self, session: Session, request: int) -> None:
        """Answers that are on their way are discarded by the endpoint."""
        session.outstanding.pop(request, None)
        if self.endpoint is not None:
            self.endpoint.unread(session.key, request)

    def released(self) -> None:
        """Nothing waits for room."""

    def turn_ended(self) -> None:
        """Nothing waits for the end of a turn."""

    def tick(self) -> None:
        """Credits, as a worker sends them."""
        for session in self.endpoint.sessions if self.endpoint is not None else ():
            self.endpoint.tell(session, Credits(1000, 0, float(time.monotonic_ns() % 1000)))
