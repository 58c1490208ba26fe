"""The protocols of this build, and what follows from their tables of routes.

1. Rows are mounted, each template once. `server.compatible` chooses the rows of paths that several servers have.
2. The protocol of a path renders the errors of the path, and is named in metrics.
3. The rows tell what holds for a path (`PathFacts`). They make the API's description.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import falcon
import falcon.asgi
import orjson
from falcon.asgi import Request, Response

from frontend.protocols import server_routes
from frontend.route_rows import METRICS, PAGES, Need, Route, Scopes
from frontend.services import Services
from ipc.errors import ConfigError, PenstockError, Unsupported
from ipc.settings import Server

MOST_KEPT_PATHS = 1024
"""Paths whose facts are kept; one more, and all are forgotten."""
MOST_KEPT_CHARACTERS = 256
"""The facts of longer paths are not kept."""

Rendered = tuple[int, dict[str, Any] | None, dict[str, str]]
"""(status, JSON body or None for an empty one, headers) of an error."""


def as_bytes(rendered: Rendered) -> tuple[int, bytes, dict[str, str]]:
    """The rendered error with its body as bytes, and the media type among the headers."""
    status, body, headers = rendered
    if body is None:
        return status, b"", headers
    return status, orjson.dumps(body), {"Content-Type": "application/json", **headers}


class WireProtocol(Protocol):
    """One contract: its table of routes, and its form of an error.

    `folders` are folders of the contract whose unknown paths are refused in its form. Paths below a route are its own
    in any case.
    """

    name: str
    routes: Sequence[Route]
    folders: Sequence[str]

    def context(self, services: Services) -> Any:
        """What the resources of the table are made from. Called once, before the first request."""

    def render_error(self, error: PenstockError, path: str, req: Request | None = None) -> Rendered:
        """The form of an error on `path`; `req` is None if the server refuses the request itself."""

    def render_http(self, error: falcon.HTTPError, path: str) -> Rendered:
        """The form of an error of the framework: unknown paths, wrong methods, bad header fields."""


class PathFacts(NamedTuple):
    """What the rows of all tables tell of a normalized path, whatever the method.

    `operation` and `model` count requests that are refused before a responder; `operation` is empty for a path that
    runs no model, `model` for a path that does not end with the name of the model. `need` is the scope of a key, with
    closed metrics. `counted`: requests are among the metrics of HTTP. `pages`: pages of other sites may get leave.
    """

    protocol: WireProtocol
    operation: str
    model: str
    need: Need
    counted: bool
    pages: bool


class Protocols:
    """The protocols of an application, and all that follows from the rows of their tables.

    Each path belongs to one protocol. A path of a `shared` row is served in the form that `compatible`, the setting
    `server.compatible`, chooses: an entry is a server, for all of its paths, or a server and one path. A path that no
    entry chooses answers 501 with the choices.
    """

    def __init__(self, known: Sequence[WireProtocol], compatible: Iterable[str] = ()) -> None:
        """Raises `ConfigError` for a path that its server does not have, and for two entries that choose a path."""
        self._known = known
        self.routes: list[Route] = [*(row for one in known for row in one.routes), *server_routes.ROUTES]
        """The rows of all tables, whether or not they are served."""
        self.owners = _owners(known)
        choice = chosen(compatible, self.owners)
        self._unchosen = [path for path in self.owners if path not in choice]
        self._served = [
            (protocol, row)
            for protocol in known
            for row in protocol.routes
            if not row.shared or choice.get(row.path) == protocol.name
        ]
        self.root = next((row.path for one in known for row in one.routes if row.root), "/")
        """The path that a POST to the root means, also while no entry chooses the path."""
        self._schema: bytes | None = None
        self._facts: dict[str, PathFacts] = {}
        self.scopes = Scopes(self.routes)
        self._folders = self._folders_of_protocols()
        running = [row for _, row in self._served if row.operation]
        self._operations = {path: row.operation for row in running for path in row.paths}
        self._operation_patterns = list(dict.fromkeys(_pattern(row) for row in running if not row.paths))
        self._uncounted = frozenset(path for row in self.routes if not row.counted for path in row.paths)
        self._uncounted_folders = tuple(
            f"{row.stem}/" for row in self.routes if not (row.counted or row.paths)
        )
        self._probes = frozenset(path for row in self.routes if row.health for path in row.paths)
        self._pages = frozenset(path for row in self.routes if row.pages for path in row.paths)
        self._probe_folders = tuple(f"{row.stem}/" for row in self.routes if row.health and "{" in row.path)

    def mount(self, app: falcon.asgi.App[Any, Any], services: Services) -> None:
        """Add the routes that are served."""
        for protocol in self._known:
            context = protocol.context(services)
            _mount(
                app, [row for one, row in self._served if one is protocol], context, services.settings.server
            )
        own = server_routes.Context(services, self.schema)
        _mount(app, server_routes.ROUTES, own, services.settings.server)
        for path in self._unchosen:
            app.add_route(path, UnchosenRoute(path, self.owners[path]))

    def schema(self) -> bytes:
        """The OpenAPI document of all tables as JSON. The first call takes a fifth of a second."""
        if self._schema is None:
            self._schema = server_routes.schema_of(self.routes, self.owners)
        return self._schema

    def at(self, path: str) -> PathFacts:
        """What holds for a path."""
        # PERF: each request asks several times, and most requests have one of few paths.
        facts = self._facts.get(path)
        return self._look_up(path) if facts is None else facts

    def of(self, path: str) -> WireProtocol:
        """The protocol with the longest prefix of whole segments of `path`; the first protocol, if none fits."""
        return self.at(path).protocol

    def need_of(self, path: str, open_metrics: bool = True) -> Need:
        """Scope that a normalized path needs; `open_metrics` opens the metrics to all."""
        return "" if open_metrics and path == METRICS else self.at(path).need

    def _look_up(self, path: str) -> PathFacts:
        facts = PathFacts(
            self._protocol_of(path),
            *self._inference_at(path),
            self.scopes.of(path),
            path not in self._uncounted and not path.startswith(self._uncounted_folders),
            path.startswith(PAGES) or path in self._pages,
        )
        if len(path) <= MOST_KEPT_CHARACTERS:
            if len(self._facts) >= MOST_KEPT_PATHS:
                self._facts.clear()
            self._facts[path] = facts
        return facts

    def _protocol_of(self, path: str) -> WireProtocol:
        whole, folders, best, end = f"{path}/", self._folders, self._known[0], 0
        while end := whole.find("/", end) + 1:
            folder = folders.get(whole[:end])
            if folder is None:
                break
            best = folder[-1] if folder else best
        return best

    def _inference_at(self, path: str) -> tuple[str, str]:
        """(operation, model) of a path."""
        route = self._operations.get(path)
        if route is not None:
            return route, ""
        for prefix, ending, operation, names_model in self._operation_patterns:
            if path.startswith(prefix) and path.endswith(ending):
                return operation, path[len(prefix) :] if names_model else ""
        return "", ""

    def is_probe(self, path: str) -> bool:
        """Whether the port for probes serves a path."""
        return path in self._probes or path.startswith(self._probe_folders)

    def _folders_of_protocols(self) -> dict[str, list[WireProtocol]]:
        """The protocols by their prefixes, the first protocol last, and an empty list for folders above a prefix."""
        prefixes = [(protocol, row.stem) for protocol, row in self._served]
        prefixes += [(protocol, folder) for protocol in self._known for folder in protocol.folders]
        prefixes.sort(key=lambda one: self._known.index(one[0]), reverse=True)
        sharing: dict[str, list[WireProtocol]] = {}
        for protocol, prefix in prefixes:
            folder = ""
            for segment in prefix.split("/"):
                folder += f"{segment}/"
                sharing.setdefault(folder, [])
            sharing[folder].append(protocol)
        return sharing


def _owners(known: Iterable[WireProtocol]) -> dict[str, list[str]]:
    """The servers that have each path which `server.compatible` chooses, by path."""
    owners: dict[str, list[str]] = {}
    for protocol in known:
        for path in dict.fromkeys(row.path for row in protocol.routes if row.shared):
            owners.setdefault(path, []).append(protocol.name)
    return dict(sorted(owners.items()))


def chosen(compatible: Iterable[str], owners: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The chosen server of each path that an entry chooses; `owners` as above. Raises `ConfigError`."""
    by: dict[str, str] = {}
    for entry in compatible:
        server, _, path = entry.partition(":")
        paths = [name for name, servers in owners.items() if server in servers and path in ("", name)]
        if not paths:
            known = ", ".join(name for name, servers in owners.items() if server in servers)
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

    def __init__(self, path: str, owners: Iterable[str]) -> None:
        choices = " or ".join(f"{server}:{path}" for server in owners)
        self._why = f"{path} answers in the form of a chosen server; set server.compatible to {choices}"

    async def on_post(self, req: Request, resp: Response) -> None:
        """Raises `Unsupported` with the choices."""
        raise Unsupported(self._why)


