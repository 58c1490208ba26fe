"""Chooses tokens on the device, so that the next step can begin before the host knows them.

1. Greedy rows take the first column of their highest logit.
2. The others get temperature and softmax. Rows without a filter find their token by sums over stretches of columns, as
   `token_draw.draw_unfiltered` does.
3. Rows with a filter sort their likeliest `_LOOK` tokens. A row that may keep more than these, or where equal
   probabilities cross the border, is missed: its token is drawn by `token_draw.draw_filtered` when the host reads the
   step, and from then on the sequence waits for its tokens.

Sums are float64 and in the order of `token_draw`, with the same uniform numbers. So a token is the one that the host
would draw. Penalties, biases, grammars and log probabilities need the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ipc.wire.messages import Sampling
from ipc.wire.streams import TokenLogprob
from workers.device.transfer import fetched, sent
from workers.generation.flights import Reading
from workers.generation.sampling import BatchedSampler, State, check_finite, highest_of
from workers.generation.scheduler import Sequence as Choice
from workers.generation.token_draw import LEAST, STRETCH, draw_filtered, filters_of

_LOOK, _WIDEST_LOOK = 128, 1024
"""Tokens of a row that are sorted, and the most with a large `top_k`."""


class Missing(NamedTuple):
    """Rows with a filter: `rows` of the step, `shares` float32 [rows, columns], and what draws from these."""

    rows: list[int]
    shares: torch.Tensor
    samplings: list[Sampling]
    uniforms: NDArray[np.float64]


class DrawnTokens:
    """`tokens` int64 [sequences] on the device (`flights.Drawn`)."""

    def __init__(
        self,
        sequences: Sequence[Choice],
        states: Sequence[State],
        tokens: torch.Tensor,
        read: Callable[[], NDArray[Any]],
        missing: Missing | None,
    ) -> None:
        """`read` gives float64 [3, sequences]: highest logits, tokens, and 1 for a row that is not missed."""
        self.tokens = tokens
        self._sequences, self._states, self._read, self._missing = sequences, states, read, missing

    def read(self, wanted: Collection[Choice]) -> Reading:
        """Wait for the step; the tokens of the `wanted` sequences. Raises `NoNextToken`."""
        peaks, tokens, sure = self._read()
        rows = [at for at, sequence in enumerate(self._sequences) if sequence in wanted]
        check_finite(peaks[rows].astype(np.float32), [self._sequences[at] for at in rows])
        chosen: dict[Choice, tuple[int, TokenLogprob | None]] = {
            self._sequences[at]: (int(tokens[at]), None) for at in rows
        }
        missed = [at for at in rows if not sure[at]]
        if missed and self._missing is not None:
            places = [self._missing.rows.index(at) for at in missed]
            shares = self._missing.shares.index_select(0, sent(np.array(places), self._missing.shares.device))
            samplings = [self._missing.samplings[place] for place in places]
            drawn = draw_filtered(shares, samplings, self._missing.uniforms[places])
            for at, token in zip(missed, drawn.tolist(), strict=True):
                chosen[self._sequences[at]] = (token, None)
                self._states[at].misses = True
        return Reading(chosen, [self._sequences[at] for at in missed])


class DeviceDrawer:
    """The sampling stage on the device, beside the sampler of the same engine, whose states are used."""

    def __init__(self, sampler: BatchedSampler) -> None:
        self._sampler = sampler

    def waits(self, sequence: Choice) -> bool:
        """Whether the next token of a sequence needs the host."""
        wish, state = sequence.call.sampling, sequence.sampler_state
        if wish.logprobs is not None or wish.logit_bias or wish.dry_multiplier:
            return True
        if wish.presence_penalty or wish.frequency_penalty or wish.repetition_penalty != 1:
            return True
        return state is not None and state.misses

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, sequences: Sequence[Choice]) -> DrawnTokens:
        """Choose from logits [sequences, columns] of any float type; nothing here waits for the device."""
        columns, device = logits.shape[1], logits.device
        states = [self._sampler.state_of(sequence, columns) for sequence in sequences]
        peaks, tokens = _highest(logits)
        sure = torch.ones_like(tokens)
        missing = None
        rows = [row for row, state in enumerate(states) if not state.greedy]
        if rows:
            index = sent(np.array(rows, np.int64), device)
            samplings = [states[row].sampling for row in rows]
            shares = _shares(logits.index_select(0, index), peaks.index_select(0, index), samplings)
            uniforms = np.array([_uniform(sequences[row], states[row]) for row in rows])
            for filtered in (False, True):
                some = [at for at, row in enumerate(rows) if states[row].filtered is filtered]
                if not some:
                    continue
                part = shares.index_select(0, sent(np.array(some), device))
                places, targets = sent(np.array([rows[at] for at in some]), device), uniforms[some]
                if filtered:
                    wishes = [samplings[at] for at in some]
                    drawn, is_sure = _draw_filtered(part, wishes, targets)
                    sure.index_copy_(0, places, is_sure.long())
                    missing = Missing([rows[at] for at in some], part, wishes, targets)
                else:
                    drawn = _draw_unfiltered(part, sent(targets, device))
                tokens.index_copy_(0, places, drawn)
        packed = torch.stack((peaks.double(), tokens.double(), sure.double()))
        return DrawnTokens(sequences, states, tokens, fetched(packed), missing)


def _uniform(sequence: Choice, state: State) -> float:
    assert state.uniforms is not None
    return state.uniforms.at(sequence.length - sequence.prompt_length)


def _highest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest value float32 [rows] of each row and its first column int64 [rows]."""
    if logits.is_cuda:
        peaks, tokens = logits.max(-1)
        return peaks.float(), tokens
    peaks_of, tokens_of = highest_of(logits.float())
    return torch.from_numpy(peaks_of), torch.from_numpy(tokens_of)


