"""Named entities by token classification, grouped and placed by the rules of transformers' pipeline.

1. `prepare` tokenizes with places; a text that is too long is cut, or read in overlapping windows ("chunk").
2. `extract` classifies every token, groups tokens of one kind (`aggregation_strategy`) and merges windows.

The rules are those of `transformers/pipelines/token_classification.py` (5.23). Blanks at the ends of an entity are cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ipc.errors import InvalidInput
from ipc.wire.extraction import Entity, Extraction
from ipc.wire.messages import Call, ExtractCall, InputItem
from workers.adapters.base import AdapterSpec, ItemFailure, LoadContext, Prepared
from workers.adapters.shared.classification import (
    ClassifierAdapter,
    ClassifierBatch,
    ClassifierItem,
    TokenClassifier,
    build_classifier,
    in_steps,
)
from workers.adapters.shared.extracting import NOT_FINITE, OffsetTokenizer, Window, text_of
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.packing import PackedBatch

STRATEGIES = ("simple", "none", "first", "average", "max")
OUTSIDE = "O"


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Options of a request; without labels all kinds are given."""

    strategy: str
    threshold: float
    labels: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Text(ClassifierItem):
    """One item with its text and windows."""

    text: str
    windows: list[Window]


@dataclass(frozen=True, slots=True)
class _Span:
    """A token, a word or an entity: label, score, and place in characters."""

    label: str
    score: float
    start: int
    end: int


class NerAdapter(ClassifierAdapter[TokenClassifier]):
    """A token classifier and the grouping of its tags."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="ner",
        operations=("extract",),
        inputs=("text",),
        outputs=("json",),
    )
    labels = "own"
    overflows = ("truncate", "truncate_left", "chunk", "error")

    def __init__(self, classifier: TokenClassifier, tokenizer: OffsetTokenizer, limit: int) -> None:
        """Put the parts together; `limit` is the longest sequence in tokens."""
        super().__init__(classifier, limit)
        self._tokenizer, self._tags = tokenizer, classifier.labels
        kinds = [_kind(tag) for tag in self._tags if tag != OUTSIDE]
        self._own = tuple(dict.fromkeys([*kinds, *(tag for tag in self._tags if tag != OUTSIDE)]))

    @classmethod
    def load(cls, context: LoadContext) -> NerAdapter:
        """Load tokenizer and weights; progress phases are "tokenizer" and "weights"."""
        classifier, tokenizer, limit = build_classifier(context, TokenClassifier)
        adapter = cls(classifier, OffsetTokenizer(tokenizer, limit), limit)
        adapter.tokenizer = tokenizer
        return adapter

    @property
    def own_labels(self) -> Sequence[str]:
        """Kinds of entities, and the tags (`B-PER`) for `aggregation_strategy` "none"."""
        return self._own

    def wanted_of(self, call: ExtractCall) -> _Wanted:
        """Options and labels of a call. Raises `InvalidInput` for overlapping windows without grouping."""
        options = OptionReader(call)
        wanted = _Wanted(
            options.choice("aggregation_strategy", "simple", STRATEGIES),
            options.threshold("threshold", 0.0),
            frozenset(call.labels),
        )
        if wanted.strategy == "none" and call.overflow == "chunk":
            raise InvalidInput(
                "params.options.overflow_policy: chunk needs an aggregation_strategy other than none"
            )
        return wanted

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Tokenize with places."""
        assert isinstance(call, ExtractCall)
        wanted, texts = self.wanted_of(call), [text_of(item) for item in items]
        return [
            Prepared(
                _Text([window.sequence for window in windows], wanted, text, windows),
                sum(len(w.sequence.ids) for w in windows),
                excess is not None,
                excess=excess,
            )
            for text, (windows, excess) in zip(
                texts, self._tokenizer.windows(texts, call.overflow), strict=True
            )
        ]

    def extract(self, batch: ClassifierBatch) -> list[Extraction | ItemFailure]:
        """The entities of each item, by place."""
        scores = (one for row in in_steps(batch.rows) for one in self._scores(row))
        extractions: list[Extraction | ItemFailure] = []
        for text in batch.items:
            read = [next(scores) for _ in text.windows]
            if not all(np.isfinite(one).all() for one in read):
                extractions.append(NOT_FINITE)
                continue
            spans = [
                self._entities(window, one, text.wanted.strategy)
                for window, one in zip(text.windows, read, strict=True)
            ]
            chosen = spans[0] if len(spans) == 1 else _merge([span for one in spans for span in one])
            extractions.append(Extraction(entities=_rendered(text, chosen)))
        return extractions

    def _scores(self, row: PackedBatch) -> Iterator[np.ndarray]:
        """float32 [tokens, labels] probabilities of each sequence, in the order given."""
        scores = torch.softmax(self._classifier.logits(row), dim=-1).cpu().numpy()
        first, last = row.layout.first.tolist(), row.layout.last.tolist()
        for place in row.restore.tolist():
            yield scores[first[place] : last[place] + 1]

    def _entities(self, window: Window, scores: np.ndarray, strategy: str) -> list[_Span]:
        """The entities of one window."""
        if not len(window.kept):
            return []
        units = _units(window, scores[window.kept], strategy)
        spans = [
            (at, _Span(self._tags[label], score, start, end))
            for at, (label, score, start, end) in enumerate(units)
            if self._tags[label] != OUTSIDE
        ]
        return [span for _, span in spans] if strategy == "none" else _grouped(spans)


