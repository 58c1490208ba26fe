"""What the parts of a path must look like; a path that does not fit is unknown: 400 without body and NV-Status."""

from __future__ import annotations

import falcon

from frontend.services import Services

_MOST_DIGITS = 20
"""One more than the largest int64 has: what is cut there is a version, or a size, that nothing has."""


def number_of(text: str) -> int | None:
    """Digits as a number, None for anything else."""
    if not (text.isascii() and text.isdigit()):
        return None
    return int(text.lstrip("0")[:_MOST_DIGITS] or "0")


def target_of(services: Services, path: str) -> tuple[str, int]:
    """Model and version (-1: none) of `<model>[/<version>]`; only models of the catalog have names with slashes.

    Raises `HTTPRouteNotFound` for any other path.
    """
    name, slash, last = path.rpartition("/")
    if path and (not slash or services.models.known(path) is not None):
        return path, -1
    version = number_of(last)
    if version is not None and name and ("/" not in name or services.models.known(name) is not None):
        return name, version
    raise falcon.HTTPRouteNotFound
