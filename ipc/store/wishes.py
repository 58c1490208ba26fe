"""What loads and unloads by name wish of models: one row of the server's store per model, which all processes follow.

1. A load by name wishes the model loaded, an unload wishes the model unloaded (`Wish`). Each is one transaction, and
   the later one counts.
2. A load may bring a configuration and files. The row holds the configuration. The files lie in a directory of their
   own in the run directory, laid out as in a repository.
3. Workers follow rows as they follow files (`workers.repository`): what a load brought takes the place of the model on
   disk. A worker that starts loads the models that are wished loaded and leaves those that are wished unloaded. A
   worker unloads a repository model whose row says so, even if no frontend has told the worker. No request makes a
   frontend load a repository model that is wished unloaded.
4. What a load brought ends with the next load that brings something, and with the unload. All rows end with the next
   start of the server.
5. A load that brings something holds one lock (`locked`) for its whole time, since a load may take minutes and a
   transaction must not. The kernel drops the lock when its holder dies.
6. A LoRA adapter that was loaded by name is a row of its own (`BroughtLora`), by the adapter's name. Workers serve it
   as if the model's catalog entry named it. One load of an adapter runs at a time (`loras_locked`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from ipc import deadline
from ipc.catalog.ids import split_id
from ipc.catalog.repository import Wish, is_model_name
from ipc.errors import DeadlineExceeded, InvalidInput
from ipc.processes.liveness import lock_on
from ipc.processes.paths import RunPaths
from ipc.store.store import Store, Table

log = logging.getLogger(__name__)

_LOCK = ".lock"
_LORA_LOCK = ".loras.lock"


class BroughtLora(msgspec.Struct, frozen=True):
    """A LoRA adapter of `model` that was loaded by name from the directory `path`."""

    model: str
    path: str


class Wishes:
    """The wishes of one server, and the files that loads brought. Changes raise as `Table.change` does."""

    def __init__(self, paths: RunPaths, store: Store) -> None:
        self.directory, self._table = paths.wishes(), Table(store, "wishes", Wish)
        self._loras = Table(store, "loras", BroughtLora)

    def get(self, model: str) -> Wish | None:
        """The wish for a model, named without a version; None without one. Raises `OSError`."""
        return self._table.rows().get(model)

    def loaded(self, model: str) -> bool | None:
        """Whether a model is wished loaded (true) or unloaded (false); None: neither. Raises `OSError`."""
        wish = self.get(model)
        return None if wish is None else wish.loaded

    def brought(self) -> Mapping[str, Wish]:
        """The wishes that bring a configuration, by model. Raises `OSError`."""
        return {model: wish for model, wish in self._table.rows().items() if wish.config is not None}

    def unloaded(self) -> frozenset[str]:
        """The models that are wished unloaded. Raises `OSError`."""
        return frozenset(model for model, wish in self._table.rows().items() if not wish.loaded)

    def preloaded(self, chosen: Iterable[str], served: Iterable[str]) -> list[str]:
        """Catalog ids to load at the start: `chosen` ones that nobody wishes unloaded, and those wished loaded.

        None at all if the rows cannot be read.
        """
        names = set(chosen)
        try:
            wishes = self._table.rows()
        except OSError as error:
            log.error("which models were loaded by name cannot be read: %s", error.strerror)
            return []
        loaded = {model: wish.loaded for model, wish in wishes.items()}
        return [entry for entry in served if loaded.get(split_id(entry)[0], entry in names)]

    async def put(self, model: str, wish: Wish, until_ns: int = 0) -> Wish | None:
        """Put a wish in the place of the earlier wish for the model, which is returned."""

        def replace(rows: dict[str, Wish]) -> Wish | None:
            former = rows.get(model)
            rows[model] = wish
            return former

        return await self._table.change(replace, until_ns)

    def loras(self) -> Mapping[str, BroughtLora]:
        """The LoRA adapters that were loaded by name. Raises `OSError`."""
        return self._loras.rows()

    async def bring_lora(self, name: str, lora: BroughtLora, until_ns: int) -> None:
        """Load a LoRA adapter by name."""

        def put(rows: dict[str, BroughtLora]) -> None:
            rows[name] = lora

        await self._loras.change(put, until_ns)

    async def end_lora(self, name: str, until_ns: int = 0) -> bool:
        """Unload a LoRA adapter by name; false if none of the name was loaded by name."""

        def drop(rows: dict[str, BroughtLora]) -> bool:
            return rows.pop(name, None) is not None

        return await self._loras.change(drop, until_ns)

    @asynccontextmanager
    async def loras_locked(self, until_ns: int) -> AsyncIterator[None]:
        """Keep other loads of LoRA adapters away meanwhile. Raises `DeadlineExceeded` and `OSError`."""
        async with lock_on(self.directory / _LORA_LOCK, until_ns, "before another load had ended"):
            yield

    async def wish_loaded(self, model: str, until_ns: int = 0) -> None:
        """Wish a model loaded, with what an earlier load brought."""

        def replace(rows: dict[str, Wish]) -> None:
            former = rows.get(model, Wish(loaded=True))
            rows[model] = Wish(True, former.config, former.files, again=former.config is not None)

        await self._table.change(replace, until_ns)

    async def restore(self, model: str, failed: Wish, former: Wish | None) -> bool:
        """The load of a wish has failed: restore the former one. False if the wish is in force no more.

        The model stays wished loaded if another load, which brought nothing, has come meanwhile.
        """

        def restore(rows: dict[str, Wish]) -> bool:
            if not _is_from(rows.get(model), failed):
                return False
            if rows[model].again:
                rows[model] = Wish(True, former.config, former.files) if former is not None else Wish(True)
            elif former is None:
                del rows[model]
            else:
                rows[model] = former
            return True

        return await self._table.change(restore)

    def is_in_force(self, model: str, wish: Wish) -> bool:
        """Whether what a load brought is in force: no unload and no later load of that kind came. Raises `OSError`."""
        return _is_from(self.get(model), wish)

    @asynccontextmanager
    async def locked(self, until_ns: int) -> AsyncIterator[None]:
        """Keep all other loads from bringing something meanwhile. Raises `DeadlineExceeded` and `OSError`."""
        where = "before another load with parameters had ended"
        async with lock_on(self.directory / _LOCK, until_ns, where):
            yield

    def draft(self, model: str, config: str, files: Mapping[str, bytes]) -> Wish:
        """A wish that is not in force yet; its files, by their path below the model's directory, are written.

        Raises `OSError`, and `InvalidInput` for a name or path that leads elsewhere.
        """
        if not is_model_name(model):
            raise InvalidInput(f"{model[:200]!a} is no name for a model")
        wish = Wish(True, config, secrets.token_hex(8) if files else "")
        try:
            for name, data in files.items():
                self._write(Path(wish.files, model), name, data)
        except BaseException:
            self.discard(wish)
            raise
        return wish

    def root_of(self, wish: Wish) -> Path:
        """The repository whose only model are the files of a wish."""
        return self.directory / wish.files

    def discard(self, wish: Wish | None) -> None:
        """Delete the files of a wish unless the wish is in force. Programs that have read the files go on."""
        if wish is None or not wish.files:
            return
        with contextlib.suppress(OSError):
            if wish.files not in {each.files for each in self._table.rows().values()}:
                shutil.rmtree(self.root_of(wish), ignore_errors=True)

    def sweep(self) -> None:
        """Delete files that a process left which died in a load; the caller holds the lock, in a thread.

        Raises `OSError`, and `DeadlineExceeded` as `Table.change_now` does, before anything is deleted.
        """
        # NOTE: a transaction, since a read may tell of what was in force before.
        named = self._table.change_now(lambda rows: {wish.files for wish in rows.values()}) | {
            _LOCK,
            _LORA_LOCK,
        }
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
            log.error("files that ended loads left in the run directory cannot be deleted: %s", error)

    def nbytes(self) -> int:
        """Bytes of all files that loads brought."""
        total = 0
        for path in self.directory.rglob("*"):
            try:
                total += path.stat().st_size if path.is_file() else 0
            except OSError:
                continue
        return total

    def _write(self, place: Path, name: str, data: bytes) -> None:
        below = Path(name)
        if below.is_absolute() or not below.name or ".." in below.parts:
            raise InvalidInput(f"{name[:100]!a} is no path below the model's directory")
        path = place / below
        # NOTE: Path.mkdir gives its mode to the last directory only.
        for parent in reversed(path.parents[:-1]):
            (self.directory / parent).mkdir(exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(self.directory / path, flags, 0o600), "wb") as file:
            file.write(data)


def _is_from(row: Wish | None, wish: Wish) -> bool:
    """Whether a row is what a load wrote, perhaps wished again since."""
    return row is not None and msgspec.structs.replace(row, again=False) == wish
