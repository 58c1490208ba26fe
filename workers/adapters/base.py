"""The interface between the worker's device thread and a model family.

A family states its abilities as data (`AdapterSpec`); operations refuse other requests before anything is queued.

1. `load` builds the model from a local directory, on a loading thread.
2. `refuse_unsupported` refuses calls that the family cannot answer, before anything is queued.
3. `prepare` makes items ready for the device (tokens, pixels), on any preparing thread.
4. `collate` lays the prepared items of one batch into host tensors, on the device thread or the thread form-ahead.
5. `encode`, `score` or `extract` runs the batch on the device thread; the answer has one entry per prepared item.
   `infer` runs a batch of named tensors (`shared.program.ProgramAdapter` is the base of such families).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import msgspec
import numpy as np
import torch

from ipc.catalog.model_config import ModelConfig
from ipc.catalog.option_names import FAMILY_OPTIONS
from ipc.errors import InvalidInput, LoraUnavailable
from ipc.settings import Generation
from ipc.wire.extraction import Extraction
from ipc.wire.messages import Call, GenerateCall, InputItem
from workers.adapters.shared.lora import LoraLayers
from workers.device.findings import Findings, Proof
from workers.repository.entries import RepositoryEntry

if TYPE_CHECKING:
    from workers.adapters.shared.gguf_blocks import Ahead
    from workers.adapters.shared.known_ids import KnownIds
    from workers.adapters.shared.named_tensors import NamedBatch
    from workers.generation.engine import Engine


class Held(NamedTuple):
    """A loaded model that generates text, for its status (`ipc.wire.messages.ModelStatus`)."""

    precision: str = ""
    weight_bytes: int = 0
    cache_bytes: int = 0
    cache_tokens: int = 0
    architecture: str = ""
    parameters: int = 0
    stored: str = ""
    template: str = ""


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one model family.

    family      name used in the catalog, for example "dense"
    operations  "encode", "score", "extract", "infer", "generate"
    inputs      kinds of inputs: "text", "image", ...
    outputs     names of outputs: "dense", "sparse", ...
    options     options that the family understands; by default those of `FAMILY_OPTIONS`
    per_call    options that are read from each call only; profiles that differ in nothing else share the weights
    builds_alone whether a load must not overlap others (`shared.building.BUILDING`)
    lora        whether LoRA adapters can be applied to the family's models
    gguf        whether the family reads models in GGUF files
    quantizes   whether the family's models can keep their weights quantised (`ipc.catalog.entries.QUANTIZED`)
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
    gguf: bool = False
    quantizes: bool = False
    needs_proof: bool = True

    def __post_init__(self) -> None:
        if not self.options:
            msgspec.structs.force_setattr(self, "options", FAMILY_OPTIONS.get(self.family, ()))


@dataclass(frozen=True, slots=True)
class Excess:
    """How much of an item was cut: the item has `tokens`, the model takes `limit`.

    `beside` names a text that the model reads beside the item; both numbers count its tokens too. With `in_query` the
    query of the call was too long, not the item.
    """

    tokens: int
    limit: int
    beside: str = ""
    in_query: bool = False


@dataclass(slots=True)
class Prepared:
    """One item ready for a batch.

    cost    tokens, special tokens included
    rows    token vectors that the item gives in `multivector`
    slot    row that an item of a sequence must have in its batch
    excess  how much of a `truncated` item was cut, where the family counts that; for messages
    """

    payload: Any
    cost: int
    truncated: bool = False
    rows: int = 1
    slot: int | None = None
    excess: Excess | None = None


@dataclass(frozen=True, slots=True)
class Gathering:
    """How long items of a model wait for others, and which batches need not wait.

    A batch of a `preferred` number of tokens need not wait, and the largest such batch of the waiting items is taken.
    `preferred` is ascending and ends with `full_tokens`. Only a batch of one item, or a batch after the delay, has more
    than `full_tokens`.
    """

    delay_ns: int
    full_tokens: int
    preferred: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ItemFailure:
    """Takes the place of an item that failed alone; `code` is a code of `ipc.errors`."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Sparse vectors on the host: per item int32 [k] indices, ascending, and their float32 [k] values."""

    indices: list[np.ndarray]
    values: list[np.ndarray]


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """fp32 [chunks of all items, dims] on the device, and for each item int32 [chunks, 2] characters on the host."""

    vectors: torch.Tensor
    spans: list[np.ndarray]


