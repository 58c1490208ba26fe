"""In which state a version of a model is, over all workers, and whether it will be there without anybody's doing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from ipc.wire.messages import ModelStatus

if TYPE_CHECKING:
    from frontend.services import Services

State = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
_STATES: dict[str, State] = {"loaded": "READY", "loading": "LOADING", "unloading": "UNLOADING"}


class VersionState(NamedTuple):
    """One version of a model as the server sees it; `reason` is for clients.

    One that is READY has a reason when its files have changed since and cannot be loaded as they are now.
    """

    version: int
    id: str
    state: State
    reason: str
    status: ModelStatus


def is_repository(entry_id: str) -> bool:
    """Whether a catalog id is that of a version of a repository model."""
    return "@" in entry_id


def model_of(entry_id: str) -> str:
    """Full name of the model that a catalog id belongs to."""
    return entry_id.partition("@")[0]


def state_of(services: Services, version: int, entry: str) -> VersionState:
    """The state of one version."""
    status = services.engine.status(entry)
    state = _STATES.get(status.state, "UNAVAILABLE")
    if state != "UNAVAILABLE":
        stale = state == "READY" and status.error_message
        reason = f"served as it was before its files changed: {stale}" if stale else ""
        return VersionState(version, entry, state, reason, status)
    if status.state == "failed":
        return VersionState(version, entry, state, status.error_message, status)
    if is_repository(entry) and is_coming(services, entry, status):
        return VersionState(version, entry, "LOADING", "", status)
    reason = "unloaded" if status.attempts or is_unloaded(services, entry) else "not loaded"
    return VersionState(version, entry, state, reason, status)


def is_coming(services: Services, entry: str, status: ModelStatus) -> bool:
    """Whether a version that is not loaded will be without an operator's doing.

    One that was unloaded by name stays so, also while a worker is still giving up its load of it; memory that other
    models needed is no such unload. Where models are loaded by name, one that none of the present workers has tried is
    coming if it was loaded, by name or at the start, by workers that are gone, and while the server starts.
    """
    if status.state == "loading":
        return may_be_loaded(services, entry)
    mark = services.extensions.control.mark(model_of(entry))
    if status.state not in ("available", "unloading") or mark is False:
        return False
    if mark or status.attempts or services.settings.repository.control == "none":
        return True
    if services.catalog[entry].preload:
        return True
    up = [channel for channel in services.client.channels if channel.state == "ready"]
    return not up or not all(channel.preloaded for channel in up)


def may_be_loaded(services: Services, entry: str) -> bool:
    """Whether a request may have a model loaded: not one of a repository that an operator unloaded meanwhile."""
    return entry in services.catalog and not (is_repository(entry) and is_unloaded(services, entry))


def is_unloaded(services: Services, entry: str) -> bool:
    """Whether an operator unloaded the model of a catalog id."""
    return services.extensions.control.mark(model_of(entry)) is False
