"""The files that the checks read, and the report of findings."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("frontend", "ipc", "penstock", "penstock_server", "workers")


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule at one line."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def python_files(root: Path) -> list[Path]:
    """Python files of the four packages under `root`, sorted, without generated protocol buffers."""
    found = (path for package in PACKAGES for path in (root / package).rglob("*.py"))
    return sorted(path for path in found if "_pb2" not in path.stem)


def parse(path: Path) -> ast.Module:
    """Syntax tree of a file. Raises `SyntaxError`."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def walk_files(root: Path, check: Callable[[Path, ast.Module], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of `check` in every file, with paths relative to `root`."""
    for path in python_files(root):
        yield from check(path.relative_to(root), parse(path))


def report(title: str, findings: Iterable[Finding]) -> int:
    """Print the findings and a closing line; 1 when there is any, else 0."""
    lines = [str(finding) for finding in findings]
    print("\n".join([*lines, f"{title}: {len(lines) or 'no'} finding{'' if len(lines) == 1 else 's'}"]))
    return int(bool(lines))


def tree_argument(arguments: list[str] | None = None) -> Path:
    """Root of the tree to check: the first command-line argument, or this repository."""
    given = sys.argv[1:] if arguments is None else arguments
    return Path(given[0]).resolve() if given else ROOT
