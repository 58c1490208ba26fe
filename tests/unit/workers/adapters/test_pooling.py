"""Pooling over packed rows, against a loop over the sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.adapters.shared.heads import pool
from workers.adapters.shared.packing import TokenSequence, pack
from workers.adapters.shared.sentence_transformers_layout import MODES, resolve_modes

CASES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 10)), min_size=1, max_size=8)


def pooled_alone(vectors: torch.Tensor, skip: int, mode: str) -> torch.Tensor:
    """One sequence's [n, width] pooled by the definition of the mode."""
    skip = skip if skip < len(vectors) else 0
    kept = vectors[skip:].double()
    weights = torch.arange(skip + 1, len(vectors) + 1).double()[:, None]
    return {
        "cls": lambda: kept[0],
        "lasttoken": lambda: kept[-1],
        "max": lambda: kept.max(0).values,
        "mean": lambda: kept.mean(0),
        "mean_sqrt_len_tokens": lambda: kept.sum(0) / len(kept) ** 0.5,
        "weightedmean": lambda: (kept * weights).sum(0) / weights.sum(),
    }[mode]()


@settings(deadline=None)
@given(CASES, st.sampled_from(MODES), st.booleans())
def test_each_mode_equals_its_definition(cases: list[tuple[int, int]], mode: str, skipping: bool) -> None:
    batch = pack([TokenSequence(np.arange(n), skip=skip * skipping) for n, skip in cases])
    rows = torch.randn((batch.ids.shape[1], 5), generator=torch.Generator().manual_seed(1))
    got = pool(rows, batch.layout, (mode,), batch.skips)[batch.restore]
    for number, (_, skip) in enumerate(cases):
        at = int(batch.restore[number])
        own = rows[int(batch.layout.first[at]) : int(batch.layout.last[at]) + 1]
        wanted = pooled_alone(own, skip * skipping, mode)
        torch.testing.assert_close(got[number].double(), wanted, atol=1e-5, rtol=1e-5)


def test_several_modes_lie_side_by_side_in_the_order_given() -> None:
    batch = pack([TokenSequence(np.arange(3)), TokenSequence(np.arange(2))])
    rows = torch.randn((5, 4), generator=torch.Generator().manual_seed(2))
    got = pool(rows, batch.layout, ("max", "cls", "mean"))
    alone = [pool(rows, batch.layout, (mode,)) for mode in ("max", "cls", "mean")]
    torch.testing.assert_close(got, torch.cat(alone, dim=1))


def test_half_precision_is_summed_in_float32() -> None:
    batch = pack([TokenSequence(np.arange(5000))])
    rows = torch.full((5000, 2), 1.01, dtype=torch.bfloat16)
    got = pool(rows, batch.layout, ("mean",))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, rows[:1].float(), atol=1e-5, rtol=0)


def test_mode_names_have_short_forms() -> None:
    assert resolve_modes("last") == ("lasttoken",)
    assert resolve_modes(["cls", "mean_sqrt_len"]) == ("cls", "mean_sqrt_len_tokens")


@pytest.mark.parametrize("bad", ["median", [], ["mean", "median"]])
def test_an_unknown_mode_is_refused(bad: str | list[str]) -> None:
    with pytest.raises(ValueError, match="unknown pooling"):
        resolve_modes(bad)
