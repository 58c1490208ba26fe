"""The parts of a configuration that say how requests are put together: dynamic batching and sequence batching."""

from __future__ import annotations

from typing import Literal, cast, get_args

from ipc.catalog.model_config import Control, DynamicBatching, ModelConfig, SequenceBatching
from ipc.catalog.repository.layout import ModelRefused
from ipc.protos import model_config_pb2 as schema

MOST_DELAY_US = 60_000_000
MOST_IDLE_US = 24 * 3600 * 1_000_000
IDLE_US = 1_000_000
"""Idle time of a sequence where none is given."""
ControlKind = Literal["START", "READY", "END", "CORRID"]
_PREFIX = "CONTROL_SEQUENCE_"
_PAIRS = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}
_IDS = {
    schema.TYPE_UINT64: "UINT64",
    schema.TYPE_INT64: "INT64",
    schema.TYPE_UINT32: "UINT32",
    schema.TYPE_INT32: "INT32",
    schema.TYPE_STRING: "BYTES",
}


def dynamic(message: schema.ModelConfig, batch: int) -> DynamicBatching | None:
    """Dynamic batching of a configuration. Raises `ModelRefused`."""
    if not message.HasField("dynamic_batching"):
        return None
    given = message.dynamic_batching
    if not batch:
        raise ModelRefused("dynamic_batching: needs max_batch_size of at least 1")
    wrong = next((size for size in given.preferred_batch_size if not 1 <= size <= batch), None)
    if wrong is not None:
        raise ModelRefused(
            f"dynamic_batching.preferred_batch_size: {wrong} is not within 1 and max_batch_size {batch}"
        )
    delay_us = given.max_queue_delay_microseconds
    if delay_us > MOST_DELAY_US:
        raise ModelRefused(
            f"dynamic_batching.max_queue_delay_microseconds: {delay_us} is above {MOST_DELAY_US}"
        )
    return DynamicBatching(tuple(sorted(set(given.preferred_batch_size))), delay_us, given.preserve_ordering)


def sequence(message: schema.ModelConfig) -> SequenceBatching | None:
    """Sequence batching of a configuration. Raises `ModelRefused`."""
    if not message.HasField("sequence_batching"):
        return None
    given = message.sequence_batching
    for field in ("oldest", "state"):
        if field in {descriptor.name for descriptor, _ in given.ListFields()}:
            raise ModelRefused(f"sequence_batching.{field}: not supported")
    if given.iterative_sequence:
        raise ModelRefused("sequence_batching.iterative_sequence: not supported")
    idle_us = given.max_sequence_idle_microseconds
    if idle_us > MOST_IDLE_US:
        raise ModelRefused(
            f"sequence_batching.max_sequence_idle_microseconds: {idle_us} is above {MOST_IDLE_US}"
        )
    return SequenceBatching(idle_us or IDLE_US, tuple(_control(each) for each in given.control_input))


def _control(message: schema.ModelSequenceBatching.ControlInput) -> Control:
    where = f"control_input {message.name[:200]!a}"
    if not message.name or len(message.control) != 1:
        raise ModelRefused(f"{where}: needs a name and one control, got {len(message.control)}")
    control = message.control[0]
    name = schema.ModelSequenceBatching.Control.Kind.Name(control.kind).removeprefix(_PREFIX)
    assert name in get_args(ControlKind), name
    kind = cast(ControlKind, name)
    given = [field for field in _PAIRS if len(getattr(control, field))]
    if kind == "CORRID":
        if given or control.data_type not in _IDS:
            raise ModelRefused(
                f"{where}: CORRID needs data_type, one of TYPE_[U]INT32, TYPE_[U]INT64, TYPE_STRING"
            )
        return Control(message.name, kind, _IDS[control.data_type])
    if len(given) != 1 or len(getattr(control, given[0])) != 2:
        raise ModelRefused(f"{where}: {kind} needs one of {', '.join(_PAIRS)}, with two values")
    off, on = getattr(control, given[0])
    return Control(message.name, kind, _PAIRS[given[0]], (float(off), float(on)))


def check_decoupled(config: ModelConfig, backend: str) -> None:
    """Raise `ModelRefused` for what any number of responses to a request cannot go with, or a `backend` without it."""
    if not config.decoupled:
        return
    if backend != "python_model":
        raise ModelRefused(
            "model_transaction_policy.decoupled: only a model.py can give several responses to a request"
        )
    if config.sequence_batching is not None:
        raise ModelRefused("sequence_batching: not supported with model_transaction_policy.decoupled")
    if config.dynamic_batching is not None and config.dynamic_batching.preserve_ordering:
        raise ModelRefused(
            "dynamic_batching.preserve_ordering: not supported with model_transaction_policy.decoupled"
        )


def check_controls(config: ModelConfig) -> None:
    """Raise `ModelRefused` for control tensors that clash with each other or with an input."""
    controls = config.sequence_batching.controls if config.sequence_batching else ()
    for i, control in enumerate(controls):
        before = controls[:i]
        if config.input(control.name) or any(other.name == control.name for other in before):
            raise ModelRefused(f"control_input {control.name[:200]!a}: there is another input of that name")
        if any(other.kind == control.kind for other in before):
            raise ModelRefused(f"control_input {control.name[:200]!a}: {control.kind} is given twice")
