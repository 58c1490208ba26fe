"""Florence-2: texts, captions, objects or answers about a picture, depending on the task.

The prompt of each task, and the reading of the model's text, are those of transformers' Florence2Processor. Texts
become entities, boxes become objects; slanted boxes and outlines become the upright box around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ipc.errors import InvalidInput
from ipc.wire.extraction import DetectedObject, Entity, Extraction
from ipc.wire.messages import ExtractCall
from workers.adapters.base import AdapterSpec
from workers.adapters.shared.image_extracting import Size, around, refuse_endless
from workers.adapters.shared.image_writing import ImageWriter, Page

QUESTION = "<DocVQA>"
_LABELS = {
    "<CAPTION>": "caption",
    "<DETAILED_CAPTION>": "caption",
    "<MORE_DETAILED_CAPTION>": "caption",
    "<REGION_TO_CATEGORY>": "category",
    "<REGION_TO_DESCRIPTION>": "caption",
    QUESTION: "answer",
}
"""Labels of the entities that hold a whole text; "text" for the others."""
_GROUNDING = ("<CAPTION_TO_PHRASE_GROUNDING>", "<OPEN_VOCABULARY_DETECTION>")


class Florence2Adapter(ImageWriter):
    """Florence-2 with its own tokenizer and post-processing."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="florence2",
        operations=("extract",),
        inputs=("image",),
        outputs=("json",),
    )
    model_class = "Florence2ForConditionalGeneration"
    default_task = "<OCR_WITH_REGION>"
    default_tokens = 1024

    def __init__(self, model: Any, processor: Any) -> None:
        """Take over a loaded model and its processor."""
        super().__init__(model, processor)
        known = processor.post_processor_config or {}
        kinds = processor.tasks_answer_post_processing_type
        self._tasks = [task for task, kind in {**kinds, QUESTION: "pure_text"}.items() if kind in known]
        tasks = (*processor.task_prompts_without_inputs, *processor.task_prompts_with_input)
        self._marks = (processor.image_token, *tasks)
        self._image = [processor.image_token_id] * processor.num_image_tokens

    @property
    def max_sequence_length(self) -> int:
        """Longest input in tokens: the picture and the prompt."""
        return int(self._model.config.text_config.max_position_embeddings)

    def _refuse_labels(self, call: ExtractCall) -> None:
        """Labels are the phrases of grounding tasks. `prompt_of` refuses labels of other tasks."""

    def prompt_of(self, task: str, call: ExtractCall) -> tuple[str, tuple[int, ...]]:
        """The places of the picture, then the task's question in words.

        An instruction with a task that takes none is a question about the picture.
        """
        if task not in self._tasks:
            raise InvalidInput(
                f"params.options.task: {task[:64]!r} is not a task of this model, which knows {', '.join(self._tasks)}"
            )
        about = call.instruction
        if call.labels:
            if task not in _GROUNDING or about is not None:
                raise InvalidInput(
                    f"params.labels: not used by {task}, which needs params.instruction or nothing"
                )
            about = ", ".join(call.labels)
        plain = task in self._processor.task_prompts_without_inputs
        if plain and about is not None and QUESTION in self._tasks:
            task, plain = QUESTION, False
        if plain == (about is not None) or (about is not None and not about.strip()):
            raise InvalidInput(f"params.instruction: {task} needs {'none' if plain else 'a text to work on'}")
        refuse_endless(about, self.max_sequence_length)
        self._refuse_marks(about or "", "params.labels" if call.labels else "params.instruction")
        tokenizer = self._processor.tokenizer
        words = self._processor(text=task + (about or ""))["input_ids"][0]
        return task, (*self._image, tokenizer.bos_token_id, *words, tokenizer.eos_token_id)

    def _refuse_marks(self, text: str, field: str) -> None:
        """Raise `InvalidInput` for a text with a mark that stands for the picture or a task."""
        mark = next((mark for mark in self._marks if mark in text), None)
        if mark is not None:
            raise InvalidInput(f"{field}: {mark!r} stands for the picture or a task in this model")

    def room_for(self, prompt: Sequence[int]) -> int:
        """All positions of the decoder, if the prompt fits into the positions of the encoder."""
        surplus = len(prompt) - self.max_sequence_length
        return self.max_sequence_length if surplus <= 0 else 1 - surplus

    def tokens_read(self, pixels: np.ndarray) -> int:
        """The prompt holds the picture's places already."""
        return 0

    def model_inputs(self, prompts: torch.Tensor) -> Mapping[str, Any]:
        """Prompts for the encoder."""
        return {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}

    def read(self, ids: list[int], page: Page) -> Extraction:
        """Entities or objects, depending on the task."""
        task, size = page.assignment.task, page.size
        text = self._processor.tokenizer.decode(ids, skip_special_tokens=False)
        parsed = self._processor.post_process_generation(
            text=text, task=task, image_size=(size.width, size.height)
        )[task]
        if isinstance(parsed, str):
            return Extraction(entities=[Entity(parsed, _LABELS.get(task, "text"))] if parsed else [])
        if "quad_boxes" in parsed:
            pairs = zip(parsed["labels"], parsed["quad_boxes"], strict=True)
            return Extraction(
                entities=[Entity(text, "text", bbox=around(quad, size)) for text, quad in pairs]
            )
        return _objects(parsed, size)


def _objects(found: Mapping[str, Any], size: Size) -> Extraction:
    """Boxes, and the boxes around outlines; `data` holds the outlines."""
    boxes = found.get("bboxes", [])
    names = found.get("labels" if "bboxes_labels" not in found else "bboxes_labels", [])
    objects = [_object(name, around(box, size)) for name, box in zip(names, boxes, strict=False)]
    outlines = found.get("polygons", [])
    owners = found.get("labels" if "polygons_labels" not in found else "polygons_labels", [])
    data = []
    for name, polygons in zip(owners, outlines, strict=False):
        points = [value for polygon in polygons for value in polygon]
        if points:
            objects.append(_object(name, around(points, size)))
            data.append({"label": objects[-1].label, "polygons": _whole(polygons)})
    return Extraction(objects=objects, data={"polygons": data} if data else {})


def _object(name: str, box: list[int]) -> DetectedObject:
    return DetectedObject(name or "object", 1.0, box)


def _whole(polygons: Iterable[Sequence[float]]) -> list[list[int]]:
    return [[round(value) for value in polygon] for polygon in polygons]
