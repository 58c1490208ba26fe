"""Run a transformer over a packed batch and give its token vectors as rows.

Two ways behind one call: the packed one sends the row through the model as it is, the padded one cuts it into
rectangles of similar lengths.  At load the packed way has to prove itself: a few random sequences go through both,
and only where the results agree is it used.  Models that bypass transformers' attention registry take the padded way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from workers.adapters.shared.attention import HALF, PACKED, VarlenKernel, select_kernel
from workers.adapters.shared.checkpoint import position_limit, position_offset
from workers.adapters.shared.linears import LaidOutLinear
from workers.adapters.shared.packing import PackedBatch, TokenSequence, filled, pack, padding_share

log = logging.getLogger(__name__)

# A padded rectangle ends where a sequence is shorter than this share of its longest one, or at this many rows.
_LEAST_FILL = 0.8
_MOST_ROWS = 64

# Lengths of the sequences in the proof: repeated, single-token and longer than common sliding windows.
_PROOF_LENGTHS = (3, 150, 17, 17, 1, 40)


class TextEncoder:
    """A transformer with its way of running batches.  `token_rows` belongs to the device thread."""

    def __init__(self, model: Any, *, special_ids: frozenset[int] = frozenset(), pad_id: int = 0) -> None:
        """Take over `model` (eval mode, on its device) and prove the packed way."""
        self.model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.position_offset = position_offset(model)
        self.position_limit = position_limit(model)
        self._pad_id = pad_id
        self._plain_attention: str | None = model.config._attn_implementation
        self._kernel: VarlenKernel | None = None
        laid_out = any(isinstance(module, LaidOutLinear) for module in model.modules())
        self._fills = self.device.type == "cpu" and (laid_out or self.dtype != torch.float32)
        """Whether oneDNN runs linear layers."""
        self.packed = self._prove(special_ids)

    def pack(self, sequences: list[TokenSequence]) -> PackedBatch:
        """One batch of host tensors for `token_rows`; thread-safe."""
        return pack(sequences, position_offset=self.position_offset, pin=self.device.type == "cuda")

    def token_rows(self, batch: PackedBatch) -> torch.Tensor:
        """Token vectors [T, width] in the model's dtype; `batch` is on the model's device."""
        return self._packed_rows(batch) if self.packed else self._padded_rows(batch)

    def padding_ratio(self, batches: Iterable[PackedBatch]) -> float:
        """Share of padding, 0 to 1, in what `token_rows` runs for these batches."""
        return 0.0 if self.packed else rectangle_padding(batches)

    def _packed_rows(self, batch: PackedBatch) -> torch.Tensor:
        """The whole row in one forward."""
        tokens = batch.ids.shape[1]
        if self._fills:
            batch = filled(batch, self._pad_id, self.position_offset)
        types = {} if batch.types is None else {"token_type_ids": batch.types}
        hidden: torch.Tensor = self.model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            packed_layout=batch.layout,
            packed_kernel=self._kernel,
            **types,
        ).last_hidden_state
        return hidden[0, :tokens]

    def _padded_rows(self, batch: PackedBatch) -> torch.Tensor:
        """The row as rectangles of similar lengths, padded on the right, one forward each."""
        parts = []
        done = 0
        for start, lens in rectangles(batch):
            places = torch.arange(lens[0], device=self.device)
            mask = places < torch.tensor(lens, device=self.device)[:, None]
            stop = start + sum(lens)
            ids = torch.full(mask.shape, self._pad_id, device=self.device)
            ids[mask] = batch.ids[0, start:stop]
            attended = (
                mask
                if batch.layout.seen is None
                else places < batch.layout.seen[done : done + len(lens), None]
            )
            done += len(lens)
            arguments = {"input_ids": ids, "attention_mask": attended.long()}
            if batch.types is not None:
                types = torch.zeros_like(ids)
                types[mask] = batch.types[0, start:stop]
                arguments["token_type_ids"] = types
            parts.append(self.model(**arguments).last_hidden_state[mask])
        return torch.cat(parts)

    @torch.inference_mode()
    def _prove(self, special_ids: frozenset[int]) -> bool:
        """Compare both ways; on a difference or an error go back to the padded one and log why."""
        batch = self.pack(self._proof_sequences(special_ids)).to(self.device)
        wanted = self._padded_rows(batch).float()
        try:
            self._use_packed_attention()
            got = self._packed_rows(batch).float()
            error = float((got - wanted).norm() / wanted.norm().clamp(min=1e-12))
            reason = (
                None if error <= (5e-2 if self.dtype in HALF else 1e-3) else f"results differ by {error:.1e}"
            )
        except (
            Exception
        ) as failure:  # NOTE: model code outside ours may raise anything; the padded way remains.
            reason = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
        if reason is None:
            return True
        if self.model.config._attn_implementation == PACKED:
            self.model.set_attn_implementation(self._plain_attention)
        log.warning("%s runs padded, not packed: %s", type(self.model).__name__, reason)
        return False

    def _use_packed_attention(self) -> None:
        """Switch the model to packed attention; raises ValueError where it does not take it."""
        self.model.set_attn_implementation(PACKED)
        if self.model.config._attn_implementation != PACKED:
            raise ValueError("the model does not use the attention registry")
        config = self.model.config.get_text_config()
        heads = int(config.num_attention_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        self._kernel = select_kernel(self.device, self.dtype, heads, kv_heads, head_dim)

    def _proof_sequences(self, special_ids: frozenset[int]) -> list[TokenSequence]:
        """Random sequences of ordinary tokens, within the model's positions."""
        config = self.model.config.get_text_config()
        special = {*special_ids, self._pad_id, getattr(config, "pad_token_id", None)}
        ordinary = torch.ones(int(config.vocab_size), dtype=torch.bool)
        ordinary[[token for token in special if token is not None and 0 <= token < len(ordinary)]] = False
        candidates = ordinary.nonzero()[:, 0]
        generator = torch.Generator().manual_seed(0)
        sequences = []
        for length in _PROOF_LENGTHS:
            count = min(length, self.position_limit or length)
            drawn = torch.randint(len(candidates), (count,), generator=generator)
            sequences.append(TokenSequence(ids=candidates[drawn].numpy()))
        return sequences


def rectangles(batch: PackedBatch) -> Iterator[tuple[int, list[int]]]:
    """Cut a row, sorted longest first, into (first token, lengths) of sequences to pad together."""
    start = 0
    lens: list[int] = []
    for run in batch.layout.runs:
        for _ in range(run.rows):
            if lens and (run.length < _LEAST_FILL * lens[0] or len(lens) == _MOST_ROWS):
                yield start, lens
                start += sum(lens)
                lens = []
            lens.append(run.length)
    yield start, lens


def rectangle_padding(batches: Iterable[PackedBatch]) -> float:
    """Share of padding, 0 to 1, in the rectangles of these batches."""
    tokens = places = 0
    for batch in batches:
        tokens += batch.ids.numel()
        places += sum(lens[0] * len(lens) for _, lens in rectangles(batch))
    return padding_share(tokens, places)