@dataclass(frozen=True, slots=True)
class LoadContext:
    """The arguments of `Adapter.load`.

    `progress(phase, fraction)` reports how far a phase has come, 0.0 to 1.0. `max_sequence_length` (tokens) and
    `options` come from the model's catalog entry; `repository` is the entry of a repository model. Sequences of one
    item with more than `batch_tokens` in all run one part after another. A model that generates text gets `generation`
    and, in `free_bytes`, a function that tells how much memory the device has left. `gguf` is the GGUF file in the
    directory that holds the model; empty for a model in another format. `findings` remember what loads found out here.
    `identity` stands for files, entry and versions of the load (`lifecycle.fingerprint`); empty where nobody knows.
    `proof` is what this load proves, or an earlier load has proven. `quantization` is int8, int4 or fp8 where the
    weights of linear layers stay quantised; else empty. `ahead` has tensors of a GGUF file that were made before the
    adapter was imported.
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
    generation: Generation = field(default_factory=Generation)
    free_bytes: Callable[[], int] = lambda: 0
    gguf: str = ""
    quantization: str = ""
    findings: Findings = field(default_factory=Findings)
    identity: str = ""
    proof: Proof = field(default_factory=Proof)
    ahead: Ahead | None = None


class ItemRefused(Exception):
    """An item that fails its request; the preparing thread adds the item's index to the message."""

    def __init__(self, item: InputItem, message: str) -> None:
        super().__init__(message)
        self.item = item


@dataclass(frozen=True, slots=True)
class Pause:
    """A stream yields a pause to wait: its next step is taken `seconds` later, and other requests run until then."""

    seconds: float


