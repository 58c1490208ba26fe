"""Run a transformer over a packed batch; the result is one vector per token, as rows.

There are two ways behind one call. The packed way sends the row through the model as it is. The padded way cuts the row
into rectangles of similar lengths. At load a few random sequences go both ways, and the packed way is used only where
the results agree. Models that bypass transformers' attention registry take the padded way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from workers.adapters.shared.attention import PACKED, VarlenKernel, select_kernel
from workers.adapters.shared.checkpoint import position_limit, position_offset
from workers.adapters.shared.linears import LaidOutLinear
from workers.adapters.shared.packing import PackedBatch, TokenSequence, filled, pack, padding_share
from workers.device.oom import is_out_of_memory
from workers.device.varlen import HALF

log = logging.getLogger(__name__)

_LEAST_FILL = 0.8
_MOST_ROWS = 64
"""A rectangle ends at this many rows, or at a sequence shorter than `_LEAST_FILL` of the rectangle's longest."""
_PROOF_LENGTHS = (3, 150, 17, 17, 1, 40)
"""Lengths of the sequences in the proof: repeated, single-token and longer than common sliding windows."""


class TextEncoder:
    """A transformer that runs packed or padded.  `token_rows` belongs to the device thread."""

    def __init__(self, model: Any, *, special_ids: frozenset[int] = frozenset(), pad_id: int = 0) -> None:
        """Take over `model` (eval mode, on its device) and compare the packed way with the padded one."""
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
        """Share of padding, 0 to 1, in the forward passes of `token_rows`."""
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
        """The row as rectangles, one forward pass each."""
        vectors, seen = [], batch.layout.seen
        for part in padded(batch, self._pad_id):
            count, longest = part.mask.shape
            attended = part.mask
            if seen is not None:
                attended = (
                    torch.arange(longest, device=self.device) < seen[part.first : part.first + count, None]
                )
            vectors.append(self.model(**part.inputs(attended)).last_hidden_state[part.mask])
        return torch.cat(vectors)

    @torch.inference_mode()
    def _prove(self, special_ids: frozenset[int]) -> bool:
        """Whether the packed way agrees with the padded one. Otherwise restore the padded way and log the reason.

        Raises the error of memory that is short, which says nothing of the model.
        """
        batch = self.pack(self._proof_sequences(special_ids)).to(self.device)
        wanted = self._padded_rows(batch)
        try:
            self._use_packed_attention()
            got = self._packed_rows(batch)
            reason = None if agree(got, wanted) else f"results differ by {difference(got, wanted):.1e}"
        # NOTE: model code outside ours may raise anything; the padded way remains.
        except Exception as failure:
            if is_out_of_memory(failure):
                raise
            reason = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
        if reason is None:
            return True
        if self.model.config._attn_implementation == PACKED:
            self.model.set_attn_implementation(self._plain_attention)
        log.warning("%s runs padded, not packed: %s", type(self.model).__name__, reason)
        return False

    def _use_packed_attention(self) -> None:
        """Switch the model to packed attention. Raises ValueError for a model that ignores the attention registry."""
        self.model.set_attn_implementation(PACKED)
        if self.model.config._attn_implementation != PACKED:
            raise ValueError("the model does not use the attention registry")
        config = self.model.config.get_text_config()
        heads = int(config.num_attention_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        self._kernel = select_kernel(self.device, self.dtype, heads, kv_heads, head_dim)

    def _proof_sequences(self, special_ids: frozenset[int]) -> list[TokenSequence]:
        """Random sequences within the model's positions."""
        config = self.model.config.get_text_config()
        special = {*special_ids, self._pad_id, getattr(config, "pad_token_id", None)}
        return random_sequences(int(config.vocab_size), special, _PROOF_LENGTHS, self.position_limit)


class Rectangle(NamedTuple):
    """Neighbouring sequences of a packed row, padded on the right to the longest of them.

    place  the tokens of these sequences in the row
    first  number of the first sequence in the row
    ids    int64 [n, longest]
    mask   bool [n, longest], true at tokens
    types  int64 [n, longest] segment ids, or None where the row has none
    """

    place: slice
    first: int
    ids: torch.Tensor
    mask: torch.Tensor
    types: torch.Tensor | None

    def inputs(self, attended: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Arguments of a transformers model; `attended` takes the place of the mask."""
        mask = self.mask if attended is None else attended
        types = {} if self.types is None else {"token_type_ids": self.types}
        return {"input_ids": self.ids, "attention_mask": mask.long(), **types}


def padded(
    batch: PackedBatch, pad_id: int, pieces: Iterable[tuple[int, list[int]]] | None = None
) -> Iterator[Rectangle]:
    """The row in rectangles on its device: by default those of `rectangles`, else `pieces` in the same form."""
    first, device = 0, batch.ids.device
    for start, lens in rectangles(batch) if pieces is None else pieces:
        place = slice(start, start + sum(lens))
        mask = torch.arange(lens[0], device=device) < torch.tensor(lens, device=device)[:, None]
        ids, types = torch.full(mask.shape, pad_id, device=device), None
        ids[mask] = batch.ids[0, place]
        if batch.types is not None:
            types = torch.zeros_like(ids)
            types[mask] = batch.types[0, place]
        yield Rectangle(place, first, ids, mask, types)
        first += len(lens)


def random_sequences(
    vocabulary: int, special: Iterable[int | None], lengths: Sequence[int], limit: int | None
) -> list[TokenSequence]:
    """The same random sequences in every call, of these lengths (at most `limit`), without the `special` ids."""
    ordinary = torch.ones(vocabulary, dtype=torch.bool)
    ordinary[[token for token in special if token is not None and 0 <= token < vocabulary]] = False
    candidates = ordinary.nonzero()[:, 0]
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randint(len(candidates), (min(length, limit or length),), generator=generator)
        for length in lengths
    ]
    return [TokenSequence(candidates[places].numpy()) for places in drawn]


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference as a share of the norm of `wanted`."""
    return float((got.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-12))


def agree(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two results are equal within the precision in which the model computed `wanted`."""
    return difference(got, wanted) <= (5e-2 if wanted.dtype in HALF else 1e-3)


def rectangles(batch: PackedBatch) -> Iterator[tuple[int, list[int]]]:
    """(first token, lengths) of neighbouring sequences to pad together; the row is sorted longest first."""
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
