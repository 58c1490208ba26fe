"""Run a transformer over a packed batch; the result is one vector per token, as rows.

There are several ways behind one call. The packed way sends the row through the model as it is, in one pass for each
class of lengths that the model tells apart. The padded way cuts the row into rectangles. At load a few sequences go
each way, and the first way is kept that gives every sequence what the model gives for that sequence alone
(`workers.adapters.shared.proving`). Models that bypass transformers' attention registry take the padded way.

Attention over packed rows, registered with transformers under the name `PACKED`.

transformers' models look up their attention function by name and pass extra keyword arguments to the function. So
`packed_attention` receives the layout of the row, and attends within each sequence:

1. on CUDA in half precision with torch's variable-length kernel (`VarlenKernel`), if `select_kernel` found that kernel
   and scaled_dot_product_attention agree;
2. else with one call of scaled_dot_product_attention per run of sequences of equal length (`attend_runs`), which are
   neighbours in the row. With a sliding window there is one call per block of queries, with only the keys that the
   block's windows reach. Runs with tokens that attention does not see (queries filled up with mask tokens) get a mask.

No mask function is registered on purpose: transformers then builds no mask, and decoder models do not read their
position ids on the host in every forward pass.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from workers.adapters.shared.checkpoint import position_limit, positions_of
from workers.adapters.shared.known_ids import embedding_rows, filler_of
from workers.adapters.shared.linears import LaidOutLinear
from workers.adapters.shared.packing import Layout, PackedBatch, TokenSequence, filled, pack, section
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
from workers.device.oom import end_if_broken, is_out_of_memory
from workers.device.varlen import HALF, Bounds, VarlenFunction

log = logging.getLogger(__name__)

WINDOW_BLOCK = 256
"""Queries per block of windowed attention."""

PACKED = "penstock_packed"
_UNSUPPORTED = ("position_bias", "softcap", "s_aux", "sinks", "head_mask", "cache")
"""Arguments that change the attention formula and are not implemented here."""


def attend_runs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    scaling: float | None,
    causal: bool,
    reach: int | None,
) -> torch.Tensor:
    """scaled_dot_product_attention per run of equal lengths; shapes as in `packed_attention`.

    PERF: a run costs three views, one kernel and one copy into the common output; nothing is done per token.
    """
    heads, tokens = query.shape[1:3]
    gqa = key.shape[1] != heads
    out = query.new_empty((1, tokens, heads, value.shape[-1]))
    row = out[0]
    first = 0
    for start, count, length in layout.runs:
        stop = start + count * length
        q, k, v = (
            states[0, :, start:stop].unflatten(1, (count, length)).transpose(0, 1)
            for states in (query, key, value)
        )
        if start in layout.partial:
            mask = _partial_mask(layout, start, (first, count, length), causal, reach)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=gqa)
        elif reach is None or length <= reach + 1:
            attended = F.scaled_dot_product_attention(
                q, k, v, is_causal=causal and length > 1, scale=scaling, enable_gqa=gqa
            )
        else:
            attended = _attend_windows(q, k, v, layout, scaling, causal, reach)
        row[start:stop].view(count, length, heads, -1).copy_(attended.transpose(1, 2))
        first += count
    return out


def _attend_windows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    scaling: float | None,
    causal: bool,
    reach: int,
) -> torch.Tensor:
    """Windowed attention of one run, [count, heads, length, dim], by blocks of queries with the keys they reach."""
    length = q.shape[2]
    blocks = []
    for start in range(0, length, WINDOW_BLOCK):
        stop = min(start + WINDOW_BLOCK, length)
        low, high = max(0, start - reach), stop if causal else min(length, stop + reach)
        mask = _window_mask(layout, (stop - start, high - low, start - low, reach, causal), q.device)
        blocks.append(
            F.scaled_dot_product_attention(
                q[:, :, start:stop],
                k[:, :, low:high],
                v[:, :, low:high],
                attn_mask=mask,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    return torch.cat(blocks, dim=2)


def _partial_mask(
    layout: Layout, start: int, run: tuple[int, int, int], causal: bool, reach: int | None
) -> torch.Tensor:
    """Boolean [count, 1, queries, keys] of a run with unseen tokens: true for seen keys in reach."""
    mask = layout.masks.get((start, reach))
    if mask is None:
        first, count, length = run
        assert layout.seen is not None
        at = torch.arange(length, device=layout.seen.device)
        visible = at < layout.seen[first : first + count, None]
        distance = at[:, None] - at[None]
        near = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if reach is not None:
            near &= distance.abs() <= reach
        mask = visible[:, None, None] & near
        layout.masks[start, reach] = mask
    return mask


def _window_mask(
    layout: Layout, shape: tuple[int, int, int, int, bool], device: torch.device
) -> torch.Tensor:
    """Boolean [queries, keys]: which key a query may see; query 0 stands at key `offset`. Kept in the layout."""
    mask = layout.masks.get(shape)
    if mask is None:
        queries, keys, offset, reach, causal = shape
        here = torch.arange(offset, offset + queries, device=device)[:, None]
        distance = here - torch.arange(keys, device=device)[None]
        mask = (distance <= reach) & (distance >= (0 if causal else -reach))
        layout.masks[shape] = mask
    return mask


class VarlenKernel:
    """`varlen_attn` over a packed row."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises NotImplementedError if `function` lacks `scale` or `window_size`."""
        self._function = VarlenFunction(function)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: Layout,
        scaling: float | None,
        causal: bool,
        reach: int | None,
    ) -> torch.Tensor:
        """Attention within each sequence; shapes as in `packed_attention`."""
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        bounds = Bounds(layout.cu_seq_lens, layout.cu_seq_lens, layout.max_len, layout.max_len)
        side = -1 if reach is None else reach
        return self._function(q, k, v, bounds, scaling, (side, 0 if causal else side)).unsqueeze(0)


