"""2,000 English passages of mixed lengths, made from installed documentation.

1. Paragraphs are collected from docstrings of the standard library (parsed, not imported) and from the READMEs and
   licences of installed packages; code, tables and duplicates are dropped.
2. They are shuffled with a fixed seed and joined to word counts that are log-uniform from 8 to 300 words, which is
   about 10 to 400 word-pieces.

The result is the same on every run with the same Python and packages; `fingerprint` goes into every report.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import math
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PASSAGES = 2000
_SHORTEST_WORDS, _LONGEST_WORDS = 8, 300
_SEED = 20_24
_MAX_FILE_NBYTES = 400_000
_SKIPPED = {"site-packages", "test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "__pycache__"}
_COMMON_WORDS = frozenset({"the", "a", "to", "of", "is", "and"})


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of `text` that read like prose."""
    for block in re.split(r"\n\s*\n", text):
        paragraph = " ".join(block.split())
        if len(paragraph) < 40:
            continue
        letters = sum(character.isalpha() or character == " " for character in paragraph)
        if letters < 0.88 * len(paragraph):
            continue
        if sum(word in _COMMON_WORDS for word in paragraph.lower().split()) >= 2:
            yield paragraph


def _docstrings(path: Path) -> Iterator[str]:
    """Docstrings of one Python file: module, classes, functions."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, OSError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _documents() -> Iterator[str]:
    """Texts of this installation in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if not _SKIPPED.intersection(path.relative_to(library).parts):
            yield from _docstrings(path)
    for directory in sorted(Path(sysconfig.get_path("purelib")).glob("*.dist-info")):
        for path in sorted(directory.rglob("*")):
            named = path.name == "METADATA" or path.name.upper().startswith(("LICENSE", "LICENCE", "NOTICE"))
            if named and path.is_file() and path.stat().st_size < _MAX_FILE_NBYTES:
                yield path.read_text(encoding="utf-8", errors="ignore")


@functools.cache
def passages(count: int = PASSAGES) -> tuple[str, ...]:
    """The first `count` passages; at most `PASSAGES` of them exist."""
    pool = list({text[:80]: text for document in _documents() for text in _paragraphs(document)}.values())
    chosen = random.Random(_SEED)
    chosen.shuffle(pool)
    words = (word for paragraph in _endless(pool) for word in paragraph.split())
    result = []
    for _ in range(PASSAGES):
        length = math.exp(chosen.uniform(math.log(_SHORTEST_WORDS), math.log(_LONGEST_WORDS)))
        result.append(" ".join(next(words) for _ in range(int(length))))
    return tuple(result[:count])


def _endless(pool: list[str]) -> Iterator[str]:
    while True:
        yield from pool


def fingerprint(texts: tuple[str, ...]) -> str:
    """Short hash of `texts`; equal hashes mean equal work."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def main() -> None:
    """Print the size of the corpus and its word counts."""
    texts = passages()
    lengths = sorted(len(text.split()) for text in texts)
    median = lengths[len(lengths) // 2]
    print(
        f"{len(texts)} passages {fingerprint(texts)}; words: {lengths[0]} to {lengths[-1]}, median {median}"
    )


if __name__ == "__main__":
    main()
