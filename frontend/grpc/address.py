"""The address of the gRPC server: checked, found free, and kept by the arbiter for its own frontends.

Frontends share the port by SO_REUSEPORT, which would let a second server of the same user share it as well, without a
word. So the arbiter first binds without that option, which fails where anybody listens, and then holds a socket of its
own on the port that never listens, so that the next server's try fails in turn.
"""

from __future__ import annotations

import socket

from ipc import addresses
from ipc.errors import ConfigError
from ipc.settings import Grpc

_SETTING = "grpc.bind"


def check(grpc: Grpc) -> None:
    """Raise `ConfigError` when the settings cannot be served."""
    if grpc.enabled:
        addresses.parse(grpc.bind, _SETTING)


def keep(grpc: Grpc) -> socket.socket:
    """A socket that keeps the address for processes of this server. Raises `ConfigError` when somebody else has it."""
    host, port = addresses.parse(grpc.bind, _SETTING)
    addresses.ensure_free(grpc.bind, _SETTING)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        kept = socket.socket(family, kind, protocol)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(address)
    except OSError as error:
        raise ConfigError(f"{_SETTING}: {grpc.bind} cannot be had: {error.strerror or error}") from None
    return kept
