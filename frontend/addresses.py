"""Addresses in the settings, as Gunicorn and gRPC both take them."""

from __future__ import annotations

import re

from ipc.errors import ConfigError

_ADDRESS = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+)):([0-9]{1,5})")


def parse(bind: str, setting: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[HOST]:PORT`, the form for IPv6.

    Raises `ConfigError`, which names the setting.
    """
    found = _ADDRESS.fullmatch(bind)
    if found is None or not 0 < int(found[3]) < 65536:
        raise ConfigError(
            f"{setting}: expected HOST:PORT or [HOST]:PORT with a port from 1 to 65535, got {bind!r}"
        )
    return found[1] or found[2], int(found[3])
