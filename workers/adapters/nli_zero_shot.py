"""Zero-shot classes by natural language inference: does the text entail "This example is {label}."?

One item gives a pair of premise and hypothesis per label, and all of them run in one forward pass. The rules are those
of `transformers/pipelines/zero_shot_classification.py` (5.23): the entailment logits over all labels, or with
`multi_label` (and for a single label) entailment against contradiction for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ipc.catalog.option_names import FAMILY_OPTIONS
from ipc.errors import InputTooLong
from ipc.wire.extraction import Extraction
from ipc.wire.messages import Call, ExtractCall, InputItem
from workers.adapters.base import AdapterSpec, Excess, ItemFailure, LoadContext, Prepared
from workers.adapters.shared.classification import SequenceClassifier, in_steps, load_classifier
from workers.adapters.shared.extracting import NOT_FINITE, ClassifierAdapter, ranked, text_of
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.packing import PackedBatch, TokenSequence
from workers.adapters.shared.pairs import PairTokenizer

TEMPLATE = "This example is {}."
_LONGEST_TEMPLATE = 500


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a request wants: its labels in order, how they compete, and from which score on."""

    labels: Sequence[str]
    hypotheses: Sequence[str]
    multi_label: bool
    threshold: float


@dataclass(frozen=True, slots=True)
class _Text:
    """One item: a sequence per label."""

    sequences: list[TokenSequence]
    wanted: _Wanted


@dataclass(frozen=True, slots=True)
class _Batch:
    """Items with the pairs of all of them in packed rows."""

    texts: list[_Text]
    rows: list[PackedBatch]


class NliZeroShotAdapter(ClassifierAdapter):
    """A premise and hypothesis classifier, asked once per label."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="nli_zero_shot",
        operations=("extract",),
        inputs=("text",),
        outputs=("json",),
        options=FAMILY_OPTIONS["nli_zero_shot"],
    )
    labels = "required"
    overflows = ("truncate", "truncate_left", "error")

    def __init__(self, classifier: SequenceClassifier, pairs: PairTokenizer) -> None:
        """Put the parts together."""
        super().__init__(classifier, pairs.limit)
        self._classifier, self._pairs = classifier, pairs
        names = [label.lower() for label in classifier.labels]
        entailing = [at for at, name in enumerate(names) if name.startswith("entail")]
        self._entailment = entailing[0] if entailing else len(names) - 1
        self._contradiction = len(names) - 1 if self._entailment == 0 else 0

    @classmethod
    def load(cls, context: LoadContext) -> NliZeroShotAdapter:
        """Load tokenizer and weights; progress phases are "tokenizer" and "weights".

        Raises ValueError for a classifier with a single label.
        """
        classifier, tokenizer, limit = load_classifier(context, SequenceClassifier)
        if len(classifier.labels) < 2:
            raise ValueError("a zero-shot model needs at least two labels, entailment and another")
        return cls(classifier, PairTokenizer(tokenizer, limit, "only_first"))

    def refuse_options(self, call: ExtractCall) -> None:
        """Refuse options of wrong type or range."""
        _wanted(call)

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Tokenize texts and hypotheses and join them.

        Raises `InputTooLong` for a hypothesis that leaves no room for the text.
        """
        wanted = _wanted(call)
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
            prepared.append(Prepared(_Text(sequences, wanted), cost, excess is not None, excess=excess))
        return prepared

    def collate(self, prepared: Sequence[Prepared]) -> _Batch:
        """All pairs of all items in packed rows."""
        texts: list[_Text] = [item.payload for item in prepared]
        sequences = [sequence for text in texts for sequence in text.sequences]
        return _Batch(texts, self._classifier.rows(sequences))

    def padding_ratio(self, batch: _Batch) -> float:
        """What the classifier pads."""
        return self._classifier.padding_ratio(batch.rows)

    def extract(self, batch: _Batch) -> list[Extraction | ItemFailure]:
        """The labels of each item, the likeliest first."""
        logits = torch.cat([self._classifier.logits(row) for row in in_steps(batch.rows)]).cpu()
        found: list[Extraction | ItemFailure] = []
        done = 0
        for text in batch.texts:
            rows = logits[done : done + len(text.sequences)]
            done += len(text.sequences)
            if not bool(torch.isfinite(rows).all()):
                found.append(NOT_FINITE)
                continue
            scores = self._scores(rows, text.wanted.multi_label).tolist()
            found.append(
                Extraction(classifications=ranked(text.wanted.labels, scores, text.wanted.threshold))
            )
        return found

    def _scores(self, logits: torch.Tensor, multi_label: bool) -> torch.Tensor:
        """fp32 [labels] from fp32 [labels, classes of the classifier]."""
        if multi_label or len(logits) == 1:
            return torch.softmax(logits[:, [self._contradiction, self._entailment]], dim=1)[:, 1]
        return torch.softmax(logits[:, self._entailment], dim=0)


def _wanted(call: Call) -> _Wanted:
    """What the call asks for; raises `InvalidInput` for a template without exactly one {}."""
    options = OptionReader(call)
    template = options.text("hypothesis_template", TEMPLATE, _LONGEST_TEMPLATE)
    if template.count("{}") != 1:
        raise options.refused("hypothesis_template", template, "must hold {} once, for the label")
    labels = call.labels if isinstance(call, ExtractCall) else []
    return _Wanted(
        labels,
        [template.replace("{}", label) for label in labels],
        options.flag("multi_label", False),
        options.threshold("threshold", 0.0),
    )