def _shares(logits: torch.Tensor, peaks: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Softmax at the rows' temperatures, float32 [rows, columns + padding of probability 0]."""
    temperatures = sent(np.array([[one.temperature] for one in samplings], np.float32), logits.device)
    scaled = (logits.float() - peaks[:, None]).div_(temperatures)
    scaled = torch.nn.functional.pad(scaled, (0, -logits.shape[1] % STRETCH), value=float("-inf"))
    return torch.softmax(scaled, -1)


def _first_above(sums: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As `token_draw._first_above`: the first column of each row whose running sum is above the target."""
    last = sums[:, -1]
    targets = torch.minimum(targets, torch.nextafter(last, torch.zeros_like(last)))
    return (sums <= targets[:, None]).sum(1)


def _draw_unfiltered(shares: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """As `token_draw.draw_unfiltered`, on the device: int64 [rows]."""
    stretches = shares.unflatten(1, (-1, STRETCH))
    totals = stretches.sum(-1).double().cumsum(1)
    targets = uniforms * totals[:, -1]
    chosen = _first_above(totals, targets)[:, None]
    before = torch.where(chosen > 0, totals.gather(1, (chosen - 1).clamp_(min=0)), 0.0)[:, 0]
    inside = stretches.gather(1, chosen[:, :, None].expand(-1, 1, STRETCH))[:, 0]
    within = _first_above(inside.double().cumsum(1), targets - before)
    return chosen[:, 0] * STRETCH + within


def _draw_filtered(
    shares: torch.Tensor, samplings: Sequence[Sampling], uniforms: NDArray[np.float64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `token_draw.draw_filtered`, from the likeliest tokens: int64 [rows], and whether each is sure, bool [rows]."""
    width, device = shares.shape[1], shares.device
    filters = filters_of(samplings, width)
    longest = int(filters.top_k[filters.top_k < width].max(initial=0))
    look = 1 + max(_LOOK, min(longest, _WIDEST_LOOK))
    numbers = sent(
        np.stack((filters.top_k, filters.top_p, filters.min_p, uniforms)).astype(np.float64), device
    )
    top_k, top_p, min_p, targets = numbers[:, :, None].unbind()
    found = shares.topk(min(look, width))
    ids, order = found.indices.sort(1)
    values, order = found.values.gather(1, order).sort(dim=1, descending=True, stable=True)
    ids, near = ids.gather(1, order), values.double()
    least = (near[:, :1] * min_p).clamp_(min=LEAST)
    sums = near.cumsum(1)
    kept = (near > least) & (torch.arange(near.shape[1], device=device) < top_k)
    kept[:, 1:] &= sums[:, :-1] < top_p
    counts = kept.sum(1, keepdim=True).clamp_(min=1)
    ends = near.gather(1, counts - 1)
    sure = (ends > near[:, -1:]) | (near.shape[1] == width)
    kept_sums = torch.where(kept, near, 0.0).cumsum(1)
    chosen = _first_above(kept_sums, (targets * kept_sums[:, -1:])[:, 0])
    return ids.gather(1, chosen[:, None])[:, 0], sure[:, 0]
