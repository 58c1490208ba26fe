"""Chooses the next token of many sequences at once from their logits.

1. Rows that want nothing but their highest logit are done with one search of the maximum.
2. The other rows are copied to float32 and changed in the contract's order: DRY, then penalties on the tokens of the
   context, then bias. Log probabilities are taken here.
3. The grammar's mask forbids tokens. A row without a finite highest logit fails.
4. Greedy rows take the highest logit. The others get temperature and softmax, and `token_draw` draws.

Each stage works on all rows that need the stage. What happens to a row depends on the row alone, so a seed gives the
same text whatever else is in the batch. A token of an answer is drawn with the uniform number of its place: a sampling
stage that raises has changed nothing, and another worker can go on with the text.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import isfinite
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ipc.errors import InferenceFailed, InvalidInput
from ipc.wire.streams import TokenLogprob
from workers.generation.scheduler import Sequence as Choice
from workers.generation.scheduler import Unfit
from workers.generation.token_draw import (
    STRETCH,
    Entries,
    Ids,
    RepeatedPassages,
    TokenCounts,
    candidates_of,
    draw_filtered,
    draw_unfiltered,
    floors_of,
    has_filters,
)

_REPEATED = 4
"""Places whose tokens may be drawn again: those of steps that have not landed."""
_COLD = 1e-7
"""Temperatures up to this are greedy."""
LEAST_LOGPROB = -9999.0
"""Stands for the log probability of an impossible token, which JSON could not hold."""
_FORBIDDEN = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1, 0.0, -np.inf
).astype(np.float32)
"""What each byte of a mask adds to the logits of its 8 tokens, float32 [256, 8]."""

Chosen = list[tuple[int, TokenLogprob | None]]
Numbers = NDArray[np.float32]


class NoNextToken(Unfit, InferenceFailed):
    """Some rows of logits have no finite highest value: not a number, infinite, or every token is forbidden.

    `sequences` are those of the rows.
    """

    def __init__(self, sequences: Sequence[Choice]) -> None:
        super().__init__("the model gave no finite score to any token that may come next")
        self.sequences = sequences


def check_bias(bias: Mapping[int, float], vocabulary: int) -> None:
    """Raise `InvalidInput` for the first biased id beyond a vocabulary of so many tokens."""
    for token in bias:
        if not 0 <= token < vocabulary:
            text = f"logit_bias: token id {token} is not below {vocabulary}, the model's vocabulary"
            raise InvalidInput(text, param="logit_bias")


class State:
    """What the sampler keeps of one sequence."""

    def __init__(
        self, sequence: Choice, columns: int, breakers: Callable[[tuple[str, ...]], frozenset[int]]
    ) -> None:
        self.sampling = wish = sequence.call.sampling
        self.greedy = wish.temperature is None or not wish.temperature > _COLD
        self.uniforms = None if self.greedy else Uniforms(_seed_of(sequence), sequence.choice)
        self.counts = self.passages = self.bias = None
        if wish.presence_penalty or wish.frequency_penalty or wish.repetition_penalty != 1:
            self.counts = TokenCounts(sequence.tokens)
        if wish.dry_multiplier:
            self.passages = RepeatedPassages(
                wish.dry_multiplier,
                wish.dry_base,
                wish.dry_allowed_length,
                breakers(wish.dry_sequence_breakers),
            )
        biases = {token: value for token, value in wish.logit_bias.items() if 0 <= token < columns}
        if biases:
            values = np.array(list(biases.values()), np.float32)
            self.bias = Entries(np.array(list(biases), np.int64), values)
        self.changes = bool(self.counts or self.passages or self.bias)
        self.filtered = has_filters(wish, columns)
        self.alternatives = None if wish.logprobs is None else min(wish.logprobs, columns)
        self.misses = False
        """Whether the device could not draw a token of the sequence (`device_token_draw`)."""
        self.plain = self.greedy and not self.changes and self.alternatives is None


def _seed_of(sequence: Choice) -> int | None:
    """The seed of the call, else the one under which any worker draws the same tokens for this request."""
    written = sequence.request.written
    seed = sequence.call.sampling.seed
    return written.seed if seed is None and written is not None else seed


class Uniforms:
    """The uniform numbers of one choice, one for each place in the answer; no two pairs of seed and choice share any.

    A number depends on seed, choice and place alone. So a worker that carries on a text draws what the worker before
    would have drawn.
    """

    def __init__(self, seed: int | None, choice: int) -> None:
        """Without a seed the numbers are those of no other choice."""
        # NOTE: `Random` takes the absolute value of a number, so -1 and 1 would be one seed.
        digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=32).digest()
        self._stream = random.Random() if seed is None else random.Random(int.from_bytes(digest))
        self._next = 0
        self._last: deque[float] = deque(maxlen=_REPEATED)

    def at(self, place: int) -> float:
        """The number of a place, counted from 0. Places may be skipped; the last `_REPEATED` may be asked for again."""
        while self._next <= place:
            self._last.append(self._stream.random())
            self._next += 1
        return self._last[place - self._next]


class _Likely(NamedTuple):
    """The likeliest tokens of a row in falling order, with their logits, and the log of the sum of all exponentials."""

    ids: list[int]
    logits: list[float]
    log_sum: float


class _Scratch:
    """Memory for one matrix of float32, kept between steps: a fresh tensor of this size costs page faults."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def matrix(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """A matrix with any content, which the next call takes over."""
        if self._memory.numel() < rows * columns or self._memory.device != device:
            self._memory = torch.empty(rows * columns, device=device)
        return self._memory[: rows * columns].view(rows, columns)


class BatchedSampler:
    """The sampling stage of one engine; its state of each sequence is in `sampler_state`."""

    def __init__(self, raw_of: Callable[[int], bytes], encode: Callable[[str], Sequence[int]]) -> None:
        """`raw_of(token)` are a token's bytes; `encode(text)` its tokens without any that frame a text."""
        self._raw_of, self._encode = raw_of, encode
        self._breakers = lru_cache(256)(self._encoded_breakers)
        self._changed, self._shares = _Scratch(), _Scratch()

    def _encoded_breakers(self, texts: tuple[str, ...]) -> frozenset[int]:
        """The token that each text ends with behind a letter, as a text at the beginning may be another token."""
        return frozenset(tokens[-1] for text in texts if (tokens := self._encode("a" + text)))

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, sequences: Sequence[Choice]) -> Chosen:
        """The next token of each sequence from its row of `logits` [rows, columns] of any float type.

        There may be more columns than tokens. Log probabilities come with the sequences that ask for them.
        Raises `NoNextToken`.
        """
        columns = logits.shape[1]
        states = [self.state_of(sequence, columns) for sequence in sequences]
        # PERF: the highest of bfloat16 is found much slower than that of a copy as float32.
        direct = logits.is_cuda or logits.dtype == torch.float32
        peaks, tokens = highest_of(logits if direct else self._wide(logits))
        check_finite(peaks, sequences)
        rows = [
            row
            for row, (state, sequence) in enumerate(zip(states, sequences, strict=True))
            if not state.plain or sequence.mask is not None
        ]
        chosen: Chosen = [(token, None) for token in tokens.tolist()]
        if rows:
            part = self._wide(logits if len(rows) == len(logits) else logits[rows])
            results = self._sample_changed(
                part, [sequences[row] for row in rows], [states[row] for row in rows]
            )
            for row, result in zip(rows, results, strict=True):
                chosen[row] = result
        return chosen

    def state_of(self, sequence: Choice, columns: int) -> State:
        """What the sampler keeps of a sequence, made when first asked for."""
        if sequence.sampler_state is None:
            sequence.sampler_state = State(sequence, columns, self._breakers)
        state: State = sequence.sampler_state
        return state

    def _sample_changed(
        self, logits: torch.Tensor, sequences: Sequence[Choice], states: Sequence[State]
    ) -> Chosen:
        """As `sample`, for rows that may be changed: float32 [rows, columns]."""
        if any(state.changes for state in states):
            _change(logits, sequences, states)
        asking = [row for row, state in enumerate(states) if state.alternatives is not None]
        likely = self._likely(logits, asking, [states[row].alternatives or 0 for row in asking])
        _forbid(logits, sequences)
        peaks, tokens = highest_of(logits)
        check_finite(peaks, sequences)
        uniforms = np.array(
            [
                0.0 if state.uniforms is None else state.uniforms.at(len(one.tokens) - one.prompt_length)
                for one, state in zip(sequences, states, strict=True)
            ]
        )
        for filtered in (False, True):
            rows = [row for row, one in enumerate(states) if not one.greedy and one.filtered is filtered]
            if rows:
                shares = self._probabilities(logits, peaks, rows, states)
                if filtered:
                    tokens[rows] = draw_filtered(
                        shares, [states[row].sampling for row in rows], uniforms[rows]
                    )
                else:
                    tokens[rows] = draw_unfiltered(shares, uniforms[rows])
        logprobs: dict[int, TokenLogprob] = {}
        if asking:
            scores = logits[asking, tokens[asking]].tolist()
            for row, near, score in zip(asking, likely, scores, strict=True):
                logprobs[row] = self._logprob(int(tokens[row]), score, near)
        return [(token, logprobs.get(row)) for row, token in enumerate(tokens.tolist())]

    def _wide(self, logits: torch.Tensor) -> torch.Tensor:
        """A float32 copy whose width is a multiple of `STRETCH`; no token is in the columns that are added."""
        rows, columns = logits.shape
        wide = self._changed.matrix(rows, columns + -columns % STRETCH, logits.device)
        wide[:, :columns] = logits
        wide[:, columns:] = float("-inf")
        return wide

    def _likely(self, logits: torch.Tensor, rows: Sequence[int], numbers: Sequence[int]) -> list[_Likely]:
        """For some rows, so many of the likeliest tokens, and what all log probabilities are counted from."""
        if not rows:
            return []
        part = logits if len(rows) == len(logits) else logits[rows]
        # PERF: a softmax is faster than torch's logsumexp. The highest probability is one part in the sum.
        shares = torch.softmax(part, -1, out=self._shares.matrix(len(part), part.shape[1], part.device))
        highest = part.unflatten(1, (-1, STRETCH)).amax(-1)
        log_sums = (highest.amax(-1) - shares.amax(-1).log()).tolist()
        floors = floors_of(highest, np.maximum(np.array(numbers, np.int64), 1))
        likely: list[_Likely] = [_Likely([], [], 0.0)] * len(rows)
        for group, near in candidates_of(part, highest, floors):
            for row, ids, values in zip(group.tolist(), near.ids, near.values, strict=True):
                number = numbers[row]
                likely[row] = _Likely(ids[:number].tolist(), values[:number].tolist(), log_sums[row])
        return likely

    def _probabilities(
        self, logits: torch.Tensor, peaks: Numbers, rows: Sequence[int], states: Sequence[State]
    ) -> torch.Tensor:
        """Softmax of some rows at their temperatures, float32 [rows, columns]."""
        device = logits.device
        chosen = torch.tensor(rows, device=device)
        temperatures = torch.tensor([[states[row].sampling.temperature] for row in rows], device=device)
        scaled = self._shares.matrix(len(rows), logits.shape[1], device)
        torch.index_select(logits, 0, chosen, out=scaled)
        # NOTE: the peak goes first, so that no small temperature makes a number infinite.
        scaled.sub_(torch.from_numpy(peaks[rows, None]).to(device)).div_(temperatures)
        return torch.softmax(scaled, -1, out=scaled)

    def _logprob(self, token: int, score: float, near: _Likely) -> TokenLogprob:
        def finite(logit: float) -> float:
            return max(logit - near.log_sum, LEAST_LOGPROB)

        top = [
            (one, self._raw_of(one), finite(logit)) for one, logit in zip(near.ids, near.logits, strict=True)
        ]
        return TokenLogprob(token, self._raw_of(token), finite(score), top)


