"""When a server has come to rest: nothing in work, nothing waiting, no byte of shared memory used."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tests.harness.server import PATIENCE_S, Server, wait_until
from workers.reports import EVERY_S

GAUGES = (
    "penstock_requests_in_flight",
    "penstock_queue_depth",
    "penstock_queue_tokens",
    "penstock_shm_bytes_used",
    "penstock_shm_leases",
    "penstock_input_shm_bytes_used",
)
OF_THE_ARENA = ("penstock_shm_bytes_used", "penstock_shm_leases")


def wait_quiet(server: Server, timeout_s: float = PATIENCE_S, gauges: Sequence[str] = GAUGES) -> None:
    """Wait until all gauges of load, or these, stay at zero for longer than a worker's sampling period."""
    busy_at = time.monotonic()

    def rested() -> bool:
        nonlocal busy_at
        if server.metric(*gauges):
            busy_at = time.monotonic()
        return time.monotonic() - busy_at > 1.5 * EVERY_S

    wait_until(rested, timeout_s, "rest")
