"""An item of many windows runs in parts: with the same answer, within the token budget, with queries in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ipc.errors import DeadlineExceeded
from ipc.wire.extraction import Extraction
from ipc.wire.messages import Call, EncodeCall, ExtractCall, InputItem, ScoreCall
from tests.tiny.models import build
from tests.tiny.pictures import encoded, picture
from workers.adapters.base import Adapter, LoadContext, Prepared, SparseRows
from workers.adapters.registry import resolve
from workers.adapters.shared.encoder import TextEncoder
from workers.adapters.shared.packing import PackedBatch, divided
from workers.device import stepping
from workers.device.stepping import Activity
from workers.scheduling.job import Piece

WINDOW, BUDGET = 16, 128
TEXT = " ".join(["The river turns the wheel, and Marie Curie lives in Paris."] * 30)
ITEMS = [InputItem("a bridge"), InputItem(TEXT), InputItem("water")]
ENCODERS = {
    "dense_mean": ("dense", ("dense",)),
    "bge_m3": ("bge_m3", ("dense", "multivector", "sparse")),
    "plain_splade": ("splade", ("sparse",)),
    "colbert_pylate": ("colbert", ("multivector",)),
}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Adapter]:
    """Loads a tiny model whose windows are short, with a token budget."""
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("split")
    context = LoadContext(
        Path(), "m", torch.device("cpu"), torch.float32, WINDOW, {}, lambda phase, part: None
    )

    def loaded(family: str, tiny: str, batch_tokens: int) -> Adapter:
        directory = place / tiny if (place / tiny).exists() else build(tiny, place / tiny)
        return resolve(family).load(replace(context, directory=directory, batch_tokens=batch_tokens))

    return loaded


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every forward pass from now on."""
    tokens: list[int] = []
    run = TextEncoder.token_rows

    def noted(self: TextEncoder, batch: PackedBatch) -> torch.Tensor:
        tokens.append(int(batch.ids.shape[1]))
        return run(self, batch)

    monkeypatch.setattr(TextEncoder, "token_rows", noted)
    return tokens


def batch_of(adapter: Adapter, call: Call) -> Any:
    """The items of a call as one batch."""
    adapter.refuse_unsupported(call)
    prepared = adapter.prepare(call.items, call)
    return adapter.collate([item for item in prepared if isinstance(item, Prepared)])