def _mount(app: falcon.asgi.App[Any, Any], rows: Iterable[Route], context: Any, server: Server) -> None:
    """Add each template once, with the resource of its first row."""
    makers: dict[str, Callable[[Any], Any]] = {}
    for row in rows:
        if not row.switch or getattr(server, row.switch):
            makers.setdefault(row.mounted, row.under.resource if row.under else row.resource)
    for template, make in makers.items():
        app.add_route(template, make(context))


def _pattern(row: Route) -> tuple[str, str, str, bool]:
    """(prefix, ending, operation, whether the path ends with the name of a model) of a route with parameters."""
    return f"{row.stem}/", row.ending, row.operation, row.path.endswith("{model:path}")


def protocols(compatible: Iterable[str] = (), *, is_gateway: bool = False) -> Protocols:
    """All protocols of this build, with those of a gateway for one. Raises `ConfigError` as `Protocols` does."""
    from frontend.protocols.agent import AgentProtocol
    from frontend.protocols.chat import ChatProtocol
    from frontend.protocols.cohere import CohereProtocol
    from frontend.protocols.files import FilesProtocol
    from frontend.protocols.gateway import GatewayProtocol
    from frontend.protocols.infinity import InfinityProtocol
    from frontend.protocols.kserve_v2 import KserveProtocol
    from frontend.protocols.messages import MessagesProtocol
    from frontend.protocols.ollama import OllamaProtocol
    from frontend.protocols.responses import ResponsesProtocol
    from frontend.protocols.sie import SieProtocol
    from frontend.protocols.skills import SkillsProtocol
    from frontend.protocols.tei import TeiProtocol
    from frontend.protocols.trtis_v1 import TrtisProtocol
    from frontend.protocols.vllm import VllmProtocol

    known: list[WireProtocol] = [
        SieProtocol(),
        CohereProtocol(),
        ChatProtocol(),
        ResponsesProtocol(),
        MessagesProtocol(),
        FilesProtocol(),
        SkillsProtocol(),
        AgentProtocol(),
        TeiProtocol(),
        VllmProtocol(),
        InfinityProtocol(),
        OllamaProtocol(),
        TrtisProtocol(),
        KserveProtocol(),
        *([GatewayProtocol()] if is_gateway else []),
    ]
    return Protocols(known, compatible)
