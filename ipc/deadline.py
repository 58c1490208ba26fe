"""Absolute deadlines on CLOCK_MONOTONIC, in nanoseconds; one clock for all processes of a host."""

from __future__ import annotations

import time

from ipc.errors import DeadlineExceeded


def after(seconds: float) -> int:
    """The instant `seconds` from now."""
    return time.monotonic_ns() + int(seconds * 1e9)


def remaining_s(deadline_ns: int) -> float:
    """Seconds left; negative when the deadline has passed."""
    return (deadline_ns - time.monotonic_ns()) / 1e9


def check(deadline_ns: int, where: str) -> None:
    """Raise `DeadlineExceeded` when the deadline has passed; `where` names the stage."""
    if time.monotonic_ns() >= deadline_ns:
        raise DeadlineExceeded(f"the deadline passed {where}", retry_after_s=1)
