"""Files with secrets, which no other user of the machine may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ipc.errors import ConfigError

MAX_NBYTES = 1 << 20


def read(path: Path, setting: str) -> bytes:
    """The content, of the very file whose mode was checked. Raises `ConfigError` that names `setting` and the path."""
    try:
        # NOTE: non-blocking, since a pipe in the place of the file would hold up the start for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _mistake(setting, path, error.strerror or "cannot be opened") from None
    try:
        _check(setting, path, os.fstat(descriptor))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_NBYTES)
    finally:
        os.close(descriptor)


def _check(setting: str, path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise _mistake(setting, path, "not a file")
    if found.st_mode & 0o007:
        mode = stat.S_IMODE(found.st_mode)
        raise _mistake(setting, path, f"mode {mode:04o} lets all users in; chmod 640 or stricter")
    if found.st_size > MAX_NBYTES:
        raise _mistake(setting, path, f"{found.st_size} bytes, the limit is {MAX_NBYTES}")


def _mistake(setting: str, path: Path, text: str) -> ConfigError:
    return ConfigError(f"{setting} {path}: {text}")
