"""Objects named by the caller, by Grounding DINO: all labels are one text, and every box scores the text's tokens.

The text is "a cat. a dog." in lower case, as in training. The score of a box is that of its best token, as in
transformers' `post_process_grounded_object_detection`. The label of a box is the caller's label that holds the best
token of all labels, if that token's score reaches `text_threshold`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ipc.errors import InputTooLong
from ipc.wire.messages import ExtractCall
from workers.adapters.base import AdapterSpec
from workers.adapters.shared.image_extracting import CHARACTERS_PER_TOKEN, Detector, Found, Scene, corners_of
from workers.adapters.shared.known_ids import KnownIds, embedding_rows
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.tokenizing import rust_copy, without_token


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Thresholds, the caller's labels, the tokens of each (first, end), and the text as int64 [t] model inputs."""

    box_threshold: float
    text_threshold: float
    labels: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    text: Mapping[str, np.ndarray]


class GroundingDinoAdapter(Detector):
    """Grounding DINO with its text tower."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="grounding_dino",
        operations=("extract",),
        inputs=("image",),
        outputs=("json",),
    )
    labels = "required"
    model_class = "GroundingDinoForObjectDetection"

    def __init__(self, model: Any, processor: Any) -> None:
        """Take over a loaded model and its processor. Raises ValueError for a tokenizer that tells no places."""
        super().__init__(model, processor)
        self._tokenizer = rust_copy(processor.tokenizer, "places of labels need it")
        self._longest = int(model.config.max_text_len)
        self.known_ids = KnownIds(embedding_rows(model.model.text_backbone), processor.tokenizer)

    def wanted_of(self, call: ExtractCall) -> _Wanted:
        """Thresholds and labels. Raises `InputTooLong` when the text of all labels is too long for the model."""
        options = OptionReader(call)
        labels = tuple(call.labels)
        # Too many or too long labels are refused before tokenizing: each takes at least a token and a full stop.
        if 2 * len(labels) + 2 > self._longest:
            raise self._too_long(f"{len(labels)} labels")
        characters = sum(map(len, labels))
        if characters > CHARACTERS_PER_TOKEN * self._longest:
            raise self._too_long(f"{characters} characters")
        encoding, places = self._text(labels)
        if len(encoding.ids) > self._longest:
            raise self._too_long(f"{len(encoding.ids)} tokens")
        text = {
            "input_ids": np.asarray(encoding.ids, np.int64),
            "attention_mask": np.asarray(encoding.attention_mask, np.int64),
            "token_type_ids": np.asarray(encoding.type_ids, np.int64),
        }
        spans = tuple(_span(encoding.offsets, encoding.special_tokens_mask, *place) for place in places)
        for index, (first, end) in enumerate(spans):
            if first == end:
                raise without_token(labels, index)
        return _Wanted(
            options.threshold("box_threshold", 0.25),
            options.threshold("text_threshold", 0.25),
            labels,
            spans,
            text,
        )

    def ids_of(self, payload: Scene) -> list[np.ndarray]:
        """The text of all labels."""
        return [payload.wanted.text["input_ids"]]

    def _text(self, labels: Sequence[str]) -> tuple[Any, list[tuple[int, int]]]:
        """The encoded text of all labels, and the characters of each label in it."""
        pieces = [label.strip().lower().rstrip(". ") for label in labels]
        places, at = [], 0
        for piece in pieces:
            places.append((at, at + len(piece)))
            at += len(piece) + len(". ")
        return self._tokenizer.encode(". ".join(pieces) + "."), places

    def _too_long(self, what: str) -> InputTooLong:
        return InputTooLong(
            f"params.labels: {what}, this model reads {self._longest} tokens of labels in all"
        )

    def inputs_of(self, image: Any, wanted: _Wanted) -> Mapping[str, np.ndarray]:
        """Pixel values float32 [3, h, w], the mask of real pixels, and the text."""
        processed = self._processor.image_processor(images=image, return_tensors="np")
        pixels = {name: np.asarray(processed[name][0]) for name in ("pixel_values", "pixel_mask")}
        return {**pixels, **wanted.text}

    def read(self, output: Any, scenes: Sequence[Scene]) -> list[list[Found]]:
        """Boxes whose best token and whose label's best token reach the thresholds."""
        chances, corners = torch.sigmoid(output.logits.float()), corners_of(output.pred_boxes)
        return [_detections(scene, *both) for scene, *both in zip(scenes, chances, corners, strict=True)]


def _span(
    offsets: Sequence[tuple[int, int]], special: Sequence[int], start: int, end: int
) -> tuple[int, int]:
    """First and end token of the characters `start` to `end`."""
    inside = [
        at for at, (first, last) in enumerate(offsets) if not special[at] and first < end and last > start
    ]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def _detections(scene: Scene, chances: torch.Tensor, corners: torch.Tensor) -> list[Found]:
    """The detections of a scene, from `chances` [boxes, tokens] and relative `corners` [boxes, 4]."""
    wanted: _Wanted = scene.wanted
    height, width = scene.size
    by_label = torch.stack([chances[:, first:end].amax(1) for first, end in wanted.spans], dim=1)
    score, (strongest, label) = chances.amax(1), by_label.max(1)
    certain = (score >= wanted.box_threshold) & (strongest >= wanted.text_threshold)
    scaled = corners[certain] * torch.tensor([width, height, width, height], device=corners.device)
    columns = (label[certain].tolist(), score[certain].tolist(), scaled.tolist())
    return [Found(wanted.labels[at], one, box) for at, one, box in zip(*columns, strict=True)]
