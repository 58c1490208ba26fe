"""Files that hold fakes up: whoever is told of such a file waits as long as the file exists."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def holding(directory: Path) -> Iterator[Path]:
    """A file in `directory` that exists within this block at most; a test may remove the file earlier."""
    path = directory / "hold"
    path.touch()
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def wait_for_end_of(hold: str) -> None:
    """Wait in the fake until the file has gone."""
    while Path(hold).exists():
        time.sleep(0.01)
