"""TCP ports of 127.0.0.1 for what a test starts: no two test processes of a machine get the same port.

A port is looked for before the process that listens there starts, and a test may end that process and start another.
Nobody else may take the port in between:

1. Ports are below those of outgoing connections, where there is room for that.
2. A process takes ports from a block. The name of an abstract socket says whose block that is: the kernel gives a name
   to one process, and takes it back when the process ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

BLOCK = 128
"""Ports that a process takes at a time."""
HELD = 2
"""Blocks that a process has: the last ports of a block are still its own when it takes from the next one."""
RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LEAST_ROOM = 20_000
"""Where the ports of outgoing connections begin below this, too few are left below them."""


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody listens on, that is no other test process's, and that this one got long ago.

    Fails if no port is free.
    """
    for port in _PORTS:
        if _is_free(port):
            return port
    raise AssertionError("no port is free")


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        return True
    return False


def _ports() -> Iterator[int]:
    """Ports of one block after another below those of outgoing connections; else any free ones."""
    first_of_connections = int(RANGE_FILE.read_text().split()[0]) if RANGE_FILE.exists() else 0
    if first_of_connections < LEAST_ROOM:
        yield from _any_ports()
    yield from blocks(first_of_connections, first_of_connections // 2 // BLOCK)


def blocks(above: int, count: int) -> Iterator[int]:
    """Ports of the blocks that this process can have of `count` below the port `above`; ends when others have all.

    After `HELD` blocks the oldest is given back, so the ports given last are this process's still.
    """
    held = list[socket.socket]()
    while True:
        has_ended = True
        for at in range(count):
            number = (os.getpid() + at) % count
            name = _claim(above - (number + 1) * BLOCK)
            if name is not None:
                has_ended = False
                held.append(name)
                if len(held) > HELD:
                    held.pop(0).close()
                yield from range(above - (number + 1) * BLOCK, above - number * BLOCK)
        if has_ended and not held:
            return
        if has_ended:
            held.pop(0).close()


def _claim(first: int) -> socket.socket | None:
    """The name of the block that begins with the port `first`, until the socket is closed; None if it is another's."""
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0penstock-test-ports-{first}")
    except OSError:
        name.close()
        return None
    return name


def _any_ports() -> Iterator[int]:
    """Free ports as the kernel chooses them, each once."""
    given = set[int]()
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if port not in given:
            given.add(port)
            yield port


_PORTS = _ports()
