"""MaxSim over slices of pairs, and pairs that share their queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipc.errors import InvalidInput
from ipc.wire.messages import Call, EncodeCall, InputItem, ScoreCall
from workers.adapters.base import Adapter, AdapterSpec, ItemFailure, LoadContext, Prepared, SparseRows
from workers.adapters.shared import late_interaction
from workers.adapters.shared.heads import paired_dots
from workers.adapters.shared.late_interaction import LateInteraction, PairBatch, max_sim, slices

WIDTH = 4


def batch_of(queries: Sequence[int], documents: Sequence[tuple[int, int]]) -> PairBatch:
    """Queries by their rows, documents by (query, rows)."""
    owners = np.array([owner for owner, _ in documents], np.int64)
    rows = np.array([count for _, count in documents], np.int64)
    return PairBatch(None, owners, np.array(queries, np.int64), rows, [], np.arange(len(documents)))


def expected_of(vectors: torch.Tensor, batch: PairBatch) -> list[float]:
    """Pair by pair, in double precision."""
    found = vectors.double().split([*batch.query_rows.tolist(), *batch.document_rows.tolist()])
    queries, documents = found[: len(batch.query_rows)], found[len(batch.query_rows) :]
    return [
        float((queries[owner] @ document.T).max(dim=1).values.sum()) if len(document) else 0.0
        for owner, document in zip(batch.owners, documents, strict=True)
    ]


@st.composite
def batches(draw: st.DrawFn) -> PairBatch:
    """Some queries, each with at least one document."""
    queries = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    documents = [
        (owner, rows)
        for owner in range(len(queries))
        for rows in draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    ]
    return batch_of(queries, documents)


@given(batch=batches(), elements=st.sampled_from([1, 8, 40, 10_000]))
def test_scores_do_not_depend_on_how_pairs_are_cut_into_slices(batch: PairBatch, elements: int) -> None:
    rows = int(batch.query_rows.sum() + batch.document_rows.sum())
    vectors = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    saved = late_interaction.SLICE_ELEMENTS["cpu"]
    late_interaction.SLICE_ELEMENTS["cpu"] = elements
    try:
        found = max_sim(vectors, batch)
    finally:
        late_interaction.SLICE_ELEMENTS["cpu"] = saved
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected_of(vectors, batch), abs=1e-5)


@given(batch=batches(), elements=st.integers(1, 200))
def test_slices_cover_all_pairs_within_their_bound(batch: PairBatch, elements: int) -> None:
    found = list(slices(batch.owners, batch.query_rows, batch.document_rows, elements))
    assert [part.first for part in found] == [0, *(part.last for part in found[:-1])]
    assert found[-1].last == len(batch.owners)
    for part in found:
        assert (part.query, part.query_end) == (batch.owners[part.first], batch.owners[part.last - 1] + 1)
        products = (
            batch.query_rows[part.query : part.query_end].sum()
            * batch.document_rows[part.first : part.last].sum()
        )
        assert products <= elements or part.last == part.first + 1


class Letters(Adapter):
    """One vector per letter, by the letter; a text with "!" cannot be prepared."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="letters", operations=("encode", "score"), inputs=("text",), outputs=("multivector",)
    )

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """Nothing to load."""
        return cls()

    max_sequence_length = 512
    memory_bytes = 0
    dims: ClassVar[Mapping[str, int]] = {"multivector": WIDTH}  # type: ignore[assignment]

    def collate(self, prepared: Sequence[Prepared]) -> list[str]:
        """The texts."""
        return [item.payload for item in prepared]

    def encode(self, batch: Any, outputs: frozenset[str]) -> dict[str, torch.Tensor | SparseRows]:
        """Vectors by letter."""
        self.encoded = list(batch)
        return {"multivector": torch.stack([vector_of(letter) for text in batch for letter in text])}


class LateLetters(LateInteraction, Letters):
    """The same with scores; it notes how its sides were asked for."""

    def __init__(self) -> None:
        self.asked: list[EncodeCall] = []

    def sides(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """A letter is a token."""
        assert isinstance(call, EncodeCall)
        self.asked.append(call)
        texts = [(call.instruction or "") + (item.text or "") for item in items]
        return [
            ItemFailure("INVALID_INPUT", "a bang")
            if "!" in text
            else Prepared(text, len(text), len(text) > 5, len(text))
            for text in texts
        ]


def vector_of(letter: str) -> torch.Tensor:
    """float32 [WIDTH]."""
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(ord(letter)))


