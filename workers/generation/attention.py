"""Attention of one packed step over the blocks of the key-value cache.

transformers' models look up attention and mask functions by name. Every engine registers both under a name of its own,
since the registry belongs to the process. In each layer the attention function

1. writes the keys and values of the step's tokens to their places in the cache;
2. attends for all sequences in one call of torch's variable-length kernel, on CUDA where `paged_kernel` proved the
   kernel, and where the layer's formula is plain (`Heads.is_plain`); else
3. reads the blocks of the sequences that compute one token, in groups of similar length, and attends;
4. attends for each part of a prompt: to the part itself where the part is the beginning, else to the blocks so far. The
   tokens of a picture see one another, earlier and later ones, where the model has it so (`Part.whole`).

In steps that CUDA captures `paged_decode` takes the place of 2 to 4 where all tokens are single ones (`captured`), and
`paged_tiles` in others (`CapturedPrompts`).

The mask function builds no mask. It returns a `MaskRule`, which the model hands on as attention mask: some models make
a sliding or chunked mask without telling the attention function of a window, and the rule is evaluated on positions.
Models that index the mask fail with a rule and get none (`PagedAttention.passes_rules`).
"""

from __future__ import annotations

import itertools
import math
import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AttentionMaskInterface

from workers.device.transfer import sent
from workers.generation.decoder import Decoder
from workers.generation.heads import Heads, MaskRule, Tuning, in_reach
from workers.generation.kernel_decoder import KernelDecoder
from workers.generation.paged_decode import Decode, select_decode
from workers.generation.paged_kernel import PagedKernel, StepLayout, Stretch, select_kernel
from workers.generation.paged_tiles import Tiles, queries_of, select_tiles
from workers.generation.rope import LengthRope
from workers.generation.sight import Pictured
from workers.generation.step_plan import Group, Part, Plan, Space, View

_SERIAL = itertools.count()
Integers = NDArray[np.int64]
_NO_BLOCKS = torch.empty(0, dtype=torch.long)


class Widths(NamedTuple):
    """What one layer needs of a cache: `key` and `value` are heads and dim; `heads` are those of the queries.

    `has_rule`: the layer's mask is more than a window.
    """

    heads: int
    key: torch.Size
    value: torch.Size
    dtype: torch.dtype
    device: torch.device
    has_rule: bool


