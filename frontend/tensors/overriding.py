"""Puts the configuration and files of a load by name in force, and takes them back if the load fails.

1. Mistakes in a configuration or in files are found before anything changes, as far as the files show them.
2. The override is one row (`ipc.store.overrides`), replaced in one transaction. The workers that answer follow at once.
3. A load that fails puts the former override back, or none. A load that brings nothing keeps the model's override.
4. One load or unload at a time changes overrides, of all models and frontends. Others wait up to their deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

from frontend.engine.interface import Control, Models
from frontend.http.bodies import BodyReader
from frontend.tensors.load_parameters import Brought
from frontend.tensors.models import TensorModels
from ipc import deadline
from ipc.catalog.entries import Catalog
from ipc.catalog.ids import is_repository
from ipc.catalog.repository import Override, is_model_name, names_of
from ipc.errors import BodyTooLarge, DeadlineExceeded, InvalidInput, ModelLoadFailed, NoReplica, PenstockError
from ipc.settings import Settings
from ipc.store.overrides import Overrides
from ipc.store.store import Marks, Store

log = logging.getLogger(__name__)


class ControlServices(Protocol):
    """The part of `frontend.services.Services` that control of models by name uses.

    `Services` holds the control, so the control cannot import `Services`. `models` exists once the frontend has
    started.
    """

    settings: Settings
    catalog: Catalog
    store: Store
    directory: Models
    bodies: BodyReader
    models: TensorModels


FOLLOW_S = 5.0
"""How long a change waits for the workers to read it."""


class Change(NamedTuple):
    """The override of a model before a load (None: the repository's own files), and the override of the load."""

    before: Override | None
    after: Override


class Overriding:
    """The overrides of this server, as loads and unloads by name change them."""

    def __init__(self, services: ControlServices, marks: Marks) -> None:
        self._services, self._marks = services, marks
        self.overrides = Overrides(services.settings.paths, services.store)

    @asynccontextmanager
    async def change(self, model: str, brought: Brought, until_ns: int) -> AsyncIterator[None]:
        """Put the override of a load in force. An error inside the context puts the former one back.

        `brought` is emptied once its files are written.

        Raises:
            InvalidInput: a name, a configuration or files that cannot be served.
            BodyTooLarge: files of all models would take more than `repository.max_upload_bytes`.
            DeadlineExceeded: another load went on for too long.
            ModelLoadFailed: the files cannot be kept, or no repository has the model of a configuration.
            NoReplica: no worker is up that could look at them.
        """
        async with contextlib.AsyncExitStack() as changing:
            with self._services.bodies.holding(brought.nbytes):
                await changing.enter_async_context(self.overrides.locked(until_ns))
                change = await self._begin(model, brought, until_ns)
            mark = self._marks.get(model)
            try:
                # Workers that see the new files load them for that.
                await self._marks.put(model, loaded=True, until_ns=until_ns)
                await self._serve(model, change.after)
                yield
            except BaseException:
                await asyncio.shield(self._undo(model, change, mark))
                raise
            self.overrides.discard(change.before)

    async def end(self, model: str, until_ns: int) -> bool:
        """The model is unloaded: remove its override. Returns whether there was one.

        Raises `DeadlineExceeded` when another load went on for too long.
        """
        if self.overrides.get(model) is None:
            return False
        async with self.overrides.locked(until_ns):
            before = self.overrides.get(model)
            if self._marks.get(model):
                log.info(
                    "what a load brought for model %a stays: somebody has loaded it by name meanwhile", model
                )
                return False
            try:
                await self._serve(model, None)
            except NoReplica:
                log.info(
                    "what a load brought for model %a has ended; no worker is up that has to know", model
                )
            except (PenstockError, OSError) as error:
                log.error("what a load brought for model %a has not been taken back: %s", model, error)
            finally:
                if self.overrides.get(model) is None:
                    self.overrides.discard(before)
        return True

    async def _serve(self, model: str, override: Override | None) -> None:
        try:
            if override is None:
                await self.overrides.remove(model)
            else:
                await self.overrides.put(override)
        except OSError as error:
            raise ModelLoadFailed(
                f"failed to load {shown(model)}, its configuration cannot be kept: {error.strerror}"
            ) from error
        await reread(self._services.directory.controlled(), model, deadline.after(FOLLOW_S))

    async def _undo(self, model: str, change: Change, mark: bool | None) -> None:
        """A load has failed: restore the mark and the override of before, or remove the override."""
        log.info("model %a is served as before its load failed", model)
        try:
            await self._marks.restore(model, mark)
            await self._serve(model, change.before)
        except (PenstockError, OSError) as error:
            log.error("model %a is not served as before its load failed: %s", model, error)
        with contextlib.suppress(DeadlineExceeded, OSError):
            if change.after != change.before and self.overrides.get(model) == change.after:
                await self.overrides.remove(model)
        self.overrides.discard(change.after)

    async def _begin(self, model: str, brought: Brought, until_ns: int) -> Change:
        """Write the files of a load in a thread, and have a worker look at them before they are in force."""
        drafting = asyncio.ensure_future(asyncio.to_thread(self._draft, model, brought))
        try:
            after = await asyncio.shield(drafting)
        except asyncio.CancelledError:
            # NOTE: the thread writes on, and must have ended before another load has the lock.
            await asyncio.wait([drafting])
            if drafting.exception() is None:
                self.overrides.discard(drafting.result())
            raise
        finally:
            brought.files.clear()
        try:
            await self._services.directory.controlled().reread(until_ns, after)
        except BaseException as error:
            self.overrides.discard(after)
            if isinstance(error, InvalidInput | ModelLoadFailed):
                raise type(error)(f"failed to load {shown(model)}, {error.message}") from error
            raise
        return Change(self.overrides.get(model), after)

    def _draft(self, model: str, brought: Brought) -> Override:
        """Write an override that is not in force yet. Blocks on files."""
        where, settings = f"failed to load {shown(model)}", self._services.settings.repository
        if not is_model_name(model):
            raise InvalidInput(f"{where}, this is no name for a model")
        if model in names_of(e for e in self._services.catalog.entries if not is_repository(e.id)):
            raise InvalidInput(f"{where}, a model of the catalog is configured there only")
        try:
            self.overrides.sweep()
            if brought.files and self.overrides.nbytes() + brought.nbytes > settings.max_upload_bytes:
                raise BodyTooLarge(
                    f"{where}, files that loads brought would take more than {settings.max_upload_bytes} bytes "
                    "together (repository.max_upload_bytes); unload a model first"
                )
            return self.overrides.draft(model, brought.config, brought.files)
        except OSError as error:
            raise ModelLoadFailed(f"{where}, its files cannot be kept: {error.strerror}") from error


async def reread(control: Control, model: str, until_ns: int) -> None:
    """Have the workers read the files of all models, for a load of one. Raises `ModelLoadFailed`, and `NoReplica`."""
    where = f"failed to load {shown(model)}"
    try:
        await control.reread(until_ns)
    except InvalidInput as error:
        raise ModelLoadFailed(f"{where}, {error.message.removeprefix('the ')}") from error
    except DeadlineExceeded as error:
        raise ModelLoadFailed(f"{where}, the workers have not read its files yet; try again") from error


def shown(model: str) -> str:
    """A model's name in messages, in single quotes."""
    return f"'{ascii(model[:200])[1:-1]}'"
