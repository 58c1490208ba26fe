"""The row of a route, and what follows from the rows of all routes.

1. A protocol lists its routes in one table of rows, and no other place names their paths.
2. `frontend.protocols.registry` mounts the rows and finds the protocol and the operation of a path.
3. `Scopes` tells the scope that a path needs.
4. `frontend.openapi.document` describes the rows that have a summary. The fuzzer follows the document.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import msgspec

JSON = "application/json"
MSGPACK = "application/msgpack"
TEXT = "text/plain"
HTML = "text/html"
EVENTS = "text/event-stream"

METRICS = "/metrics"
"""The path that settings open, close, and move to a port of its own."""

MCP = "/mcp"
"""The path of MCP, which a port of its own serves, and no other."""

PAGES = "/v1/"
"""The folder whose paths pages of other sites may get leave to use, also paths that no row names."""

Need = Literal["", "infer", "admin"]
"""The scope of a key that a route needs; empty where the route is open to all. The strictest comes last."""
_NEEDS = get_args(Need)

Faults = Mapping[int, type[msgspec.Struct] | tuple[type[msgspec.Struct], ...] | None]
"""Statuses, and the bodies that answers with a status may have; None for no described body."""

_CONVERTER = re.compile(r":\w+}")
_IN_BRACES = re.compile(r"{[^}]*}")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A query parameter or a header of a request; `schema` is JSON Schema."""

    name: str
    place: Literal["query", "header"]
    text: str
    schema: dict[str, Any] = field(default_factory=lambda: {"type": "string"})


@dataclass(frozen=True, slots=True)
class Folder:
    """A template that is mounted once for several routes, whose resource reads the rest of the path by itself."""

    path: str
    resource: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Route:
    """One method on one path: who answers, who may ask, and how the API's description tells of the route.

    `path` is Falcon's template: `{model:path}` may hold slashes, other names in braces are parameters of one word.
    `resource` makes the resource from what the protocol gives (`context`); the rows of one path have the same one. A
    route without a `summary` is not described: a further name of another route, or a path that only says why the path
    is not served.
    """

    method: Literal["get", "post", "put", "delete"]
    path: str
    resource: Callable[[Any], Any]
    summary: str = ""
    tag: str = ""
    body: Any = None
    """The struct of requests."""
    body_required: bool = True
    answer: Any = None
    """The type of answers in each media type of `media`, a tuple for any of its types, None for text."""
    answer_text: str = "Success."
    many: bool = False
    """Whether the answer is a list of `answer`."""
    media: tuple[str, ...] = (JSON,)
    request_media: tuple[str, ...] = ()
    errors: Faults = field(default_factory=dict)
    """Further statuses, and their bodies."""
    also: dict[int, str] = field(default_factory=dict)
    """Further statuses that are no errors and have the body of `answer`, or none."""
    parameters: tuple[Parameter, ...] = ()
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Values of a parameter of the path, by its name, where the values are fixed."""
    timed: bool = False
    """Whether answers carry the timing headers."""
    streams: bool = False
    """Whether the answer may also be a stream of events."""
    example: dict[str, Any] | None = None
    variants: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Further examples by what they show."""
    error_media: tuple[str, ...] = (TEXT,)
    """Media types of errors without a struct; none: their body is empty and has no type."""
    retry_header: bool = True
    """Whether errors that pass with time carry Retry-After."""
    error_code_header: bool = True
    """Whether errors carry X-SIE-Error-Code."""
    need: Need = "infer"
    """The scope that a key needs, where the server has keys."""
    operation: str = ""
    """Name in metrics of what the route runs; empty for a route that runs no model. By default the resource's."""
    under: Folder | None = None
    """What is mounted in place of the route, where one resource answers for a whole folder."""
    switch: Literal["", "admin", "mcp_port"] = ""
    """The setting of the section `server` without which the route is not served."""
    shared: bool = False
    """Whether `server.compatible` chooses the server in whose form the path answers."""
    root: bool = False
    """Whether a POST to the root means this path, where the path is served."""
    health: bool = False
    """Whether the port for probes serves the route."""
    counted: bool = True
    """Whether requests are among the metrics of HTTP."""
    pages: bool = False
    """Whether pages of other sites may get leave to use the path, as all paths below `PAGES` may."""

    def __post_init__(self) -> None:
        if not self.operation:
            object.__setattr__(self, "operation", getattr(self.resource, "operation", ""))

    @property
    def mounted(self) -> str:
        """The template that is mounted."""
        return self.under.path if self.under else self.path

    @property
    def shown(self) -> str:
        """The path as the API's description writes it: `/v1/encode/{model}`."""
        return _CONVERTER.sub("}", self.path)

    @property
    def stem(self) -> str:
        """The path up to its first parameter, without a slash at the end."""
        return self.path.partition("{")[0].rstrip("/")

    @property
    def ending(self) -> str:
        """The path behind its last parameter; without parameters the whole path."""
        return self.path.rpartition("}")[2]

    @property
    def name(self) -> str:
        """Stable id: `post_v1_encode_model`."""
        words = [word.strip("{}") for word in self.shown.split("/") if word]
        return "_".join([self.method, *(word.replace(".", "_") for word in words or ["root"])])

    @property
    def accepts(self) -> tuple[str, ...]:
        """Media types of requests."""
        return self.request_media or self.media

    @property
    def paths(self) -> list[str]:
        """The paths of the route; empty where a parameter may be any text."""
        if not set(_IN_BRACES.findall(self.path)) <= {f"{{{name}}}" for name in self.choices}:
            return []
        paths = [self.path]
        for name, values in self.choices.items():
            paths = [path.replace(f"{{{name}}}", value) for path in paths for value in values]
        return paths


