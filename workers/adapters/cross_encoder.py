"""Cross-encoders: a classifier with one label reads query and document as one sequence; its logit is the score.

Serves ...ForSequenceClassification checkpoints, as transformers or sentence-transformers' CrossEncoder saves them.

1. `prepare` joins the query with each document; a pair that is too long loses tokens of its longer half first. Before
   the query stands the instruction of the call, else the default prompt that sentence-transformers has stored.
2. `score` runs the pairs as one packed row and applies the stored activation to the logit, by default a sigmoid. The
   rule is that of sentence-transformers 6.2 (`cross_encoder/model.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ipc.wire.messages import Call
from workers.adapters.base import AdapterSpec, LoadContext, Prepared
from workers.adapters.shared.classification import SequenceClassifier, build_classifier
from workers.adapters.shared.heads import stored_activation
from workers.adapters.shared.packing import PackedBatch
from workers.adapters.shared.pairs import (
    AUTO,
    PairTokenizer,
    ScoreAdapter,
    activation,
    pair_excess,
    query_of,
)
from workers.adapters.shared.sentence_transformers_layout import PROMPTS_FILE, default_prompt
from workers.adapters.shared.transformer_settings import read_json

log = logging.getLogger(__name__)


class CrossEncoderAdapter(ScoreAdapter):
    """A sequence classifier with one label over pairs."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="cross_encoder",
        operations=("score",),
        inputs=("text",),
        outputs=("score",),
    )
    overflows = ("truncate", "truncate_left", "error")
    _model: SequenceClassifier
    _prompt = ""

    @property
    def memory_bytes(self) -> int:
        """Bytes held by weights and buffers."""
        return self._model.memory_bytes

    @property
    def own_labels(self) -> Sequence[str]:
        """The one label."""
        return self._model.labels

    @classmethod
    def load(cls, context: LoadContext) -> CrossEncoderAdapter:
        """Load tokenizer and weights; progress phases are "tokenizer" and "weights".

        Raises ValueError for a classifier with more than one label.
        """
        classifier, tokenizer, limit = build_classifier(context, SequenceClassifier)
        labels = len(classifier.labels)
        if labels != 1:
            raise ValueError(f"a cross-encoder that scores has one label, this model has {labels}")
        chosen = str(context.options.get("activation", AUTO))
        stored = read_json(context.directory / PROMPTS_FILE)
        function = _stored_activation(stored, classifier.config) if chosen == AUTO else activation(chosen)
        adapter = cls(classifier, PairTokenizer(tokenizer, limit, "longest_first"), function)
        adapter.tokenizer, adapter.known_ids = tokenizer, classifier.known_ids
        adapter._prompt = default_prompt(stored)
        return adapter

    def joined(self, texts: Sequence[str], call: Call) -> list[Prepared]:
        """Tokenize the query once and join it with each document; an instruction goes before the query."""
        before = f"{call.instruction} " if call.instruction else self._prompt
        query = f"{before}{query_of(call)}"
        [first] = self._pairs.halves([query])
        fits = len(first.ids) <= self._pairs.limit
        documents = self._pairs.sides(texts, call.overflow) if fits else self._pairs.halves(texts)
        pairs = [self._pairs.join(first, document, call.overflow) for document in documents]
        whole = len(first.ids) + self._pairs.special
        return [
            Prepared(
                pair.sequence,
                len(pair.sequence.ids),
                pair.truncated,
                excess=pair_excess(whole, pair.tokens, self._pairs.limit) if pair.truncated else None,
            )
            for pair in pairs
        ]

    @torch.inference_mode()
    def logits(self, batch: PackedBatch) -> torch.Tensor:
        """The one logit of each pair."""
        return self._model.logits(batch)[:, 0].float()


def _stored_activation(stored: Mapping[str, Any], config: Any) -> nn.Module:
    """The activation that the checkpoint names, or a sigmoid. Code of other packages than torch is not run."""
    in_config = getattr(config, "sentence_transformers", None) or {}
    name = (
        stored.get("activation_fn")
        or in_config.get("activation_fn")
        or getattr(config, "sbert_ce_default_activation_function", None)
    )
    if name is not None and not str(name).startswith("torch."):
        log.warning("the stored activation %s is not one of torch; a sigmoid is used", name)
        name = None
    return nn.Sigmoid() if name is None else stored_activation(str(name))
