"""Classes of a whole text by a sequence classifier's own labels, as transformers' pipeline scores them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from ipc.wire.extraction import Classification, Extraction
from ipc.wire.messages import Call, ExtractCall, InputItem
from workers.adapters.base import AdapterSpec, Excess, ItemFailure, LoadContext, Prepared
from workers.adapters.shared.classification import (
    ClassifierAdapter,
    ClassifierBatch,
    ClassifierItem,
    SequenceClassifier,
    build_classifier,
)
from workers.adapters.shared.extracting import NOT_FINITE, OffsetTokenizer, ranked, text_of
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.packing import TokenSequence
from workers.adapters.shared.pairs import PairTokenizer
from workers.adapters.shared.text_model import sequence_of
from workers.adapters.shared.tokenizing import TextTokenizer

FUNCTIONS = ("auto", "sigmoid", "softmax", "none")
_Read = tuple[TokenSequence, Excess | None]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Options of a request. With `top_k` 0 and without labels all classes are given."""

    function: str
    threshold: float
    top_k: int
    labels: frozenset[str]


class TextClassificationAdapter(ClassifierAdapter[SequenceClassifier]):
    """A sequence classifier with labels of its own."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="text_classification",
        operations=("extract",),
        inputs=("text",),
        outputs=("json",),
    )
    labels = "own"
    overflows = ("truncate", "truncate_left", "error")

    def __init__(self, classifier: SequenceClassifier, tokenizer: OffsetTokenizer, limit: int) -> None:
        """Put the parts together; `limit` is the longest sequence in tokens."""
        super().__init__(classifier, limit)
        self._tokenizer, self._own = tokenizer, classifier.labels

    @cached_property
    def _ids(self) -> TextTokenizer:
        """For token ids in place of a text."""
        tokenizer = TextTokenizer(copy.deepcopy(self.tokenizer))
        tokenizer.limit(self._limit)
        tokenizer.known = self.known_ids
        return tokenizer

    @cached_property
    def _pairs(self) -> PairTokenizer:
        """Made for the first pair: most classifiers never get one. Two threads may make one each."""
        return PairTokenizer(self.tokenizer, self._limit, "longest_first")

    @classmethod
    def load(cls, context: LoadContext) -> TextClassificationAdapter:
        """Load tokenizer and weights; progress phases are "tokenizer" and "weights"."""
        classifier, tokenizer, limit = build_classifier(context, SequenceClassifier)
        adapter = cls(classifier, OffsetTokenizer(tokenizer, limit), limit)
        adapter.tokenizer = tokenizer
        return adapter

    @property
    def own_labels(self) -> Sequence[str]:
        """The model's classes."""
        return self._own

    def wanted_of(self, call: ExtractCall) -> _Wanted:
        """Options and labels of a call."""
        options = OptionReader(call)
        return _Wanted(
            options.choice("function_to_apply", "auto", FUNCTIONS),
            options.threshold("threshold", 0.0),
            options.whole("top_k", 0, 1),
            frozenset(call.labels),
        )

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Tokenize texts, those of token ids, and pairs of texts as one sequence."""
        assert isinstance(call, ExtractCall)
        wanted = self.wanted_of(call)
        texts = self._texts([item for item in items if item.first is None], call.overflow)
        pairs = self._joined([item for item in items if item.first is not None], call.overflow)
        sequences = [next(texts if item.first is None else pairs) for item in items]
        return [
            Prepared(ClassifierItem([sequence], wanted), len(sequence.ids), excess is not None, excess=excess)
            for sequence, excess in sequences
        ]

    def _texts(self, items: Sequence[InputItem], overflow: str) -> Iterator[_Read]:
        texts = [text_of(item) for item in items if item.ids is None]
        windows = iter(self._tokenizer.windows(texts, overflow) if texts else ())
        for item in items:
            if item.ids is None:
                [window], excess = next(windows)
                yield window.sequence, excess
            else:
                yield self._given(item, overflow)

    def _given(self, item: InputItem, overflow: str) -> _Read:
        """The token ids of a caller as they are."""
        [([[window], truncated, tokens], _)] = self._ids.fitted([item], ("", ""), overflow)
        return sequence_of(window), Excess(tokens, self._limit) if truncated else None

    def _joined(self, items: Sequence[InputItem], overflow: str) -> Iterator[_Read]:
        firsts = self._pairs.halves([item.first or "" for item in items])
        for first, second in zip(firsts, self._pairs.halves([text_of(item) for item in items]), strict=True):
            pair = self._pairs.join(first, second, overflow)
            excess = Excess(pair.tokens, self._pairs.limit, "in both texts") if pair.truncated else None
            yield pair.sequence, excess

    def extract(self, batch: ClassifierBatch) -> list[Extraction | ItemFailure]:
        """The classes of each item, the likeliest first."""
        logits = self._classifier.logits_of_rows(batch.rows)
        finite = torch.isfinite(logits).all(dim=1).tolist()
        return [
            Extraction(classifications=self._classes(row, item.wanted)) if fine else NOT_FINITE
            for row, item, fine in zip(logits, batch.items, finite, strict=True)
        ]

    def _classes(self, logits: torch.Tensor, wanted: _Wanted) -> list[Classification]:
        """The classes of one row of logits."""
        function = self._function() if wanted.function == "auto" else wanted.function
        if function != "none":
            logits = torch.sigmoid(logits) if function == "sigmoid" else torch.softmax(logits, dim=-1)
        classes = ranked(self._own, logits.tolist(), wanted.threshold if function != "none" else None)
        chosen = [one for one in classes if not wanted.labels or one.label in wanted.labels]
        return chosen[: wanted.top_k or None]

    def _function(self) -> str:
        """The function that the model's configuration asks for, by transformers' rule (text_classification.py)."""
        config = self._classifier.config
        if config.problem_type == "regression":
            return "none"
        multiple = config.problem_type == "multi_label_classification" or config.num_labels == 1
        return "sigmoid" if multiple else "softmax"
