"""One error tree for all protocols and processes; each class carries its stable wire code.

    PenstockError                 INTERNAL_ERROR       500
    +-- InvalidInput              INVALID_INPUT        400
    |   +-- InputTooLong          INPUT_TOO_LONG       422
    |   +-- BodyTooLarge          BODY_TOO_LARGE       413
    |   +-- TooSlow               TOO_SLOW             408
    |   +-- HeadersTooLarge       HEADERS_TOO_LARGE    431
    |   +-- RegionExists          REGION_EXISTS        400
    |   +-- RegionNotFound        REGION_NOT_FOUND     404
    |   +-- SequenceUnknown       SEQUENCE_UNKNOWN     400
    |   +-- FileNotFound          FILE_NOT_FOUND       404
    |   +-- PoolNotFound          POOL_NOT_FOUND       404
    |   +-- ContentConflict       CONTENT_CONFLICT     409
    |   +-- ConfigRefused         VALIDATION_ERROR     422
    |   +-- KeyReused             IDEMPOTENCY_MISMATCH 422
    +-- AccessRefused
    |   +-- Unauthenticated       UNAUTHENTICATED      401
    |   +-- Forbidden             FORBIDDEN            403
    |   +-- RateLimited           RATE_LIMITED         429  retryable
    +-- ModelError
    |   +-- ModelNotFound         MODEL_NOT_FOUND      404
    |   +-- ModelLoadFailed       MODEL_LOAD_FAILED    502
    |   +-- ModelNotLoaded        MODEL_NOT_LOADED     503  retryable
    |   +-- ModelLoading          MODEL_LOADING        503  retryable
    |   +-- LoraLoading           LORA_LOADING         503  retryable
    |   +-- LoraBusy              LORA_BUSY            429  retryable
    |   +-- LoraUnavailable       LORA_RUNTIME_UNAVAILABLE 409
    |   +-- DependencyConflict    DEPENDENCY_CONFLICT  409
    |   +-- InferenceFailed       INFERENCE_ERROR      500
    |   +-- UnexpectedOutput      UNEXPECTED_OUTPUT    500
    +-- Overloaded
    |   +-- QueueFull             QUEUE_FULL           503  retryable
    |   +-- Draining              DRAINING             503  retryable
    |   +-- NoReplica             NO_REPLICA           503  retryable
    |   +-- Provisioning          PROVISIONING         503  retryable
    |   +-- GpuNotConfigured      GPU_NOT_CONFIGURED   503
    |   +-- QueueUnavailable      QUEUE_UNAVAILABLE    503  retryable
    |   +-- DeadlineExceeded      DEADLINE_EXCEEDED    504  retryable
    |   +-- ResourceExhausted     RESOURCE_EXHAUSTED   422
    |   +-- ShmExhausted          SHM_EXHAUSTED        503  retryable
    +-- WorkerFault
    |   +-- WorkerLost            WORKER_LOST          503  retryable
    |   +-- WorkerCrashed         WORKER_CRASHED       500
    |   |   +-- InputRefused      WORKER_CRASHED       500
    |   +-- LeaseRevoked          LEASE_REVOKED        503  retryable
    |   +-- SequenceLost          SEQUENCE_LOST        503
    +-- ToolFault
    |   +-- ToolsUnavailable      TOOLS_UNAVAILABLE    503  retryable
    |   +-- ToolHostLost          TOOL_HOST_LOST       503
    |   +-- SandboxFailed         SANDBOX_FAILED       503
    +-- StateFull                 STATE_FULL           507
    +-- Cancelled                 CANCELLED            499
    +-- Unsupported               UNSUPPORTED          501
    +-- ControlDisabled           CONTROL_DISABLED     503
    +-- ConfigError               CONFIG_ERROR         (never on the wire)
    |   +-- MachineUnfit          CONFIG_ERROR         (never on the wire)
    +-- ProtocolError             PROTOCOL_ERROR       (between our own processes)

Errors are raised anywhere and rendered once per protocol. Messages are meant for clients: no path, no address, no
stack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

_NAMED = 20
"""Failed items that a message names beside the first."""


class PenstockError(Exception):
    """Base of every error that Penstock raises on purpose.

    `message` is client-safe text; `retry_after_s` becomes Retry-After; `detail` holds further public fields.
    """

    code: ClassVar[str] = "INTERNAL_ERROR"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after_s: float | None = None, **detail: Any) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.detail = detail

    def retry_after(self, default_s: float = 1.0) -> str:
        """Whole seconds for a Retry-After, at least 1; `default_s` if the error names none."""
        return str(max(1, math.ceil(self.retry_after_s or default_s)))


class InvalidInput(PenstockError):
    """The request is malformed or a value in it is out of range."""

    code, status = "INVALID_INPUT", 400


class InputTooLong(InvalidInput):
    """An input exceeds a length that the caller asked not to be truncated to."""

    code, status = "INPUT_TOO_LONG", 422


class BodyTooLarge(InvalidInput):
    """The request body is over `limits.max_body_bytes`."""

    code, status = "BODY_TOO_LARGE", 413


class TooSlow(InvalidInput):
    """The request body arrives below the accepted rate."""

    code, status = "TOO_SLOW", 408


class HeadersTooLarge(InvalidInput):
    """The request line and the header fields are over `server.max_header_bytes`."""

    code, status = "HEADERS_TOO_LARGE", 431


class RegionExists(InvalidInput):
    """A shared memory region of that name is registered already."""

    code, status = "REGION_EXISTS", 400


class RegionNotFound(InvalidInput):
    """No shared memory region of that name is registered."""

    code, status = "REGION_NOT_FOUND", 404


class SequenceUnknown(InvalidInput):
    """The request goes on with a sequence that never began, has ended, or was idle for too long."""

    code, status = "SEQUENCE_UNKNOWN", 400


class FileNotFound(InvalidInput):
    """No file of that id is stored for the caller, or the file has expired."""

    code, status = "FILE_NOT_FOUND", 404


class PoolNotFound(InvalidInput):
    """No pool of that name is there, or nobody renewed its lease."""

    code, status = "POOL_NOT_FOUND", 404


class ContentConflict(InvalidInput):
    """A configuration gives other content to a model or a profile that is there; what is there stays."""

    code, status = "CONTENT_CONFLICT", 409


class ConfigRefused(InvalidInput):
    """A configuration of a model has a mistake, or no bundle of boxes can run the model."""

    code, status = "VALIDATION_ERROR", 422


class KeyReused(InvalidInput):
    """The Idempotency-Key of a request was that of another body before."""

    code, status = "IDEMPOTENCY_MISMATCH", 422


NEVER_BEGUN = "it did not begin here, or it has ended"
STATE_GONE = "its worker has gone, and its state with it"
"""Why a sequence is not open."""


def not_begun(sequence: int | str, model: str, why: str) -> str:
    """The message of `SequenceUnknown`, with the reason why the sequence is not open."""
    return (
        f"inference request for sequence {sequence!a} to model '{model}' must specify the START flag on the "
        f"first request of the sequence: {why}"
    )


class AccessRefused(PenstockError):
    """The caller may not do this, or not now; nothing of the request was read but its head."""


class Unauthenticated(AccessRefused):
    """The request has no key, or an unknown key; `presented` says which."""

    code, status = "UNAUTHENTICATED", 401

    def __init__(self, message: str, *, presented: bool = False, **detail: Any) -> None:
        super().__init__(message, **detail)
        self.presented = presented


class Forbidden(AccessRefused):
    """The key is known but may not do this."""

    code, status = "FORBIDDEN", 403


class RateLimited(AccessRefused):
    """The key has used up its own rate; never for load of the whole server."""

    code, status, retryable = "RATE_LIMITED", 429, True


class ModelError(PenstockError):
    """Something about the model that was asked for."""


class ModelNotFound(ModelError):
    """No model of that name is in the catalog."""

    code, status = "MODEL_NOT_FOUND", 404


class ModelLoadFailed(ModelError):
    """The model is known but its load failed for good or is cooling down."""

    code, status = "MODEL_LOAD_FAILED", 502


class ModelNotLoaded(ModelError):
    """The model is known but not loaded, and no load is running."""

    code, status, retryable = "MODEL_NOT_LOADED", 503, True


class ModelLoading(ModelError):
    """The model is being loaded."""

    code, status, retryable = "MODEL_LOADING", 503, True


class LoraLoading(ModelError):
    """The model is loaded and the LoRA adapter that was asked for is not, yet."""

    code, status, retryable = "LORA_LOADING", 503, True


class LoraBusy(ModelError):
    """Another LoRA adapter is being loaded by name."""

    code, status, retryable = "LORA_BUSY", 429, True


class LoraUnavailable(ModelError):
    """The model takes no LoRA adapters."""

    code, status = "LORA_RUNTIME_UNAVAILABLE", 409


class DependencyConflict(ModelError):
    """The model needs a library that this installation lacks."""

    code, status = "DEPENDENCY_CONFLICT", 409


class InferenceFailed(ModelError):
    """The model raised, gave a result that is not finite, or its LoRA adapter could not be loaded."""

    code, status = "INFERENCE_ERROR", 500


class UnexpectedOutput(ModelError):
    """The model gave an output whose shape or datatype its configuration forbids."""

    code, status = "UNEXPECTED_OUTPUT", 500


class Overloaded(PenstockError):
    """The request is fine, but capacity or time ran out."""


class QueueFull(Overloaded):
    """Every worker that could run this is out of credits."""

    code, status, retryable = "QUEUE_FULL", 503, True


class Draining(Overloaded):
    """This process is shutting down."""

    code, status, retryable = "DRAINING", 503, True


class NoReplica(Overloaded):
    """No worker is up that could run this."""

    code, status, retryable = "NO_REPLICA", 503, True


class Provisioning(Overloaded):
    """No box of the cluster is there that could run this; one may come."""

    code, status, retryable = "PROVISIONING", 503, True


class GpuNotConfigured(Overloaded):
    """The cluster has no machines of the profile that the request asks for, and will not have any."""

    code, status = "GPU_NOT_CONFIGURED", 503


class QueueUnavailable(Overloaded):
    """No broker of the cluster can be reached."""

    code, status, retryable = "QUEUE_UNAVAILABLE", 503, True


class DeadlineExceeded(Overloaded):
    """The deadline passed before the result was ready."""

    code, status, retryable = "DEADLINE_EXCEEDED", 504, True


class ResourceExhausted(Overloaded):
    """The item does not fit in device memory even alone."""

    code, status = "RESOURCE_EXHAUSTED", 422


class ShmExhausted(Overloaded):
    """The arena has no room for the result."""

    code, status, retryable = "SHM_EXHAUSTED", 503, True


class WorkerFault(PenstockError):
    """A worker process died or took its memory back."""


class WorkerLost(WorkerFault):
    """The worker died while it held the request; `suspect` tells whether the request was on the device, `alone` or not.

    A request that is not `sent` never left the frontend, whose socket took nothing.
    """

    code, status, retryable = "WORKER_LOST", 503, True

    def __init__(
        self, message: str, *, suspect: bool = False, alone: bool = False, sent: bool = True, **detail: Any
    ) -> None:
        super().__init__(message, **detail)
        self.suspect, self.alone, self.sent = suspect, alone, sent


class WorkerCrashed(WorkerFault):
    """A worker died twice on this very input; the input is refused for a while."""

    code, status = "WORKER_CRASHED", 500


class InputRefused(WorkerCrashed):
    """This input crashed workers before and is not run again for a while."""


class LeaseRevoked(WorkerFault):
    """The result block was taken back before it was read; the bytes read must not be used."""

    code, status, retryable = "LEASE_REVOKED", 503, True


class SequenceLost(WorkerFault):
    """The worker that held the state of a sequence died; the sequence must begin again."""

    code, status = "SEQUENCE_LOST", 503

    @classmethod
    def of(cls, sequence: int | str) -> SequenceLost:
        """The error of a request that was lost with the state of its sequence."""
        return cls(
            f"the worker was lost, and with it the state of sequence {sequence!a}, which must begin again"
        )


class ToolFault(PenstockError):
    """A tool could not run on this server; nothing that has begun is run again."""


class ToolsUnavailable(ToolFault):
    """No tool host is there now; nothing has run."""

    code, status, retryable = "TOOLS_UNAVAILABLE", 503, True


class ToolHostLost(ToolFault):
    """The tool host died while it ran the call. The call may have had effects, so the server does not repeat it."""

    code, status = "TOOL_HOST_LOST", 503


class SandboxFailed(ToolFault):
    """The sandbox of the call could not be started, or broke."""

    code, status = "SANDBOX_FAILED", 503


class StateFull(PenstockError):
    """The state directory has no room for a new file, skill or session."""

    code, status = "STATE_FULL", 507


class Cancelled(PenstockError):
    """The client went away."""

    code, status = "CANCELLED", 499


class Unsupported(PenstockError):
    """The feature is not offered by this build."""

    code, status = "UNSUPPORTED", 501


class ControlDisabled(PenstockError):
    """Models are loaded and unloaded by name only with `repository.control: explicit`."""

    code, status = "CONTROL_DISABLED", 503


class ConfigError(PenstockError):
    """Settings or catalog are wrong; the process exits with code 3."""

    code = "CONFIG_ERROR"


class MachineUnfit(ConfigError):
    """The machine lacks what right settings ask for, a GPU or room in shared memory; a worker exits with code 5.

    Unlike a wrong setting, the lack may end by itself: the driver loads late, or another program gives memory back.
    """


class ProtocolError(PenstockError):
    """A frame between our own processes breaks the schema or its limits."""

    code = "PROTOCOL_ERROR"


def _tree(cls: type[PenstockError]) -> list[type[PenstockError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in _tree(child))]


class FailedItem(Protocol):
    """An item of a request that failed alone."""

    @property
    def index(self) -> int:
        """Its place in the request."""

    @property
    def code(self) -> str:
        """Of the class of the error."""

    @property
    def message(self) -> str:
        """The text, which names the item."""


def of_items(failed: Sequence[FailedItem]) -> PenstockError:
    """The error of a request that fails with some of its items: the first one's, which names the others."""
    first, *others = sorted(failed, key=lambda item: item.index)
    named = ", ".join(str(item.index) for item in others[:_NAMED])
    more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    text = f"; items {named}{more} failed too" if len(others) > 1 else f"; item {named} failed too"
    return from_code(first.code, first.message + (text if others else ""))


def from_code(
    code: str, message: str, *, retry_after_s: float | None = None, detail: dict[str, Any] | None = None
) -> PenstockError:
    """Rebuild the error that another process sent; an unknown code becomes `PenstockError`."""
    # Intermediate classes inherit the root's code; the first class that declares a code owns it.
    owners = {cls.__dict__["code"]: cls for cls in _tree(PenstockError) if "code" in cls.__dict__}
    return owners.get(code, PenstockError)(message, retry_after_s=retry_after_s, **(detail or {}))