def match(query: str, document: str) -> float:
    """MaxSim of two texts."""
    rows = [torch.stack([vector_of(letter) for letter in text]).double() for text in (query, document)]
    return float((rows[0] @ rows[1].T).max(dim=1).values.sum())


def call_of(query: str, *documents: str, **fields: Any) -> ScoreCall:
    """A score call over texts."""
    return ScoreCall([InputItem(text) for text in documents], InputItem(query), **fields)


def pairs_of(adapter: LateLetters, call: ScoreCall) -> list[Prepared]:
    """All items of a call, prepared."""
    return [item for item in adapter.prepare(call.items, call) if isinstance(item, Prepared)]


def test_each_distinct_query_of_a_batch_is_encoded_once_and_pairs_keep_their_order() -> None:
    adapter = LateLetters()
    first = pairs_of(adapter, call_of("ab", "xyz", "b", "cab"))
    second = pairs_of(adapter, call_of("zq", "za", "q"))
    mixed = [first[2], second[0], first[0], second[1], first[1]]
    scores = adapter.score(adapter.collate(mixed))
    assert adapter.encoded == ["ab", "zq", "cab", "xyz", "b", "za", "q"]
    wanted = [match("ab", "cab"), match("zq", "za"), match("ab", "xyz"), match("zq", "q"), match("ab", "b")]
    assert scores.tolist() == pytest.approx(wanted, abs=1e-5)


def test_a_pair_costs_both_its_sides_and_is_cut_when_one_of_them_is() -> None:
    adapter = LateLetters()
    assert [(p.cost, p.truncated) for p in pairs_of(adapter, call_of("ab", "c", "longer"))] == [
        (3, False),
        (8, True),
    ]
    assert [p.truncated for p in pairs_of(adapter, call_of("a long query", "c"))] == [True]


def test_instruction_goes_to_the_query_and_only_documents_are_split() -> None:
    adapter = LateLetters()
    pairs_of(adapter, call_of("ab", "c", instruction="i", overflow="chunk", options={"k": 1}))
    query, documents = adapter.asked
    assert (query.is_query, query.instruction, query.overflow, query.options) == (
        True,
        "i",
        "truncate",
        {"k": 1},
    )
    assert (documents.is_query, documents.instruction, documents.overflow) == (False, None, "chunk")


def test_a_document_that_fails_stands_alone_and_a_query_that_fails_ends_the_call() -> None:
    adapter = LateLetters()
    call = call_of("ab", "c", "!", "d")
    assert [type(item) for item in adapter.prepare(call.items, call)] == [Prepared, ItemFailure, Prepared]
    call = call_of("!", "c")
    with pytest.raises(InvalidInput, match="query: a bang"):
        adapter.prepare(call.items, call)


def test_items_to_encode_pass_through() -> None:
    adapter = LateLetters()
    call = EncodeCall([InputItem("ab")], ["multivector"])
    [item] = adapter.prepare(call.items, call)
    assert isinstance(item, Prepared) and adapter.collate([item]) == ["ab"]


def test_sparse_products_count_only_shared_terms() -> None:
    def rows(*vectors: dict[int, float]) -> SparseRows:
        return SparseRows(
            [np.array(sorted(vector), np.int32) for vector in vectors],
            [np.array([vector[term] for term in sorted(vector)], np.float32) for vector in vectors],
        )

    queries = rows({1: 2.0, 9: 1.0}, {}, {0: 1.0, 3: 4.0})
    documents = rows({1: 3.0, 3: 5.0}, {9: 2.0, 1: 1.0}, {1: 1.0}, {3: 0.5, 9: 7.0}, {})
    owners = np.array([0, 0, 1, 2, 2])
    assert paired_dots(queries, documents, owners, 10).tolist() == [6.0, 4.0, 0.0, 2.0, 0.0]
    assert paired_dots(rows({}), rows({1: 1.0}), np.array([0]), 10).tolist() == [0.0]
