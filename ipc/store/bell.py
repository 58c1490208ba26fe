"""A bell wakes processes that wait for a change of a store, at once and without looks at intervals.

1. A bell is a file. A process rings after its commit, by a new time of the file.
2. A process that waits listens: the kernel (inotify) makes a descriptor readable at each ring. The event loop calls a
   function then.
3. A ring may be lost: the ringing process dies between commit and ring, the file is removed while processes listen, or
   the kernel has no watch left for this user (`fs.inotify.max_user_instances`). So listeners also look at their store
   at intervals, short ones without a watch.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_IN_ATTRIB = 0x4
"""Times, mode or number of links have changed (inotify(7))."""
_EVENTS_NBYTES = 4096
_LIBC = ctypes.CDLL(None, use_errno=True)


class Bell:
    """The file `path`, which the first listener makes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ring(self) -> None:
        """Wake all listeners. Without a file nobody listens."""
        with contextlib.suppress(OSError):
            os.utime(self._path)

    @contextmanager
    def listening(self, heard: Callable[[], None]) -> Iterator[bool]:
        """Within the context the running event loop calls `heard` after rings; False where the kernel has no watch."""
        descriptor = self._watch()
        if descriptor < 0:
            yield False
            return

        def read() -> None:
            with contextlib.suppress(BlockingIOError):
                os.read(descriptor, _EVENTS_NBYTES)
            heard()

        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, read)
        try:
            yield True
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def _watch(self) -> int:
        """A descriptor that is readable after a ring; negative where there is none."""
        try:
            self._path.touch(mode=0o600)
        except OSError:
            return -1
        descriptor: int = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if descriptor >= 0 and _LIBC.inotify_add_watch(descriptor, os.fsencode(self._path), _IN_ATTRIB) < 0:
            os.close(descriptor)
            return -1
        return descriptor
