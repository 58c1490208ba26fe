"""Numbers of requests: from 1, one more for every request of any kind, over all frontends of a server.

The last number given is 8 bytes of a file in the run directory. It is read, raised and written under an flock, which
the kernel drops when its holder dies. (A shared counter in memory would need atomic operations that Python lacks.)
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

_NUMBER = struct.Struct("<Q")
FILE_NAME = "request-number"


class RequestNumbers:
    """Gives numbers; the file is opened when the first one is asked for, after the fork."""

    def __init__(self, root: Path) -> None:
        self._path = root / FILE_NAME
        self._fd = -1

    def next(self) -> int:
        """One more than the last number of any frontend."""
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            raw = os.pread(self._fd, _NUMBER.size, 0)
            number = (_NUMBER.unpack(raw)[0] if len(raw) == _NUMBER.size else 0) + 1
            os.pwrite(self._fd, _NUMBER.pack(number), 0)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        return int(number)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
