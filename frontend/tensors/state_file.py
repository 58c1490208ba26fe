"""A small state that all frontends share: one file in the run directory, read again only when it was replaced."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


class StateFile(Generic[T]):
    """A struct in a file; `default` while nobody has written it."""

    def __init__(self, path: Path, default: T) -> None:
        self._path, self._default = path, default
        self._known: tuple[tuple[int, int] | None, T] = (None, default)

    @property
    def stamp(self) -> tuple[int, int] | None:
        """Changes with the state."""
        try:
            facts = self._path.stat()
        except FileNotFoundError:
            return None
        return facts.st_ino, facts.st_mtime_ns

    def read(self) -> T:
        """The present state."""
        stamp = self.stamp
        if stamp != self._known[0]:
            self._known = (stamp, self._decode() if stamp else self._default)
        return self._known[1]

    def change(self, how: Callable[[T], T]) -> T:
        """Replace the state by `how(state)`, one frontend after the other; nothing changes when it raises."""
        with self._locked():
            state = how(self._decode() if self.stamp else self._default)
            draft = self._path.with_name(f".{secrets.token_hex(8)}")
            draft.write_bytes(msgspec.json.encode(state))
            draft.replace(self._path)
        return state

    def _decode(self) -> T:
        return msgspec.json.decode(self._path.read_bytes(), type=type(self._default))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The lock is held for the moment of one change; the kernel drops it when its holder dies."""
        fd = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)
