"""The attention formula of one layer, and computations of it with plain torch: which keys a query sees, and how.

`Heads` are facts of a layer. Its methods attend for sequences whose keys lie side by side. `MaskRule` stands for the
mask of a model that tells the attention function of no window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from numpy.typing import NDArray

_Positions = TypeVar("_Positions", torch.Tensor, NDArray[Any])


@dataclass(frozen=True, slots=True)
class MaskRule:
    """What a layer's mask allows, by absolute positions; `is_plain` means every earlier token."""

    function: Callable[..., torch.Tensor]
    is_plain: bool

    def allows(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Boolean, of the shape that both positions broadcast to."""
        zero = torch.zeros((), dtype=torch.long, device=queries.device)
        return self.function(zero, zero, queries, keys)


def in_reach(queries: _Positions, keys: _Positions, window: int) -> _Positions:
    """Boolean: whether a query at one position sees a key at another, by a window (0: every key before)."""
    seen = keys <= queries
    return seen & (keys > queries - window) if window else seen


class Tuning(NamedTuple):
    """Queries that grow with their place in the text (`attn_temperature_tuning` of Llama 4, arXiv:2501.19399)."""

    scale: float
    tokens: float

    @classmethod
    def of(cls, module: Any) -> Tuning | None:
        """The tuning of a layer; None for a layer without."""
        if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
            return None
        return cls(float(module.attn_scale), float(module.floor_scale))

    def corrected(self, q: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Queries [tokens, heads, dim] by their places int64 [tokens]; the layer took their rows for these."""
        rows = torch.arange(len(q), device=q.device)
        factors = self._factors(places) / self._factors(rows)
        return (q * factors[:, None, None]).to(q.dtype)

    def _factors(self, places: torch.Tensor) -> torch.Tensor:
        return torch.log1p(torch.floor((places.float() + 1) / self.tokens)) * self.scale + 1


class Heads(NamedTuple):
    """The formula of one layer: scale, soft cap, sinks, and which keys a query sees (`window` 0: all before)."""

    scaling: float | None
    softcap: float | None
    sinks: torch.Tensor | None
    window: int
    rule: MaskRule | None

    @property
    def is_plain(self) -> bool:
        """Whether softmax over the keys in the window is all."""
        return not self.softcap and self.sinks is None and self.rule is None

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
        attended = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=self.scaling)
        return attended.reshape(count, heads, -1)

    def whole(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The beginning of a sequence: q [tokens, heads, dim] to [tokens, heads, value dim]."""
        length = len(q)
        at = torch.arange(length, device=q.device)
        if self.rule is not None or (self.window and length > self.window):
            return self.masked(q, k, v, self.allows(at[:, None], at[None]))
        if self.softcap or self.sinks is not None:
            return self.masked(q, k, v, at[None] <= at[:, None])
        q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))
        attended = F.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            scale=self.scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return attended[0].transpose(0, 1)

    def later(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, low: int) -> torch.Tensor:
        """As `whole`, for the last tokens of a sequence, with the keys from position `low`."""
        past = len(k) - len(q)
        if self.is_plain and not self.window and not q.is_cuda and q.shape[2] == v.shape[2]:
            return self._joined(q, k, v, past)
        at = torch.arange(low, low + len(k), device=q.device)
        return self.masked(q, k, v, self.allows(at[past:, None], at[None]))

    def _joined(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: int) -> torch.Tensor:
        """The first `past` keys are seen by all queries, the others as in `whole`."""
        # PERF: two products without a mask, joined by their sums of exponentials, are 1.3 to 1.9 times faster than one
        # with a mask. The query heads of one key head are rows of the first.
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        length, heads, dim = q.shape
        q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))
        shared = heads // k.shape[1]
        rows = q.reshape(1, k.shape[1], shared * length, dim)
        before, before_sums = attend(rows, k[:, :, :past], v[:, :, :past], scale=self.scaling)
        k, v = (states[:, :, past:].repeat_interleave(shared, 1) for states in (k, v))
        own, own_sums = attend(q, k, v, is_causal=True, scale=self.scaling)
        share = torch.sigmoid(before_sums.reshape(own_sums.shape) - own_sums)[..., None].to(own.dtype)
        return torch.lerp(own, before.reshape(own.shape), share)[0].transpose(0, 1)

    def masked(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """One sequence with a mask: q [queries, heads, dim], k and v [keys, key heads, dim], seen [queries, keys]."""
        q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))
        if self.softcap or self.sinks is not None:
            mask = torch.zeros(seen.shape, device=q.device, dtype=q.dtype).masked_fill_(~seen, float("-inf"))
            attended = self._by_hand(q, k, v, mask)
        else:
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=self.scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
        return attended[0].transpose(0, 1)

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
