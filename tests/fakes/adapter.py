"""A model family without a model: deterministic vectors, and texts that make the process fail on purpose.

The vector of a text is drawn from the text's hash, so an answer shows which input it belongs to. Commands in a text:

    #crash            the process kills itself on the device thread
    #hang             the device thread sleeps for an hour
    #hold PATH        the device thread sleeps as long as there is a file PATH, whose name has no spaces
    #note PATH        the device thread adds the word before the command to the file PATH, as a line
    #raise            the forward pass raises
    #nan              the row is not finite
    #unpreparable     preparing raises

    #lost             the item alone fails while being prepared

Options: `dims`, `batch_ms` and `token_us` (time of a forward pass), `memory_tokens` (a larger batch runs out of
memory), `load_s` (time of a load), `fail_load` (an error class to fail with), `token_dims` (width of token vectors,
0 for none; a text has one for every four characters) and `vocabulary` (size of the sparse output, 0 for none; the terms
of a text are the places of its characters).
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch

from ipc.wire.messages import Call, InputItem
from tests.fakes.holding import wait_for_end_of
from workers.adapters.base import Adapter, AdapterSpec, ItemFailure, LoadContext, Prepared, SparseRows

LOAD_PARTS = 50
"""Parts in which a load that takes time tells how far it has come."""


def vector_of(text: str, dims: int) -> np.ndarray:
    """float32 [dims] vector that stands for `text`; unit length."""
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    # A short random block is repeated, so that wide vectors cost a copy and not a random draw.
    block = np.random.default_rng(seed).standard_normal(min(dims, 64)).astype(np.float32)
    row = np.resize(block, dims)
    return row / np.linalg.norm(row)


def token_vectors_of(text: str, rows: int, dims: int) -> np.ndarray:
    """float32 [rows, dims] token vectors that stand for `text`: its vector, turned by one value per token."""
    vector = vector_of(text, dims)
    return np.stack([np.roll(vector, turn) for turn in range(rows)])


def terms_of(text: str, vocabulary: int) -> dict[int, float]:
    """Weight by term: how often each character occurs, by its number."""
    counts = Counter(ord(character) % vocabulary for character in text)
    return {term: float(count) for term, count in sorted(counts.items())}


class FakeAdapter(Adapter):
    """Vectors by hash, with time, memory and failures by command."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="fake",
        operations=("encode",),
        inputs=("text",),
        outputs=("dense", "sparse", "multivector"),
        builds_alone=False,
        options=(
            "dims",
            "batch_ms",
            "token_us",
            "memory_tokens",
            "load_s",
            "fail_load",
            "token_dims",
            "vocabulary",
        ),
    )

    def __init__(self, options: dict[str, Any], longest: int) -> None:
        self._dims = int(options.get("dims", 16))
        self._batch_s = float(options.get("batch_ms", 0)) / 1e3
        self._token_s = float(options.get("token_us", 0)) / 1e6
        self._memory_tokens = int(options.get("memory_tokens", 0))
        self._longest = longest
        self._token_dims = int(options.get("token_dims", 0))
        self._vocabulary = int(options.get("vocabulary", 0))

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """Wait as long as the options say, or fail."""
        load_s = float(context.options.get("load_s", 0))
        for part in range(LOAD_PARTS if load_s else 0):
            context.progress("weights", part / LOAD_PARTS)
            time.sleep(load_s / LOAD_PARTS)
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
        """Widths of the outputs that the options switch on."""
        widths = {"dense": self._dims, "sparse": self._vocabulary, "multivector": self._token_dims}
        return {name: width for name, width in widths.items() if width}

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
        return [self._prepared(text) for text in texts]

    def _prepared(self, text: str) -> Prepared | ItemFailure:
        if "#lost" in text:
            return ItemFailure("INVALID_INPUT", "fake failure of one item")
        cost = len(text) // 4 + 1
        tokens = min(cost, self._longest)
        return Prepared((text, tokens), tokens, cost > self._longest, tokens)

    def collate(self, prepared: Sequence[Prepared]) -> Any:
        """Texts with their tokens, and their cost."""
        return [item.payload for item in prepared], sum(item.cost for item in prepared)

    def encode(self, batch: Any, outputs: frozenset[str]) -> dict[str, torch.Tensor | SparseRows]:
        """The wanted outputs, each from the text alone."""
        items, tokens = batch
        texts = [text for text, _ in items]
        self.run(texts, tokens)
        found: dict[str, torch.Tensor | SparseRows] = {}
        if "dense" in outputs:
            rows = np.stack([vector_of(text, self._dims) for text in texts])
            rows[["#nan" in text for text in texts], 0] = np.nan
            found["dense"] = torch.from_numpy(rows)
        if "multivector" in outputs:
            vectors = [token_vectors_of(text, count, self._token_dims) for text, count in items]
            vectors = [
                rows * np.nan if "#nan" in text else rows
                for (text, _), rows in zip(items, vectors, strict=True)
            ]
            found["multivector"] = torch.from_numpy(np.concatenate(vectors))
        if "sparse" in outputs:
            terms = [terms_of(text, self._vocabulary) for text in texts]
            found["sparse"] = SparseRows(
                [np.array(list(each), np.int32) for each in terms],
                [np.array(list(each.values()), np.float32) for each in terms],
            )
        return found

    def run(self, texts: Sequence[str], tokens: int) -> None:
        """What a forward pass does beside its results: obey, need memory, take time."""
        for text in texts:
            self._obey(text)
        if self._memory_tokens and tokens > self._memory_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory (fake)")
        time.sleep(self._batch_s + self._token_s * tokens)

    @staticmethod
    def _obey(text: str) -> None:
        if "#crash" in text:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10)
        if "#hang" in text:
            time.sleep(3600)
        if "#note" in text:
            before, _, after = text.partition("#note ")
            with Path(after.split()[0]).open("a") as lines:
                lines.write(before.split()[-1] + "\n")
        if "#hold" in text:
            wait_for_end_of(text.partition("#hold ")[2].split()[0])
        if "#raise" in text:
            raise RuntimeError("fake model failure")


class NoopAdapter(FakeAdapter):
    """Vectors made once: what the path costs without a model."""

    def __init__(self, options: dict[str, Any], longest: int) -> None:
        super().__init__(options, longest)
        self._rows = torch.full((1, self._dims), 0.5).expand(4096, self._dims)
        # Numbers with all their digits, since writing those is what JSON costs.
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(65536 if self._token_dims else 0, self._token_dims, generator=generator)
        self._token_rows = torch.nn.functional.normalize(drawn, dim=-1)

    def encode(self, batch: Any, outputs: frozenset[str]) -> dict[str, torch.Tensor | SparseRows]:
        """float32 rows, the same for every text."""
        time.sleep(self._batch_s) if self._batch_s else None
        items, tokens = batch
        found: dict[str, torch.Tensor | SparseRows] = {"dense": self._rows[: len(items)]}
        if "multivector" in outputs:
            found["multivector"] = self._token_rows[:tokens]
        return {name: rows for name, rows in found.items() if name in outputs}
