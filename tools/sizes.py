"""Size rules: no function above 60 lines, no module above 500, no line of Markdown above 120 columns.

A function counts from its `def` to its last line, docstring included and decorators not. Tables of Markdown are as wide
as their content.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.source_tree import Finding, python_files, report, tree_argument, walk_files

MAX_FUNCTION_LINES = 60
MAX_MODULE_LINES = 500
LONG_MODULES = {
    "frontend/protocols/kserve_v2/routes.py": "the table of KServe's routes, with what answers each row",
    "frontend/server/protocol.py": "one connection and its requests, which change each other's states",
    "ipc/settings.py": "one tree of settings, a section after another",
    "ipc/wire/messages.py": "all messages between frontends and workers, without logic",
    "workers/adapters/gliner.py": "one family of models, whose classes no other family uses",
}
"""Modules above the limit, each with the reason why the module is not two."""
MAX_COLUMNS = 120
_PLACES = ("benchmarks", "docs", "tests")


def long_functions(path: Path, tree: ast.Module) -> Iterator[Finding]:
    """Functions and methods above the limit."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield Finding(
                    path, node.lineno, f"{node.name}() has {lines} lines, {MAX_FUNCTION_LINES} are allowed"
                )


def long_modules(root: Path) -> Iterator[Finding]:
    """Modules above the limit that `LONG_MODULES` does not name, and names there of modules that are below."""
    for path in python_files(root):
        name, lines = str(path.relative_to(root)), path.read_text(encoding="utf-8").count("\n")
        if lines > MAX_MODULE_LINES and name not in LONG_MODULES:
            yield Finding(Path(name), 1, f"{lines} lines, {MAX_MODULE_LINES} are allowed")
        elif lines <= MAX_MODULE_LINES and name in LONG_MODULES:
            yield Finding(Path(name), 1, f"{lines} lines, so LONG_MODULES need not name the module")


def find(root: Path) -> list[Finding]:
    """Everything too long under `root`."""
    return [*walk_files(root, long_functions), *long_modules(root), *long_lines(root)]


def long_lines(root: Path) -> Iterator[Finding]:
    """Lines of Markdown above the limit, in the directory itself and in the directories of pages."""
    pages = [
        *root.glob("*.md"),
        *(page for place in _PLACES for page in (root / place).rglob("*.md")),
    ]
    for page in sorted(pages):
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if len(line) > MAX_COLUMNS and not line.startswith("|"):
                yield Finding(
                    page.relative_to(root), number, f"{len(line)} columns, {MAX_COLUMNS} are allowed"
                )


if __name__ == "__main__":
    sys.exit(report("sizes", find(tree_argument())))
