"""Packed rows and the attention over them, against each sequence on its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import varlen as reference_kernels
from tests.tiny.models import build
from workers.adapters.shared import encoder as encoder_module
from workers.adapters.shared.checkpoint import build_transformer
from workers.adapters.shared.classification import SequenceClassifier
from workers.adapters.shared.encoder import (
    WINDOW_BLOCK,
    TextEncoder,
    VarlenKernel,
    attend_runs,
    select_kernel,
)
from workers.adapters.shared.linears import LaidOutLinear
from workers.adapters.shared.packing import COUNTED, PackedBatch, Positions, TokenSequence, filled, pack

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=12)
CPU = torch.device("cpu")


def sequences(lengths: list[int], skip: int = 0) -> list[TokenSequence]:
    """Sequences whose ids tell their number: 100, 101, ... for the first, 200, ... for the second."""
    return [TokenSequence(np.arange(n) + 100 * (i + 1), skip=skip) for i, n in enumerate(lengths)]


def attend_alone(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, reach: int | None
) -> torch.Tensor:
    """Attention of one sequence [heads, n, dim] by its formula, in float64."""
    groups = query.shape[0] // key.shape[0]
    q, k, v = (
        query.double(),
        key.double().repeat_interleave(groups, 0),
        value.double().repeat_interleave(groups, 0),
    )
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    at = torch.arange(q.shape[1])
    distance = at[:, None] - at[None]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance < 0
    if reach is not None:
        hidden |= distance.abs() > reach
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def states(tokens: int, heads: int) -> torch.Tensor:
    """Random [1, heads, T, 8] in the memory order of a model: heads beside each other per token."""
    generator = torch.Generator().manual_seed(tokens * 31 + heads)
    return torch.randn((1, tokens, heads, 8), generator=generator).transpose(1, 2)


def assert_attention(
    got: torch.Tensor,
    batch: PackedBatch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    reach: int | None,
) -> None:
    """Compare [1, T, heads, dim] with every sequence alone."""
    bounds = batch.layout.cu_seq_lens.tolist()
    for start, stop in itertools.pairwise(bounds):
        wanted = attend_alone(q[0, :, start:stop], k[0, :, start:stop], v[0, :, start:stop], causal, reach)
        torch.testing.assert_close(got[0, start:stop].transpose(0, 1).double(), wanted, atol=1e-5, rtol=1e-5)


@given(LENGTHS)
def test_a_row_holds_every_sequence_once_and_restore_finds_it(lengths: list[int]) -> None:
    batch = pack(sequences(lengths), positions=Positions(2))
    bounds = batch.layout.cu_seq_lens.tolist()
    for number, length in enumerate(lengths):
        at = int(batch.restore[number])
        ids = batch.ids[0, bounds[at] : bounds[at + 1]]
        assert ids.tolist() == list(range(100 * (number + 1), 100 * (number + 1) + length))
        assert batch.positions[0, bounds[at] : bounds[at + 1]].tolist() == list(range(2, length + 2))
        assert (int(batch.layout.first[at]), int(batch.layout.last[at])) == (bounds[at], bounds[at + 1] - 1)
    assert bounds[-1] == sum(lengths)


@given(LENGTHS)
def test_runs_cover_the_row_with_falling_lengths(lengths: list[int]) -> None:
    layout = pack(sequences(lengths)).layout
    found = [run.length for run in layout.runs]
    assert found == sorted(set(lengths), reverse=True)
    assert [run.rows for run in layout.runs] == [lengths.count(length) for length in found]
    assert [run.start for run in layout.runs] == [sum(n for n in lengths if n > length) for length in found]
    assert layout.max_len == max(lengths)


def test_segment_ids_and_skips_travel_only_where_there_are_any() -> None:
    plain = pack(sequences([3, 2]))
    assert plain.types is None and plain.skips is None
    typed = TokenSequence(np.array([7, 8]), types=np.array([0, 1]), skip=1)
    batch = pack([typed, *sequences([3])])
    assert batch.types is not None and batch.types.tolist() == [[0, 0, 0, 0, 1]]
    assert batch.skips is not None and batch.skips.tolist() == [0, 1]


@pytest.mark.parametrize("bad", [[], [TokenSequence(np.array([], dtype=np.int64))]])
def test_an_empty_batch_or_sequence_is_refused(bad: list[TokenSequence]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        pack(bad)


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.booleans(), st.sampled_from([None, 1, 3]), st.sampled_from([1, 2, 4]))
def test_attention_by_runs_equals_each_sequence_alone(
    lengths: list[int], causal: bool, reach: int | None, kv_heads: int
) -> None:
    batch = pack(sequences(lengths))
    q, k, v = states(sum(lengths), 4), states(sum(lengths), kv_heads), states(sum(lengths), kv_heads) * 2
    got = attend_runs(q, k, v, batch.layout, 8**-0.5, causal, reach)
    assert_attention(got, batch, q, k, v, causal, reach)


@pytest.mark.parametrize("causal", [False, True])
def test_windows_across_several_blocks_equal_each_sequence_alone(causal: bool) -> None:
    lengths = [2 * WINDOW_BLOCK + 17, WINDOW_BLOCK + 1, WINDOW_BLOCK + 1, 20]
    batch = pack(sequences(lengths))
    q, k, v = states(sum(lengths), 2), states(sum(lengths), 2), states(sum(lengths), 2) * 2
    got = attend_runs(q, k, v, batch.layout, 8**-0.5, causal, 40)
    assert_attention(got, batch, q, k, v, causal, 40)


@pytest.mark.parametrize("function", [reference_kernels.varlen_attn_2_11, reference_kernels.varlen_attn_2_13])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("reach", [None, 3])
def test_the_varlen_call_means_the_same_in_every_torch(
    function: Callable[..., torch.Tensor], causal: bool, reach: int | None
) -> None:
    batch = pack(sequences([9, 4, 4, 1]))
    q, k, v = states(18, 4), states(18, 2), states(18, 2) * 2
    got = VarlenKernel(function)(q, k, v, batch.layout, 8**-0.5, causal, reach)
    assert_attention(got, batch, q, k, v, causal, reach)


def test_a_varlen_kernel_without_windows_is_not_used() -> None:
    with pytest.raises(NotImplementedError, match="scale, window_size"):
        VarlenKernel(reference_kernels.varlen_attn_2_10)


def test_cpu_has_no_varlen_kernel() -> None:
    assert select_kernel(CPU, torch.bfloat16, 4, 4, 64) is None


def test_a_packed_result_that_differs_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = build("dense_xlmr", tmp_path / "model")
    batch_of = [TokenSequence(np.arange(10, 10 + n)) for n in (5, 3, 3)]
    right = TextEncoder(build_transformer(directory, device=CPU, dtype=torch.float32))
    monkeypatch.setattr(encoder_module, "positions_of", lambda model: COUNTED)
    wrong = TextEncoder(build_transformer(directory, device=CPU, dtype=torch.float32))
    assert (right.packed, wrong.packed) == (True, False)
    assert any("results differ" in record.message for record in caplog.records)
    with torch.inference_mode():
        torch.testing.assert_close(
            wrong.token_rows(wrong.pack(batch_of)),
            right.token_rows(right.pack(batch_of)),
            atol=1e-4,
            rtol=1e-4,
        )


@pytest.mark.parametrize("kind", [TextEncoder, SequenceClassifier])
def test_a_proof_that_lacks_memory_fails_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[..., object]
) -> None:
    def without_memory(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model: Any = build_transformer(build("dense_xlmr", tmp_path / "model"), device=CPU, dtype=torch.float32)
    if kind is SequenceClassifier:
        model = SequenceClassifier.factory.from_config(model.config).eval()
    monkeypatch.setattr(TextEncoder, "_packed_rows", without_memory)
    with pytest.raises(torch.OutOfMemoryError):
        kind(model)


def test_rows_have_few_sizes_that_are_little_larger() -> None:
    sizes = set()
    for tokens in range(1, 2049):
        size = filled(pack(sequences([tokens])), 0, 0).ids.shape[1]
        assert tokens <= size <= max(32, tokens * 17 / 16)
        sizes.add(size)
    assert set(range(1, 33)) <= sizes and len(sizes) == 32 + 6 * 16


@pytest.mark.parametrize("name", ["dense_xlmr", "dense_modernbert"])
def test_on_cpu_linear_layers_of_onednn_see_few_numbers_of_rows_and_results_stay(
    tmp_path: Path, name: str
) -> None:
    model = build_transformer(build(name, tmp_path / "model"), device=CPU, dtype=torch.float32)
    encoder = TextEncoder(model)
    assert encoder.packed and not encoder._fills, "the library of torch for float32 keeps nothing"
    layer = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
    seen: set[int] = set()
    layer.register_forward_hook(lambda module, inputs, output: seen.add(inputs[0].shape[-2]))
    with torch.inference_mode():
        for lengths in ([33, 20, 1], [40], [50, 50, 50], [64, 7, 7, 7], [3]):
            given = [TokenSequence(np.arange(10, 10 + n)) for n in lengths]
            encoder._fills = False
            plain = encoder.token_rows(encoder.pack(given))
            seen.clear()
            encoder._fills = True
            rows = encoder.token_rows(encoder.pack(given))
            assert seen == {filled(pack(given), 0, 0).ids.shape[1]} and rows.shape == plain.shape
            torch.testing.assert_close(rows, plain, atol=1e-5, rtol=1e-5)


def test_rows_are_filled_where_onednn_runs_layers(tmp_path: Path) -> None:
    model = build_transformer(build("dense_xlmr", tmp_path / "model"), device=CPU, dtype=torch.float32)
    model.encoder.layer[0].intermediate.dense = LaidOutLinear(model.encoder.layer[0].intermediate.dense)
    assert TextEncoder(model)._fills
    assert TextEncoder(build_transformer(tmp_path / "model", device=CPU, dtype=torch.bfloat16))._fills
