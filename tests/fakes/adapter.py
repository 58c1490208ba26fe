"""A model family without a model: deterministic vectors, and texts that make the process fail on purpose.

The vector of a text is drawn from the text's hash, so an answer shows which input it belongs to. Commands in a text:

    #crash            the process kills itself on the device thread
    #hang             the device thread sleeps for an hour
    #raise            the forward pass raises
    #nan              the row is not finite
    #unpreparable     preparing raises

Options: `dims`, `batch_ms` and `token_us` (time of a forward pass), `memory_tokens` (a larger batch runs out of
memory), `load_s` (time of a load), `fail_load` (an error class to fail with).
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch

from ipc.messages import Call, InputItem
from workers.adapters.base import Adapter, ItemFailure, LoadContext, Prepared, SparseRows
from workers.adapters.spec import AdapterSpec


def vector_of(text: str, dims: int) -> np.ndarray:
    """float32 [dims] vector that stands for `text`; unit length."""
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    # A short random block is repeated, so that wide vectors cost a copy and not a random draw.
    block = np.random.default_rng(seed).standard_normal(min(dims, 64)).astype(np.float32)
    row = np.resize(block, dims)
    return row / np.linalg.norm(row)


class FakeAdapter(Adapter):
    """Vectors by hash, with time, memory and failures by command."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="fake",
        operations=("encode",),
        inputs=("text",),
        outputs=("dense",),
        options=("dims", "batch_ms", "token_us", "memory_tokens", "load_s", "fail_load"),
    )

    def __init__(self, options: dict[str, Any], longest: int) -> None:
        self._dims = int(options.get("dims", 16))
        self._batch_s = float(options.get("batch_ms", 0)) / 1e3
        self._token_s = float(options.get("token_us", 0)) / 1e6
        self._memory_tokens = int(options.get("memory_tokens", 0))
        self._longest = longest

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """Wait as long as the options say, or fail."""
        time.sleep(float(context.options.get("load_s", 0)))
        failure = context.options.get("fail_load")
        if failure == "OOM":
            raise torch.OutOfMemoryError("out of memory (fake)")
        if failure:
            raise RuntimeError(f"fake load failure {failure}")
        context.progress("weights", 1.0)
        return cls(dict(context.options), context.max_sequence_length or 512)

    @property
    def max_sequence_length(self) -> int:
        """Characters per text, counted as tokens."""
        return self._longest

    @property
    def dims(self) -> dict[str, int]:
        """Width of the vectors."""
        return {"dense": self._dims}

    @property
    def memory_bytes(self) -> int:
        """A made-up size."""
        return 1 << 20

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """One token per four characters."""
        texts = [item.text if item.text is not None else " ".join(map(str, item.ids or ())) for item in items]
        if any("#unpreparable" in text for text in texts):
            raise RuntimeError("fake preparing failure")
        texts = [f"{call.instruction} {text}" if call.instruction else text for text in texts]
        costs = [len(text) // 4 + 1 for text in texts]
        return [
            Prepared(text, min(cost, self._longest), cost > self._longest)
            for text, cost in zip(texts, costs, strict=True)
        ]

    def collate(self, prepared: Sequence[Prepared]) -> Any:
        """Texts and their cost."""
        return [item.payload for item in prepared], sum(item.cost for item in prepared)

    def encode(self, batch: Any, outputs: frozenset[str]) -> dict[str, torch.Tensor | SparseRows]:
        """float32 [n, dims]."""
        texts, tokens = batch
        for text in texts:
            self._obey(text)
        if self._memory_tokens and tokens > self._memory_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory (fake)")
        time.sleep(self._batch_s + self._token_s * tokens)
        rows = np.stack([vector_of(text, self._dims) for text in texts])
        for index, text in enumerate(texts):
            if "#nan" in text:
                rows[index, 0] = np.nan
        return {"dense": torch.from_numpy(rows)}

    @staticmethod
    def _obey(text: str) -> None:
        if "#crash" in text:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10)
        if "#hang" in text:
            time.sleep(3600)
        if "#raise" in text:
            raise RuntimeError("fake model failure")


class NoopAdapter(FakeAdapter):
    """Zero vectors of a fixed width, made once: what the path costs without a model."""

    def __init__(self, options: dict[str, Any], longest: int) -> None:
        super().__init__(options, longest)
        self._rows = torch.full((1, self._dims), 0.5).expand(4096, self._dims)

    def encode(self, batch: Any, outputs: frozenset[str]) -> dict[str, torch.Tensor | SparseRows]:
        """float32 [n, dims], the same for every text."""
        time.sleep(self._batch_s) if self._batch_s else None
        return {"dense": self._rows[: len(batch[0])]}
