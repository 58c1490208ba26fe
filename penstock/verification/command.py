"""`penstock verify MODEL`: our results beside those of the reference library, over the same texts.

1. Our adapter loads the model in this process and answers, then makes room.
2. The reference of the family answers the same calls, in float32.
3. Every output is compared: cosines of vectors, order of scores, findings. Exit code 1 when one is below its limits.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ipc.catalog.entries import DEFAULT_SIMILARITY, ModelEntry
from ipc.errors import PenstockError
from ipc.settings import Settings
from ipc.wire.extraction import Extraction
from ipc.wire.messages import InputItem
from penstock import terminal
from penstock.files import ignore_progress, located
from penstock.verification import samples
from penstock.verification.samples import drawn
from penstock.verification.supported import refuse_unsupported

Array = np.ndarray[Any, Any]
Vectors = Sequence[Array]
Limits = tuple[float, float]
FULL_LIMITS: Limits = (0.9999, 0.99)
HALF_LIMITS: Limits = (0.99, 0.95)
"""Least cosine and least rank agreement, in float32 and in half precision."""
SCORED_QUERIES = samples.QUERIES[:5]


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """One output compared.

    closest     worst cosine over all items; for scores and findings 1 - the largest difference
    mean        the same, on average
    rank        Kendall's tau of the order of documents over all queries; for findings the share found by both sides
    """

    output: str
    items: int
    closest: float
    mean: float
    rank: float
    least_closest: float
    least_rank: float

    @property
    def fine(self) -> bool:
        """Whether both limits are kept."""
        return self.closest >= self.least_closest and self.rank >= self.least_rank


class Report(msgspec.Struct, frozen=True):
    """Our model, the reference, and how well each output agrees."""

    model: str
    device: str
    precision: str
    reference: str
    outputs: list[Agreement]

    @property
    def fine(self) -> bool:
        """Whether every output keeps its limits."""
        return bool(self.outputs) and all(output.fine for output in self.outputs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("model", metavar="MODEL")
    terminal.with_json(parser)


def run(entry: ModelEntry, settings: Settings, *, as_json: bool) -> int:
    """Compare and print; 0 when everything agrees, else 1."""
    from workers import foreign
    from workers.adapters.registry import UnknownAdapterError
    from workers.loading import failure

    try:
        report = compare(entry, settings)
    except PenstockError:
        raise
    except UnknownAdapterError as error:
        print(f"penstock: {entry.id}: {error}", file=sys.stderr)
        return 1
    except BaseException as raised:
        failed = failure.classify(foreign.error_of(raised))
        print(f"penstock: {entry.id}: {failed.error_class}: {failed.message}", file=sys.stderr)
        return 1
    _print(report, as_json=as_json)
    return 0 if report.fine else 1


def compare(entry: ModelEntry, settings: Settings) -> Report:
    """Load both sides in turn and compare their answers.

    The files come first: without a network the command ends before libraries are imported, which takes long.
    Raises `Unsupported` for a family without a reference, `DependencyConflict` for a missing extra, `ConfigError` for a
    missing device, and what adapters and libraries raise.
    """
    refuse_unsupported(entry.adapter)
    directory = located(entry, ignore_progress)
    import torch
    from transformers.utils import logging as transformers_logging

    from penstock.verification import references
    from penstock.verification.ours import Ours
    from penstock.verification.references import Opening

    chatter: Any = transformers_logging
    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    ours = Ours(entry, settings, directory)
    device, precision = ours.device, str(ours.dtype).removeprefix("torch.")
    opening = Opening(
        entry, directory, device, ours.adapter.max_sequence_length, settings.worker.trust_remote_code
    )
    mine = answers(ours, entry)
    del ours
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    reference = references.open_reference(opening)
    theirs = answers(reference, entry)
    limits = FULL_LIMITS if precision == "float32" else HALF_LIMITS
    outputs = compared(mine, theirs, entry, limits)
    return Report(entry.id, str(device), precision, reference.name, outputs)


def _print(report: Report, *, as_json: bool) -> None:
    if as_json:
        fields: dict[str, Any] = {**msgspec.to_builtins(report), "fine": report.fine}
        print(terminal.as_json(fields))
        return
    print(f"{report.model} on {report.device} in {report.precision}, against {report.reference} in float32")
    print("  output         items    closest       mean       rank   limits")
    for one in report.outputs:
        limits = f"{one.least_closest:g}, {one.least_rank:g}"
        numbers = f"{one.items:6d} {one.closest:10.6f} {one.mean:10.6f} {one.rank:10.4f}"
        print(f"  {one.output:<13} {numbers}   {limits:<12} {'ok' if one.fine else 'BAD'}")


def cosines(ours: Vectors, theirs: Vectors) -> Array:
    """Worst cosine per item, float64 [items].  An item is a vector [dims] or token vectors [tokens, dims].

    Items of another shape count as -1, two zero vectors as 1.
    """
    return np.array([_cosine(a, b) for a, b in zip(ours, theirs, strict=True)])


def _cosine(a: Array, b: Array) -> float:
    if a.shape != b.shape:
        return -1.0
    x, y = (np.atleast_2d(v).astype(np.float64) for v in (a, b))
    lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    products = (x * y).sum(axis=1)
    zero = (np.abs(x).sum(axis=1) == 0) & (np.abs(y).sum(axis=1) == 0)
    cosines = np.where(lengths > 0, products / np.where(lengths > 0, lengths, 1.0), np.where(zero, 1.0, 0.0))
    return float(cosines.min(initial=1.0))


def similarities(queries: Vectors, documents: Vectors, similarity: str) -> Array:
    """Scores [queries, documents] by "cosine", "dot" or "maxsim"."""
    if similarity == "maxsim":
        return np.array([[(q @ d.T).max(axis=1).sum() for d in documents] for q in queries])
    left, right = np.stack(queries), np.stack(documents)
    if similarity == "cosine":
        left, right = (v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-12) for v in (left, right))
    scores: Array = left @ right.T
    return scores


def kendall(ours: Array, theirs: Array, tie: float) -> float:
    """Kendall's tau over the rows of two score tables [queries, documents].

    Pairs of documents whose reference scores differ by at most `tie` have no order and do not count.
    """
    left, right = (table[:, :, None] - table[:, None, :] for table in (ours, theirs))
    ordered = np.abs(right) > tie
    if not ordered.any():
        return 1.0
    return float(np.where(np.sign(left) == np.sign(right), 1.0, -1.0)[ordered].mean())


class Answers(msgspec.Struct):
    """Vectors of queries and documents by output, scores [queries, documents], and findings by text."""

    queries: dict[str, list[Array]] = {}
    documents: dict[str, list[Array]] = {}
    scores: Array | None = None
    findings: list[Extraction] = []


def answers(side: Any, entry: ModelEntry) -> Answers:
    """Ask one side for every output of the model.

    Scores of models that also give vectors follow from the vectors and are not asked for.
    """
    collected = Answers()
    queries = [InputItem(text) for text in samples.QUERIES]
    documents = [InputItem(text) for text in samples.DOCUMENTS]
    if "image" in entry.inputs and entry.encode_outputs:
        documents = [InputItem(images=[data]) for data in drawn()]
    for output in entry.encode_outputs:
        collected.queries[output] = side.encode(queries, output, is_query=True)
        collected.documents[output] = side.encode(documents, output, is_query=False)
    if "score" in entry.outputs and not entry.encode_outputs:
        collected.scores = np.stack([side.score(query, samples.DOCUMENTS) for query in SCORED_QUERIES])
    if "json" in entry.outputs:
        collected.findings = side.extract(*_labelled(entry.adapter))
    return collected


def _labelled(adapter: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Texts and labels for the extract operation; families with classes of their own get no labels."""
    if adapter == "ner":
        return samples.NEWS, ()
    return samples.OPINIONS, samples.OPINION_LABELS if adapter == "nli_zero_shot" else ()


