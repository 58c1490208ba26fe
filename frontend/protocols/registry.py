"""Which protocols are served, and which of them renders the errors of a path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import falcon.asgi

from frontend.services import Services
from ipc.errors import PenstockError


class WireProtocol(Protocol):
    """One contract: its routes, and its form of an error."""

    name: str
    prefixes: Sequence[str]

    def mount(self, app: falcon.asgi.App[Any, Any], services: Services) -> None:
        """Add the routes of this protocol."""

    def render_error(self, error: PenstockError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error on `path`."""


def protocols() -> list[WireProtocol]:
    """All protocols of this build, most specific prefix first."""
    from frontend.protocols.sie import SieProtocol

    return [SieProtocol()]


def protocol_of(path: str, known: Sequence[WireProtocol]) -> WireProtocol:
    """The protocol whose prefix fits best; the first one serves what no prefix claims."""
    fitting = [(len(prefix), p) for p in known for prefix in p.prefixes if path.startswith(prefix)]
    return max(fitting, key=lambda entry: entry[0])[1] if fitting else known[0]
