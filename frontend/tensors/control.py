"""Loads and unloads of models by name, and the index of all models, as both tensor protocols offer them.

1. `load` has the workers read the repository anew. It waits until every version that the policy chooses is loaded from
   its present files, and until the workers have told all frontends of it (`Control.spread`). A load may bring a
   configuration and files (`overriding`), which hold until an unload or until another load brings some.
2. `unload` returns once the workers were told.
3. Both mark the model in the store (`ipc.store.store`), so that no frontend loads a model for a request which somebody
   unloaded. The mark ends with the next `load`, and with the next start of the server.
4. All of this needs `repository.control: explicit`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from frontend.http.rendering import off_loop_if
from frontend.tensors import load_parameters
from frontend.tensors.load_parameters import Brought
from frontend.tensors.models import VersionState
from frontend.tensors.overriding import ControlServices, Overriding, reread, shown
from frontend.tensors.request import UnavailableModel
from ipc import deadline
from ipc.catalog.ids import model_of
from ipc.errors import (
    ControlDisabled,
    DeadlineExceeded,
    InvalidInput,
    ModelError,
    ModelLoadFailed,
    NoReplica,
)
from ipc.store.store import Marks

log = logging.getLogger(__name__)

FOLLOW_S = 5.0
"""How long a load waits for other frontends to know of it."""
LEARN_S = 2.0
"""How long a frontend that begins waits for the models of workers that are up."""
LONG_NBYTES = 64 << 10
"""Parameters of a load above this size are read by a thread."""
JOIN_S = 2.5
"""How long an unload waits for workers that are being joined."""
UNLOAD_S = 5.0
"""How long an unload waits for the workers to say that they have begun."""


class RepositoryControl:
    """Loads, unloads and lists the models of this server."""

    def __init__(self, services: ControlServices) -> None:
        self._services = services
        self._explicit = services.settings.repository.control == "explicit"
        self._marks = Marks(services.store)
        self._overriding = Overriding(services, self._marks)

    async def begin(self) -> None:
        """The frontend starts: delete what dead frontends left, and learn the models of workers that are up.

        On a reload, or after the death of another frontend, the first request so finds the models of repositories.
        """
        directory = self._services.directory
        await self._overriding.overrides.sweep_unless_locked()
        try:
            await directory.wait(lambda: not directory.is_learning, deadline.after(LEARN_S))
        except DeadlineExceeded:
            log.warning("no worker has told its models yet")

    async def load(self, model: str, parameters: dict[str, Any], deadline_ns: int) -> None:
        """Load all chosen versions and wait for them. `parameters` is emptied: files in it are large, and loads long.

        Raises `ControlDisabled`, and as `Models.controlled`; `InvalidInput` and `Unsupported` as
        `load_parameters.read` and `Overriding.change` do; `NoReplica`; `DeadlineExceeded`; `ModelLoadFailed` whose
        message begins `failed to load '<model>', `, for unknown models too. The server serves the models of before
        until the load has succeeded.
        """
        self._check_allowed()
        brought = await self._brought(parameters)
        if brought is not None:
            async with self._overriding.change(model, brought, deadline_ns):
                await self._load(model, deadline_ns)
            return
        if self._services.settings.catalog.watch:
            # A load serves files that were copied there just now.
            await reread(self._services.directory.controlled(), model, deadline_ns)
        await self._load(model, deadline_ns)

    async def _brought(self, parameters: dict[str, Any]) -> Brought | None:
        nbytes = load_parameters.nbytes_of(parameters)
        with self._services.bodies.holding(nbytes):
            long = nbytes > LONG_NBYTES
            try:
                return await off_loop_if(long, load_parameters.read, parameters, self._services.settings)
            finally:
                parameters.clear()

    async def _load(self, model: str, deadline_ns: int) -> None:
        entries = await self._entries(model, deadline_ns)
        await self._marks.put(model_of(entries[0]), loaded=True, until_ns=deadline_ns)
        log.info("model %a is loaded by name", model[:200])
        loads = [self._load_entry(model, entry, deadline_ns) for entry in entries]
        ended = await asyncio.gather(*loads, return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException):
                raise error
        try:
            # The next request may come to any frontend.
            await self._services.directory.controlled().spread(min(deadline_ns, deadline.after(FOLLOW_S)))
        except DeadlineExceeded:
            log.warning("another frontend does not know yet that model %a is loaded", model[:200])

    async def unload(self, model: str, parameters: Mapping[str, Any], deadline_ns: int) -> None:
        """Begin to unload all versions; an unknown model is no error.

        Raises `ControlDisabled`, `InvalidInput` for a parameter other than `unload_dependents`, and as
        `Overriding.end` where a load had brought something.
        """
        self._check_allowed()
        _check_unload(parameters)
        try:
            versions = await self._services.models.told_versions(model, deadline_ns)
        except NoReplica:
            # No worker has said yet which models there are. Those that come heed the mark.
            await self._marks.put(model, loaded=False, until_ns=deadline_ns)
            await self._end_override(model, deadline_ns)
            return
        except UnavailableModel:
            log.info("model %a is not unloaded: there is none of that name", model[:200])
            await self._end_override(model, deadline_ns)
            return
        await self._marks.put(model_of(versions[0][1]), loaded=False, until_ns=deadline_ns)
        log.info("model %a is unloaded by name", model)
        until = deadline.after(UNLOAD_S)
        await asyncio.gather(*(self._unload_entry(entry, until) for _, entry in versions))
        await self._end_override(model, deadline_ns)

    def index(self, ready_only: bool = False) -> list[tuple[str, VersionState]]:
        """Name of the model and state of every version of every model, by name and version.

        Raises `NoReplica` while no worker has said which models repositories have.
        """
        if not self._services.directory.is_told:
            raise NoReplica("no worker is up", retry_after_s=2)
        return [
            (name, state)
            for name in self._services.models.names()
            for state in self._services.models.states(name)
            if state.state == "READY" or not ready_only
        ]

    def mark(self, model: str) -> bool | None:
        """Whether the model was loaded by name (true) or unloaded (false) last; None: neither.

        One that was unloaded must not be loaded for a request.
        """
        return self._marks.get(model) if self._explicit else None

    def _check_allowed(self) -> None:
        self._services.directory.controlled()
        if not self._explicit:
            raise ControlDisabled(
                "explicit model load / unload is not allowed if model control is not enabled "
                "(repository.control: explicit)"
            )

    async def _entries(self, model: str, deadline_ns: int) -> list[str]:
        """Catalog ids of all versions that the files choose. Raises `ModelLoadFailed` for a model that they lack."""
        services = self._services
        try:
            versions = await services.models.told_versions(model, deadline_ns)
        except UnavailableModel:
            raise ModelLoadFailed(
                f"failed to load {shown(model)}, the repository has no such model"
            ) from None
        chosen = services.directory.chosen(model)
        return [entry for number, entry in versions if not chosen or number in chosen]

    async def _end_override(self, model: str, deadline_ns: int) -> None:
        """End the override of a model that is unloaded now, and wait for a while until all processes know."""
        if await self._overriding.end(model, deadline_ns):
            with contextlib.suppress(DeadlineExceeded):
                await self._services.directory.controlled().spread(min(deadline_ns, deadline.after(FOLLOW_S)))

    async def _load_entry(self, model: str, entry: str, deadline_ns: int) -> None:
        directory, limits = self._services.directory, self._services.settings.limits

        def known() -> bool:
            return any(worker.responsive and entry in worker.models for worker in directory.workers())

        def is_wanted() -> bool:
            return self._marks.get(model_of(entry)) is not False

        # A frontend that has just started, or whose worker starts again, has nobody to ask yet.
        with contextlib.suppress(DeadlineExceeded):
            await directory.wait(known, min(deadline_ns, deadline.after(limits.restart_wait_s)))
        control = directory.controlled()
        try:
            await control.renew(entry, deadline_ns, is_wanted)
            await control.load(entry, True, deadline_ns, is_wanted)
        except ModelError as error:
            raise ModelLoadFailed(f"failed to load {shown(model)}, {error.message}") from error

    async def _unload_entry(self, entry: str, until_ns: int) -> None:
        directory, control = self._services.directory, self._services.directory.controlled()
        # NOTE: a worker that is only being joined is told nothing, and may have the model.
        with contextlib.suppress(DeadlineExceeded):
            await directory.wait(lambda: control.reaches_all, min(until_ns, deadline.after(JOIN_S)))
        if self._marks.get(model_of(entry)):
            log.info("model %s is not unloaded: somebody has loaded it by name meanwhile", entry)
            return
        try:
            await control.unload(entry, False, until_ns)
        except DeadlineExceeded:
            log.warning("no worker has said yet that it unloads model %s", entry)


def _check_unload(parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        if name != "unload_dependents":
            raise InvalidInput(f"unload parameter {name[:100]!a}: expected 'unload_dependents'")
        if not isinstance(value, bool):
            raise InvalidInput(
                f"unload parameter 'unload_dependents': expected true or false, got {str(value)[:100]!a}"
            )
