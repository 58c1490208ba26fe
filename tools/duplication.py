"""Duplication rule: less than 5 % of the code lines may stand in a run of lines that occurs twice.

1. Each file becomes a list of code lines: comments, docstrings, imports and lines of closing brackets are left
   out, spacing is normalised and every string and number becomes one placeholder, so that copies with other
   constants still match.
2. Every window of six consecutive code lines is looked up in a table of all windows.
3. A line is duplicated when one of its windows occurs more than once.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

from tools.source_tree import parse, python_files, tree_argument

WINDOW_LINES = 6
LIMIT_PERCENT = 5.0

_LITERALS = {tokenize.NUMBER, tokenize.STRING}
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}

CodeLine = tuple[int, str]
Place = tuple[Path, int]


def code_lines(path: Path) -> list[CodeLine]:
    """(line number, normalised text) of every line of code of a file."""
    skipped = _docstring_and_import_lines(parse(path))
    words: dict[int, list[str]] = defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type not in _LAYOUT and token.start[0] not in skipped:
            words[token.start[0]].append("0" if token.type in _LITERALS else token.string)
    return [
        (line, " ".join(tokens))
        for line, tokens in sorted(words.items())
        if any(word.isalnum() for word in tokens)
    ]


def duplicated(files: dict[Path, list[CodeLine]]) -> dict[Place, Place]:
    """Each duplicated line with one other place where its run of lines stands."""
    windows: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    for path, lines in files.items():
        for start in range(len(lines) - WINDOW_LINES + 1):
            windows[tuple(text for _, text in lines[start : start + WINDOW_LINES])].append((path, start))
    found: dict[Place, Place] = {}
    for places in windows.values():
        if len(places) > 1:
            for (path, start), (other, other_start) in zip(places, places[1:] + places[:1], strict=True):
                for offset in range(WINDOW_LINES):
                    found[path, files[path][start + offset][0]] = (
                        other,
                        files[other][other_start + offset][0],
                    )
    return found


def percentage(root: Path) -> tuple[float, dict[Place, Place]]:
    """Share of duplicated code lines under `root` in percent, and where they are."""
    files = {path.relative_to(root): code_lines(path) for path in python_files(root)}
    total = sum(len(lines) for lines in files.values())
    found = duplicated(files)
    return (100.0 * len(found) / total if total else 0.0), found


def main(root: Path) -> int:
    """Print the runs and the percentage; 1 when the limit is reached."""
    percent, found = percentage(root)
    for place, other in sorted(found.items()):
        if (place[0], place[1] - 1) not in found:
            print(f"{place[0]}:{place[1]}: also at {other[0]}:{other[1]}")
    print(f"duplication: {percent:.1f} % of the code lines, the limit is {LIMIT_PERCENT:.0f} %")
    return int(percent >= LIMIT_PERCENT)


def _docstring_and_import_lines(tree: ast.Module) -> set[int]:
    skipped: set[int] = set()
    for node in ast.walk(tree):
        is_text = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            assert isinstance(node, ast.stmt)
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return skipped


if __name__ == "__main__":
    sys.exit(main(tree_argument()))