def highest_of(logits: torch.Tensor) -> tuple[Numbers, Ids]:
    """The highest value of each row and its first column; a row with a NaN has NaN."""
    if logits.is_cuda:
        peaks, columns = logits.max(-1)
        return peaks.float().cpu().numpy(), columns.cpu().numpy()
    # PERF: torch finds the place of a maximum 3 to 10 times slower than numpy.
    values = logits.numpy()
    tokens = values.argmax(-1)
    return values[np.arange(len(values)), tokens], tokens


def check_finite(peaks: Numbers, sequences: Sequence[Choice]) -> None:
    """Raise `NoNextToken` for the sequences whose highest logits `peaks` [sequences] are not finite."""
    values = peaks.tolist()
    if not all(map(isfinite, values)):
        raise NoNextToken([one for one, peak in zip(sequences, values, strict=True) if not isfinite(peak)])


def _change(logits: torch.Tensor, sequences: Sequence[Choice], states: Sequence[State]) -> None:
    """DRY, then penalties, then bias, in place."""
    both = list(zip(sequences, states, strict=True))
    passages = {
        row: state.passages.update(one.tokens) for row, (one, state) in enumerate(both) if state.passages
    }
    counts = {row: state.counts.update(one.tokens) for row, (one, state) in enumerate(both) if state.counts}
    biases = {row: state.bias for row, state in enumerate(states) if state.bias}
    if passages:
        rows, ids, values = _flat(passages, logits)
        logits[rows, ids] -= values
    if counts:
        rows, ids, number = _flat(counts, logits)
        wishes = [states[row].sampling for row in counts]
        sizes = [len(entries.ids) for entries in counts.values()]
        frequency, presence, repetition = (
            torch.from_numpy(np.repeat(np.array(column, np.float32), sizes)).to(logits.device)
            for column in zip(
                *((one.frequency_penalty, one.presence_penalty, one.repetition_penalty) for one in wishes),
                strict=True,
            )
        )
        near = logits[rows, ids] - number * frequency - presence
        logits[rows, ids] = torch.where(near > 0, near / repetition, near * repetition)
    if biases:
        rows, ids, values = _flat(biases, logits)
        logits[rows, ids] += values


def _flat(
    entries: Mapping[int, Entries], logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, columns and values of entries by row, side by side, on the logits' device."""
    rows = np.repeat(np.array(list(entries), np.int64), [len(one.ids) for one in entries.values()])
    ids = np.concatenate([one.ids for one in entries.values()])
    values = np.concatenate([one.values for one in entries.values()])
    return tuple(torch.from_numpy(one).to(logits.device) for one in (rows, ids, values))  # type: ignore[return-value]


def _forbid(logits: torch.Tensor, sequences: Sequence[Choice]) -> None:
    """Add the masks of grammars, in place; columns beyond a mask are forbidden."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.mask is not None]
    if not rows:
        return
    bits = np.stack([np.asarray(sequences[row].mask, np.int32) for row in rows]).view(np.uint8)
    width = min(bits.shape[1] * 8, logits.shape[1])
    masks = torch.from_numpy(_FORBIDDEN.take(bits, axis=0).reshape(len(rows), -1)).to(logits.device)
    if len(rows) == len(logits):
        logits[:, :width] += masks[:, :width]
    else:
        logits[rows, :width] += masks[:, :width]
    if width < logits.shape[1]:
        logits[rows, width:] = float("-inf")