def _units(window: Window, scores: np.ndarray, strategy: str) -> Iterator[tuple[int, float, int, int]]:
    """(label, score, start, end) of each token, or of each word where the strategy goes by words."""
    starts, ends = window.places[:, 0], window.places[:, 1]
    if strategy in ("first", "average", "max"):
        inner = window.inner.copy()
        inner[0] = False
        first = np.flatnonzero(~inner)
        last = np.append(first[1:], len(inner))
        scores = _word_scores(scores, first, last, strategy)
        starts, ends = starts[first], ends[last - 1]
    labels = scores.argmax(axis=1)
    best = scores[np.arange(len(labels)), labels]
    return zip(labels.tolist(), best.tolist(), starts.tolist(), ends.tolist(), strict=True)


def _word_scores(scores: np.ndarray, first: np.ndarray, last: np.ndarray, strategy: str) -> np.ndarray:
    """float32 [words, labels] from the scores of the tokens `first` up to `last` (excluded) of each word."""
    if strategy == "first":
        return scores[first]
    if strategy == "average":
        sums: np.ndarray = np.add.reduceat(scores, first, axis=0)
        return sums / (last - first)[:, None]
    best = scores.max(axis=1)
    chosen = [start + int(best[start:stop].argmax()) for start, stop in zip(first, last, strict=True)]
    return scores[chosen]


def _grouped(spans: list[tuple[int, _Span]]) -> list[_Span]:
    """Neighbours of one kind as one entity with the mean score; a tag that begins with "B-" starts another entity."""
    groups: list[list[_Span]] = []
    before = -2
    for at, span in spans:
        joins = at == before + 1 and not span.label.startswith("B-")
        if joins and _tag(span.label) == _tag(groups[-1][-1].label):
            groups[-1].append(span)
        else:
            groups.append([span])
        before = at
    return [
        _Span(
            _kind(group[0].label), float(np.mean([one.score for one in group])), group[0].start, group[-1].end
        )
        for group in groups
    ]


def _tag(label: str) -> str:
    """A label without its B- or I-."""
    return label[2:] if label.startswith(("B-", "I-")) else label


def _kind(label: str) -> str:
    """The name under which a group is reported."""
    return label.split("-", 1)[-1]


def _merge(spans: list[_Span]) -> list[_Span]:
    """Of entities that overlap, as found in two windows, keep the longer one; of equally long ones the surer one."""
    merged: list[_Span] = []
    for span in sorted(spans, key=lambda one: one.start):
        if not merged or span.start >= merged[-1].end:
            merged.append(span)
        elif (span.end - span.start, span.score) > (merged[-1].end - merged[-1].start, merged[-1].score):
            merged[-1] = span
    return merged


def _rendered(text: _Text, spans: list[_Span]) -> list[Entity]:
    """The entities of one text above the threshold and among the labels of the request."""
    entities = []
    for span in spans:
        is_wanted = not text.wanted.labels or span.label in text.wanted.labels
        piece = text.text[span.start : span.end]
        bare = piece.strip()
        if is_wanted and span.score >= text.wanted.threshold and bare:
            start = span.start + len(piece) - len(piece.lstrip())
            entities.append(Entity(bare, span.label, span.score, start, start + len(bare)))
    return entities
