"""The place of a gateway's stores: rows and large bytes at the brokers (`frontend.state.places.Place`).

1. Each store has a bucket (`SharedRows`), made with its first row. Large rows and contents are parts in one bucket.
2. Copies of rows lie in the run directory, in files of this process alone, which end with the process. Copies of
   contents are shared by the frontends of this host.
3. Each store follows what other gateways write. `run` compares copies with the brokers each `SWEEP_EVERY_S`.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from frontend.cluster.broker import Broker
from frontend.cluster.parts import Parts, SharedContents
from frontend.cluster.rows import SharedRows
from frontend.state.places import Lives, Tables
from ipc.logs import Seldom
from ipc.settings import Settings
from ipc.store.store import StoreUnreadable
from ipc.wire.cluster_names import Names

log = logging.getLogger(__name__)

SWEEP_EVERY_S = 120.0


class SharedBell:
    """Tells of changes of some rows, also of those that other gateways make."""

    def __init__(self, rows: SharedRows) -> None:
        self._rows = rows

    def ring(self) -> None:
        """Nothing: the brokers tell of every write."""

    @contextmanager
    def listening(self, heard: Callable[[], None]) -> Iterator[bool]:
        """Within the context `heard` is called after changes."""
        self._rows.heard.append(heard)
        try:
            yield True
        finally:
            self._rows.heard.remove(heard)


class ClusterPlace:
    """Where all gateways of a cluster keep their stores."""

    def __init__(self, settings: Settings, broker: Broker, names: Names, lives: Lives, slot: int) -> None:
        """`slot` is the number of this frontend, whose older copies are deleted with the first use."""
        self._broker, self._names = broker, names
        self._most_nbytes = 2 * settings.limits.max_body_bytes
        """Of a row: a stored conversation has what came before it, and its own request."""
        self._root = settings.paths.root / "copies"
        self._copies, self._is_empty = self._root / f"frontend-{slot}", False
        self._seldom = Seldom(log)
        self.lives = lives
        self._stores: dict[str, SharedRows] = {}
        self._all_parts: list[Parts] = []

    def _parts(self, store: str) -> Parts:
        self._all_parts.append(Parts(self._broker, self._names.files, store, self.lives))
        return self._all_parts[-1]

    def rows(self, file: str, schema: str, tables: Tables) -> SharedRows:
        """The tables of a store. A second call for the same store gives the same object."""
        name = Path(file).stem
        if name not in self._stores:
            if not self._is_empty:
                shutil.rmtree(self._copies, ignore_errors=True)
                self._is_empty = True
            self._stores[name] = SharedRows(
                self._broker,
                self._names.agents(name),
                self._copies / file,
                schema,
                tables,
                self._parts(name),
                self._most_nbytes,
            )
        return self._stores[name]

    def contents(self, name: str) -> SharedContents:
        """The contents of a store."""
        return SharedContents(self._root / name, self._parts(name))

    def lacks_room(self, nbytes: int) -> bool:
        """Whether the brokers have refused the last write of a store for their room: how much they have is not told."""
        return any(parts.is_full for parts in self._all_parts)

    def bell(self, name: str) -> SharedBell:
        """What tells of changes of the store whose name begins like that of the bell."""
        kind = Path(name).stem
        return SharedBell(next(rows for store, rows in self._stores.items() if store.startswith(kind)))

    async def run(self) -> None:
        """Compare and sweep for ever."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            for rows in list(self._stores.values()):
                failed = "stored rows could not be compared with those of the brokers"
                try:
                    await rows.sweep()
                    self._seldom.over(failed)
                except StoreUnreadable as error:
                    self._seldom.warning(failed, str(error.strerror))

    def close(self) -> None:
        """Follow the brokers no more, and delete the copies of this process."""
        for rows in self._stores.values():
            rows.close()
        shutil.rmtree(self._copies, ignore_errors=True)