@functools.cache
def select_kernel(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> VarlenKernel | None:
    """The kernel for this device, dtype and head shape; None where SDPA per run is used.

    Raises the error of memory that is short: the result is kept for all later loads.
    """
    if device.type != "cuda" or dtype not in HALF:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn

        kernel = VarlenKernel(varlen_attn)
        _compare_with_sdpa(kernel, device, dtype, heads, kv_heads, head_dim)
    except (ImportError, RuntimeError, ValueError, TypeError) as error:
        end_if_broken(error)
        if is_out_of_memory(error):
            raise
        log.warning("variable-length attention is not used: %s", str(error).splitlines()[0])
        return None
    return kernel


def _compare_with_sdpa(
    kernel: VarlenKernel, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Compare with SDPA: full, causal, windowed, both.  Raises RuntimeError where they differ."""
    lens = (1, 7, 7, 40)
    layout = pack([TokenSequence(ids=torch.zeros(n, dtype=torch.int64).numpy()) for n in lens]).layout.to(
        device
    )
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn((1, count, sum(lens), head_dim), generator=generator).to(device, dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    for causal in (False, True):
        for reach in (None, 3):
            got = kernel(query, key, value, layout, head_dim**-0.5, causal, reach)
            want = attend_runs(query, key, value, layout, head_dim**-0.5, causal, reach)
            if not torch.allclose(got.float(), want.float(), atol=3e-2, rtol=3e-2):
                raise RuntimeError(f"varlen_attn differs from SDPA (causal={causal}, window={reach})")


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    packed_layout: Layout | None = None,
    packed_kernel: VarlenKernel | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within each sequence of a packed row.

    query [1, heads, T, dim], key and value [1, kv_heads, T, dim]; returns [1, T, heads, dim] and no weights.
    `sliding_window` is the reach to each side plus one. Raises NotImplementedError for a kind of attention that is not
    implemented here.
    """
    unsupported = [name for name in _UNSUPPORTED if extra.get(name) is not None]
    if packed_layout is None or attention_mask is not None or query.shape[0] != 1 or unsupported:
        raise NotImplementedError(
            f"attention is not packed: {', '.join(unsupported) or 'mask or missing layout'}"
        )
    causal = _causal(module, is_causal)
    reach = int(sliding_window) - 1 if sliding_window else None
    # NOTE: the kernel attends to whole sequences; batches with unseen tokens take the masked way.
    if packed_kernel is not None and packed_layout.seen is None:
        return packed_kernel(query, key, value, packed_layout, scaling, causal, reach), None
    return attend_runs(query, key, value, packed_layout, scaling, causal, reach), None


def _causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    """Whether a token sees only earlier tokens, by the rules of transformers' sdpa function."""
    if getattr(getattr(module, "config", None), "is_causal", None) is False:
        return False
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


AttentionInterface.register(PACKED, packed_attention)


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
        classes = [
            list(runs) for _, runs in groupby(batch.layout.runs, lambda run: self._lengths.of(run.length))
        ]
        for runs in classes:
            yield batch if len(classes) == 1 else section(batch, runs)

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
        sequences, expected = self._alone(proof_sequences(self.embeddings, odd, self.position_limit))
        batch = self.pack(sequences).to(self.device)
        name = type(self.model).__name__
        if (reason := fault(partial(self._with_packed_attention, batch), expected)) is None:
            return True
        if self.model.config._attn_implementation == PACKED:
            self.model.set_attn_implementation(self._plain_attention)
        log.warning("%s runs padded, not packed: %s", name, reason)
        self._cut = proven_cut(name, partial(self._padded_rows, batch), expected, self._lengths)
        return False

    def _alone(self, given: list[TokenSequence]) -> tuple[list[TokenSequence], torch.Tensor]:
        """The sequences that the model takes, and their token vectors, each run alone, in the order of a packed row."""

        def run(sequence: TokenSequence) -> torch.Tensor:
            return self._padded_rows(self.pack([sequence]).to(self.device), ALONE)

        pairs = sorted(possible(given, run), key=lambda pair: -len(pair[0].ids))
        return [sequence for sequence, _ in pairs], torch.cat([rows for _, rows in pairs])

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
