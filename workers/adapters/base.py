"""The interface between the worker's device thread and a model family.

A family states what it can do as data (`AdapterSpec`); operations refuse the rest before anything reaches the device.

1. `load` builds the model from a local directory, on a loading thread.
2. `refuse_unsupported` refuses what the family cannot answer, before anything is queued.
3. `prepare` makes items ready for the device (tokens, pixels) on any of the preparing threads.
4. `collate` lays the prepared items of one batch into host tensors, on the device thread or the one that forms ahead.
5. `encode`, `score` or `extract` runs the batch on the device thread; the answer has one entry per prepared item.
   `infer` runs one of named tensors (`shared.program.ProgramAdapter` is the base of such families).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec
import numpy as np
import torch

from ipc.catalog.model_config import ModelConfig
from ipc.catalog.repository.entries import RepositoryEntry
from ipc.errors import InvalidInput
from ipc.wire.extraction import Extraction
from ipc.wire.messages import Call, InputItem
from workers.adapters.shared.lora import LoraLayers

if TYPE_CHECKING:
    from workers.adapters.shared.named_tensors import NamedBatch


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one model family.

    family      name used in the catalog, for example "dense"
    operations  operations it serves: "encode", "score", "extract", ...
    inputs      input kinds it accepts: "text", "image", ...
    outputs     outputs it can give: "dense", "sparse", ...
    options     keys of a model's `options` that the family understands
    per_call    those of them that are read from each call only; profiles that differ in nothing else share the weights
    builds_alone whether a load must not overlap others (`shared.building.BUILDING`)
    lora        whether LoRA adapters can be applied to its models
    needs_proof whether a load fails when none of the canned inferences suits the model (`lifecycle.proof`)
    """

    family: str
    operations: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    options: tuple[str, ...] = ()
    per_call: tuple[str, ...] = ()
    builds_alone: bool = True
    lora: bool = False
    needs_proof: bool = True


@dataclass(frozen=True, slots=True)
class Excess:
    """How much of an item was cut: `tokens` were found, `limit` fit; both count what is read `beside` it, if anything.

    `in_query` tells that the query of the call was too long.
    """

    tokens: int
    limit: int
    beside: str = ""
    in_query: bool = False


@dataclass(slots=True)
class Prepared:
    """One item ready for a batch.

    `cost` is its token count, special tokens included; `rows` is how many token vectors it gives in `multivector`.
    `slot` is the row that an item of a sequence must have in its batch. `excess` is for messages about an item that is
    `truncated`, where its family counts what it cuts.
    """

    payload: Any
    cost: int
    truncated: bool = False
    rows: int = 1
    slot: int | None = None
    excess: Excess | None = None


@dataclass(frozen=True, slots=True)
class Gathering:
    """How long items of a model wait for others, and how many tokens make a batch that need not wait.

    A batch with one of the `preferred` numbers of tokens (ascending; the last are `full_tokens`) need not wait; the
    largest that the waiting items make up is taken. No batch has more than `full_tokens`, unless the batch is one item
    or the delay has passed.
    """

    delay_ns: int
    full_tokens: int
    preferred: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ItemFailure:
    """Stands in the place of an item that failed alone; `code` is one of `ipc.errors`."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Sparse vectors on the host: per item int32 [k] indices, ascending, and their float32 [k] values."""

    indices: list[np.ndarray]
    values: list[np.ndarray]


@dataclass(frozen=True, slots=True)
class LoadContext:
    """All that `Adapter.load` may know.

    `progress(phase, fraction)` reports how far a phase has come, 0.0 to 1.0.  `max_sequence_length` (tokens) and
    `options` come from the model's catalog entry; `repository` is the whole entry of a repository model. An item of
    several sequences that has more than `batch_tokens` runs in parts.
    """

    directory: Path
    model_id: str
    device: torch.device
    dtype: torch.dtype
    max_sequence_length: int | None
    options: Mapping[str, Any]
    progress: Callable[[str, float], None]
    trust_remote_code: bool = False
    repository: RepositoryEntry | None = None
    batch_tokens: int = 16384


class ItemRefused(Exception):
    """An item that nobody can use, which fails its request; the preparer says which one it is."""

    def __init__(self, item: InputItem, message: str) -> None:
        super().__init__(message)
        self.item = item


@dataclass(frozen=True, slots=True)
class Pause:
    """What a stream yields to wait: its next step is taken `seconds` later, and other requests run until then."""

    seconds: float


