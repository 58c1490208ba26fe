"""Zero-shot classes by natural language inference: does the text entail "This example is {label}."?

One item gives a pair of premise and hypothesis per label, and all pairs run in one forward pass. The rules are those of
`transformers/pipelines/zero_shot_classification.py` (5.23): a softmax of the entailment logits over all labels, or with
`multi_label` and for a single label a softmax of entailment against contradiction for each label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ipc.errors import InputTooLong
from ipc.wire.extraction import Extraction
from ipc.wire.messages import Call, ExtractCall, InputItem
from workers.adapters.base import AdapterSpec, Excess, ItemFailure, LoadContext, Prepared
from workers.adapters.shared.classification import (
    ClassifierAdapter,
    ClassifierBatch,
    ClassifierItem,
    SequenceClassifier,
    build_classifier,
)
from workers.adapters.shared.extracting import NOT_FINITE, ranked, text_of
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.pairs import PairTokenizer

TEMPLATE = "This example is {}."
_LONGEST_TEMPLATE = 500


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Options of a request: labels in order, a hypothesis for each, how labels compete, and the least score."""

    labels: Sequence[str]
    hypotheses: Sequence[str]
    multi_label: bool
    threshold: float


class NliZeroShotAdapter(ClassifierAdapter[SequenceClassifier]):
    """A classifier of premise and hypothesis, run once per label."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="nli_zero_shot",
        operations=("extract",),
        inputs=("text",),
        outputs=("json",),
    )
    labels = "required"
    overflows = ("truncate", "truncate_left", "error")

    def __init__(self, classifier: SequenceClassifier, pairs: PairTokenizer) -> None:
        """Put the parts together."""
        super().__init__(classifier, pairs.limit)
        self._pairs = pairs
        names = [label.lower() for label in classifier.labels]
        entailing = [at for at, name in enumerate(names) if name.startswith("entail")]
        self._entailment = entailing[0] if entailing else len(names) - 1
        self._contradiction = len(names) - 1 if self._entailment == 0 else 0

    @classmethod
    def load(cls, context: LoadContext) -> NliZeroShotAdapter:
        """Load tokenizer and weights; progress phases are "tokenizer" and "weights".

        Raises ValueError for a classifier with a single label.
        """
        classifier, tokenizer, limit = build_classifier(context, SequenceClassifier)
        if len(classifier.labels) < 2:
            raise ValueError("a zero-shot model needs at least two labels, entailment and another")
        adapter = cls(classifier, PairTokenizer(tokenizer, limit, "only_first"))
        adapter.tokenizer = tokenizer
        return adapter

    def wanted_of(self, call: ExtractCall) -> _Wanted:
        """Options and labels of a call. Raises `InvalidInput` for a template without exactly one {}."""
        options = OptionReader(call)
        template = options.text("hypothesis_template", TEMPLATE, _LONGEST_TEMPLATE)
        if template.count("{}") != 1:
            raise options.refused("hypothesis_template", template, "must hold {} once, for the label")
        return _Wanted(
            call.labels,
            [template.replace("{}", label) for label in call.labels],
            options.flag("multi_label", False),
            options.threshold("threshold", 0.0),
        )

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Tokenize texts and hypotheses and join them.

        Raises `InputTooLong` for a hypothesis that leaves no room for the text.
        """
        assert isinstance(call, ExtractCall)
        wanted = self.wanted_of(call)
        hypotheses = self._pairs.halves(wanted.hypotheses)
        for label, hypothesis in zip(wanted.labels, hypotheses, strict=True):
            taken = len(hypothesis.ids) + self._pairs.special
            if taken >= self._pairs.limit:
                raise InputTooLong(
                    f"params.labels: {label[:64]!r} takes {taken} tokens in its hypothesis, "
                    f"the model takes {self._pairs.limit} with the text"
                )
        prepared: list[Prepared | ItemFailure] = []
        most = max(hypotheses, key=lambda hypothesis: len(hypothesis.ids))
        for premise in self._pairs.sides([text_of(item) for item in items], call.overflow):
            pairs = [self._pairs.join(premise, most, call.overflow)]
            if not (pairs[0].truncated and call.overflow == "error"):
                pairs = [self._pairs.join(premise, hypothesis, call.overflow) for hypothesis in hypotheses]
            sequences = [pair.sequence for pair in pairs]
            cost = sum(len(sequence.ids) for sequence in sequences)
            longest = max(pairs, key=lambda pair: pair.tokens)
            excess = Excess(longest.tokens, self._pairs.limit, "with a label") if longest.truncated else None
            prepared.append(
                Prepared(ClassifierItem(sequences, wanted), cost, excess is not None, excess=excess)
            )
        return prepared

    def extract(self, batch: ClassifierBatch) -> list[Extraction | ItemFailure]:
        """The labels of each item, the likeliest first."""
        logits = self._classifier.logits_of_rows(batch.rows)
        extractions: list[Extraction | ItemFailure] = []
        done = 0
        for text in batch.items:
            rows = logits[done : done + len(text.sequences)]
            done += len(text.sequences)
            if not bool(torch.isfinite(rows).all()):
                extractions.append(NOT_FINITE)
                continue
            scores = self._scores(rows, text.wanted.multi_label).tolist()
            extractions.append(
                Extraction(classifications=ranked(text.wanted.labels, scores, text.wanted.threshold))
            )
        return extractions

    def _scores(self, logits: torch.Tensor, multi_label: bool) -> torch.Tensor:
        """fp32 [labels] from fp32 [labels, classes of the classifier]."""
        if multi_label or len(logits) == 1:
            return torch.softmax(logits[:, [self._contradiction, self._entailment]], dim=1)[:, 1]
        return torch.softmax(logits[:, self._entailment], dim=0)
