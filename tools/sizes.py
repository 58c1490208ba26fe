"""Size rule: no function above 60 lines. A file is as long as its concept.

A function counts from its `def` to its last line, docstring included and decorators not.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.source_tree import Finding, report, tree_argument, walk_files

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


def find(root: Path) -> list[Finding]:
    """Everything too long under `root`."""
    return list(walk_files(root, long_functions))


if __name__ == "__main__":
    sys.exit(report("sizes", find(tree_argument())))
