"""Routes that answer in the form of one chosen server, since several servers have their path or their path is general.

1. A path that one server alone has is always served.
2. A path in `OWNERS` is served in the form that `server.compatible` chooses. An entry is a server, for all of its
   paths, or a server and one path.
3. A path that no entry chooses answers 501 with the choices.
4. A POST to the root means a path of TEI, where that path was chosen.
"""

from __future__ import annotations

from collections.abc import Iterable

from falcon.asgi import Request, Response

from ipc.errors import ConfigError, Unsupported

OWNERS: dict[str, tuple[str, ...]] = {
    "/classify": ("vllm", "infinity"),
    "/invocations": ("tei",),
    "/rerank": ("tei", "vllm", "infinity"),
    "/tokenize": ("tei", "vllm"),
}
"""The servers that have each path."""
_ROOT = {"tei": "/invocations"}
"""The path that a POST to the root means, by server."""


def chosen(compatible: Iterable[str]) -> dict[str, str]:
    """The chosen server of each path that an entry chooses.

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


def root_of(compatible: Iterable[str]) -> str:
    """The path that a POST to the root is sent to, or the root where no server with such a route was chosen."""
    choice = chosen(compatible)
    return next((path for server, path in _ROOT.items() if choice.get(path) == server), "/")


class UnchosenRoute:
    """A path that several servers have, of which none was chosen."""

    def __init__(self, path: str) -> None:
        choices = " or ".join(f"{server}:{path}" for server in OWNERS[path])
        self._why = f"{path} answers in the form of a chosen server; set server.compatible to {choices}"

    async def on_post(self, req: Request, resp: Response) -> None:
        """Raises `Unsupported` with the choices."""
        raise Unsupported(self._why)
