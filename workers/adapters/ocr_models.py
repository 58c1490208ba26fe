"""LightOnOCR, GLM-OCR and PaddleOCR-VL: language models that write down what stands on a page.

A page and the words of a task make a conversation by the checkpoint's own chat template, which the model continues.
The text becomes one entity. An instruction takes the place of the task's words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import torch

from ipc.errors import InvalidInput
from ipc.wire.extraction import Entity, Extraction
from ipc.wire.messages import ExtractCall, InputItem
from workers.adapters.base import AdapterSpec, ItemFailure, LoadContext, Prepared
from workers.adapters.shared.checkpoint import build_model
from workers.adapters.shared.image_extracting import refuse_endless, size_of
from workers.adapters.shared.image_writing import Assignment, ImageWriter, Page
from workers.adapters.shared.vision_chat import VisionChat


class OcrAdapter(ImageWriter):
    """Base of these families.

    tasks  the words of each task, by the task's name
    typed  whether the model wants to be told which tokens are those of the picture
    """

    tasks: ClassVar[Mapping[str, str]]
    typed: ClassVar[bool] = True
    default_task = "ocr"
    default_tokens = 2048
    _processor: VisionChat

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """Load tokenizer, image processor and weights; progress phases are "tokenizer" and "weights"."""
        import transformers

        chat = VisionChat.read(context)
        return cls.build(build_model(context, getattr(transformers, cls.model_class)), chat, context)

    @property
    def max_sequence_length(self) -> int:
        """Positions of the model, for the page, the task and the written text."""
        return int(self._model.config.get_text_config().max_position_embeddings)

    def prompt_of(self, task: str, call: ExtractCall) -> tuple[str, tuple[int, ...]]:
        """The words of the task or the instruction, and the conversation without the page."""
        if task not in self.tasks:
            raise InvalidInput(
                f"params.options.task: {task[:64]!r} is not a task of this model, which knows {', '.join(self.tasks)}"
            )
        refuse_endless(call.instruction, self.max_sequence_length)
        words = call.instruction or self.tasks[task]
        if (mark := self._processor.mark_in(words)) is not None:
            raise InvalidInput(f"params.instruction: {mark!r} stands for the picture in this model")
        return words, tuple(self._processor.prompt([("user", [words])]).ids)

    def room_for(self, prompt: Sequence[int]) -> int:
        """The positions after the prompt, and one token more, as the last token needs no position."""
        return self.max_sequence_length - len(prompt) + 1

    def prepared(self, image: Any, item: InputItem, wanted: Assignment) -> Prepared | ItemFailure:
        """The conversation with the page."""
        picture = self._processor.picture(image)
        words = [wanted.task] if wanted.task else []
        prompt = tuple(self._processor.prompt([("user", [picture, *words])]).ids)
        room = self.room_for(prompt)
        if room < 1:
            return ItemFailure(
                "INPUT_TOO_LONG",
                f"images[0]: {len(prompt)} tokens with the task, the limit of this model is {self.max_sequence_length}",
            )
        wanted = replace(wanted, prompt=prompt, max_new_tokens=min(room, wanted.max_new_tokens))
        return Prepared(Page(picture.inputs, size_of(image), wanted), len(prompt))

    def tokens_read(self, pixels: np.ndarray) -> int:
        """The prompt holds the picture's tokens already."""
        return 0

    def model_inputs(self, prompts: torch.Tensor) -> Mapping[str, Any]:
        """Prompts with the places of the picture."""
        inputs = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
        if self.typed:
            inputs["mm_token_type_ids"] = (prompts == int(self._model.config.image_token_id)).int()
        return {**inputs, "pad_token_id": self._processor.pad_id}

    def read(self, ids: list[int], page: Page) -> Extraction:
        """The text after the prompt."""
        written = ids[len(page.assignment.prompt) :]
        text = self._processor.tokenizer.decode(written, skip_special_tokens=True).strip()
        return Extraction(entities=[Entity(text, "text")] if text else [])


def _spec(family: str) -> AdapterSpec:
    return AdapterSpec(family=family, operations=("extract",), inputs=("image",), outputs=("json",))


class LightOnOcrAdapter(OcrAdapter):
    """A Pixtral encoder and Qwen3; the model has one task, which needs no words (github.com/lightonai)."""

    spec = _spec("lighton_ocr")
    model_class = "LightOnOcrForConditionalGeneration"
    tasks: ClassVar[Mapping[str, str]] = {"ocr": ""}
    typed = False


class GlmOcrAdapter(OcrAdapter):
    """GLM-OCR (github.com/zai-org/GLM-OCR)."""

    spec = _spec("glm_ocr")
    model_class = "GlmOcrForConditionalGeneration"
    tasks: ClassVar[Mapping[str, str]] = {
        "ocr": "Text Recognition:",
        "table": "Table Recognition:",
        "formula": "Formula Recognition:",
    }


class PaddleOcrVlAdapter(OcrAdapter):
    """PaddleOCR-VL (github.com/PaddlePaddle/PaddleOCR)."""

    spec = _spec("paddleocr_vl")
    model_class = "PaddleOCRVLForConditionalGeneration"
    tasks: ClassVar[Mapping[str, str]] = {
        "ocr": "OCR:",
        "table": "Table Recognition:",
        "formula": "Formula Recognition:",
        "chart": "Chart Recognition:",
        "spotting": "Spotting:",
        "seal": "Seal Recognition:",
    }