class Adapter(ABC):
    """One loaded model of one family."""

    spec: ClassVar[AdapterSpec]
    tells_errors: ClassVar[bool] = False
    """Whether clients are told the line of what a run raised, as of runtimes, whose words are about the input."""
    atomic: bool = False
    """Whether a run that raises has changed nothing in the model, so that parts of its batch may run again."""
    loras: LoraLayers | None = None
    """The LoRA adapters of this model, in families whose spec has `lora`."""
    gathering: Gathering | None = None
    """How batches of this model are put together, where configured; by default all waiting items are taken."""
    batch_tokens: int | None = None
    """Most tokens of a batch of several requests; None where the device's memory alone decides."""
    streams: bool = False
    """Whether `stream` answers requests, in any number of parts, and not the operation's own method."""
    identity: str = ""
    """Stands for all that decides the model's numbers (`workers.lifecycle.fingerprint`); the loader sets it."""
    tokenizer: Any = None
    """The transformers tokenizer, for callers who ask for tokens; None in families that offer none."""
    known_ids: KnownIds | None = None
    """The ids for which the model has embeddings, in families that read texts."""
    engine: Engine | None = None
    """The engine of a model that generates text. The payloads of its `Prepared` items are `GenerationRequest`s."""

    @classmethod
    @abstractmethod
    def load(cls, context: LoadContext) -> Self:
        """Build the model. `workers.loading.failure` classifies any exception."""

    @property
    @abstractmethod
    def max_sequence_length(self) -> int:
        """Longest sequence in tokens, special tokens included; longer texts are cut and marked as truncated."""

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
        """Estimated cost of an image in tokens, before the image is prepared."""
        return 1024

    @property
    def uses(self) -> frozenset[str]:
        """Options that this model reads from a request, without those that protocols resolve.

        Families of extract add "labels", "output_schema" and "instruction".
        """
        return frozenset()

    @property
    def own_labels(self) -> Sequence[str]:
        """Labels of the model, of a classifier in the order of its outputs; empty where the caller brings labels."""
        return ()

    @property
    def tools_shown(self) -> str:
        """How a model that generates text is shown functions (`workers.generation.tool_texts`); empty for others."""
        return ""

    @property
    def sees(self) -> bool:
        """Whether a model that generates text reads pictures of messages."""
        return False

    @property
    def limited_by(self) -> str:
        """The setting that keeps inputs shorter than the model could take; empty without such a setting."""
        return ""

    @property
    def held(self) -> Held:
        """Memory of a model that generates text; empty for others."""
        return Held()

    @property
    def chunk_refusal(self) -> str:
        """Why this model makes no vectors of the chunks of a document; empty if it does."""
        return "this model's family makes no vectors of chunks"

    @property
    def config(self) -> ModelConfig | None:
        """Inputs and outputs of a model of named tensors, always the same object; None for other models."""
        return None

    @property
    def told_config(self) -> ModelConfig | None:
        """`config` as clients are told of it."""
        return self.config

    def refuse_unsupported(self, call: Call) -> None:
        """Raise `InvalidInput` for options, labels or inputs that this family refuses.

        Raises `LoraUnavailable` for a LoRA adapter of generated text that the family does not apply.
        """
        if call.lora and self.loras is None:
            if isinstance(call, GenerateCall):
                raise LoraUnavailable("this model has no LoRA adapters")
            before = call.names.options
            raise InvalidInput(f"{before}lora, {before}lora_id: this model has no LoRA adapters")

    def prompt_ids(self, call: GenerateCall) -> Sequence[int]:
        """Token ids of the prompt of a call, of any length. Raises `InvalidInput` for what makes no prompt."""
        raise InvalidInput("messages: this model continues no conversations, send a text as prompt")

    def using(self, lora: str) -> AbstractContextManager[None]:
        """While entered, batches run with this LoRA adapter, with "" without any.  Device thread only."""
        return self.loras.using(lora) if lora and self.loras is not None else nullcontext()

    def group(self, call: Call) -> Hashable:
        """Calls share a forward pass if model, operation, outputs and this value are equal.

        Options that are applied to single items after the forward pass (thresholds, names) belong into the payload.
        """
        return None

    @abstractmethod
    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Make items of `call` ready for the device; one result per item, in order.  Thread-safe, CPU only."""

    def ids_of(self, payload: Any) -> Sequence[Sequence[int] | np.ndarray]:
        """The sequences of token ids in the payload of a prepared item, which must have embeddings."""
        return ()

    @abstractmethod
    def collate(self, prepared: Sequence[Prepared]) -> Any:
        """Lay prepared items into one batch of host tensors (pinned for CUDA).  Thread-safe."""

    def padding_ratio(self, batch: Any) -> float:
        """Share of padding in a collated batch, 0 to 1; computed on the host for each batch."""
        return 0.0

    def encode(self, batch: Any, outputs: frozenset[str]) -> dict[str, torch.Tensor | SparseRows]:
        """Run one batch: the named outputs, all from one forward pass.  Device thread only.

        dense        fp32 [items, dims] on the device
        multivector  fp32 [rows of all items, dims] on the device, item after item, `Prepared.rows` of each
        sparse       `SparseRows`
        """
        raise InvalidInput("this model does not support encode")

    def encode_chunks(self, batch: Any) -> ChunkRows:
        """Run one batch of documents with `EncodeCall.chunking`, if `chunk_refusal` is empty.  Device thread only."""
        raise InvalidInput(self.chunk_refusal)

    def score(self, batch: Any) -> torch.Tensor:
        """Run one batch of prepared pairs: fp32 [items].  Device thread only."""
        raise InvalidInput("this model does not support score")

    def scored(self, batch: Any, call: Call) -> torch.Tensor:
        """`score` with what a call says about the scores.  Device thread only."""
        return self.score(batch)

    def extract(self, batch: Any) -> list[Extraction | ItemFailure]:
        """Run one batch: the findings of each item.  Device thread only."""
        raise InvalidInput("this model does not support extract")

    def infer(self, batch: NamedBatch) -> Mapping[str, np.ndarray | torch.Tensor]:
        """Run one batch of named tensors: at least the outputs of `batch.outputs`.  Device thread only.

        `batch.array(name)` and `batch.tensor(name, device)` give inputs: checked against `config`, joined along the
        rows, in the shape of the program ([rows, *reshape or dims]; without rows when `max_batch_size` is 0).

        An output has the shape [rows, *reshape or dims of the program] (without rows when `max_batch_size` is 0), with
        all rows of the batch, and the datatype of `config`: a tensor on any device, or an array. BF16 is a
        `torch.bfloat16` tensor or an array of its 16 bits (uint16); BYTES is an array of objects (`bytes`, or `str`
        for UTF-8). An output may share memory with an input: outputs are copied before the next batch runs.

        A `PenstockError` becomes the answer of the request that causes the error. A ValueError, an IndexError and an
        error about shapes become `InvalidInput` with their first line. The client is told of another exception only if
        the family `tells_errors`. When a batch of several requests raises, its halves run again.
        """
        raise InvalidInput("this model does not support infer")

    def stream(self, batch: NamedBatch) -> Iterator[Mapping[str, np.ndarray | torch.Tensor] | Pause]:
        """The parts of the answer to one request, which is a batch of its own.  Device thread only.

        Each part has at least the outputs of `batch.outputs`, in the form of `infer`, and is copied before the next
        part is asked for. No other batch runs during a step. When nobody waits any more the iterator's `close`, if
        there is one, is called in place of the next step. No step ever runs again.
        """
        raise InvalidInput("this model does not answer in parts")
