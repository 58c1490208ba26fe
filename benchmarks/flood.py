"""A load from a process of its own that lasts until it is stopped, and the batches that the server ran meanwhile."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Event

from benchmarks.connection import Connection
from benchmarks.load import Address, closed_loop
from benchmarks.processes import ServerFailed

_POLL_S = 0.05
_MOST_BETWEEN_BATCHES_S = 60.0
_BEGUN_BATCHES = 10


def _endless(address: Address, requests: Sequence[bytes], clients: int, begun: Event) -> None:
    begun.set()
    while True:
        closed_loop(address, requests, clients)


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches that a model has run since the server started, and their tokens."""

    count: float
    tokens: float
    read_s: float

    def since(self, before: Batches) -> Batches:
        """Batches and tokens between two readings, and the seconds between them."""
        return Batches(self.count - before.count, self.tokens - before.tokens, self.read_s - before.read_s)


def batches(address: Address, model: str) -> Batches:
    """Read `/metrics`; `read_s` is the instant of the reading."""
    with Connection(address) as connection:
        _, body = connection.fetch(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")

    def total(name: str) -> float:
        found = re.findall(
            rf'^{name}{{model="{re.escape(model)}"[^}}]*}} (\S+)$', body.decode(), re.MULTILINE
        )
        return sum(map(float, found))

    return Batches(
        total("penstock_batch_tokens_count"), total("penstock_batch_tokens_sum"), time.perf_counter()
    )


@contextlib.contextmanager
def flooded(address: Address, model: str, requests: Sequence[bytes], clients: int) -> Iterator[None]:
    """`clients` connections ask for `model` again and again; entered once the device is at it.

    The process of the clients may take long to start on a busy machine, so the clock of a batch starts with its first
    request. Raises ServerFailed when the process ends, or when no further batch follows for a minute.
    """
    spawn = multiprocessing.get_context("spawn")
    begun = spawn.Event()
    process = spawn.Process(target=_endless, args=(address, requests, clients, begun), daemon=True)
    ran = first = batches(address, model).count
    process.start()
    try:
        while not begun.wait(_POLL_S):
            _check_alive(process.exitcode)
        since = time.perf_counter()
        while (count := batches(address, model).count) < first + _BEGUN_BATCHES:
            _check_alive(process.exitcode)
            if count > ran:
                ran, since = count, time.perf_counter()
            elif time.perf_counter() - since > _MOST_BETWEEN_BATCHES_S:
                raise ServerFailed(
                    f"{model} ran {count - first:g} batches under load, then none for {_MOST_BETWEEN_BATCHES_S:g} s"
                )
            time.sleep(_POLL_S)
        yield
    finally:
        process.kill()
        process.join()


def _check_alive(exitcode: int | None) -> None:
    if exitcode is not None:
        raise ServerFailed(f"the clients ended with exit code {exitcode}")
