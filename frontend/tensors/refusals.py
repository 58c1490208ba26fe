"""Why a request is not run, with what a protocol needs to say so in its own words."""

from __future__ import annotations

from typing import Any, Literal

from ipc.errors import DeadlineExceeded, ModelNotFound

Reason = Literal["model", "version", "unloaded", "failed"]


class UnavailableModel(ModelNotFound):
    """No such model or version, or a known one that was unloaded or failed to load (`reason`)."""

    def __init__(self, model: str, version: int | None, reason: Reason, why: str = "", **detail: Any) -> None:
        """`why` says more where more is known, such as the error of the load."""
        named = f"model {model[:200]!a}" + (f" version {version}" if version is not None else "")
        super().__init__(f"{named} is not available ({reason}{': ' + why if why else ''})", **detail)
        self.model, self.version, self.reason, self.why = model, version, reason, why


class TimeoutExpired(DeadlineExceeded):
    """The `timeout` that the request itself states passed before it ran; unlike the client's deadline, that is 503."""

    status = 503
