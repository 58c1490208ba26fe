"""Addresses in the settings, as Gunicorn and gRPC both take them: their forms, and whether they are free.

1. `check` looks at the form when settings are read; `parse` gives host and port.
2. `ensure_free` binds and lets go, before anything of the server has begun.
3. `reserve` keeps the port of gRPC, which the frontends of this server share, from other servers.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from pathlib import Path

from ipc.errors import ConfigError

BACKLOG = 2048
"""Connections that wait until a process accepts them, at each listener for other hosts."""
_ADDRESS = re.compile(r"(?:\[([^\[\]/]+)\]|([^:\[\]/\s]+)):([0-9]{1,5})")
_DESCRIPTOR = re.compile(r"fd://[0-9]+")
_UNIX = "unix:"
_LONGEST_PATH = 107
FORM = "HOST:PORT or [HOST]:PORT with a port from 1 to 65535"
_WHY = {
    errno.EADDRINUSE: "another program has it",
    errno.EACCES: "this user may not take it",
    errno.EADDRNOTAVAIL: "this machine has no such address",
}


def parse(bind: str, setting: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[HOST]:PORT`, the form for IPv6.

    Raises `ConfigError`, which names the setting.
    """
    match = _ADDRESS.fullmatch(bind)
    if match is None or match[2] == "*" or not 0 < int(match[3]) < 65536:
        raise ConfigError(f"{setting}: expected {FORM}, got {bind!r}")
    return match[1] or match[2], int(match[3])


def unix_path(bind: str) -> str:
    """The file of `unix:PATH`; empty for other addresses."""
    return bind.removeprefix(_UNIX) if bind.startswith(_UNIX) else ""


def port_of(bind: str, setting: str) -> int:
    """The port of an address, 0 for a Unix socket or an inherited one. Raises `ConfigError` as `parse`."""
    return 0 if unix_path(bind) or _DESCRIPTOR.fullmatch(bind) else parse(bind, setting)[1]


def check(section: str, field: str, value: str) -> str:
    """The allowed forms if `value` is no address for `section.field`, otherwise empty."""
    sockets = (section, field) == ("server", "bind")
    if not value:
        return "" if not sockets and section == "server" else FORM
    if sockets and (path := unix_path(value)):
        fits = len(os.fsencode(path)) <= _LONGEST_PATH and Path(path).parent.is_dir()
        return "" if fits else f"unix:PATH in a directory that exists, of at most {_LONGEST_PATH} bytes"
    try:
        (port_of if sockets else parse)(value, "")
    except ConfigError:
        return f"{FORM}{', unix:PATH or fd://NUMBER' if sockets else ''}"
    return ""


def is_loopback(text: str) -> bool:
    """Whether a text is a loopback address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def ensure_free(bind: str, setting: str) -> None:
    """Raise `ConfigError` if another program listens on the address, or this process may not."""
    if path := unix_path(bind):
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path) == 0:
                raise ConfigError(f"{setting}: {bind} cannot be had: {_WHY[errno.EADDRINUSE]}")
        return
    if _DESCRIPTOR.fullmatch(bind):
        return
    host, port = parse(bind, setting)
    try:
        # NOTE: Gunicorn takes the IPv4 address of a name.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # NOTE: without SO_REUSEADDR, closing connections of an earlier life look like a server.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        why = _WHY.get(error.errno or 0) or error.strerror or str(error)
        raise ConfigError(f"{setting}: {bind} cannot be had: {why}") from None


def reserve(bind: str, setting: str) -> socket.socket:
    """A socket that keeps the address for processes of this server.

    The processes share the port by SO_REUSEPORT, by which a second server of the same user could share the port as
    well, without a word. So the address is first bound without that option, which fails where anybody listens. The
    socket never listens, so the next server's try fails in turn. Raises `ConfigError` when somebody else has the
    address.
    """
    host, port = parse(bind, setting)
    ensure_free(bind, setting)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        reserved = socket.socket(family, kind, protocol)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(address)
    except OSError as error:
        raise ConfigError(f"{setting}: {bind} cannot be had: {error.strerror or error}") from None
    return reserved
