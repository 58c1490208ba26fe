"""Run a transformer over a packed batch; the result is one vector per token, as rows.

There are several ways behind one call. The packed way sends the row through the model as it is, in one pass for each
class of lengths that the model tells apart. The padded way cuts the row into rectangles. At load a few sequences go
each way, and the first way is kept that gives every sequence what the model gives for that sequence alone
(`workers.adapters.shared.proving`). Models that bypass transformers' attention registry take the padded way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

import torch

from workers.adapters.shared.attention import PACKED, VarlenKernel, select_kernel
from workers.adapters.shared.checkpoint import position_limit, positions_of
from workers.adapters.shared.known_ids import embedding_rows, filler_of
from workers.adapters.shared.linears import LaidOutLinear
from workers.adapters.shared.packing import PackedBatch, TokenSequence, filled, pack, section
from workers.adapters.shared.proving import (
    fault,
    odd_ids,
    possible,
    proof_sequences,
    proven_cut,
    zeros_count,
)
from workers.adapters.shared.rectangles import ALONE, PADDED, Cut, padded
from workers.adapters.shared.rope import LengthClasses

log = logging.getLogger(__name__)


class TextEncoder:
    """A transformer that runs packed or padded.  `token_rows` belongs to the device thread."""

    def __init__(
        self,
        model: Any,
        *,
        special_ids: frozenset[int] = frozenset(),
        pad_id: int = 0,
        types: bool = False,
    ) -> None:
        """Take over `model` (eval mode, on its device) and find its fastest way that gives the model's own results.

        `special_ids` are ids of the tokenizer that a model may treat apart. With `types` the tokenizer makes segment
        ids, also where all are 0.
        """
        self.model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.positions = positions_of(model)
        self.position_limit = position_limit(model)
        self.embeddings = embedding_rows(model)
        """How many token ids have an embedding."""
        self._lengths = LengthClasses(model)
        self._filler = filler_of(model, pad_id)
        self._plain_attention: str | None = model.config._attn_implementation
        self._kernel: VarlenKernel | None = None
        laid_out = any(isinstance(module, LaidOutLinear) for module in model.modules())
        self._fills = self.device.type == "cpu" and (laid_out or self.dtype != torch.float32)
        """Whether oneDNN runs linear layers."""
        self._types = False
        self._cut = PADDED
        self.packed = self._prove(odd_ids(model, {*special_ids, pad_id}), types)

    def pack(self, sequences: list[TokenSequence]) -> PackedBatch:
        """One batch of host tensors for `token_rows`; thread-safe."""
        pin = self.device.type == "cuda"
        return pack(sequences, positions=self.positions, types=self._types, pin=pin)

    def token_rows(self, batch: PackedBatch) -> torch.Tensor:
        """Token vectors [T, width] in the model's dtype; `batch` is on the model's device."""
        return self._packed_rows(batch) if self.packed else self._padded_rows(batch, self._cut)

    def padding_ratio(self, batches: Iterable[PackedBatch]) -> float:
        """Share of padding, 0 to 1, in the forward passes of `token_rows`."""
        return 0.0 if self.packed else self._cut.padding(batches)

    def _packed_rows(self, batch: PackedBatch) -> torch.Tensor:
        """The whole row in one forward pass for each class of lengths."""
        parts = [self._pass(part) for part in self._classes(batch)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _classes(self, batch: PackedBatch) -> Iterator[PackedBatch]:
        """The sequences of each class of lengths; neighbours in the row, which is sorted by length."""
        if not self._lengths.many:
            yield batch
            return
        found = [
            list(runs) for _, runs in groupby(batch.layout.runs, lambda run: self._lengths.of(run.length))
        ]
        for runs in found:
            yield batch if len(found) == 1 else section(batch, runs)

    def _pass(self, batch: PackedBatch) -> torch.Tensor:
        """The row in one forward pass."""
        tokens = batch.ids.shape[1]
        if self._fills:
            batch = filled(batch, self._filler, self.positions.offset)
        types = {} if batch.types is None else {"token_type_ids": batch.types}
        self._lengths.reset()
        hidden: torch.Tensor = self.model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            packed_layout=batch.layout,
            packed_kernel=self._kernel,
            **types,
        ).last_hidden_state
        return hidden[0, :tokens]

    def _padded_rows(self, batch: PackedBatch, cut: Cut) -> torch.Tensor:
        """The row as rectangles, one forward pass each."""
        vectors, seen = [], batch.layout.seen
        for part in padded(batch, self._filler, cut):
            count, longest = part.mask.shape
            attended = part.mask
            if seen is not None:
                attended = (
                    torch.arange(longest, device=self.device) < seen[part.first : part.first + count, None]
                )
            self._lengths.reset()
            vectors.append(self.model(**part.inputs(attended)).last_hidden_state[part.mask])
        return torch.cat(vectors)

    @torch.inference_mode()
    def _prove(self, odd: list[int], types: bool) -> bool:
        """Choose the way of running; whether it is the packed one. What is not chosen is logged with the reason.

        Raises the error of memory that is short, which says nothing of the model.
        """
        self._types = types and zeros_count(self._with_types)
        sequences, wanted = self._alone(proof_sequences(self.embeddings, odd, self.position_limit))
        batch = self.pack(sequences).to(self.device)
        name = type(self.model).__name__
        if (reason := fault(partial(self._with_packed_attention, batch), wanted)) is None:
            return True
        if self.model.config._attn_implementation == PACKED:
            self.model.set_attn_implementation(self._plain_attention)
        log.warning("%s runs padded, not packed: %s", name, reason)
        self._cut = proven_cut(name, partial(self._padded_rows, batch), wanted, self._lengths)
        return False

    def _alone(self, given: list[TokenSequence]) -> tuple[list[TokenSequence], torch.Tensor]:
        """The sequences that the model takes, and their token vectors, each run alone, in the order of a packed row."""

        def run(sequence: TokenSequence) -> torch.Tensor:
            return self._padded_rows(self.pack([sequence]).to(self.device), ALONE)

        found = sorted(possible(given, run), key=lambda pair: -len(pair[0].ids))
        return [sequence for sequence, _ in found], torch.cat([rows for _, rows in found])

    def _with_types(self, types: bool) -> torch.Tensor:
        """The token vectors of a sequence, with segment ids of 0 or without any."""
        sequence = proof_sequences(self.embeddings, (), self.position_limit)[2]
        batch = pack([sequence], positions=self.positions, types=types)
        return self._padded_rows(batch.to(self.device), ALONE)

    def _with_packed_attention(self, batch: PackedBatch) -> torch.Tensor:
        """Switch the model to packed attention and run. Raises ValueError for a model that ignores the registry."""
        self.model.set_attn_implementation(PACKED)
        if self.model.config._attn_implementation != PACKED:
            raise ValueError("the model does not use the attention registry")
        config = self.model.config.get_text_config()
        heads = int(config.num_attention_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        self._kernel = select_kernel(self.device, self.dtype, heads, kv_heads, head_dim)
        return self._packed_rows(batch)
