"""The operations on a model by the type of the call: those of texts and images in `items`, named tensors in `infer`.

Scheduling, strategies and the runtime import this package; none of them knows an operation by name.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ipc.errors import InvalidInput
from ipc.wire.messages import Call, EncodeCall, ExtractCall, GenerateCall, InferCall, ScoreCall, TokenizeCall
from workers import foreign
from workers.adapters.base import Adapter, ItemFailure, Prepared
from workers.inputs import Payload
from workers.operations.infer import Infer
from workers.operations.items import (
    Encode,
    Extract,
    Generate,
    NamedOutput,
    Results,
    ResultTensor,
    Score,
    Tokenize,
)


class Operation(Protocol):
    """One operation over any adapter that offers it."""

    name: str
    itemized: bool
    """Whether a request has items that can fail one by one, and that messages name."""
    refuses: bool
    """Whether an error that a model raises about an input is the client's (`workers.foreign.is_refusal`)."""
    on_device: bool
    """Whether prepared items go to the device; else preparing has made their results."""

    def check(self, adapter: Any, call: Any) -> None:
        """Raise `InvalidInput` when the adapter cannot answer this call."""

    def group(self, call: Any) -> Hashable:
        """Calls with equal groups may share a forward pass."""

    def needs_prepared(self, call: Any) -> bool:
        """Whether the layout is known only when all items are prepared."""

    def layout(self, adapter: Any, call: Any, prepared: Sequence[Prepared]) -> list[ResultTensor]:
        """The tensors of the result whose size is known before the device runs."""

    def instant(self, call: Any) -> bool:
        """Whether preparing takes less time than handing the request to another thread."""

    def prepare(
        self, adapter: Any, call: Any, start: int, stop: int, payload: Payload
    ) -> Sequence[Prepared | ItemFailure]:
        """Items `start` to `stop` made ready for the device."""

    def run(self, adapter: Any, batch: Any, call: Any) -> Results:
        """One forward pass over a collated batch."""


class StreamingOperation(Protocol):
    """One operation that some adapters answer in parts (`Adapter.streams`)."""

    def stream(self, adapter: Any, batch: Any) -> Iterator[Any]:
        """The steps of a request that is a batch of its own; each gives one part."""

    def part(self, adapter: Any, batch: Any, found: object) -> Mapping[str, NamedOutput]:
        """What a step gave, checked."""


_INFER = Infer()
_STREAMING: dict[type, StreamingOperation] = {InferCall: _INFER}
_BY_CALL: dict[type, Operation] = {
    EncodeCall: Encode(),
    ScoreCall: Score(),
    ExtractCall: Extract(),
    InferCall: _INFER,
    GenerateCall: Generate(),
    TokenizeCall: Tokenize(),
}


def operation_of(call: Call) -> Operation:
    """The operation that a call asks for."""
    return _BY_CALL[type(call)]


def streaming_of(call: Call) -> StreamingOperation:
    """The same for a call that is answered in parts."""
    return _STREAMING[type(call)]


def check(adapter: Adapter, call: Call) -> None:
    """Raise `InvalidInput` when the adapter does not offer the operation or refuses the call."""
    operation = operation_of(call)
    if operation.on_device and operation.name not in adapter.spec.operations:
        raise InvalidInput(f"this model does not support {operation.name}")
    # NOTE: an error of the family's own code is the request's, whatever the error says of this worker.
    foreign.ask(operation.check, adapter, call)
    foreign.ask(adapter.refuse_unsupported, call)


def group_of(adapter: Adapter, call: Call) -> Hashable:
    """What two calls to one model must have in common to share a forward pass."""
    operation = operation_of(call)
    own = foreign.ask(adapter.group, call)
    hash(own)
    return (operation.name, operation.group(call), own, call.lora)
