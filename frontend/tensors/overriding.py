"""Puts the configuration and files of a load by name in force, and takes them back if the load fails.

1. Mistakes in a configuration or in files are found before anything changes, as far as the files show them.
2. The override is one row (`ipc.catalog.repository.overrides`), replaced in one transaction. This frontend follows at
   once, other processes within about a second.
3. A load that fails puts the former override back, or none. A load that brings nothing keeps the model's override.
4. One load or unload at a time changes overrides, of all models and frontends. Others wait up to their deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from frontend.engine.catalog_following import CatalogFollower
from frontend.engine.interface import Directory
from frontend.http.bodies import BodyReader
from frontend.tensors.load_parameters import Brought
from frontend.tensors.models import TensorModels
from ipc.catalog.entries import Catalog
from ipc.catalog.repository import entries, layout
from ipc.catalog.repository.entries import RepositoryEntry
from ipc.catalog.repository.layout import id_of, is_repository, split_id
from ipc.catalog.repository.overrides import Override, Overrides
from ipc.errors import BodyTooLarge, ConfigError, DeadlineExceeded, InvalidInput, ModelLoadFailed
from ipc.settings import Settings
from ipc.store.store import Marks, Store


class ControlServices(Protocol):
    """The part of `frontend.services.Services` that control of models by name uses.

    `Services` holds the control, so the control cannot import `Services`. `models` and `follower` exist once the
    frontend has started.
    """

    settings: Settings
    catalog: Catalog
    slot: int
    store: Store
    directory: Directory
    bodies: BodyReader
    models: TensorModels
    follower: CatalogFollower


log = logging.getLogger(__name__)


class Change(NamedTuple):
    """The override of a model before a load (None: the repository's own files), and the override of the load."""

    before: Override | None
    after: Override


class Overriding:
    """The overrides of this server, as loads and unloads by name change them."""

    def __init__(self, services: ControlServices, marks: Marks) -> None:
        self._services, self._marks = services, marks
        self._overrides = Overrides(services.settings.paths, services.store)

    @asynccontextmanager
    async def change(self, model: str, brought: Brought, until_ns: int) -> AsyncIterator[Change]:
        """Put the override of a load in force. An error inside the context puts the former one back.

        `brought` is emptied once its files are written.

        Raises:
            InvalidInput: a name, a configuration or files that cannot be served.
            BodyTooLarge: files of all models would take more than `repository.max_upload_bytes`.
            DeadlineExceeded: another load went on for too long.
            ModelLoadFailed: the files cannot be kept.
        """
        async with contextlib.AsyncExitStack() as changing:
            with self._services.bodies.holding(brought.nbytes):
                await changing.enter_async_context(self._overrides.locked(until_ns))
                change = await self._begin(model, brought)
            mark = self._marks.get(model)
            try:
                # Workers that see the new files load them for that.
                await self._marks.put(model, loaded=True, until_ns=until_ns)
                await self._serve(model, change.after)
                yield change
            except BaseException:
                await asyncio.shield(self._undo(model, change, mark))
                raise
            self._overrides.discard(change.before)

    async def end(self, model: str, until_ns: int) -> bool:
        """The model is unloaded: remove its override. Returns whether there was one.

        Raises `DeadlineExceeded` when another load went on for too long.
        """
        if self._overrides.get(model) is None:
            return False
        async with self._overrides.locked(until_ns):
            before = self._overrides.get(model)
            try:
                await self._marks.put(model, loaded=False, until_ns=until_ns)
                await self._serve(model, None)
            except (ModelLoadFailed, DeadlineExceeded, OSError) as error:
                log.error("what a load brought for model %a has not been taken back: %s", model, error)
            finally:
                if self._overrides.get(model) is None:
                    self._overrides.discard(before)
        return True

    async def followed(self, model: str, change: Change, until_ns: int) -> None:
        """Wait until all workers that answer know the override of a change. Raises `ModelLoadFailed`."""

        def done() -> bool:
            if self._overrides.get(model) != change.after:
                raise ModelLoadFailed(f"failed to load {shown(model)}, another load has taken its place")
            return self.is_followed(model)

        try:
            await self._services.directory.wait(done, until_ns)
        except DeadlineExceeded:
            raise ModelLoadFailed(
                f"failed to load {shown(model)}, the workers have not taken over what it brought"
            ) from None

    async def settled(self, model: str, until_ns: int) -> None:
        """Wait until the workers know the files that this frontend knows, or until `until_ns`."""
        if not self._services.settings.catalog.watch:
            return
        with contextlib.suppress(DeadlineExceeded):
            await self._services.directory.wait(lambda: self.is_followed(model), until_ns)

    def is_followed(self, model: str) -> bool:
        """Whether all workers that answer know the same versions and files of the model as this frontend.

        A worker may know files that it does not serve yet or cannot load; the former files are served meanwhile.
        """
        services, catalog = self._services, self._services.catalog
        up = [worker for worker in services.directory.workers() if worker.responsive]
        served = {id_of(model, version) for version in catalog.versions.get(model, ())}
        if not served:
            known = {name for worker in up for name in worker.models if is_repository(name)}
            return not any(split_id(name)[0] == model for name in known)
        told = [(name, worker.models[name]) for worker in up for name in served if name in worker.models]
        return served == {name for name, _ in told} and all(
            name in catalog and (status.next or status.revision) == catalog[name].code
            for name, status in told
        )

    def is_behind(self, model: str) -> bool:
        """Whether a worker that answers knows a version of the model in older files than this frontend."""
        catalog = self._services.catalog
        up = [worker.models for worker in self._services.directory.workers() if worker.responsive]
        names = [id_of(model, version) for version in catalog.versions.get(model, ())]
        told = [(catalog[name].code, each[name]) for each in up for name in names if name in each]
        return any((status.next or status.revision) != code for code, status in told)

    async def _serve(self, model: str, override: Override | None) -> None:
        try:
            if override is None:
                await self._overrides.remove(model)
            else:
                await self._overrides.put(override)
        except OSError as error:
            raise ModelLoadFailed(
                f"failed to load {shown(model)}, its configuration cannot be kept: {error.strerror}"
            ) from error
        try:
            await self._services.follower.reload()
        except ConfigError as error:
            log.error("the catalog is refused, the old one stays: %s", error.message)
            raise ModelLoadFailed(
                f"failed to load {shown(model)}, model files have mistakes; the server's log names them"
            ) from error

    async def _undo(self, model: str, change: Change, mark: bool | None) -> None:
        """A load has failed: restore the mark and the override of before, or remove the override."""
        log.info("model %a is served as before its load failed", model)
        try:
            await self._marks.restore(model, mark)
            await self._serve(model, change.before)
        except (ModelLoadFailed, DeadlineExceeded, OSError) as error:
            log.error("model %a is not served as before its load failed: %s", model, error)
        with contextlib.suppress(DeadlineExceeded, OSError):
            if change.after != change.before and self._overrides.get(model) == change.after:
                await self._overrides.remove(model)
        self._overrides.discard(change.after)

    async def _begin(self, model: str, brought: Brought) -> Change:
        """Write the files of a load in a thread. If the client goes meanwhile, delete the files again."""
        drafting = asyncio.ensure_future(asyncio.to_thread(self._draft, model, brought))
        try:
            after = await asyncio.shield(drafting)
        except asyncio.CancelledError:
            # NOTE: the thread writes on, and must have ended before another load has the lock.
            await asyncio.wait([drafting])
            if drafting.exception() is None:
                self._overrides.discard(drafting.result())
            raise
        finally:
            brought.files.clear()
        return Change(self._overrides.get(model), after)

    def _draft(self, model: str, brought: Brought) -> Override:
        """Write and check an override that is not in force yet. Blocks on files."""
        where, settings = f"failed to load {shown(model)}", self._services.settings.repository
        try:
            directory = self._check_name(model, where, bool(brought.files))
            self._overrides.sweep()
            if brought.files and self._overrides.nbytes() + brought.nbytes > settings.max_upload_bytes:
                raise BodyTooLarge(
                    f"{where}, files that loads brought would take more than {settings.max_upload_bytes} bytes "
                    "together (repository.max_upload_bytes); unload a model first"
                )
            override = self._overrides.draft(model, brought.config, brought.files)
        except OSError as error:
            raise ModelLoadFailed(f"{where}, its files cannot be kept: {error.strerror}") from error
        try:
            made = entries.overridden(settings, self._overrides, override, directory)
            if all(entry.error for entry in made):
                raise InvalidInput(f"{where}, {made[-1].error}")
        except BaseException:
            self._overrides.discard(override)
            raise
        return override

    def _check_name(self, model: str, where: str, files: bool) -> str:
        """Directory of the model in a repository, "" for none. Raises `InvalidInput`, `ModelLoadFailed`."""
        catalog = self._services.catalog
        if not layout.is_model_name(model):
            raise InvalidInput(f"{where}, this is no name for a model")
        own = (entry for entry in catalog.entries if not isinstance(entry, RepositoryEntry))
        taken = {name for entry in own for name in (entry.id, entry.id.rpartition("/")[2])}
        if model in taken:
            raise InvalidInput(f"{where}, a model of the catalog is configured there only")
        places = (Path(root) / model for root in self._services.settings.repository.dirs)
        directory = next((str(place) for place in places if place.is_dir()), "")
        if not (directory or files):
            raise ModelLoadFailed(f"{where}, the repository has no such model")
        return directory


def shown(model: str) -> str:
    """A model's name in messages, in single quotes."""
    return f"'{ascii(model[:200])[1:-1]}'"
