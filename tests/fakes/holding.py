"""Files that hold fakes up: whoever is told of such a file waits as long as the file exists."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BEGUN = ".begun"
"""Ending of the file beside a hold that tells of a fake that waits, and of the file that tells of a stream."""


@contextmanager
def holding(directory: Path) -> Iterator[Path]:
    """A file in `directory` that exists within this block at most; a test may remove the file earlier."""
    path = directory / "hold"
    path.touch()
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def is_waited_for(hold: Path) -> bool:
    """Whether a program has begun to wait for the end of the file."""
    return Path(f"{hold}{BEGUN}").exists()


def wait_for_end_of(hold: str) -> None:
    """Wait in the fake until the file has gone."""
    while Path(hold).exists():
        time.sleep(0.01)
