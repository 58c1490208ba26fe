"""Routes that several servers have by the same path, each in a form of its own: which form this server answers in.

1. A path that one server alone has is always served.
2. A path in `OWNERS` is served in the form that `server.compatible` chooses. An entry is a server, for all of its
   paths, or a server and one path.
3. A path that no entry chooses answers 501 with the choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import falcon.asgi
from falcon.asgi import Request, Response

from frontend.services import Services
from ipc.errors import ConfigError, Unsupported

OWNERS: dict[str, tuple[str, ...]] = {
    "/classify": ("vllm", "infinity"),
    "/rerank": ("tei", "vllm", "infinity"),
    "/tokenize": ("tei", "vllm"),
}
"""The servers that have each path."""


def chosen(compatible: Iterable[str]) -> dict[str, str]:
    """The server whose form each path has that some entry chooses.

    Raises `ConfigError` for a path that its server does not have, and for two entries that choose a path.
    """
    by: dict[str, str] = {}
    for entry in compatible:
        server, _, path = entry.partition(":")
        paths = [name for name, owners in OWNERS.items() if server in owners and path in ("", name)]
        if not paths:
            known = ", ".join(name for name, owners in OWNERS.items() if server in owners)
            raise ConfigError(f"server.compatible: {entry!r}: {server} shares {known} with other servers")
        for name in paths:
            other = by.setdefault(name, entry)
            if other != entry:
                raise ConfigError(
                    f"server.compatible: {other!r} and {entry!r} both choose the form of {name}; leave one out, or "
                    f"choose single routes, such as {server}:{name}"
                )
    return {path: entry.partition(":")[0] for path, entry in by.items()}


class UnchosenRoute:
    """A path that several servers have, of which none was chosen."""

    def __init__(self, path: str) -> None:
        choices = " or ".join(f"{server}:{path}" for server in OWNERS[path])
        self._why = f"{path} has another form in each server; set server.compatible to {choices}"

    async def on_post(self, req: Request, resp: Response) -> None:
        """Raises `Unsupported` with the choices."""
        raise Unsupported(self._why)


def mount(
    app: falcon.asgi.App[Any, Any], services: Services, server: str, resources: Mapping[str, Any]
) -> tuple[str, ...]:
    """Add those of a server's routes that it has alone or that were chosen; returns their paths.

    The first owner of a path that nobody chose adds the route that says so.
    """
    choice = chosen(services.settings.server.compatible)
    served = []
    for path, resource in resources.items():
        if path not in OWNERS or choice.get(path) == server:
            app.add_route(path, resource)
            served.append(path)
        elif path not in choice and OWNERS[path][0] == server:
            app.add_route(path, UnchosenRoute(path))
    return tuple(served)
