"""Routes that answer in the form of one chosen server, since several servers have their path or their path is general.

1. A path that one server alone has is always served.
2. A path in `OWNERS` is served in the form that `server.compatible` chooses. An entry is a server, for all of its
   paths, or a server and one path.
3. A path that no entry chooses answers 501 with the choices.
4. A POST to the root means a path of TEI, where that path was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import falcon
import falcon.asgi
from falcon.asgi import Request, Response

from frontend.http.inference import InferenceRoute
from frontend.services import Services
from ipc.errors import ConfigError, PenstockError, ResourceExhausted, Unsupported

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


class ErrorForm(Protocol):
    """The module of a server's errors."""

    def render(self, error: PenstockError) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, body, headers) of an error."""

    def render_http(self, error: falcon.HTTPError) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, body, headers) of an error of the framework."""


class ServerProtocol:
    """Base of the protocols of other servers: routes by path, and one form of errors.

    `inference` are the routes that run a model, `others` the rest. `prefixes` are the paths that are served, without
    those in `left_to_sie`, whose errors SIE renders: routes of SIE lie below them.
    """

    def __init__(
        self,
        name: str,
        inference: Mapping[str, type[InferenceRoute]],
        errors: ErrorForm,
        others: Mapping[str, Callable[[Services], Any]] | None = None,
        left_to_sie: Collection[str] = (),
    ) -> None:
        self.name = name
        self.prefixes: Sequence[str] = ()
        self._inference, self._others = inference, others or {}
        self._errors, self._left_to_sie = errors, left_to_sie
        self._exhausted_retry_s: float | None = None

    def mount(self, app: falcon.asgi.App[Any, Any], services: Services) -> None:
        """Add the routes that this server has alone, or that were chosen.

        The first owner of a path that nobody chose adds the route that says so.
        """
        self._exhausted_retry_s = services.settings.limits.exhausted_retry_s
        choice = chosen(services.settings.server.compatible)
        served = []
        routes: dict[str, Callable[[Services], Any]] = {**self._inference, **self._others}
        for path, make in routes.items():
            if path not in OWNERS or choice.get(path) == self.name:
                app.add_route(path, make(services))
                served.append(path)
            elif path not in choice and OWNERS[path][0] == self.name:
                app.add_route(path, UnchosenRoute(path))
        self.prefixes = tuple(path for path in served if path not in self._left_to_sie)

    def inference_at(self, path: str) -> tuple[str, str]:
        """The operation of a route; no path names a model."""
        resource = self._inference.get(path)
        return resource.operation if resource else "", ""

    def render_error(
        self, error: PenstockError, path: str, req: Request | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error."""
        if isinstance(error, ResourceExhausted) and error.retry_after_s is None:
            error.retry_after_s = self._exhausted_retry_s
        return self._errors.render(error)

    def render_http(self, error: falcon.HTTPError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error of the framework."""
        return self._errors.render_http(error)
