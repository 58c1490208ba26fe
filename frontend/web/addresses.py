"""Hosts that the server may connect to for a client: those of the internet, and networks that the operator names.

1. An address is public if no registry of special addresses has the address (IANA, RFC 6890). The list is ours, since
   the ones of Python versions differ.
2. IPv6 addresses that stand for IPv4 addresses (mapped, compatible, 6to4, Teredo, NAT64) are never public: a gateway
   could turn them into addresses of this network.
3. Names that are resolved in local networks only are refused, whatever their addresses are.

`fetch.allowed_networks` is an exception to all three.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from ipc.errors import ConfigError, InvalidInput

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")
_SPECIAL: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",  # The metadata service of one cloud has a public address.
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/3",
        "2001::/23",
        "2001:db8::/32",
        "2002::/16",
        "3fff::/20",
    )
)
_LOCAL_ENDINGS = (
    "localhost",
    "local",
    "localdomain",
    "internal",
    "intranet",
    "lan",
    "home",
    "home.arpa",
    "corp",
)


def networks_of(given: Sequence[str]) -> tuple[Network, ...]:
    """The networks of `fetch.allowed_networks`. Raises `ConfigError`."""
    networks = []
    for text in given:
        try:
            networks.append(ipaddress.ip_network(text))
        except ValueError as error:
            raise ConfigError(f"fetch.allowed_networks: {text!a} is no network: {error}") from None
    return tuple(networks)


def is_public(address: Address) -> bool:
    """Whether an address belongs to the internet."""
    if address.version == 6 and address not in _GLOBAL_V6:
        return False
    return not any(address.version == network.version and address in network for network in _SPECIAL)


def is_local_name(host: str) -> bool:
    """Whether a host name means something in local networks only: a name without a dot, or of a local domain."""
    name = host.rstrip(".").lower()
    return "." not in name or any(name == each or name.endswith(f".{each}") for each in _LOCAL_ENDINGS)


class FetchFailed(InvalidInput):
    """A URL cannot be fetched. The message is for the caller who named the URL, and tells no address."""


class AddressRefused(OSError):
    """A connection to an address that is neither public nor allowed. No address is named."""


class Guard:
    """Decides about addresses; `allowed` are networks of the operator."""

    def __init__(self, allowed: Iterable[Network]) -> None:
        self._allowed = tuple(allowed)

    def check(self, text: str) -> None:
        """Raise `AddressRefused` unless the server may connect to the address `text`."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            raise AddressRefused("no address") from None
        if not (self._is_allowed(address) or is_public(address)):
            raise AddressRefused("not public")

    def check_name(self, host: str, addresses: Iterable[str]) -> None:
        """Raise `AddressRefused` for a host, if it is local or any of its addresses is refused."""
        for text in addresses:
            self.check(text)
            if is_local_name(host) and not self._is_allowed(ipaddress.ip_address(text)):
                raise AddressRefused("local name")

    def _is_allowed(self, address: Address) -> bool:
        # NOTE: an address with a scope (`fe80::1%eth0`) compares without its scope.
        return any(address.version == network.version and address in network for network in self._allowed)
