"""The configuration of a model that takes named tensors: the struct that both sides share, from any kind of file.

Dims never contain the batch dimension of a model that batches (`max_batch_size` above 0); -1 stands for any size.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ROW_COST = 16
"""Tokens that a row counts as in queues, credits and budgets."""


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all parts of a model configuration."""


class TensorConfig(Part, frozen=True):
    """One input or output: `datatype` as in `ipc.memory.datatypes`; `reshape` are the dims that the program itself
    takes.

    `format` is NONE, NHWC or NCHW; `labels` name the classes of an output, by index.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    format: str = "NONE"
    reshape: tuple[int, ...] | None = None
    optional: bool = False
    label_filename: str = ""
    labels: tuple[str, ...] = ()


class DynamicBatching(Part, frozen=True):
    """Requests are joined; a batch of no preferred size waits for others up to the delay."""

    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    preserve_ordering: bool = False


class Control(Part, frozen=True):
    """A tensor that tells the model where sequences begin and end; `off_on` are its two values (not for CORRID).

    Its shape is [rows, 1]; `flat`: [rows], for a program that declares one dimension or does not batch.
    """

    name: str
    kind: Literal["START", "READY", "END", "CORRID"]
    datatype: str
    off_on: tuple[float, float] = (0, 1)
    flat: bool = False


class SequenceBatching(Part, frozen=True):
    """Requests of one correlation id run in order, in one slot of one worker."""

    max_idle_us: int = 1_000_000
    controls: tuple[Control, ...] = ()


class VersionPolicy(Part, frozen=True):
    """Which versions are served: the `latest` so many, `all`, or the versions in `specific`."""

    kind: Literal["latest", "all", "specific"] = "latest"
    latest: int = 1
    specific: tuple[int, ...] = ()


class InstanceGroup(Part, frozen=True):
    """Where instances run; `kind` is KIND_AUTO, KIND_GPU, KIND_CPU or KIND_MODEL."""

    name: str = ""
    count: int = 1
    kind: str = "KIND_AUTO"
    gpus: tuple[int, ...] = ()


class WarmupInput(Part, frozen=True):
    """Values of one input of a warm-up, without the batch dimension: zeros, random values, or the bytes of a file."""

    datatype: str
    dims: tuple[int, ...]
    data: Literal["zero", "random", "file"] = "zero"
    file: str = ""


class Warmup(Part, frozen=True):
    """A request that the model must answer before it counts as loaded, `count` times; `batch_size` 0 is one row."""

    name: str
    inputs: dict[str, WarmupInput]
    batch_size: int = 0
    count: int = 1


class ModelConfig(Part, frozen=True):
    """One model of named tensors. `platform` names the program's format; `backend` is the adapter's name."""

    name: str
    platform: str = ""
    backend: str = ""
    max_batch_size: int = 0
    inputs: tuple[TensorConfig, ...] = ()
    outputs: tuple[TensorConfig, ...] = ()
    version_policy: VersionPolicy = VersionPolicy()
    instance_groups: tuple[InstanceGroup, ...] = ()
    default_model_filename: str = ""
    dynamic_batching: DynamicBatching | None = None
    sequence_batching: SequenceBatching | None = None
    decoupled: bool = False
    metric_tags: dict[str, str] = {}
    parameters: dict[str, str] = {}
    warmups: tuple[Warmup, ...] = ()

    @property
    def gpus(self) -> set[int]:
        """The GPUs that all instance groups together name; empty when one of the groups leaves the choice open."""
        if any(not group.gpus for group in self.instance_groups):
            return set()
        return {gpu for group in self.instance_groups for gpu in group.gpus}

    def worker_slots(self, workers: int, on_cpu: bool) -> list[int]:
        """The slots, of so many workers, that offer the model; all of them when the named GPUs do not exist."""
        gpus = set() if on_cpu else self.gpus
        return [slot for slot in range(workers) if slot in gpus] or list(range(workers))

    @property
    def batches(self) -> bool:
        """Whether tensors have a leading batch dimension that `dims` leave out."""
        return self.max_batch_size > 0

    def input(self, name: str) -> TensorConfig | None:
        """The input of that name."""
        return next((tensor for tensor in self.inputs if tensor.name == name), None)

    def output(self, name: str) -> TensorConfig | None:
        """The output of that name."""
        return next((tensor for tensor in self.outputs if tensor.name == name), None)
