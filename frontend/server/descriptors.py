"""Divides the open files of a frontend: HTTP connections, gRPC connections, and all other files.

The other files are indispensable: sockets to workers, arenas, metric files, health checks. If the hard limit of the
process is too low for all connections that the settings allow, HTTP and gRPC get less, in proportion.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence

OTHERS = 512
_LEAST_SHARE = 2
"""Under a very low hard limit, other files get at most one part in so many."""


def wanted(connections: Sequence[int]) -> int:
    """Open files for these numbers of connections, and other files."""
    return sum(connections) + OTHERS


def shares(connections: Sequence[int], limit: int) -> list[int]:
    """How many connections each may have under a limit of open files (negative: none), one at least."""
    if limit < 0 or wanted(connections) <= limit:
        return list(connections)
    free = limit - min(OTHERS, limit // _LEAST_SHARE)
    total = sum(connections)
    return [max(1, number * free // total) for number in connections]


def hard_limit() -> int:
    """The hard limit of open files; negative without one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return -1 if hard == resource.RLIM_INFINITY else hard


def make_room(number: int) -> None:
    """Raise the soft limit to so many, or as near as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < reachable:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
