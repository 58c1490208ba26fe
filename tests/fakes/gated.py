"""A dense family whose LoRA adapters finish loading when a test says so: while their directory has a file `hold`."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.holding import wait_for_end_of
from workers.adapters.dense import DenseAdapter
from workers.adapters.shared.lora import FittedLora, LoraLayers
from workers.adapters.shared.sentence_transformers_layout import ModelLayout
from workers.adapters.shared.text_model import TextModel


class GatedLayers(LoraLayers):
    """Waits before it reads an adapter."""

    def fit(self, directory: Path) -> FittedLora:
        """As the base class, once there is no file `hold`."""
        wait_for_end_of(str(directory / "hold"))
        return super().fit(directory)


class GatedDenseAdapter(DenseAdapter):
    """The dense family over gated LoRA adapters."""

    def __init__(self, text: TextModel, layout: ModelLayout) -> None:
        super().__init__(text, layout)
        self.loras = GatedLayers(text.encoder.model)