def assert_alike(found: torch.Tensor | SparseRows, expected: torch.Tensor | SparseRows) -> None:
    """Equal but for the last bits."""
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        return
    assert isinstance(found, SparseRows) and isinstance(expected, SparseRows)
    for mine, other in zip(found.indices, expected.indices, strict=True):
        np.testing.assert_array_equal(mine, other)
    for mine, other in zip(found.values, expected.values, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("tiny", ENCODERS)
def test_parts_give_the_vectors_that_one_pass_gives(
    load: Callable[..., Adapter], passes: list[int], tiny: str
) -> None:
    family, outputs = ENCODERS[tiny]
    call = EncodeCall(ITEMS, list(outputs), overflow="chunk")
    whole = load(family, tiny, 1 << 20)
    passes.clear()
    expected = whole.encode(batch_of(whole, call), frozenset(outputs))
    assert len(passes) == 1 and passes[0] > 2 * BUDGET
    divided_adapter = load(family, tiny, BUDGET)
    passes.clear()
    found = divided_adapter.encode(batch_of(divided_adapter, call), frozenset(outputs))
    assert len(passes) > 8 and max(passes) <= BUDGET // 4
    assert found.keys() == expected.keys() == set(outputs)
    for name in outputs:
        assert_alike(found[name], expected[name])


@pytest.mark.parametrize("tiny", ["bge_m3", "colbert_pylate"])
def test_parts_give_the_scores_that_one_pass_gives(
    load: Callable[..., Adapter], passes: list[int], monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    options = {"score_mode": "hybrid"} if tiny == "bge_m3" else {}
    call = ScoreCall(ITEMS, InputItem("who turns the wheel"), options=options, overflow="chunk")
    whole = load(ENCODERS[tiny][0], tiny, 1 << 20)
    expected = whole.score(batch_of(whole, call))
    adapter = load(ENCODERS[tiny][0], tiny, BUDGET)
    monkeypatch.setattr("workers.adapters.shared.late_interaction.SLICE_ELEMENTS", {"cpu": 64, "cuda": 64})
    passes.clear()
    found = adapter.score(batch_of(adapter, call))
    assert max(passes) <= BUDGET // 4
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_parts_find_the_entities_that_one_pass_finds(load: Callable[..., Adapter], passes: list[int]) -> None:
    call = ExtractCall(ITEMS, options={"aggregation_strategy": "simple"}, overflow="chunk")
    whole, adapter = load("ner", "ner", 1 << 20), load("ner", "ner", BUDGET)
    expected = whole.extract(batch_of(whole, call))
    passes.clear()
    found = adapter.extract(batch_of(adapter, call))
    assert len(passes) > 8 and max(passes) <= BUDGET // 4

    def places(items: Any) -> list[list[tuple[Any, ...]]]:
        return [[(one.label, one.start, one.end) for one in item.entities] for item in items]

    assert places(found) == places(expected) and any(places(found))


def test_many_labels_beside_a_text_run_in_parts(load: Callable[..., Adapter], passes: list[int]) -> None:
    call = ExtractCall(ITEMS, [f"river {number}" for number in range(40)], options={"multi_label": True})
    whole, adapter = load("nli_zero_shot", "nli", 1 << 20), load("nli_zero_shot", "nli", BUDGET)
    expected = whole.extract(batch_of(whole, call))
    passes.clear()
    found = adapter.extract(batch_of(adapter, call))
    assert len(passes) > 8 and max(passes) <= BUDGET // 4
    for mine, other in zip(found, expected, strict=True):
        scores = [{one.label: one.score for one in item.classifications} for item in (mine, other)]  # type: ignore[union-attr]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_windows_of_a_page_run_in_parts(load: Callable[..., Adapter]) -> None:
    words = ["river", "bridge", "wheel", "water"] * 50
    boxes = [[7 * at % 80, at % 60, 9, 4] for at in range(len(words))]
    page = InputItem(images=[encoded(picture(1))], metadata={"words": words, "boxes": boxes})
    call = ExtractCall([page], instruction="who?", options={"top_k": 5}, overflow="chunk")
    answers, steps = [], []
    for tokens in (1 << 20, BUDGET):
        adapter = load("document_qa", "layoutlm", tokens)
        steps.append(0)

        def count() -> None:
            steps[-1] += 1

        with stepping.Running(Activity(), [], count):
            [found] = adapter.extract(batch_of(adapter, call))
        assert isinstance(found, Extraction)
        answers.append([(one.text, one.bbox, pytest.approx(one.score, abs=1e-5)) for one in found.entities])
    assert answers[0] == answers[1] and len(answers[0]) == 5
    assert steps[0] == 0 and steps[1] > 4


def test_what_fits_the_budget_is_one_pass_without_steps(
    load: Callable[..., Adapter], passes: list[int]
) -> None:
    adapter, steps = load("dense", "dense_mean", BUDGET), []
    call = EncodeCall([InputItem("a bridge")] * 20, ["dense"], overflow="chunk")
    batch = batch_of(adapter, call)
    passes.clear()
    with stepping.Running(Activity(), [], lambda: steps.append(1)):
        adapter.encode(batch, frozenset(["dense"]))
    assert len(passes) == 1 and not steps


def test_between_two_parts_others_run_and_what_nobody_waits_for_ends(
    load: Callable[..., Adapter], passes: list[int]
) -> None:
    adapter = load("dense", "dense_mean", BUDGET)
    batch = batch_of(adapter, EncodeCall([InputItem(TEXT)], ["dense"], overflow="chunk"))
    job = SimpleNamespace(state="open", work=SimpleNamespace(deadline_ns=1 << 62))
    pieces: list[Piece] = [SimpleNamespace(job=job)]  # type: ignore[list-item]
    passes.clear()
    steps: list[int] = []
    with stepping.Running(Activity(), pieces, lambda: steps.append(len(passes))):
        adapter.encode(batch, frozenset(["dense"]))
    assert steps == list(range(1, len(passes)))

    def cancelled() -> None:
        job.state = "cancelled" if len(passes) == 3 else "open"

    passes.clear()
    with stepping.Running(Activity(), pieces, cancelled), pytest.raises(DeadlineExceeded):
        adapter.encode(batch, frozenset(["dense"]))
    assert len(passes) == 3


@pytest.mark.parametrize(
    ("tokens", "budget", "parts"),
    [
        ([], 8, []),
        ([100], 8, [1]),
        ([4, 4], 8, [2]),
        ([1, 1, 4, 5, 1, 1], 8, [2, 1, 1, 2]),
        ([3, 3, 3], 8, [1, 1, 1]),
        ([2, 2, 2, 2, 2], 16, [5]),
        ([2, 2, 2, 2, 2, 7], 16, [2, 2, 1, 1]),
    ],
)
def test_only_what_is_over_the_budget_is_divided(tokens: list[int], budget: int, parts: list[int]) -> None:
    found = divided(tokens, budget)
    assert [len(tokens[part]) for part in found] == parts
    assert [count for part in found for count in tokens[part]] == tokens
