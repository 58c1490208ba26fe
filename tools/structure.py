"""The shape of the tree: no import circles, floors, few imports per module, docstrings of packages.

1. Modules that import one another in a circle are a finding. Imports under `TYPE_CHECKING` and inside functions count.
2. Rooms are the modules and packages of a top-level package. A room imports rooms of lower floors only (`FLOORS`), so
   that rooms form no circle.
3. A module imports at most `MAX_IMPORTS` of our own modules.
4. The docstring of a package has three lines: a summary, an empty line, and who may import the package.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.imports import imported_names
from tools.source_tree import Finding, parse, python_files, report, tree_argument

MAX_IMPORTS = 20
PACKAGE_LINES = 3
FLOORS = {
    "ipc": (
        ("decoding", "errors", "machine", "protos", "shares", "version", "yaml_text"),
        ("addresses", "deadline", "mcp_servers"),
        ("processes", "setting_sources"),
        ("extras", "settings"),
        ("brokers", "catalog", "logs"),
        ("wire",),
        ("memory", "metrics", "store"),
        ("sweep",),
    ),
    "frontend": (
        ("route_rows",),
        ("access", "access_log"),
        ("scope",),
        ("http", "tracing", "web"),
        ("openapi", "records", "server"),
        ("background", "engine", "state"),
        ("tensors",),
        ("services",),
        ("cluster",),
        ("assembly", "grpc", "sending", "status"),
        ("generation",),
        ("agent",),
        ("protocols",),
        ("arbiter", "bridge", "lifespan"),
        ("app",),
    ),
    "workers": (
        ("foreign", "inputs", "libraries", "repository", "tools"),
        ("spare",),
        ("device", "supervisor"),
        ("image_settings",),
        ("images",),
        ("generation",),
        ("loading",),
        ("adapters",),
        ("endpoint", "operations"),
        ("scheduling",),
        ("lifecycle", "strategies"),
        ("reports",),
        ("runtime",),
        ("main",),
        ("__main__",),
    ),
}
"""Rooms by top-level package, from the ground upwards."""

Graph = dict[str, set[str]]
"""Own modules that each module imports, by dotted name."""


def name_of(path: Path) -> str:
    """Dotted name of the module in a file; `path` is relative to the root of the tree."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def graph_of(root: Path) -> Graph:
    """The imports of every module under `root`; a name inside a module counts as the module."""
    trees = {
        name_of(path.relative_to(root)): (path.relative_to(root), parse(path)) for path in python_files(root)
    }
    return {name: _imports(name, path, tree, set(trees)) for name, (path, tree) in trees.items()}


def _imports(module: str, path: Path, tree: ast.Module, known: set[str]) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        for name in imported_names(node, path):
            owner = name if name in known else name.rpartition(".")[0]
            if owner in known and owner != module:
                found.add(owner)
    return found


def circles(graph: Graph) -> list[list[str]]:
    """Groups of modules that reach one another, each sorted (strongly connected components, Tarjan 1972)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        numbers[module] = lowest[module] = len(numbers)
        path.append(module)
        for other in sorted(graph[module]):
            if other not in numbers:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in path:
                lowest[module] = min(lowest[module], numbers[other])
        if lowest[module] == numbers[module]:
            group = path[path.index(module) :]
            del path[path.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in sorted(graph):
        if module not in numbers:
            visit(module)
    return sorted(found)


def uphill(graph: Graph) -> Iterator[tuple[str, str]]:
    """(module, what is wrong) of each import of a room that is on no lower floor of the same top-level package."""
    for module, imports in sorted(graph.items()):
        top, own = _room(module)
        if top not in FLOORS or not own:
            continue
        heights = {room: height for height, floor in enumerate(FLOORS[top]) for room in floor}
        if own not in heights:
            yield module, f"{top}.{own} is on no floor of FLOORS"
            continue
        for other, room in sorted({_room(name) for name in imports}):
            if other == top and room not in ("", own) and heights.get(room, 0) >= heights[own]:
                yield module, f"{top}.{own} must not import {top}.{room}, which is on no lower floor"


def _room(module: str) -> tuple[str, str]:
    """(top-level package, room in the package or nothing) of a module."""
    top, _, rest = module.partition(".")
    return top, rest.partition(".")[0]


def find(root: Path) -> Iterator[Finding]:
    """Everything that breaks a rule of this module under `root`."""
    graph = graph_of(root)
    files = {name_of(path.relative_to(root)): path.relative_to(root) for path in python_files(root)}
    for group in circles(graph):
        yield Finding(files[group[0]], 1, f"imports in a circle: {', '.join(group)}")
    for module, problem in uphill(graph):
        yield Finding(files[module], 1, problem)
    for module, imports in sorted(graph.items()):
        if len(imports) > MAX_IMPORTS:
            yield Finding(files[module], 1, f"{len(imports)} own imports, {MAX_IMPORTS} are allowed")
    for path in files.values():
        if path.name == "__init__.py":
            text = ast.get_docstring(parse(root / path)) or ""
            if len(text.splitlines()) != PACKAGE_LINES:
                yield Finding(path, 1, f"the docstring of a package has {PACKAGE_LINES} lines")


if __name__ == "__main__":
    sys.exit(report("structure", find(tree_argument())))
