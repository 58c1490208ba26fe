"""The order of texts of the web: words first, then an embedding model, and the order of the engine without one."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from frontend.agent.ranking import MOST_ENCODED, PASSAGE_CHARS, Ranking, bm25, passages
from frontend.agent.web import _fitting
from frontend.engine import planning
from frontend.scope import RequestScope
from ipc import deadline
from ipc.catalog.entries import Catalog
from ipc.errors import ConfigError, WorkerLost
from ipc.settings import Settings, load
from ipc.wire.messages import EncodeCall, ModelStatus, Work
from tests.fakes.adapter import vector_of
from tests.fakes.engine import Arrays, InProcessDirectory, InProcessEngine
from tests.unit.frontend.protocols.foreign.test_shared_routes import entry

MODEL = "org/dense"
CATALOG = Catalog([entry(MODEL), entry("org/sparse", outputs={"sparse": {}})])


def _drawn(work: Work, _: Arrays) -> Arrays:
    """The vector of each text, three times as long."""
    return {"dense": np.stack([vector_of(item.text or "", 16) * 3 for item in work.call.items])}


def _lost(*_: Any) -> Arrays:
    raise WorkerLost("the worker died")


def _made(model: Callable[..., Any] = _drawn) -> tuple[Ranking, InProcessEngine]:
    directory = InProcessDirectory(CATALOG, [ModelStatus(MODEL, "loaded", dims=16)])
    engine = InProcessEngine(directory, {MODEL: model})
    services: Any = SimpleNamespace(settings=Settings(), catalog=CATALOG, directory=directory, engine=engine)
    return Ranking(services, MODEL, 5.0), engine


def _scope() -> RequestScope:
    return RequestScope("r", "t", "", time.perf_counter(), deadline.after(3600))


def _best(ranking: Ranking, query: str, texts: list[str]) -> list[int]:
    return asyncio.run(ranking.best(_scope(), query, texts))


def test_scores_of_words_are_those_of_the_formula() -> None:
    texts = ["Rome has hills, rome", "paris", "rome and many more words than others", ""]
    lengths, mean = [4, 1, 7, 0], 3.0
    weight = math.log(1 + (4 - 2 + 0.5) / (2 + 0.5))
    expected = [
        weight * often * 2.2 / (often + 1.2 * (0.25 + 0.75 * length / mean))
        for often, length in zip([2, 0, 1, 0], lengths, strict=True)
    ]
    assert bm25("ROME! unknown", texts) == pytest.approx(expected)
    assert bm25("", texts) == [*bm25("?", ["", ""]), 0.0, 0.0] == [0.0] * 4


def test_the_model_decides_the_order_and_the_record_of_the_run_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    ranking, engine = _made()
    texts = [f"text {number}" for number in range(9)]
    query = vector_of("query", 16)
    expected = sorted(range(9), key=lambda at: -float(vector_of(texts[at], 16) @ query))
    scope = _scope()
    scope.model = "org/chat"
    assert asyncio.run(ranking.best(scope, "query", texts)) == expected
    asked, documents = (work.call for work in engine.works)
    assert isinstance(asked, EncodeCall) and isinstance(documents, EncodeCall)
    assert (asked.is_query, documents.is_query) == (True, False)
    assert (scope.model, scope.phases) == ("org/chat", {})
    assert [lease.releases for lease in engine.leases] == [1, 1]


def test_of_many_texts_those_with_words_of_the_query_reach_the_model() -> None:
    ranking, engine = _made()
    texts = [f"text {number}" for number in range(MOST_ENCODED + 20)]
    texts[-1] = "about rome"
    found = _best(ranking, "rome", texts)
    assert len(found) == len(set(found)) == MOST_ENCODED and len(texts) - 1 in found
    assert len(engine.works[1].call.items) == MOST_ENCODED
    assert sorted(found) == [*range(MOST_ENCODED - 1), len(texts) - 1]


def test_texts_stay_in_their_order_without_a_model_that_answers(caplog: pytest.LogCaptureFixture) -> None:
    ranking, engine = _made(_lost)
    assert _best(ranking, "b", ["a", "b", "c"]) == [0, 1, 2]
    assert "org/dense: texts of the web stay in their order: the worker died" in caplog.text
    assert len(engine.works) == 1


@pytest.mark.parametrize("texts", [[], ["one"]])
def test_a_single_text_is_not_ranked(texts: list[str]) -> None:
    ranking, engine = _made()
    assert _best(ranking, "query", texts) == [*range(len(texts))]
    assert not engine.works


def test_passages_are_whole_lines_and_long_lines_are_cut() -> None:
    lines = ["a" * 400, "b" * 400, "c" * 400, "", "d" * 2500]
    found = passages("\n".join(lines))
    assert found[:2] == [f"{lines[0]}\n{lines[1]}", lines[2]]
    assert max(map(len, found)) <= PASSAGE_CHARS
    assert "".join(found).replace("\n", "") == "".join(lines)
    assert passages("") == []


def test_of_a_long_page_the_passages_that_fit_best_are_read_in_their_order() -> None:
    page = "\n".join(f"{number}" * 900 for number in range(6))

    async def rank(query: str, texts: Any) -> list[int]:
        assert query == "hills" and len(texts) == 6
        return [4, 1, 0, 2, 3, 5]

    text = asyncio.run(_fitting(page, "hills", rank, 1500))
    assert text == "\n".join(["1" * 900, "4" * 900])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("org/typo", r"search_embedding_model: no model 'org/typo' is served"),
        ("org/sparse", r"search_embedding_model: no model 'org/sparse' takes texts and gives dense vectors"),
    ],
)
def test_a_start_with_a_model_that_cannot_rank_is_refused(name: str, said: str) -> None:
    planning.check(CATALOG, load(None, {"agent.search_embedding_model": MODEL}, {}))
    with pytest.raises(ConfigError, match=said):
        planning.check(CATALOG, load(None, {"agent.search_embedding_model": name}, {}))
