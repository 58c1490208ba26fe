"""A small state that all frontends share: one file in the run directory, read again only when it was replaced."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from ipc.processes.liveness import lock_on

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

    async def change(self, how: Callable[[T], T], until_ns: int) -> T:
        """Replace the state by `how(state)`, one frontend after the other; nothing changes when it raises.

        Raises `DeadlineExceeded` when another frontend holds the lock until `until_ns`.
        """
        lock = self._path.with_suffix(".lock")
        async with lock_on(lock, until_ns, "before another change of these settings had ended"):
            state = how(self._decode() if self.stamp else self._default)
            draft = self._path.with_name(f".{secrets.token_hex(8)}")
            draft.write_bytes(msgspec.json.encode(state))
            draft.replace(self._path)
        return state

    def _decode(self) -> T:
        return msgspec.json.decode(self._path.read_bytes(), type=type(self._default))
