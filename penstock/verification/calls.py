"""The calls that both sides answer, and the comparison of their answers."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ipc.catalog.entries import DEFAULT_SIMILARITY, ModelEntry
from ipc.wire.extraction import Extraction
from ipc.wire.messages import InputItem
from penstock.verification import agreement, texts
from penstock.verification.agreement import Agreement
from penstock.verification.pictures import drawn

Array = np.ndarray[Any, Any]

SCORED_QUERIES = texts.QUERIES[:5]
PAIR_FAMILIES = ("cross_encoder", "qwen3_reranker")


class Answers(msgspec.Struct):
    """Vectors of queries and documents by output, scores [queries, documents], and findings by text."""

    queries: dict[str, list[Array]] = {}
    documents: dict[str, list[Array]] = {}
    scores: Array | None = None
    findings: list[Extraction] = []


def answers(side: Any, entry: ModelEntry) -> Answers:
    """Ask one side everything that the model can do.

    Scores of models that also give vectors follow from the vectors and are not asked for.
    """
    found = Answers()
    queries = [InputItem(text) for text in texts.QUERIES]
    documents = [InputItem(text) for text in texts.DOCUMENTS]
    if "image" in entry.inputs and entry.encode_outputs:
        documents = [InputItem(images=[data]) for data in drawn()]
    for output in entry.encode_outputs:
        found.queries[output] = side.encode(queries, output, is_query=True)
        found.documents[output] = side.encode(documents, output, is_query=False)
    if "score" in entry.outputs and not entry.encode_outputs:
        found.scores = np.stack([side.score(query, texts.DOCUMENTS) for query in SCORED_QUERIES])
    if "json" in entry.outputs:
        found.findings = side.extract(*_labelled(entry.adapter))
    return found


def _labelled(adapter: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Texts and labels for the extract operation; families with classes of their own get no labels."""
    if adapter == "ner":
        return texts.NEWS, ()
    return texts.OPINIONS, texts.OPINION_LABELS if adapter == "nli_zero_shot" else ()


def compared(
    mine: Answers, theirs: Answers, entry: ModelEntry, limits: tuple[float, float]
) -> list[Agreement]:
    """One `Agreement` per output; `limits` are the least closeness and the least rank agreement."""
    found = [_vectors(output, mine, theirs, entry, limits) for output in mine.queries]
    if mine.scores is not None and theirs.scores is not None:
        found.append(_scores(mine.scores, theirs.scores, limits))
    if mine.findings:
        found.append(_findings(mine.findings, theirs.findings, limits))
    return found


def _vectors(
    output: str, mine: Answers, theirs: Answers, entry: ModelEntry, limits: tuple[float, float]
) -> Agreement:
    queries, documents = (
        (mine.queries[output], theirs.queries[output]),
        (mine.documents[output], theirs.documents[output]),
    )
    cosines = np.concatenate([agreement.cosines(*queries), agreement.cosines(*documents)])
    similarity = entry.outputs[output].similarity or DEFAULT_SIMILARITY[output]
    ours, reference = (
        agreement.similarities(q, d, similarity) for q, d in zip(queries, documents, strict=True)
    )
    rank = agreement.kendall(ours, reference, _tie(reference, limits))
    return _agreement(output, cosines, rank, limits)


def _scores(mine: Array, theirs: Array, limits: tuple[float, float]) -> Agreement:
    spread = max(1.0, float(np.ptp(theirs)))
    closeness = 1.0 - np.abs(mine - theirs).ravel() / spread
    return _agreement("score", closeness, agreement.kendall(mine, theirs, _tie(theirs, limits)), limits)


def _tie(table: Array, limits: tuple[float, float]) -> float:
    """Differences of scores that rounding may turn round."""
    return float(np.ptp(table)) * (1.0 - limits[0])


def _findings(mine: list[Extraction], theirs: list[Extraction], limits: tuple[float, float]) -> Agreement:
    left, right = (
        {key: score for at, one in enumerate(side) for key, score in _scored(at, one)}
        for side in (mine, theirs)
    )
    shared, every = left.keys() & right.keys(), left.keys() | right.keys()
    closeness = np.array([1.0 - abs(left[key] - right[key]) for key in shared] or [1.0])
    return _agreement("json", closeness, len(shared) / len(every) if every else 1.0, limits)


def _scored(at: int, found: Extraction) -> list[tuple[tuple[Any, ...], float]]:
    """What names a finding, and its score."""
    entities = [((at, one.label, one.start, one.end), one.score) for one in found.entities]
    return entities + [((at, one.label), one.score) for one in found.classifications]


def _agreement(output: str, closeness: Array, rank: float, limits: tuple[float, float]) -> Agreement:
    return Agreement(
        output=output,
        items=len(closeness),
        closest=float(closeness.min()),
        mean=float(closeness.mean()),
        rank=rank,
        least_closest=limits[0],
        least_rank=limits[1],
    )
