"""The proof at load that a model gives a sequence the same result in company as alone.

1. `proof_sequences` draws sequences of uneven lengths. Some hold the ids from which models derive something: padding
   (positions), ends of a text (pooling), masks, unknown and added tokens (`odd_ids`).
2. A family runs each of them alone, as the model's own library does, and then all of them together, in the fastest way
   first. `fault` compares row by row, so that a few wrong rows do not hide among many right ones.
3. The family keeps the first way without a fault. Of the padded ways `proven_cut` finds the widest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from workers.adapters.shared.known_ids import embedding_rows
from workers.adapters.shared.packing import TokenSequence
from workers.adapters.shared.rectangles import ALONE, EQUAL, PADDED, Cut
from workers.adapters.shared.rope import LengthClasses
from workers.device.oom import is_out_of_memory
from workers.device.varlen import HALF

log = logging.getLogger(__name__)

_NARROWER = ((EQUAL, "only sequences of one length together"), (ALONE, "each sequence alone"))
_LENGTHS = (3, 150, 17, 17, 1, 40)
"""Lengths of sequences of ordinary tokens: repeated, single-token and longer than common sliding windows."""
_ODD_LENGTHS = (38, 21, 17, 15, 9, 8, 1)
"""Lengths of sequences with odd tokens. Some are a little shorter than others, and so are padded beside those."""
_ODD_SHARE = 0.3
_ODDEST = 8
"""So many of the odd ids, those of the model's own config first, stand for half of the odd tokens."""


def odd_ids(model: Any, others: Iterable[int]) -> list[int]:
    """The ids that the model's config names, then `others`, as far as the model has embeddings for them."""
    config, rows = model.config.get_text_config(), embedding_rows(model)
    named = [
        value for name, value in config.to_dict().items() if name.endswith(("_token_id", "_token_index"))
    ]
    flat = [one for value in named for one in (value if isinstance(value, list) else [value])]
    ids = dict.fromkeys([*flat, *sorted(others)])
    return [one for one in ids if isinstance(one, int) and not isinstance(one, bool) and 0 <= one < rows]


def proof_sequences(rows: int, odd: Sequence[int], limit: int | None) -> list[TokenSequence]:
    """The same sequences in every call, of ids below `rows` and of at most `limit` tokens."""
    generator = torch.Generator().manual_seed(0)
    ordinary = torch.ones(rows, dtype=torch.bool)
    ordinary[list(odd)] = False
    candidates = ordinary.nonzero()[:, 0] if ordinary.any() else torch.arange(rows)

    def drawn(length: int) -> torch.Tensor:
        count = min(length, limit or length)
        return candidates[torch.randint(len(candidates), (count,), generator=generator)]

    plain = [drawn(length) for length in _LENGTHS]
    mixed = [_mixed(drawn(length), odd, generator) for length in _ODD_LENGTHS] if odd else []
    return [TokenSequence(ids.numpy()) for ids in (*plain, *mixed)]


def _mixed(ids: torch.Tensor, odd: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """`ids` with odd ones among them, also at the end."""
    chosen = torch.rand(len(ids), generator=generator) < _ODD_SHARE
    chosen[-1] = True
    pools = [torch.tensor(odd[:_ODDEST]), torch.tensor(odd)]
    first, second = (pool[torch.randint(len(pool), (len(ids),), generator=generator)] for pool in pools)
    strange = torch.where(torch.rand(len(ids), generator=generator) < 0.5, first, second)
    return torch.where(chosen, strange, ids)


def possible(
    sequences: Iterable[TokenSequence], run: Callable[[TokenSequence], torch.Tensor]
) -> Iterator[tuple[TokenSequence, torch.Tensor]]:
    """Each sequence with its result alone; without those that the model itself refuses, unless it refuses all.

    Raises the error of memory that is short, and the last error of a model that refuses all.
    """
    refusal: Exception | None = None
    any_found = False
    for sequence in sequences:
        try:
            rows = run(sequence)
        except Exception as failure:
            if is_out_of_memory(failure):
                raise
            # NOTE: a model may refuse ids that stand for pictures, or a text without an end.
            refusal = failure
            continue
        any_found = True
        yield sequence, rows
    if not any_found and refusal is not None:
        raise refusal


def fault(run: Callable[[], torch.Tensor], wanted: torch.Tensor) -> str | None:
    """What is wrong with the result of `run` beside the `wanted` rows; None if both agree.

    Raises the error of memory that is short, which says nothing of the model.
    """
    try:
        got = run()
    # NOTE: model code outside ours may raise anything; a slower way remains.
    except Exception as failure:
        if is_out_of_memory(failure):
            raise
        return f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
    if agree(got, wanted):
        return None
    return f"results differ by {difference(got, wanted):.1e}, in one row by {_worst(got, wanted):.1e}"


def proven_cut(
    name: str, run: Callable[[Cut], torch.Tensor], wanted: torch.Tensor, lengths: LengthClasses
) -> Cut:
    """The widest cut with which `run` gives the `wanted` rows; what is refused is logged under the model's `name`."""
    cut = lengths.within(PADDED)
    for narrower, way in _NARROWER:
        reason = fault(partial(run, cut), wanted)
        if reason is None:
            break
        log.warning("%s runs %s: %s", name, way, reason)
        cut = lengths.within(narrower)
    return cut


def zeros_count(run: Callable[[bool], torch.Tensor]) -> bool:
    """Whether segment ids of 0 are something else for a model than none, as in XLNet.

    `run` gives the rows of a sequence with such segment ids, or without.
    """
    try:
        return not agree(run(True), run(False))
    except Exception as failure:
        if is_out_of_memory(failure):
            raise
        # NOTE: a model may refuse segments in any way, and a sequence without an end.
        return False


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference as a share of the norm of `wanted`."""
    return float((got.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-12))


def agree(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether all rows of two results are equal within the precision in which the model computed `wanted`.

    In half precision single rows are less exact than all rows together.
    """
    if got.shape != wanted.shape:
        return False
    half = wanted.dtype in HALF
    return difference(got, wanted) <= (5e-2 if half else 1e-3) and _worst(got, wanted) <= (
        0.2 if half else 1e-3
    )


def _worst(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference of a row as a share of the row's norm, and at least of the mean norm."""
    got, wanted = got.float().flatten(1), wanted.float().flatten(1)
    norms = wanted.norm(dim=1)
    return float(((got - wanted).norm(dim=1) / norms.clamp(min=float(norms.mean()) + 1e-12)).max())
