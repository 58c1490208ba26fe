"""A fake model with a file that its vectors follow from, and with vectors of the chunks of a text.

Each line is a chunk, or each span of a request. `SALT` in the model's directory stands before every text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Self

import numpy as np
import torch

from ipc.wire.messages import Call, EncodeCall, InputItem
from tests.fakes.adapter import FakeAdapter, vector_of
from workers.adapters.base import ChunkRows, ItemFailure, LoadContext, Prepared

SALT = "salt.txt"


class DividingAdapter(FakeAdapter):
    """Vectors by hash of the salt and the text, or of each chunk."""

    salt = ""

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """Read the salt."""
        made = super().load(context)
        made.salt = (context.directory / SALT).read_text()
        return made

    @property
    def chunk_refusal(self) -> str:
        """Chunks are made."""
        return ""

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """One token per four characters; of a text to divide its chunks."""
        if not isinstance(call, EncodeCall) or call.chunking is None:
            salted = [InputItem(self.salt + (item.text or "")) for item in items]
            return super().prepare(salted, call)
        return [self._divided(item) for item in items]

    def _divided(self, item: InputItem) -> Prepared:
        text = item.text or ""
        spans = item.spans or lines_of(text)
        tokens = len(text) // 4 + 1
        return Prepared((text, spans), tokens, rows=len(spans))

    def encode_chunks(self, batch: Any) -> ChunkRows:
        """float32 rows of all chunks."""
        items, _ = batch
        rows = [
            vector_of(self.salt + text[a:b], self.dims["dense"]) for text, spans in items for a, b in spans
        ]
        vectors = np.stack(rows) if rows else np.zeros((0, self.dims["dense"]), np.float32)
        spans = [np.array(each, np.int32).reshape(-1, 2) for _, each in items]
        return ChunkRows(torch.from_numpy(vectors), spans)


def lines_of(text: str) -> list[tuple[int, int]]:
    """The spans of the lines."""
    stops = accumulate(map(len, text.splitlines(keepends=True)))
    return [*pairwise([0, *stops])]
