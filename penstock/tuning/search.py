"""The order of the trials, and the best of their results.

1. Workers x threads that the cores allow, with the default batch.
2. Token budgets, with the best workers and threads.
3. Precisions, with the best workers, threads and budget.

Results within 3 % of the highest rate count as equal, and of equal results the one with the least memory is best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from penstock.tuning.trial import Measured

NOISE = 0.03
CPU_TOKENS = (1024, 2048, 4096)
CUDA_TOKENS = (8192, 16384, 32768, 65536)


class Choice(msgspec.Struct, frozen=True):
    """One point of the search. `threads` 0: the GPU computes, and threads are not tried."""

    workers: int
    threads: int
    tokens: int
    precision: str

    @property
    def settings(self) -> dict[str, str | int]:
        """Settings, by `section.field`."""
        found: dict[str, str | int] = {"worker.count": self.workers}
        if self.threads:
            found["worker.torch_threads"] = self.threads
        return found | {"batch.max_tokens": self.tokens, "worker.precision": self.precision}


class Result(msgspec.Struct, frozen=True):
    """A choice and its figures; None when the server of the trial failed."""

    choice: Choice
    measured: Measured | None
    failure: str = ""


class Space(msgspec.Struct, frozen=True):
    """Values to try: (workers, threads) pairs, token budgets, precisions; the first of each is the default."""

    topologies: Sequence[tuple[int, int]]
    tokens: Sequence[int]
    precisions: Sequence[str]

    @property
    def trials(self) -> int:
        """How many trials the search makes at most."""
        return len(self.topologies) + len(self.tokens) - 1 + len(self.precisions) - 1


def topologies(cores: int, *, quick: bool) -> list[tuple[int, int]]:
    """(workers, threads) that use all cores: one worker with all, then twice as many with half as many threads each.

    With more than two cores also those that leave one core to the frontends. A quick search skips them.
    """
    found: list[tuple[int, int]] = []
    workers = 1
    while workers <= cores:
        found.append((workers, cores // workers))
        spared = (cores - 1) // workers
        if not quick and cores > 2 and 0 < spared != cores // workers:
            found.append((workers, spared))
        workers *= 2
    return found


def search(space: Space, run: Callable[[Choice], Result]) -> Iterator[Result]:
    """Search the space; `run` makes one trial. A choice whose trial failed is never best."""
    first = Choice(*space.topologies[0], space.tokens[0], space.precisions[0])
    done = []
    for workers, threads in space.topologies:
        done.append(run(msgspec.structs.replace(first, workers=workers, threads=threads)))
        yield done[-1]
    for field, values in (("tokens", space.tokens[1:]), ("precision", space.precisions[1:])):
        found = best(done)
        for value in values if found is not None else ():
            assert found is not None
            changed: dict[str, Any] = {field: value}
            done.append(run(msgspec.structs.replace(found.choice, **changed)))
            yield done[-1]


def best(results: Sequence[Result]) -> Result | None:
    """The best result; None when all failed."""
    measured = [(result, result.measured) for result in results if result.measured is not None]
    if not measured:
        return None
    enough = max(figures.rate for _, figures in measured) * (1 - NOISE)
    return min(
        (pair for pair in measured if pair[1].rate >= enough),
        key=lambda pair: (pair[1].memory_nbytes, -pair[1].rate),
    )[0]
