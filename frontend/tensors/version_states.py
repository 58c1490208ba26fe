"""In which state a version of a model is, over all workers, and whether a wait alone will bring it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from frontend.engine.interface import Models
from ipc.catalog.ids import NO_VERSION, is_repository, model_of
from ipc.wire.messages import ModelStatus

State = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
_STATES: dict[str, State] = {"loaded": "READY", "loading": "LOADING", "unloading": "UNLOADING"}


class VersionState(NamedTuple):
    """One version of a model as the server sees it; `reason` is for clients.

    A READY version has a reason if its files have changed since and the changed files cannot be loaded.
    """

    version: int
    id: str
    state: State
    reason: str
    status: ModelStatus

    @property
    def is_version(self) -> bool:
        """Whether there is such a version; else the state tells why the model has none."""
        return self.version != NO_VERSION


class VersionStates:
    """States by catalog id.

    `control` is `repository.control`. `mark` tells whether a model was loaded (true) or unloaded (false) by name last.
    """

    def __init__(self, directory: Models, control: str, mark: Callable[[str], bool | None]) -> None:
        self.directory, self._control, self.mark = directory, control, mark

    def of(self, version: int, entry: str) -> VersionState:
        """The state of one version."""
        status = self.directory.status(entry)
        state = _STATES.get(status.state, "UNAVAILABLE")
        if state != "UNAVAILABLE":
            stale = state == "READY" and status.error_message
            reason = f"served as it was before its files changed: {stale}" if stale else ""
            return VersionState(version, entry, state, reason, status)
        if status.state == "failed":
            return VersionState(version, entry, state, status.error_message, status)
        if is_repository(entry) and self.is_coming(entry, status):
            return VersionState(version, entry, "LOADING", "", status)
        reason = "unloaded" if status.attempts or self.is_unloaded(entry) else "not loaded"
        return VersionState(version, entry, state, reason, status)

    def is_coming(self, entry: str, status: ModelStatus) -> bool:
        """Whether a version that is not loaded will be loaded without an operator's doing.

        A version that was unloaded by name stays unloaded, also while a worker still gives up its load. An eviction for
        want of memory is no such unload. Where models are loaded by name, a version that no present worker has tried is
        coming in two cases: workers that are gone had loaded it, by name or at the start; or the server is starting.
        """
        if status.state == "loading":
            return self.may_be_loaded(entry)
        mark = self.mark(model_of(entry))
        if status.state not in ("available", "unloading") or mark is False:
            return False
        if mark or status.attempts or self._control == "none":
            return True
        if self.directory.catalog[entry].preload:
            return True
        up = [worker for worker in self.directory.workers() if worker.state == "ready"]
        return not up or not all(worker.preloaded for worker in up)

    def may_be_loaded(self, entry: str) -> bool:
        """Whether a request may have a model loaded: not a repository model that an operator has unloaded."""
        return entry in self.directory.catalog and not (is_repository(entry) and self.is_unloaded(entry))

    def is_unloaded(self, entry: str) -> bool:
        """Whether an operator unloaded the model of a catalog id."""
        return self.mark(model_of(entry)) is False
