"""Size rule: no file above 400 lines, no function above 60.

A function counts from its `def` to its last line, docstring included and decorators not.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.source_tree import Finding, python_files, report, tree_argument, walk_files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def long_functions(path: Path, tree: ast.Module) -> Iterator[Finding]:
    """Functions and methods above the limit."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield Finding(
                    path, node.lineno, f"{node.name}() has {lines} lines, {MAX_FUNCTION_LINES} are allowed"
                )


def long_files(root: Path) -> Iterator[Finding]:
    """Files above the limit."""
    for path in python_files(root):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            yield Finding(path.relative_to(root), lines, f"{lines} lines, {MAX_FILE_LINES} are allowed")


def find(root: Path) -> list[Finding]:
    """Everything too long under `root`."""
    return [*long_files(root), *walk_files(root, long_functions)]


if __name__ == "__main__":
    sys.exit(report("sizes", find(tree_argument())))
