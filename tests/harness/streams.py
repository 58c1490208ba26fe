"""Streams of the fake program `parts`: what is asked, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from frontend.engine.local.client import Client
from frontend.engine.streams.part_stream import PartStream
from ipc.metrics import registry as metrics
from ipc.wire.messages import Work
from ipc.wire.streams import WINDOW
from tests.harness.tensors import call_of, read, request_of
from tests.harness.worker import Workers


def asking(model: str, count: int, timeout_s: float = 30.0, **parameters: Any) -> tuple[Work, Any]:
    """A request for so many parts, and its payload."""
    call, payload = call_of(
        {"INPUT0": ("INT32", np.array([count], np.int32))}, ["OUTPUT0"], batches=False, parameters=parameters
    )
    return request_of(model, call, payload, timeout_s, parts=WINDOW)


async def rest_of(stream: PartStream) -> list[int]:
    """The numbers of the parts that are still to come, each checked to be whole."""
    numbers = []
    async for reply in stream:
        values = read(reply)["OUTPUT0"]
        assert (values == values[0]).all()
        numbers.append(int(values[0]))
    return numbers


async def all_of(client: Client, request: tuple[Work, Any]) -> list[int]:
    """The numbers of all parts of a request."""
    with await client.stream(*request) as stream:
        return await rest_of(stream)


def record_of(path: Path) -> Callable[[], list[str]]:
    """What reads the steps that a model has noted."""
    return lambda: path.read_text().split() if path.exists() else []


def in_use(running: Workers, slot: int = 0) -> tuple[int, int]:
    """(bytes, leases) of a worker's arena, by its metrics as last sampled."""
    found = {"penstock_shm_bytes_used": 0.0, "penstock_shm_leases": 0.0}
    for line in metrics.render(running.paths).decode().splitlines():
        name = line.split("{")[0]
        if name in found and f'worker="worker-{slot}"' in line:
            found[name] += float(line.rpartition(" ")[2])
    return int(found["penstock_shm_bytes_used"]), int(found["penstock_shm_leases"])
