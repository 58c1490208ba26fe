"""Attention of one packed step over the blocks of the key-value cache.

transformers' models look up attention and mask functions by name. Every engine registers both under a name of its own,
since the registry belongs to the process. In each layer the attention function

1. writes the keys and values of the step's tokens to their places in the cache;
2. reads the blocks of the sequences that compute one token, in groups of similar length, and attends;
3. attends for each part of a prompt: to the part itself where the part is the beginning, else to the blocks so far.

The mask function builds no mask. It returns a `MaskRule`, which the model hands on as attention mask: some models make
a sliding or chunked mask without telling the attention function of a window, and the rule is evaluated on positions.
Models that index the mask fail with a rule and get none (`PagedAttention.passes_rules`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import AttentionInterface, AttentionMaskInterface

from workers.generation.sequence import Span

_SERIAL = itertools.count()
_Positions = TypeVar("_Positions", torch.Tensor, NDArray[Any])
_GROW, _NEAR = 1.5, 64
"""Sequences share a group while the longest has at most `_GROW` times the shortest's tokens plus `_NEAR`."""


@dataclass(frozen=True, slots=True)
class MaskRule:
    """What a layer's mask allows, by absolute positions; `is_plain` means every earlier token."""

    function: Callable[..., torch.Tensor]
    is_plain: bool

    def allows(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Boolean, of the shape that both positions broadcast to."""
        zero = torch.zeros((), dtype=torch.long, device=queries.device)
        return self.function(zero, zero, queries, keys)


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of similar length that compute one token each.

    `rows` int64 [n] are their rows of the step, None for all rows from 0. `lengths` are their tokens with the new one.
    """

    rows: torch.Tensor | None
    lengths: list[int]
    tables: list[NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens `start` to `stop` of a sequence, at `row` of the step; `table` are the sequence's blocks."""

    row: int
    start: int
    stop: int
    table: torch.Tensor


@dataclass(slots=True)
class Plan:
    """One step, laid out once and read by every layer.

    `slots` int64 [tokens] are the places of the step's tokens in the cache. The first `singles` rows belong to
    `groups`. `views` keeps the block tables and masks of the groups by kind of mask.
    """

    slots: torch.Tensor
    singles: int
    groups: list[Group]
    parts: list[Part]
    views: dict[Any, list[View]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class View:
    """What a group reads: its rows, `count` sequences, their blocks int64 [count * blocks], the first `width` keys.

    `mask` is additive [count, 1, 1, width], None if every key is seen. A single sequence whose blocks lie side by side
    has the place of the first as `start`.
    """

    rows: torch.Tensor | None
    count: int
    blocks: torch.Tensor
    width: int
    mask: torch.Tensor | None
    start: int | None


def plan_of(spans: Sequence[Span], block_tokens: int, device: torch.device) -> Plan:
    """The plan of a step; spans of single tokens come first."""
    slots: list[int] = []
    parts: list[Part] = []
    singles: list[Span] = []
    for span in spans:
        blocks, start, stop = span.sequence.blocks, span.start, span.stop
        if stop - start == 1 and not parts:
            singles.append(span)
            slots.append(blocks[start // block_tokens] * block_tokens + start % block_tokens)
        else:
            table = torch.from_numpy(span.sequence.block_table()).to(device)
            parts.append(Part(len(slots), start, stop, table))
            slots += [
                blocks[at // block_tokens] * block_tokens + at % block_tokens for at in range(start, stop)
            ]
    return Plan(torch.tensor(slots, device=device), len(singles), _groups_of(singles, device), parts)


def _groups_of(singles: list[Span], device: torch.device) -> list[Group]:
    """Sequences of similar length together: padding stays below half of what is read."""
    if not singles:
        return []
    lengths = [span.stop for span in singles]
    if max(lengths) <= _GROW * min(lengths) + _NEAR:
        return [_group(None, singles)]
    order = sorted(range(len(singles)), key=lengths.__getitem__)
    groups, current = [], [order[0]]
    for row in order[1:]:
        if lengths[row] > _GROW * lengths[current[0]] + _NEAR:
            groups.append(current)
            current = []
        current.append(row)
    groups.append(current)
    return [_group(torch.tensor(rows, device=device), [singles[row] for row in rows]) for rows in groups]


def _group(rows: torch.Tensor | None, spans: list[Span]) -> Group:
    return Group(rows, [span.stop for span in spans], [span.sequence.block_table() for span in spans])


class PagedAttention:
    """The cache and the attention function of one engine."""

    def __init__(self, block_tokens: int) -> None:
        """Register both functions. `allocate` gives the cache its memory, once the widths of all layers are known."""
        self.name = f"penstock_paged_{next(_SERIAL)}"
        self.passes_rules = True
        self.called: set[int] = set()
        """Layers that have called the attention function."""
        self.plan: Plan | None = None
        self.block_tokens, self._blocks = block_tokens, 0
        self._pools: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._widths: dict[int, tuple[torch.Size, torch.Size, torch.dtype, torch.device]] = {}
        self._buffers: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        # NOTE: transformers never forgets a function. A strong reference would keep the memory of an unloaded model.
        AttentionInterface.register(self.name, _weakly(self.attend))
        AttentionMaskInterface.register(self.name, _weakly(self._mask))

    def token_nbytes(self) -> int:
        """Bytes of one token's keys and values in all layers that were called so far."""
        return sum((k.numel() + v.numel()) * dtype.itemsize for k, v, dtype, _ in self._widths.values())

    def allocate(self, blocks: int) -> None:
        """Give the cache `blocks` blocks. Their content is lost."""
        self._blocks = blocks
        self._pools = {
            layer: tuple(
                torch.zeros((blocks * self.block_tokens, *width), dtype=dtype, device=device)
                for width in (key, value)
            )  # type: ignore[misc]
            for layer, (key, value, dtype, device) in self._widths.items()
        }

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
        self.called.add(layer)
        rule = (
            attention_mask if isinstance(attention_mask, MaskRule) and not attention_mask.is_plain else None
        )
        window = int(sliding_window or 0)
        heads = Heads(scaling, softcap, s_aux, window, None if window else rule)
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        if self.plan is None:
            self._widths[layer] = k.shape[1:], v.shape[1:], k.dtype, k.device
            return heads.whole(q, k, v)[None], None
        keys, values = self._pools[layer]
        keys.index_copy_(0, self.plan.slots, k)
        values.index_copy_(0, self.plan.slots, v)
        return self._attend(heads, q, k, v, keys, values)[None], None

    def _attend(
        self,
        heads: Heads,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        plan = self.plan
        assert plan is not None
        out = None
        if plan.singles:
            out = self._singles(heads, q, keys, values)
            if plan.singles == plan.tokens:
                return out
        whole = q.new_empty(plan.tokens, q.shape[1], v.shape[2])
        if out is not None:
            whole[: plan.singles] = out
        for part in plan.parts:
            rows = slice(part.row, part.row + part.stop - part.start)
            if part.start == 0:
                whole[rows] = heads.whole(q[rows], k[rows], v[rows])
            else:
                whole[rows] = self._later_part(heads, q[rows], part, keys, values)
        return whole

    def _singles(
        self, heads: Heads, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """[singles, heads, dim]: each row attends to all keys of its sequence."""
        plan, key_heads = self.plan, keys.shape[1]
        assert plan is not None
        out = None
        for view in self._views(heads):
            rows = q[: plan.singles] if view.rows is None else q[view.rows]
            if view.start is None:
                gathered = [
                    self._gather(place, pool, view.blocks).view(view.count, -1, key_heads, pool.shape[2])
                    for place, pool in enumerate((keys, values))
                ]
                k, v = (states[:, : view.width].transpose(1, 2) for states in gathered)
            else:
                k, v = (
                    pool[None, view.start : view.start + view.width].transpose(1, 2)
                    for pool in (keys, values)
                )
            found = heads.single(rows, k, v, view.mask)
            if view.rows is None:
                return found
            if out is None:
                out = found.new_empty(plan.singles, *found.shape[1:])
            out[view.rows] = found
        assert out is not None
        return out

    def _gather(self, place: int, pool: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """The content of blocks side by side."""
        # PERF: in a buffer kept between layers and steps. A fresh tensor of this size costs page faults.
        rows = pool.view(self._blocks, -1)
        needed = len(blocks) * rows.shape[1]
        buffer = self._buffers.get((place, rows.dtype))
        if buffer is None or buffer.numel() < needed:
            buffer = self._buffers[place, rows.dtype] = rows.new_empty(needed + needed // 4)
        return torch.index_select(rows, 0, blocks, out=buffer[:needed].view(len(blocks), -1))

    def _later_part(
        self, heads: Heads, q: torch.Tensor, part: Part, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """A part of a prompt that attends to its own tokens and to all before."""
        size = self.block_tokens
        first = max(0, part.start + 1 - heads.window) // size if heads.window else 0
        table, low = part.table[first : -(-part.stop // size)], first * size
        k, v = (
            pool.view(self._blocks, -1).index_select(0, table).view(-1, *pool.shape[1:])[: part.stop - low]
            for pool in (keys, values)
        )
        at = torch.arange(low, part.stop, device=q.device)
        return heads.masked(q, k, v, heads.allows(at[part.start - low :, None], at[None]))

    def _views(self, heads: Heads) -> list[View]:
        """What each group reads, made once a step for each kind of mask."""
        plan = self.plan
        assert plan is not None
        key = heads.window, id(heads.rule) if heads.rule else 0
        views = plan.views.get(key)
        if views is None:
            views = plan.views[key] = [self._view(group, heads) for group in plan.groups]
        return views

    def _view(self, group: Group, heads: Heads) -> View:
        size, lengths, tables = self.block_tokens, group.lengths, group.tables
        firsts = [max(0, length - heads.window) // size if heads.window else 0 for length in lengths]
        lasts = [-(-length // size) for length in lengths]
        width = max(last - first for first, last in zip(firsts, lasts, strict=True))
        blocks = np.zeros((len(lengths), width), np.int64)
        for row, table, first, last in zip(blocks, tables, firsts, lasts, strict=True):
            row[: last - first] = table[first:last]
        assert self.plan is not None
        device = self.plan.slots.device
        flat = torch.from_numpy(blocks.reshape(-1)).to(device)
        start = None
        if len(lengths) == 1 and bool((np.diff(blocks[0]) == 1).all()):
            start = int(blocks[0, 0]) * size
        if not heads.window and heads.rule is None and min(lengths) == max(lengths):
            return View(group.rows, len(lengths), flat, lengths[0], None, start)
        at = np.multiply(firsts, size)[:, None] + np.arange(width * size)
        now = np.array(lengths)[:, None] - 1
        seen = in_reach(now, at, heads.window)
        if heads.rule is not None:
            places = (torch.from_numpy(positions).to(device) for positions in (now, at))
            seen &= heads.rule.allows(*places).cpu().numpy()
        if not heads.window:
            seen = seen[:, : max(lengths)]
        mask = None
        if not seen.all():
            mask = np.where(seen, np.float32(0), np.float32("-inf"))[:, None, None]
        return View(
            group.rows,
            len(lengths),
            flat,
            seen.shape[1],
            None if mask is None else torch.from_numpy(mask).to(device),
            start,
        )


def in_reach(queries: _Positions, keys: _Positions, window: int) -> _Positions:
    """Boolean: whether a query at one position sees a key at another, by a window (0: every key before)."""
    seen = keys <= queries
    return seen & (keys > queries - window) if window else seen


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a method without keeping the method's object."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any, **named: Any) -> Any:
        found = reference()
        assert found is not None
        return found(*arguments, **named)

    return call


@dataclass(frozen=True, slots=True)
class Heads:
    """The formula of one layer: scale, soft cap, sinks, and which keys a query sees (`window` 0: all before)."""

    scaling: float | None
    softcap: float | None
    sinks: torch.Tensor | None
    window: int
    rule: MaskRule | None

    def allows(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Boolean: whether a query at one position sees a key at another."""
        seen = in_reach(queries, keys, self.window)
        if self.rule is not None:
            seen = seen & self.rule.allows(queries, keys)
        return seen

    def single(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """One query for each sequence: q [n, heads, dim], k and v [n, key heads, keys, dim] to [n, heads, dim]."""
        count, heads, dim = q.shape
        mask = None if mask is None else mask.to(q.dtype)
        if self.softcap or self.sinks is not None:
            return self._by_hand(q[:, :, None], k, v, mask).view(count, heads, -1)
        # PERF: the query heads of one key head are rows of one product. It is 1.2 to 1.5 times faster than enable_gqa.
        rows = q.reshape(count, k.shape[1], heads // k.shape[1], dim)
        found = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=self.scaling)
        return found.reshape(count, heads, -1)

    def whole(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The beginning of a sequence: q [tokens, heads, dim] to [tokens, heads, value dim]."""
        length = len(q)
        at = torch.arange(length, device=q.device)
        if self.rule is not None or (self.window and length > self.window):
            return self.masked(q, k, v, self.allows(at[:, None], at[None]))
        if self.softcap or self.sinks is not None:
            return self.masked(q, k, v, at[None] <= at[:, None])
        q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))
        found = F.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            scale=self.scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return found[0].transpose(0, 1)

    def masked(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """One sequence with a mask: q [queries, heads, dim], k and v [keys, key heads, dim], seen [queries, keys]."""
        q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))
        if self.softcap or self.sinks is not None:
            mask = torch.zeros(seen.shape, device=q.device, dtype=q.dtype).masked_fill_(~seen, float("-inf"))
            found = self._by_hand(q, k, v, mask)
        else:
            found = F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=self.scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
        return found[0].transpose(0, 1)

    def _by_hand(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """With a soft cap (Gemma 2) or sinks (gpt-oss): q [n, heads, t, dim], k and v [n, key heads, s, dim]."""
        count, heads, length, dim = q.shape
        grouped = q.reshape(count, k.shape[1], -1, dim)
        scale = dim**-0.5 if self.scaling is None else self.scaling
        weights = (grouped @ k.transpose(-1, -2)).view(count, heads, length, -1) * scale
        if self.softcap:
            weights = torch.tanh(weights / self.softcap) * self.softcap
        if mask is not None:
            weights = weights + mask
        if self.sinks is not None:
            sinks = self.sinks.view(1, heads, 1, 1).expand(count, heads, length, 1).to(weights.dtype)
            weights = torch.cat([weights, sinks], dim=-1)
        weights = torch.softmax(weights.float(), dim=-1).to(q.dtype)
        if self.sinks is not None:
            weights = weights[..., :-1]
        return (weights.view(count, k.shape[1], -1, weights.shape[-1]) @ v).view(count, heads, length, -1)
