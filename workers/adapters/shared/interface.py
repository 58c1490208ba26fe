"""Inputs and outputs of a program, completed and checked against its configuration.

1. A configuration without inputs or outputs gets those of the program. A configuration that states none of these and no
   `max_batch_size` batches if the first dimension of all inputs and outputs may have any size (`default_batch`).
2. A configured tensor is the program's tensor of that name, else the tensor whose place `__<number>` at the end of the
   name tells, from 0 on. A program's only tensor may have any name. The order of a configuration means nothing.
3. Types and shapes must agree. A contradiction is a `ModelRefused` that names the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.memory.datatypes import DATATYPES
from workers.repository.entries import RepositoryEntry
from workers.repository.layout import ModelRefused

DATATYPE_OF = {
    torch.bfloat16 if name == "BF16" else getattr(torch, datatype.array): name
    for name, datatype in DATATYPES.items()
    if datatype.nbytes
}
"""Names of datatypes by torch dtype."""
_NUMBERED = re.compile(r".*__(\d{1,6})")
"""A name that tells the place of a tensor, as Triton's backend for TorchScript has them."""


@dataclass(frozen=True, slots=True)
class ProgramTensor:
    """One input or output of a program. `datatype` "" and `shape` None mean unknown, a size of -1 means any."""

    name: str
    datatype: str = ""
    shape: tuple[int, ...] | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Interface:
    """All inputs and outputs in the program's order; `most_rows` is the largest first dimension, if known."""

    inputs: tuple[ProgramTensor, ...]
    outputs: tuple[ProgramTensor, ...]
    most_rows: int | None = None


@dataclass(frozen=True, slots=True)
class Fitted:
    """The completed configuration, and the configured names of inputs and outputs in the program's order.

    A name is "" for a tensor that is not configured: an optional input, or an output.
    """

    config: ModelConfig
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def fit(entry: RepositoryEntry, interface: Interface) -> Fitted:
    """The configuration of an entry for a program. Raises `ModelRefused`."""
    config = entry.config
    batch = _batch(interface, entry.default_batch) if entry.infers_batch else config.max_batch_size
    config = msgspec.structs.replace(
        config,
        max_batch_size=batch,
        inputs=config.inputs or _inferred("input", interface.inputs, batch, _control_names(config)),
        outputs=config.outputs or _inferred("output", interface.outputs, batch, ()),
    )
    names = [tensor.name for tensor in config.inputs] + list(_control_names(config))
    inputs = _match("input", names, interface.inputs)
    outputs = _match("output", [tensor.name for tensor in config.outputs], interface.outputs)
    _refuse_misfit("input", config, config.inputs, dict(zip(inputs, interface.inputs, strict=True)))
    config = _with_controls(config, dict(zip(inputs, interface.inputs, strict=True)))
    _refuse_misfit("output", config, config.outputs, dict(zip(outputs, interface.outputs, strict=True)))
    if interface.most_rows is not None and batch > interface.most_rows:
        raise ModelRefused(
            f"max_batch_size: {batch} is above {interface.most_rows}, the most rows of the program"
        )
    return Fitted(config, inputs, outputs)


def _control_names(config: ModelConfig) -> tuple[str, ...]:
    sequence = config.sequence_batching
    return tuple(control.name for control in sequence.controls) if sequence else ()


def _batch(interface: Interface, default: int) -> int:
    tensors = [*interface.inputs, *interface.outputs]
    free = all(tensor.shape is not None and tensor.shape[:1] == (-1,) for tensor in tensors)
    return min(default, interface.most_rows or default) if tensors and free else 0


def _inferred(
    kind: str, tensors: Sequence[ProgramTensor], batch: int, left_out: Sequence[str]
) -> tuple[TensorConfig, ...]:
    tensors_inferred = []
    for tensor in tensors:
        if tensor.name in left_out:
            continue
        if not tensor.datatype or tensor.shape is None:
            raise ModelRefused(
                f"the program does not tell type and shape of {kind} {tensor.name!a}; configure it"
            )
        dims = tensor.shape[1:] if batch else tensor.shape
        tensors_inferred.append(TensorConfig(tensor.name, tensor.datatype, dims, optional=tensor.optional))
    return tuple(tensors_inferred)


