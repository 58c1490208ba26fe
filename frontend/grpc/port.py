"""The gRPC port, which the arbiter keeps for the frontends of this server.

Frontends share the port by SO_REUSEPORT, by which a second server of the same user could share the port as well,
without a word. So the arbiter first binds without that option, which fails where anybody listens. Then the arbiter
holds a socket on the port that never listens, so that the next server's try fails in turn (`reserve`).
"""

from __future__ import annotations

import socket

from ipc import addresses
from ipc.errors import ConfigError
from ipc.settings import Grpc

_SETTING = "grpc.bind"


def validate_address(grpc: Grpc) -> None:
    """Raise `ConfigError` when the settings cannot be served."""
    if grpc.enabled:
        addresses.parse(grpc.bind, _SETTING)


def reserve(grpc: Grpc) -> socket.socket:
    """A socket that keeps the address for processes of this server. Raises `ConfigError` when somebody else has it."""
    host, port = addresses.parse(grpc.bind, _SETTING)
    addresses.ensure_free(grpc.bind, _SETTING)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        reserved = socket.socket(family, kind, protocol)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(address)
    except OSError as error:
        raise ConfigError(f"{_SETTING}: {grpc.bind} cannot be had: {error.strerror or error}") from None
    return reserved
