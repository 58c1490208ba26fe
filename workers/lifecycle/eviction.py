"""Who has to leave the memory: a pure policy.

1. Pinned models stay, and so does the one that is kept out of question (the one being loaded).
2. Models without open work go before models with work; among equals the one that was used longest ago.
3. The last loaded model stays, unless the caller says that even it may go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Resident(NamedTuple):
    """A loaded model: `last_used` on any clock, `busy` while requests for it are open."""

    serial: int
    nbytes: int
    last_used: float
    pinned: bool = False
    busy: bool = False


def order(residents: Sequence[Resident]) -> list[Resident]:
    """Those that may go, the first to go first."""
    free = [resident for resident in residents if not resident.pinned]
    return sorted(free, key=lambda resident: (resident.busy, resident.last_used, resident.serial))


def victims(residents: Sequence[Resident], excess_bytes: int, *, last_may_go: bool = False) -> list[Resident]:
    """Enough of them to free `excess_bytes`, or as many as may go."""
    chosen: list[Resident] = []
    most = len(residents) if last_may_go else len(residents) - 1
    for resident in order(residents):
        if excess_bytes <= 0 or len(chosen) >= most:
            break
        chosen.append(resident)
        excess_bytes -= resident.nbytes
    return chosen
