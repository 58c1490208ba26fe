"""R25: random kills of workers and frontends under load; no answer ever belongs to another request."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

from tests.fault import rounds, serving
from tests.harness.load import Load
from tests.harness.server import Server, wait_until

CLIENTS = 16
# A slot that fails five times in a minute is taken out of service.
KILLS_PER_SLOT_AND_MINUTE = 3
WRONG = (b"RESOURCE_EXHAUSTED", b"INTERNAL_ERROR", b"INFERENCE_ERROR", b"UNEXPECTED_OUTPUT")
"""Codes of a live lease that was revoked, and those of status 500 that do not tell of the death of two workers."""


class Killer:
    """Kills random processes of a server, workers no more often than their slots bear."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server, self._random = server, random.Random(seed)
        self._kills: dict[int, list[float]] = {0: [], 1: []}
        self.killed = {"worker": 0, "frontend": 0}

    def kill(self) -> None:
        """One SIGKILL."""
        slot = self._random.randrange(2)
        recent = [at for at in self._kills[slot] if time.monotonic() - at < 60]
        worker = self._server.worker_pid(slot)
        if worker and len(recent) < KILLS_PER_SLOT_AND_MINUTE and self._random.random() < 0.4:
            self._kills[slot] = [*recent, time.monotonic()]
            victim, kind = worker, "worker"
        else:
            victim, kind = self._random.choice(self._server.frontend_pids() or [0]), "frontend"
        if victim:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                self.killed[kind] += 1

    def pause_s(self) -> float:
        """Time until the next kill."""
        return self._random.uniform(0.1, 1.0)


def test_no_answer_is_wrong_under_random_kills(tmp_path: Path) -> None:
    # Every result goes through shared memory, however small it is.
    settings = {
        "worker.count": 2,
        "server.frontends": 2,
        "arena.inline_bytes": 0,
        "limits.restart_wait_s": 30,
    }
    with serving(tmp_path, settings=settings) as server:
        wait_until(lambda: server.metric("penstock_worker_up") == 2, what="two workers")
        killer = Killer(server, seed=20)
        with Load(server.port, clients=CLIENTS) as load:
            for _ in range(rounds(short=3, long=2000)):
                before, resume = load.done, time.monotonic() + killer.pause_s()
                wait_until(
                    lambda seen=before, at=resume: load.done > seen + 5 and time.monotonic() > at,
                    what="traffic",
                )
                killer.kill()
            seen = load.done
            wait_until(lambda: load.done > seen + 200, what="traffic after the last kill")
            outcome = load.stop()
        assert killer.killed["worker"] and killer.killed["frontend"]
        assert outcome.wrong == 0
        assert set(outcome.statuses) <= {200, 500, 503}
        assert not any(code in body for code in WRONG for body in outcome.bodies), outcome.bodies
        assert len(outcome.broken) <= killer.killed["frontend"] * CLIENTS
        wait_until(
            lambda: (
                (server.metric("penstock_shm_bytes_used"), server.metric("penstock_shm_leases")) == (0, 0)
            ),
            what="empty arenas",
        )