class Pool(NamedTuple):
    """The keys (`place` 0) or values (1) of one layer: the same memory in three forms.

    `tokens` [tokens, heads, dim], `blocks` [blocks, elements], `heads` [1, heads, tokens, dim], of all blocks. `shape`
    are heads and dim.
    """

    place: int
    shape: tuple[int, int]
    tokens: torch.Tensor
    blocks: torch.Tensor
    heads: torch.Tensor


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros of a cache. PERF: on CPU the kernel gives each page when the page is first written, already zeroed."""
    numbers = math.prod(shape)
    if device.type != "cpu" or not numbers:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, numbers * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        # Kernels without huge pages refuse the advice.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class PagedAttention:
    """The cache and the attention function of one engine."""

    def __init__(
        self,
        block_tokens: int,
        select: Callable[..., PagedKernel | None] = select_kernel,
        select_decode: Callable[..., Decode | None] = select_decode,
        select_tiles: Callable[..., Tiles | None] = select_tiles,
    ) -> None:
        """Register both functions. `allocate` gives the cache its memory, once the widths of all layers are known.

        `select`, `select_decode` and `select_tiles` find the kernels of a layer, with the arguments of `select_kernel`
        in `paged_kernel`, and of the functions of these names in `paged_decode` and `paged_tiles`.
        """
        self.name = f"penstock_paged_{next(_SERIAL)}"
        self.passes_rules = True
        self.rope: LengthRope | None = None
        """Positions of the model that depend on the length of a text."""
        self.decoder: Decoder | KernelDecoder | None = None
        """What computes the layers of the model in place of transformers' modules, where the proof found it right."""
        self.formulas: dict[int, Heads] = {}
        """The formulas of layers that have called the attention function in a measuring pass."""
        self.plan: Plan | None = None
        self.block_tokens, self._blocks, self._select = block_tokens, 0, select
        self._select_decode, self._select_tiles = select_decode, select_tiles
        self.tile_queries = 0
        """Queries of a tile of `paged_tiles`, for all layers."""
        self.spare_slot = 0
        """A cell of a block that belongs to no sequence, where `allocate` was asked for one."""
        self._pools: dict[int, tuple[Pool, Pool]] = {}
        self._kernels: dict[int, PagedKernel] = {}
        self._decodes: dict[int, Decode] = {}
        self._tiles: dict[int, Tiles] = {}
        self._widths: dict[int, Widths] = {}
        self._tunings: dict[int, Tuning] = {}
        self._buffers: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        # NOTE: transformers never forgets a function. A strong reference would keep the memory of an unloaded model.
        AttentionInterface.register(self.name, _weakly(self.attend))
        AttentionMaskInterface.register(self.name, _weakly(self._mask))

    def token_nbytes(self) -> int:
        """Bytes of one token's keys and values in all layers that were called so far."""
        return sum(
            (each.key.numel() + each.value.numel()) * each.dtype.itemsize for each in self._widths.values()
        )

    def allocate(self, blocks: int, spare: bool = False) -> None:
        """Give the cache `blocks` blocks, and one more with `spare`. Their content is lost."""
        self._blocks, self.spare_slot = blocks + spare, blocks * self.block_tokens
        self._pools = {
            layer: (self._pool(0, each.key, each), self._pool(1, each.value, each))
            for layer, each in self._widths.items()
        }
        self._kernels = {
            layer: kernel
            for layer, each in self._widths.items()
            if (kernel := self._kernel(each)) is not None
        }

    def prepare_decoding(self) -> bool:
        """Whether single tokens of all layers can be attended to by `PagedDecode`, as steps of `Plan.decoding` want."""
        for layer, each in self._widths.items():
            decode = None
            if not each.has_rule:
                decode = self._select_decode(
                    each.device, each.dtype, each.heads, each.key, each.value, self.block_tokens
                )
            if decode is None:
                return False
            self._decodes[layer] = decode
        return True

    def prepare_tiles(self) -> bool:
        """Whether parts of prompts of all layers can be attended to by `PagedTiles`, as steps of `Plan.tiled` want."""
        self.tile_queries = queries_of(max(each.heads // each.key[0] for each in self._widths.values()))
        for layer, each in self._widths.items():
            tiles = None
            if not each.has_rule:
                shape = each.device, each.dtype, each.heads, each.key, each.value
                tiles = self._select_tiles(*shape, self.block_tokens, self.tile_queries)
            if tiles is None:
                return False
            self._tiles[layer] = tiles
        return True

    def _kernel(self, widths: Widths) -> PagedKernel | None:
        if widths.key != widths.value:
            return None
        heads, dim = widths.key
        return self._select(widths.device, widths.dtype, widths.heads, heads, dim, self.block_tokens)

    def _pool(self, place: int, shape: torch.Size, widths: Widths) -> Pool:
        tokens = _zeros((self._blocks * self.block_tokens, *shape), widths.dtype, widths.device)
        heads = tokens.transpose(0, 1)[None]
        return Pool(place, (shape[0], shape[1]), tokens, tokens.view(self._blocks, -1), heads)

    def _mask(
        self, *_: Any, mask_function: Any = None, local_size: Any = None, use_vmap: bool = False, **__: Any
    ) -> Any:
        if not self.passes_rules or mask_function is None:
            return None
        return MaskRule(mask_function, is_plain=local_size is None and not use_vmap)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: MaskRule | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        s_aux: torch.Tensor | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of one layer: query [1, heads, T, dim], key and value [1, key heads, T, dim] to [1, T, heads, dim].

        Without a plan (a measuring pass) the row is one sequence, and the layer's widths are noted.
        """
        layer: int = module.layer_idx  # type: ignore[assignment]
        rule = (
            attention_mask if isinstance(attention_mask, MaskRule) and not attention_mask.is_plain else None
        )
        window = int(sliding_window or 0)
        heads = Heads(scaling, softcap, s_aux, window, None if window else rule)
        q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
        if self.plan is None:
            self.formulas[layer] = heads
            self._widths[layer] = Widths(
                q.shape[1], k.shape[1:], v.shape[1:], k.dtype, k.device, heads.rule is not None
            )
            if (tuning := Tuning.of(module)) is not None:
                self._tunings[layer] = tuning
            return heads.whole(q, k, v)[None], None
        return self.attended(layer, heads, q, k, v)[None], None

    def cells(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values [slots, key heads, dim] of a layer in the cache."""
        keys, values = self._pools[layer]
        return keys.tokens, values.tokens

    def attended(
        self,
        layer: int,
        heads: Heads,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        written: bool = False,
    ) -> torch.Tensor:
        """As `attend`, by the formula of the layer: q [T, heads, dim], k and v [T, key heads, dim] to [T, heads, dim].

        There must be a plan. `written`: the keys and values are in the cache already.
        """
        plan = self.plan
        assert plan is not None
        if self._tunings and layer in self._tunings:
            q = self._tunings[layer].corrected(q, plan.places)
        keys, values = self._pools[layer]
        if not written:
            keys.tokens.index_copy_(0, plan.slots, k)
            values.tokens.index_copy_(0, plan.slots, v)
        if plan.decoding is not None:
            return self._decodes[layer](q, keys.tokens, values.tokens, plan.decoding, heads)
        if plan.tiled is not None:
            return self._tiles[layer](q, keys.tokens, values.tokens, plan.tiled, heads)
        kernel = self._kernels.get(layer)
        if kernel is not None and heads.is_plain and not plan.looks_ahead:
            layout = self._layout(plan, kernel, heads.window)
            return kernel(q, keys.tokens, values.tokens, layout, heads.scaling, heads.window)
        return self._attend(plan, heads, q, k, v, keys, values)

    def _layout(self, plan: Plan, kernel: PagedKernel, window: int) -> StepLayout:
        """What a kernel reads, made once a step for all layers of a kind."""
        layout = plan.layouts.get(kernel.kind(window))
        if layout is None:
            stretches = [Stretch(start, stop, each.block_table()) for each, start, stop in plan.spans]
            layout = kernel.layout(stretches, window, plan.slots.device)
            plan.layouts[kernel.kind(window)] = layout
        return layout

    def _attend(
        self,
        plan: Plan,
        heads: Heads,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: Pool,
        values: Pool,
    ) -> torch.Tensor:
        if plan.singles == plan.tokens:
            return self._singles(plan, heads, q, keys, values)
        whole = q.new_empty(plan.tokens, q.shape[1], v.shape[2])
        if plan.singles:
            whole[: plan.singles] = self._singles(plan, heads, q[: plan.singles], keys, values)
        for part in plan.parts:
            rows = slice(part.row, part.row + part.stop - part.start)
            if part.whole:
                whole[rows] = self._looking_ahead(heads, q[rows], part, keys, values)
            elif part.start == 0:
                whole[rows] = heads.whole(q[rows], k[rows], v[rows])
            else:
                whole[rows] = self._later_part(heads, q[rows], part, keys, values)
        return whole

    def _singles(self, plan: Plan, heads: Heads, q: torch.Tensor, keys: Pool, values: Pool) -> torch.Tensor:
        """q [singles, heads, dim] to [singles, heads, value dim]: each row attends to all keys of its sequence."""
        out = None
        for view in self._views(plan, heads):
            k, v = self._read(view, keys), self._read(view, values)
            if view.rows is None:
                return heads.single(q, k, v, view.mask)
            if out is None:
                out = q.new_empty(plan.singles, q.shape[1], v.shape[3])
            out[view.rows] = heads.single(q[view.rows], k, v, view.mask)
        assert out is not None
        return out

    def _read(self, view: View, pool: Pool) -> torch.Tensor:
        """[sequences, heads, width, dim] of a pool."""
        if view.start is not None:
            return pool.heads.narrow(2, view.start, view.width)
        space = view.spaces.get((pool.place, pool.shape))
        if space is None:
            space = view.spaces[pool.place, pool.shape] = self._space(view, pool)
        torch.index_select(pool.blocks, 0, view.blocks, out=space.blocks)
        return space.heads

    def _space(self, view: View, pool: Pool) -> Space:
        # PERF: in a buffer kept between steps. A fresh tensor of this size costs page faults.
        blocks, elements = len(view.blocks), pool.blocks.shape[1]
        buffer = self._buffers.get((pool.place, pool.blocks.dtype))
        if buffer is None or buffer.numel() < blocks * elements:
            buffer = pool.blocks.new_empty(blocks * elements * 5 // 4)
            self._buffers[pool.place, pool.blocks.dtype] = buffer
        near = buffer[: blocks * elements].view(blocks, elements)
        return Space(near, near.view(view.sequences, -1, *pool.shape)[:, : view.width].transpose(1, 2))

    def _later_part(
        self, heads: Heads, q: torch.Tensor, part: Part, keys: Pool, values: Pool
    ) -> torch.Tensor:
        """A part of a prompt that attends to its own tokens and to all before."""
        low = self._lowest(heads, part.start)
        return heads.later(q, self._from(low, part, keys), self._from(low, part, values), low)

    def _looking_ahead(
        self, heads: Heads, q: torch.Tensor, part: Part, keys: Pool, values: Pool
    ) -> torch.Tensor:
        """As `_later_part`, and the tokens of a picture attend to the later ones of the picture as well."""
        low = min(
            self._lowest(heads, part.start), part.whole[0].first // self.block_tokens * self.block_tokens
        )
        at = torch.arange(low, part.stop, device=q.device)
        seen = heads.allows(at[part.start - low :, None], at[None])
        for first, stop in part.whole:
            seen[max(0, first - part.start) : stop - part.start, first - low : stop - low] = True
        return heads.masked(q, self._from(low, part, keys), self._from(low, part, values), seen)

    def _lowest(self, heads: Heads, start: int) -> int:
        """The first token of the first block that the token at `start` sees."""
        return (
            max(0, start + 1 - heads.window) // self.block_tokens * self.block_tokens if heads.window else 0
        )

    def _from(self, low: int, part: Part, pool: Pool) -> torch.Tensor:
        """[tokens, heads, dim] of a pool, from the block that begins at `low` to the end of a part."""
        size = self.block_tokens
        table = part.table[low // size : -(-part.stop // size)]
        return pool.blocks.index_select(0, table).view(-1, *pool.shape)[: part.stop - low]

    def _views(self, plan: Plan, heads: Heads) -> list[View]:
        """What each group reads, made once a step for each kind of mask."""
        key = heads.window, id(heads.rule) if heads.rule else 0
        views = plan.views.get(key)
        if views is None:
            views = plan.views[key] = [self._view(group, heads, plan.slots.device) for group in plan.groups]
        return views

    def _view(self, group: Group, heads: Heads, device: torch.device) -> View:
        size, window, spans = self.block_tokens, heads.window, group.spans
        lengths = [span.stop for span in spans]
        tables = [span.sequence.block_table() for span in spans]
        # PERF: one sequence whose blocks lie side by side needs no copy, and no mask for a window.
        if len(spans) == 1 and spans[0].sequence.is_run and heads.rule is None:
            [length], low = lengths, max(0, lengths[0] - window) if window else 0
            start = spans[0].sequence.blocks[0] * size + low
            return View(group.rows, 1, length - low, start, _NO_BLOCKS, None, {})
        firsts = [max(0, length - window) // size if window else 0 for length in lengths]
        width = max(-(-length // size) - first for length, first in zip(lengths, firsts, strict=True))
        blocks = np.zeros((len(spans), width), np.int64)
        for row, table, first in zip(blocks, tables, firsts, strict=True):
            near = table[first : first + width]
            row[: len(near)] = near
        keys = width * size if window else max(lengths)
        mask = None
        if window or heads.rule is not None:
            mask = self._mask_of(heads, np.array(lengths), np.array(firsts), keys, device)
        elif min(lengths) < keys:
            mask = sent(_ends(lengths, keys), device)
        flat = sent(blocks.reshape(-1), device)
        return View(group.rows, len(spans), keys, None, flat, mask, {})

    def _mask_of(
        self, heads: Heads, lengths: Integers, firsts: Integers, keys: int, device: torch.device
    ) -> torch.Tensor | None:
        """As `_ends`, for the keys from the first block of each sequence on, by a window or a rule."""
        at, now = firsts[:, None] * self.block_tokens + np.arange(keys), lengths[:, None] - 1
        seen = in_reach(now, at, heads.window)
        if heads.rule is not None:
            places = (torch.from_numpy(positions).to(device) for positions in (now, at))
            seen &= heads.rule.allows(*places).cpu().numpy()
        if seen.all():
            return None
        return sent(np.where(seen, np.float32(0), np.float32("-inf"))[:, None, None], device)


def _ends(lengths: list[int], keys: int) -> NDArray[np.float32]:
    """What is added to the scores of `keys` keys: 0 for so many of each sequence, then -inf."""
    mask = np.zeros((len(lengths), 1, 1, keys), np.float32)
    for row, length in zip(mask[:, 0, 0], lengths, strict=True):
        row[length:] = -np.inf
    return mask


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a method without keeping the method's object."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any, **named: Any) -> Any:
        found = reference()
        assert found is not None
        return found(*arguments, **named)

    return call


def attend_with(model: Any, implementation: str) -> None:
    """Give the text of a model another implementation of attention; a vision tower keeps its own."""
    config = model.config
    text = config.get_text_config()
    names = [name for name in config.sub_configs if getattr(config, name, None) is text]
    model.set_attn_implementation({names[0]: implementation} if names else implementation)


def packed_pass(
    model: Any, attention: PagedAttention, plan: Plan, keep: torch.Tensor | int = 0, *, hooked: bool = False
) -> torch.Tensor:
    """Logits [rows, vocabulary] of the rows `keep` of a step, int64 [rows]; 0 for all.

    `hooked`: the modules of the model have hooks that the step needs.
    """
    attention.plan, rope = plan, attention.rope
    if attention.decoder is not None and not hooked and plan.pictured is None and plan.positions.dim() == 1:
        return attention.decoder.logits(plan.ids, plan.positions, attention.attended, keep)
    if rope is None:
        return _logits(model, plan, keep)
    with rope.applied(plan.lengths or rope.lengths(plan.spans, plan.ids.device)):
        return _logits(model, plan, keep)


def _logits(model: Any, plan: Plan, keep: torch.Tensor | int) -> torch.Tensor:
    if plan.pictured is not None or plan.positions.dim() > 1:
        return _pictured_logits(model, plan, plan.pictured, keep)
    logits: torch.Tensor = model(
        input_ids=plan.ids[None],
        position_ids=plan.positions[None],
        # NOTE: without a mask of ones some models look for packed sequences in the positions.
        attention_mask=_ones(plan),
        use_cache=False,
        logits_to_keep=keep,
    ).logits[0]
    return logits


def _pictured_logits(model: Any, plan: Plan, seen: Pictured | None, keep: torch.Tensor | int) -> torch.Tensor:
    """The logits of a step with pictures: features take the place of word embeddings.

    Further features are added behind the first layers of the text (DeepStack, arXiv:2406.04334).
    """
    words = model.get_input_embeddings()(plan.ids[None])
    deep: dict[str, Any] = {}
    if seen is not None:
        words[0, seen.rows] = seen.words.to(words.dtype)
        if seen.deep:
            places = torch.zeros(1, plan.tokens, dtype=torch.bool, device=words.device)
            places[0, seen.rows] = True
            deep = {"visual_pos_masks": places, "deepstack_visual_embeds": seen.deep}
    positions = plan.positions[:, None] if plan.positions.dim() > 1 else plan.positions[None]
    common = {
        "inputs_embeds": words,
        "position_ids": positions,
        "attention_mask": _ones(plan),
        "use_cache": False,
    }
    if not deep:
        logits: torch.Tensor = model(**common, logits_to_keep=keep).logits[0]
        return logits
    # NOTE: the whole model takes these features only together with the pictures themselves.
    hidden = model.get_decoder()(**common, **deep).last_hidden_state[0]
    kept: torch.Tensor = model.get_output_embeddings()(hidden if isinstance(keep, int) else hidden[keep])
    return kept


def _ones(plan: Plan) -> torch.Tensor:
    return torch.ones(1, plan.tokens, dtype=torch.long, device=plan.ids.device)
