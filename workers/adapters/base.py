"""The interface between the worker's executor and a model family.

1. `load` builds the model from a local directory, on the loading thread.
2. `prepare` turns items into token sequences on any of the preparing threads.
3. `collate` lays the sequences of one batch into host tensors, on the device thread or the one that forms ahead.
4. `encode` runs the batch on the device thread and returns device tensors, one row per prepared item.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from workers.adapters.spec import AdapterSpec


@dataclass(frozen=True, slots=True)
class TextItem:
    """One input: its text, or token ids that the caller made with the model's own tokenizer.

    Ids are decoded without their special tokens and tokenized again, so that prompts and limits apply to them
    as they do to text.
    """

    text: str | None = None
    ids: tuple[int, ...] | list[int] | None = None


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """The request options that change the text a model sees."""

    instruction: str | None = None
    is_query: bool = False


@dataclass(slots=True)
class Prepared:
    """One item ready for a batch.  `cost` is its token count, special tokens included."""

    payload: Any
    cost: int
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class LoadContext:
    """All that `Adapter.load` may know.

    `progress(phase, fraction)` reports how far a phase has come, 0.0 to 1.0.  `max_sequence_length` (tokens) and
    `options` come from the model's catalog entry.
    """

    directory: Path
    model_id: str
    device: torch.device
    dtype: torch.dtype
    max_sequence_length: int | None
    options: Mapping[str, Any]
    progress: Callable[[str, float], None]
    trust_remote_code: bool = False


class Adapter(ABC):
    """One loaded model of one family."""

    spec: ClassVar[AdapterSpec]

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

    @abstractmethod
    def prepare(self, items: Sequence[TextItem], options: EncodeOptions) -> list[Prepared]:
        """Tokenize; one result per item, in order.  Thread-safe, CPU only."""

    @abstractmethod
    def collate(self, prepared: Sequence[Prepared]) -> Any:
        """Lay prepared items into one batch of host tensors (pinned for CUDA).  Thread-safe."""

    @abstractmethod
    def encode(self, batch: Any, outputs: frozenset[str]) -> dict[str, torch.Tensor]:
        """Run one batch: the named outputs as fp32 device tensors, row i for prepared item i.  Device thread only."""
