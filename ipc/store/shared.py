"""A small struct that all frontends share, in one row of the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from ipc.store.store import Change, Row, Store

T = TypeVar("T", bound=msgspec.Struct)

_KIND = "settings"


class SharedStruct(Generic[T]):
    """A struct by name; `default` while nobody has changed it."""

    def __init__(self, store: Store, name: str, default: T) -> None:
        self._store, self._name, self._default = store, name, default
        self._known = (0, default)

    @property
    def generation(self) -> int:
        """Another number after each change; 0 while there was none."""
        row = self._store.rows(_KIND).get(self._name)
        return 0 if row is None else row.generation

    def read(self) -> T:
        """The present state."""
        row = self._store.rows(_KIND).get(self._name)
        generation = 0 if row is None else row.generation
        if generation != self._known[0]:
            self._known = generation, self._decode(row)
        return self._known[1]

    async def change(self, how: Callable[[T], T], until_ns: int) -> T:
        """Replace the state by `how(state)`; nothing changes when `how` raises. Raises as `Store.write` does."""

        def replace(change: Change) -> T:
            state = how(self._decode(change.get(_KIND, self._name)))
            change.put(_KIND, self._name, msgspec.json.encode(state))
            return state

        return await self._store.write(replace, until_ns)

    def _decode(self, row: Row | None) -> T:
        return self._default if row is None else msgspec.json.decode(row.value, type=type(self._default))
