"""A fake family that extracts: every word of a text is an entity, with the labels of the call in turn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from ipc.wire.extraction import Entity, Extraction
from ipc.wire.messages import Call, ExtractCall, InputItem
from tests.fakes.adapter import FakeAdapter
from workers.adapters.base import AdapterSpec, ItemFailure, Prepared


class FakeExtractor(FakeAdapter):
    """Words as entities; commands that make it fail are those of `FakeAdapter`."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="fake_extractor",
        operations=("extract",),
        inputs=("text",),
        outputs=("json",),
        options=FakeAdapter.spec.options,
    )

    @property
    def dims(self) -> dict[str, int]:
        """No vectors."""
        return {}

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """The text and the labels of each item."""
        labels = call.labels if isinstance(call, ExtractCall) and call.labels else ["word"]
        texts = [item.text or "" for item in items]
        return [Prepared((text, labels), len(text) // 4 + 1) for text in texts]

    def extract(self, batch: Any) -> list[Extraction | ItemFailure]:
        """Entities in the order of the text."""
        items, _ = batch
        for text, _ in items:
            self._obey(text)
        return [_entities(text, labels) for text, labels in items]


def _entities(text: str, labels: Sequence[str]) -> Extraction:
    found = enumerate(re.finditer(r"\S+", text))
    return Extraction(
        [Entity(word[0], labels[at % len(labels)], 0.5, word.start(), word.end()) for at, word in found]
    )