def asking(
    path: str,
    resource: Callable[[Any], Any],
    summary: str,
    body: Any,
    answer: Any,
    example: dict[str, Any],
    *,
    tag: str,
    **more: Any,
) -> Route:
    """The row of a route that is asked with a JSON body and an example; `more` are other fields of `Route`."""
    return Route(
        "post",
        path,
        resource,
        summary,
        tag,
        body=body,
        answer=answer,
        example=example,
        request_media=(JSON,),
        **more,
    )


class Scopes:
    """The scope that each path needs. A path that no row names needs `infer`: new routes are closed by default.

    The gate does not look at methods, so a path needs what the strictest of its rows needs. A folder in which every
    route needs `admin` needs `admin` as a whole, whatever path is asked for in the folder. A folder is open if every
    route in the folder is open.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        table = list(routes)
        by_need = sorted(table, key=lambda route: _NEEDS.index(route.need))
        self._exact: dict[str, Need] = {path: route.need for route in by_need for path in route.paths}
        folders = {route.stem + "/" for route in table if not route.need and not route.paths}
        closed = [route.path for route in table if route.need]
        self._open_folders = tuple(
            folder for folder in folders if not any(path.startswith(folder) for path in closed)
        )
        admin = [route for route in table if route.need == "admin"]
        others = [route.path for route in table if route.need != "admin"]
        self.admin_folders = tuple(sorted({_highest(route.path, others) for route in admin} - {""}))
        patterns = sorted({pattern for route in admin for pattern in _patterns(route)})
        self._admin = re.compile(f"(?:{'|'.join(patterns)})/?", re.DOTALL) if patterns else None

    def of(self, path: str) -> Need:
        """Scope that a normalized path (`frontend.http.listeners`) needs."""
        need = self._exact.get(path)
        if need is not None:
            return need
        if path.startswith(self.admin_folders) or (self._admin is not None and self._admin.fullmatch(path)):
            return "admin"
        return "" if path.startswith(self._open_folders) else "infer"


def _highest(path: str, others: Sequence[str]) -> str:
    """The highest folder of `path` that has none of the `others` and is not the root; empty where there is none."""
    folder = "/"
    for word in path.partition("{")[0].split("/")[1:-1]:
        folder += f"{word}/"
        if not any(other.startswith(folder) for other in others):
            return folder
    return ""


def _patterns(route: Route) -> list[str]:
    """Patterns of the paths of a route, and of further spellings that the resource of a folder knows."""
    if "{" not in route.path:
        return [re.escape(route.path)]
    prefix = route.mounted.partition("{")[0]
    if route.under:
        return [f"{re.escape(prefix)}(?:.*/)?{re.escape(route.ending.lstrip('/'))}"]
    return [f"{re.escape(prefix)}.*{re.escape(route.ending)}"]
