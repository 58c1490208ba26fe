"""Numbers of requests: from 1, one more for every request of any kind, over all frontends of a server.

1. Every request appends one byte to a file of the run directory; the length of the file after that byte is its number.
   The kernel gives each append an end of its own, so no frontend locks anything and none waits for another one.
2. Whoever draws a multiple of `KEPT_NBYTES` gives the file's blocks back: its length stays, and it takes no room.
3. The file goes with the other ones of `RunPaths.control` when the server starts again (docs/adr/0031).
"""

from __future__ import annotations

import ctypes
import os

from ipc.processes.paths import RunPaths

FILE_NAME = "request-number"
KEPT_NBYTES = 1 << 20
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


class RequestNumbers:
    """Gives numbers; the file is opened when the first one is asked for, after the fork."""

    def __init__(self, paths: RunPaths) -> None:
        self._path = paths.control() / FILE_NAME
        self._fd = -1

    def next(self) -> int:
        """One more than the last number of any frontend; 0 when the file cannot be written, a full disk for example."""
        try:
            if self._fd < 0:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._fd = os.open(self._path, flags, 0o600)
            os.write(self._fd, b"\0")
            # NOTE: the position belongs to this process's own descriptor, and an append leaves it behind its byte.
            number = os.lseek(self._fd, 0, os.SEEK_CUR)
        except OSError:
            return 0
        if number % KEPT_NBYTES == 0:
            _give_back(self._fd, number)
        return number

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _give_back(fd: int, nbytes: int) -> None:
    """Free the blocks of the first `nbytes`; a file system that cannot do this keeps them."""
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
    if fallocate is not None:
        fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(nbytes))
