"""Who is at the other end of a connection, as gRPC and as sockets tell it, and whom it counts for."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple
from urllib.parse import unquote

_V6_NETWORK_BITS = 64
"""What one host of IPv6 has to itself: its addresses count as one caller."""


class Peer(NamedTuple):
    """The other end of a TCP connection, its address in the usual form; ("", 0) for a Unix socket."""

    address: str
    port: int

    @classmethod
    def of(cls, address: str, port: int) -> Peer:
        """By what a socket tells; IPv4 within IPv6 becomes IPv4."""
        try:
            found = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return cls(address, port)
        mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
        return cls(str(mapped or found), port)

    @classmethod
    def named(cls, name: str) -> Peer:
        """By gRPC's `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`."""
        kind, _, rest = unquote(name).partition(":")
        if kind not in ("ipv4", "ipv6"):
            return cls("", 0)
        address, _, port = rest.rpartition(":")
        return cls.of(address.strip("[]"), int(port))


def host_of(peer: Peer) -> str:
    """Whom a connection counts for: its address, of IPv6 the network of one host."""
    if ":" not in peer.address:
        return peer.address
    return str(ipaddress.ip_network((peer.address, _V6_NETWORK_BITS), strict=False))
