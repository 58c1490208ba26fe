"""The connections of a frontend's gRPC port, found among the descriptors of this process.

gRPC's core accepts connections itself and tells nothing of them.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from frontend.grpc.peers import Peer


def of_port(port: int) -> Iterator[tuple[socket.socket, Peer]]:
    """Connections of this process that were made to its `port`, and who made them."""
    for link in Path("/proc/self/fd").iterdir():
        # What was closed meanwhile, is no connection, or has lost its peer.
        with contextlib.suppress(OSError):
            if not str(link.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as connection:
                if _is_connection(connection) and connection.getsockname()[1] == port:
                    yield connection, Peer.of(*connection.getpeername()[:2])


def _is_connection(connection: socket.socket) -> bool:
    return connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
