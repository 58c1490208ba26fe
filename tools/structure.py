"""The shape of the tree: no import circles, few imports per module, and a docstring of three lines per package.

1. Modules that import one another in a circle are a finding. Imports under `TYPE_CHECKING` and inside functions count.
2. A module imports at most `MAX_IMPORTS` of our own modules.
3. The docstring of a package has three lines: a summary, an empty line, and who may import the package.
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


def find(root: Path) -> Iterator[Finding]:
    """Everything that breaks a rule of this module under `root`."""
    graph = graph_of(root)
    files = {name_of(path.relative_to(root)): path.relative_to(root) for path in python_files(root)}
    for group in circles(graph):
        yield Finding(files[group[0]], 1, f"imports in a circle: {', '.join(group)}")
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
