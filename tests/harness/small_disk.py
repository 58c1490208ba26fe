"""A file system of a few bytes, for tests of what happens without room."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conformance.required_tool import lacking


@contextmanager
def small_disk(mount: Path, nbytes: int) -> Iterator[Path]:
    """A file system of `nbytes` at the new directory `mount`; the test is skipped for users who may not mount."""
    mount.mkdir()
    options = f"size={nbytes},mode=0700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "penstock-test", str(mount)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lacking(f"no file system of {nbytes} bytes to test on: {done.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)
