"""Explores a target: hypothesis draws inputs, each within bounds, and what fails is made small and kept."""

from __future__ import annotations

import os
import resource
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import hypothesis
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.fuzz import corpus
from tests.fuzz.mutation import mutated

LONGEST_S = 2.0
"""Processor time of one input."""
MOST_GROWTH_KIB = 256 << 10
"""Growth of the process over an exploration."""
MOST_NBYTES, MOST_TIMES = 16 << 20, 200
"""Memory that one input may take: so much, and so many times its own size."""
SEED = int(os.environ.get("TEST_FUZZ_SEED", "1"))


class TooLong(Exception):
    """An input has used more processor time than it may."""


@contextmanager
def in_time(limit_s: float = LONGEST_S) -> Iterator[None]:
    """Raise `TooLong` within what runs longer; it reaches Python code only, pytest's own timeout ends the rest."""

    def stop(*_: object) -> None:
        raise TooLong(f"more than {limit_s} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def within_bounds(target: Callable[[bytes], object], data: bytes) -> None:
    """Run one input with its time and its memory bounded."""
    tracemalloc.start()
    try:
        # Tracing makes all code several times slower.
        with in_time(5 * LONGEST_S):
            target(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= MOST_NBYTES + MOST_TIMES * len(data), f"{peak} bytes of memory for an input of {len(data)}"


def explore(
    name: str, target: Callable[[bytes], object], examples: int, seed: int = SEED, root: Path = corpus.ROOT
) -> None:
    """Run so many inputs, which the seed determines. Raises what the smallest failing one raised, which is kept."""
    seeds, last = corpus.inputs(name, root), b""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.randoms(use_true_random=False))
    def run(chance: Random) -> None:
        nonlocal last
        last = mutated(chance, seeds)
        with in_time():
            target(last)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        run()
    except BaseException:
        print(f"{name}, seed {seed}: kept as {corpus.keep(name, last, root)}")
        raise
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown <= MOST_GROWTH_KIB, f"{name}: grown by {grown} KiB"