def _match(kind: str, names: Sequence[str], tensors: Sequence[ProgramTensor]) -> tuple[str, ...]:
    """The configured name of each of the program's tensors."""
    by_place: dict[int, str] = {}
    for name in names:
        at = _place(kind, name, names, tensors)
        if at in by_place:
            both, one = _shown([by_place[at], name]), _shown([tensors[at].name])
            raise ModelRefused(f"{kind}s {both} are both the program's {one}")
        by_place[at] = name
    for at, tensor in enumerate(tensors):
        if kind == "input" and not tensor.optional and at not in by_place:
            raise ModelRefused(f"{kind} {_shown([tensor.name])} of the program is not configured")
    return tuple(by_place.get(at, "") for at in range(len(tensors)))


def _place(kind: str, name: str, names: Sequence[str], tensors: Sequence[ProgramTensor]) -> int:
    """The place in the program of a configured tensor."""
    known = [tensor.name for tensor in tensors]
    if name in known:
        return known.index(name)
    number = number_of(name)
    if number is not None and number < len(known):
        return number
    if len(names) == len(known) == 1 and number is None:
        return 0
    where = f"{kind} {_shown([name])} is none of the program's, which are {_shown(known)}"
    raise ModelRefused(
        f"{where}; write one of these, or a name that ends with its number, __0 to __{len(known) - 1}"
    )


def number_of(name: str) -> int | None:
    """The place that a name like `OUTPUT__1` tells."""
    numbered = _NUMBERED.fullmatch(name)
    return int(numbered[1]) if numbered else None


def _shown(names: Sequence[str]) -> str:
    return ", ".join(ascii(name[:64]) for name in names[:16]) + (", ..." if len(names) > 16 else "") or "none"


def _refuse_misfit(
    kind: str, config: ModelConfig, tensors: Sequence[TensorConfig], program: dict[str, ProgramTensor]
) -> None:
    rows = config.max_batch_size if config.sequence_batching is not None else -1
    for tensor in tensors:
        other, where = program[tensor.name], f"{kind} {tensor.name[:200]!a}"
        if other.datatype and other.datatype != tensor.datatype:
            raise ModelRefused(f"{where}: data_type is {tensor.datatype}, the program's is {other.datatype}")
        if other.shape is None:
            continue
        dims = tensor.dims if tensor.reshape is None else tensor.reshape
        shape = (rows, *dims) if config.batches else dims
        pairs = zip(shape, other.shape, strict=False)
        if len(shape) != len(other.shape) or any(theirs not in (-1, ours) for ours, theirs in pairs):
            raise ModelRefused(f"{where}: shape is {list(shape)}, the program's is {list(other.shape)}")


def _with_controls(config: ModelConfig, program: dict[str, ProgramTensor]) -> ModelConfig:
    """The configuration with controls in the program's shape: [rows, 1] or [rows]."""
    sequence = config.sequence_batching
    if sequence is None:
        return config
    controls = []
    for control in sequence.controls:
        other, where = program[control.name], f"control_input {control.name[:200]!a}"
        if other.datatype and other.datatype != control.datatype:
            raise ModelRefused(
                f"{where}: {control.datatype} is configured, the program's is {other.datatype}"
            )
        rows = max(1, config.max_batch_size)
        shape = [rows, 1] if config.batches else [rows]
        flat = other.shape is not None and len(other.shape) == 1
        expected = shape[:1] if flat else shape
        if other.shape is not None and (
            len(other.shape) != len(expected)
            or any(theirs not in (-1, ours) for ours, theirs in zip(expected, other.shape, strict=True))
        ):
            raise ModelRefused(f"{where}: shape is {shape}, the program's is {list(other.shape)}")
        controls.append(msgspec.structs.replace(control, flat=flat))
    return msgspec.structs.replace(
        config, sequence_batching=msgspec.structs.replace(sequence, controls=tuple(controls))
    )
