"""Models that a load by name brought a configuration or files for.

1. An override is one row of the server's store (`ipc.store`). The files that came with it lie in a directory of their
   own in the run directory, laid out as in a repository.
2. Workers that read the repositories (`workers.repository`) put overrides in the place of the models on disk, and
   notice new overrides as they notice files. So overrides reach every worker, and workers that start anew.
3. An override ends with the next load that brings none, with the unload, and with the next start of the server.
4. Whoever changes any of them holds one lock meanwhile (`locked`), which the kernel drops when its holder dies: a load
   may take minutes, and a transaction of the store must not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from ipc import deadline
from ipc.catalog.repository import Override, is_model_name
from ipc.errors import DeadlineExceeded, InvalidInput
from ipc.processes.liveness import lock_on
from ipc.processes.paths import RunPaths
from ipc.store.store import Store, Table

log = logging.getLogger(__name__)

_LOCK = ".lock"


class Overrides:
    """The overrides of one server."""

    def __init__(self, paths: RunPaths, store: Store) -> None:
        self.directory, self._table = paths.overrides(), Table(store, "overrides", Override)

    def read(self) -> Mapping[str, Override]:
        """All overrides in force, by model. Raises `OSError`."""
        return self._table.rows()

    def get(self, model: str) -> Override | None:
        """The override of a model, None without one. Raises `OSError`."""
        return self._table.rows().get(model)

    def root_of(self, override: Override) -> Path:
        """The repository whose only model are the files of an override."""
        return self.directory / override.files

    @asynccontextmanager
    async def locked(self, until_ns: int) -> AsyncIterator[None]:
        """Keep everybody else from changing overrides meanwhile. Raises `DeadlineExceeded` and `OSError`."""
        where = "before another load with parameters had ended"
        async with lock_on(self.directory / _LOCK, until_ns, where):
            yield

    def sweep(self) -> None:
        """Delete files that a process left which died in a change; the caller holds the lock, in a thread.

        Raises `OSError`, and `DeadlineExceeded` as `Table.change_now` does, before anything is deleted.
        """
        # NOTE: a transaction, since `read` may tell of what was in force before.
        named = self._table.change_now(lambda rows: {override.files for override in rows.values()}) | {_LOCK}
        for path in self.directory.iterdir():
            if path.name not in named:
                shutil.rmtree(path, ignore_errors=True)

    async def sweep_unless_locked(self) -> None:
        """`sweep` at the start of a process. A process that holds the lock sweeps as well."""
        try:
            with contextlib.suppress(DeadlineExceeded):
                async with self.locked(deadline.after(0)):
                    await asyncio.to_thread(self.sweep)
        except OSError as error:
            log.error("what ended loads left in the run directory cannot be deleted: %s", error)

    def draft(self, model: str, config: str, files: Mapping[str, bytes]) -> Override:
        """An override not in force yet; its files, by their path below the model's directory, are written.

        Raises `OSError`, and `InvalidInput` for a name or path that leads elsewhere.
        """
        if not is_model_name(model):
            raise InvalidInput(f"{model[:200]!a} is no name for a model")
        if not files:
            return Override(model, config)
        override = Override(model, config, secrets.token_hex(8))
        try:
            for name, data in files.items():
                self._write(override, name, data)
        except BaseException:
            self.discard(override)
            raise
        return override

    async def put(self, override: Override) -> None:
        """Put `override` in force, in place of an earlier override of its model. Raises as `Table.change` does."""
        await self._table.change(lambda rows: rows.update({override.model: override}))

    async def remove(self, model: str) -> None:
        """Let the repository's own model be in force again; the files stay until `discard`.

        Raises as `Table.change` does.
        """
        await self._table.change(lambda rows: rows.pop(model, None))

    def discard(self, override: Override | None) -> None:
        """Delete the files of an override that is not in force any more. Programs that have read them go on."""
        if override is not None and override.files:
            shutil.rmtree(self.root_of(override), ignore_errors=True)

    def nbytes(self) -> int:
        """Bytes of all files."""
        found = 0
        for path in self.directory.rglob("*"):
            try:
                found += path.stat().st_size if path.is_file() else 0
            except OSError:
                continue
        return found

    def _write(self, override: Override, name: str, data: bytes) -> None:
        below = Path(name)
        if below.is_absolute() or not below.name or ".." in below.parts:
            raise InvalidInput(f"{name[:100]!a} is no path below the model's directory")
        path = Path(override.files, override.model) / below
        # NOTE: Path.mkdir gives its mode to the last directory only.
        for place in reversed(path.parents[:-1]):
            (self.directory / place).mkdir(exist_ok=True, mode=0o700)
        _write_new(self.directory / path, data)


def _write_new(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