def compared(mine: Answers, theirs: Answers, entry: ModelEntry, limits: Limits) -> list[Agreement]:
    """One `Agreement` per output."""
    agreements = [_vectors(output, mine, theirs, entry, limits) for output in mine.queries]
    if mine.scores is not None and theirs.scores is not None:
        agreements.append(_scores(mine.scores, theirs.scores, limits))
    if mine.findings:
        agreements.append(_findings(mine.findings, theirs.findings, limits))
    return agreements


def _vectors(output: str, mine: Answers, theirs: Answers, entry: ModelEntry, limits: Limits) -> Agreement:
    queries, documents = (
        (mine.queries[output], theirs.queries[output]),
        (mine.documents[output], theirs.documents[output]),
    )
    closeness = np.concatenate([cosines(*queries), cosines(*documents)])
    similarity = entry.outputs[output].similarity or DEFAULT_SIMILARITY[output]
    ours, reference = (similarities(q, d, similarity) for q, d in zip(queries, documents, strict=True))
    rank = kendall(ours, reference, _tie(reference, limits))
    return _agreement(output, closeness, rank, limits)


def _scores(mine: Array, theirs: Array, limits: Limits) -> Agreement:
    spread = max(1.0, float(np.ptp(theirs)))
    closeness = 1.0 - np.abs(mine - theirs).ravel() / spread
    return _agreement("score", closeness, kendall(mine, theirs, _tie(theirs, limits)), limits)


def _tie(table: Array, limits: Limits) -> float:
    """Largest difference of two scores whose order rounding may change."""
    return float(np.ptp(table)) * (1.0 - limits[0])


def _findings(mine: list[Extraction], theirs: list[Extraction], limits: Limits) -> Agreement:
    left, right = (
        {key: score for at, one in enumerate(side) for key, score in _scored(at, one)}
        for side in (mine, theirs)
    )
    shared, every = left.keys() & right.keys(), left.keys() | right.keys()
    closeness = np.array([1.0 - abs(left[key] - right[key]) for key in shared] or [1.0])
    return _agreement("json", closeness, len(shared) / len(every) if every else 1.0, limits)


def _scored(at: int, found: Extraction) -> list[tuple[tuple[Any, ...], float]]:
    """(key, score) of each finding; findings of both sides with one key are the same finding."""
    entities = [((at, one.label, one.start, one.end), one.score) for one in found.entities]
    return entities + [((at, one.label), one.score) for one in found.classifications]


def _agreement(output: str, closeness: Array, rank: float, limits: Limits) -> Agreement:
    return Agreement(
        output=output,
        items=len(closeness),
        closest=float(closeness.min()),
        mean=float(closeness.mean()),
        rank=rank,
        least_closest=limits[0],
        least_rank=limits[1],
    )
