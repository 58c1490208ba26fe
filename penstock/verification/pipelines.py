"""References that are pipelines of transformers, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

from ipc.wire.extraction import Classification, Entity, Extraction
from penstock.verification.opening import Opening


class _Pipeline:
    """One task of transformers over the model's directory."""

    task = ""

    def __init__(self, opening: Opening, **arguments: Any) -> None:
        self._options = opening.entry.runtime | opening.entry.loadtime
        pipeline: Any = transformers.pipeline
        self._run = pipeline(
            self.task,
            model=opening.place,
            device=opening.device,
            dtype=torch.float32,
            trust_remote_code=opening.trust_remote_code,
            **arguments,
        )
        self.name = f"transformers {transformers.__version__} pipeline {self.task}"


class Entities(_Pipeline):
    """Token classification with the entry's aggregation."""

    task = "token-classification"

    def __init__(self, opening: Opening) -> None:
        strategy = opening.entry.runtime.get("aggregation_strategy", "simple")
        super().__init__(opening, aggregation_strategy=strategy)

    def extract(self, texts: Sequence[str], labels: Sequence[str]) -> list[Extraction]:
        """Entities of each text."""
        return [Extraction(entities=[_entity(found, text) for found in self._run(text)]) for text in texts]


class Classes(_Pipeline):
    """Text classification, every class scored."""

    task = "text-classification"

    def extract(self, texts: Sequence[str], labels: Sequence[str]) -> list[Extraction]:
        """Classes of each text."""
        function = self._options.get("function_to_apply")
        chosen = {} if function in (None, "auto") else {"function_to_apply": function}
        return [_classified(self._run(text, top_k=None, **chosen)) for text in texts]


class ZeroShotClasses(_Pipeline):
    """Zero-shot classification by entailment."""

    task = "zero-shot-classification"

    def extract(self, texts: Sequence[str], labels: Sequence[str]) -> list[Extraction]:
        """The labels of each text, scored."""
        template = self._options.get("hypothesis_template", "This example is {}.")
        several = bool(self._options.get("multi_label", False))
        answers = [
            self._run(text, candidate_labels=list(labels), hypothesis_template=template, multi_label=several)
            for text in texts
        ]
        return [
            _classified(
                [
                    {"label": label, "score": score}
                    for label, score in zip(one["labels"], one["scores"], strict=True)
                ]
            )
            for one in answers
        ]


def _entity(found: dict[str, Any], text: str) -> Entity:
    start, end = int(found["start"]), int(found["end"])
    label = str(found.get("entity_group") or found["entity"])
    return Entity(text[start:end], label, float(found["score"]), start, end)


def _classified(found: list[dict[str, Any]]) -> Extraction:
    return Extraction(
        classifications=[Classification(str(one["label"]), float(one["score"])) for one in found]
    )