class Adapter(ABC):
    """One loaded model of one family."""

    spec: ClassVar[AdapterSpec]
    loras: LoraLayers | None = None
    """The LoRA adapters of this model, in families whose spec has `lora`."""
    gathering: Gathering | None = None
    """How batches of this model are put together where that is configured; by default what waits is taken."""
    batch_tokens: int | None = None
    """Most tokens of a batch of several requests, whatever the device may hold; None where the device alone decides."""
    streams: bool = False
    """Whether requests are answered with any number of parts, by `stream` in place of the operation's own method."""

    @classmethod
    @abstractmethod
    def load(cls, context: LoadContext) -> Self:
        """Build the model; raises whatever went wrong, for `workers.loading.failure` to classify."""

    @property
    @abstractmethod
    def max_sequence_length(self) -> int:
        """Longest sequence in tokens, special tokens included; longer texts are cut and flagged."""

    @property
    @abstractmethod
    def dims(self) -> dict[str, int]:
        """Width of each output, by output name."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes held by weights and buffers."""

    @property
    def image_tokens(self) -> int:
        """About how many tokens an image counts as, before it is prepared."""
        return 1024

    @property
    def uses(self) -> frozenset[str]:
        """What this model reads of a request beside items, query and what protocols resolve: names of options, and
        "labels", "output_schema" and "instruction" in extract."""
        return frozenset()

    @property
    def config(self) -> ModelConfig | None:
        """Inputs and outputs of a model of named tensors, None for any other; the same object as long as it lives."""
        return None

    def refuse_unsupported(self, call: Call) -> None:
        """Raise `InvalidInput` for options, labels or inputs that this family refuses."""
        if call.lora and self.loras is None:
            before = call.names.options
            raise InvalidInput(f"{before}lora, {before}lora_id: this model has no LoRA adapters")

    def using(self, lora: str) -> AbstractContextManager[None]:
        """Within, batches run with this LoRA adapter, or with none where it is empty.  Device thread only."""
        return self.loras.using(lora) if lora and self.loras is not None else nullcontext()

    def group(self, call: Call) -> Hashable:
        """What two calls must have in common to share a forward pass, beside model, operation and outputs.

        What is applied to single items afterwards (thresholds, names) belongs into their payload instead.
        """
        return None

    @abstractmethod
    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Make items of `call` ready; one result per item, in order.  Thread-safe, CPU only."""

    @abstractmethod
    def collate(self, prepared: Sequence[Prepared]) -> Any:
        """Lay prepared items into one batch of host tensors (pinned for CUDA).  Thread-safe."""

    def padding_ratio(self, batch: Any) -> float:
        """Share of the tokens of a collated batch, 0 to 1, that only fill it up; read off the host for each batch."""
        return 0.0

    def encode(self, batch: Any, outputs: frozenset[str]) -> dict[str, torch.Tensor | SparseRows]:
        """Run one batch: the named outputs, all from one forward pass.  Device thread only.

        dense        fp32 [items, dims] on the device
        multivector  fp32 [rows of all items, dims] on the device, item after item, `Prepared.rows` of each
        sparse       `SparseRows`
        """
        raise InvalidInput("this model does not support encode")

    def score(self, batch: Any) -> torch.Tensor:
        """Run one batch of prepared pairs: fp32 [items].  Device thread only."""
        raise InvalidInput("this model does not support score")

    def extract(self, batch: Any) -> list[Extraction | ItemFailure]:
        """Run one batch: what was found in each item.  Device thread only."""
        raise InvalidInput("this model does not support extract")

    def infer(self, batch: NamedBatch) -> Mapping[str, np.ndarray | torch.Tensor]:
        """Run one batch of named tensors: at least the outputs of `batch.outputs`.  Device thread only.

        Inputs come from `batch.array(name)` or `batch.tensor(name, device)`: checked against `config`, joined along the
        rows, in the shape of the program ([rows, *reshape or dims]; without rows when `max_batch_size` is 0).

        An output has the shape [rows, *reshape or dims of the program] (without rows when `max_batch_size` is 0), with
        all rows of the batch, and the datatype of `config`: a tensor on any device, or an array. BF16 is a
        `torch.bfloat16` tensor or an array of its 16 bits (uint16); BYTES is an array of objects (`bytes`, or `str`
        for UTF-8). It may share memory with an input; it is copied before the next batch runs.

        A `PenstockError` becomes the answer of the request that causes it; any other exception says nothing to the
        client. When a batch of several requests raises, its halves are tried, so this may be called again for the same.
        """
        raise InvalidInput("this model does not support infer")

    def stream(self, batch: NamedBatch) -> Iterator[Mapping[str, np.ndarray | torch.Tensor] | Pause]:
        """The parts of the answer to one request, which is a batch of its own.  Device thread only.

        Each has at least the outputs of `batch.outputs`, as `infer` gives them; it is copied before the next one is
        asked for. Every step holds the device for as long as it takes. When nobody waits any more the iterator's
        `close`, if it has one, is called in place of the next step. Nothing is ever run again.
        """
        raise InvalidInput("this model does not answer in parts")
