"""Objects named by the caller, by OWLv2: image patches are compared with the vectors of label texts.

All pictures of a batch go through the image tower together, and each distinct label text of a batch goes through the
text tower once. The model pads a picture to a square at the right and lower edge; boxes are relative to the square.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch

from ipc.errors import InputTooLong
from ipc.extras import require
from ipc.wire.messages import ExtractCall
from workers.adapters.base import AdapterSpec
from workers.adapters.shared.image_extracting import Detector, Found, Scene, Scenes, corners_of, patches
from workers.adapters.shared.known_ids import KnownIds, embedding_rows
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.packing import padding_share
from workers.adapters.shared.tokenizing import TextTokenizer

LONGEST_SIDE = 4096
"""Larger pictures are made smaller first: the padded square would take gigabytes, and the model uses 1008 pixels."""
TEMPLATE = "a photo of {label}"


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Least score, the caller's labels, and the token ids of the text for each."""

    threshold: float
    labels: tuple[str, ...]
    texts: tuple[tuple[int, ...], ...]


class Owlv2Adapter(Detector):
    """OWLv2 with its text tower."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="owlv2",
        operations=("extract",),
        inputs=("image",),
        outputs=("json",),
    )
    labels = "required"
    model_class = "Owlv2ForObjectDetection"

    def __init__(self, model: Any, processor: Any) -> None:
        """Take over a loaded model and its processor. Raises ImportError without scipy, which resizes its pictures."""
        super().__init__(model, processor)
        require("scipy.ndimage", "vision")
        self._tokenizer = TextTokenizer(processor.tokenizer)
        self._longest = int(model.config.text_config.max_position_embeddings)
        self._tokenizer.limit(self._longest)
        self.known_ids = KnownIds(embedding_rows(model.owlv2.text_model), processor.tokenizer)

    def refuse_options(self, call: ExtractCall) -> None:
        """Refuse options that cannot be used. `prepare` tokenizes the labels, and refuses those that are too long."""
        _options(call)

    def wanted_of(self, call: ExtractCall) -> _Wanted:
        """Threshold, labels and their texts. Raises `InputTooLong` for a label with too many tokens."""
        threshold, template = _options(call)
        texts = self._tokenizer.encode([template.replace("{label}", label) for label in call.labels])
        for index, (label, tokens) in enumerate(zip(call.labels, texts, strict=True)):
            if tokens.truncated:
                raise InputTooLong(
                    f"params.labels[{index}]: {label[:64]!r} has more than the {self._longest} tokens "
                    "that this model reads of a label"
                )
        ids = tuple(tuple(tokens.ids) for tokens in texts)
        return _Wanted(threshold, tuple(call.labels), ids)

    def inputs_of(self, image: Any, wanted: Any) -> Mapping[str, np.ndarray]:
        """Pixel values float32 [3, h, w]."""
        if max(image.size) > LONGEST_SIDE:
            image = image.copy()
            image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        processed = self._processor.image_processor(images=image, return_tensors="np")
        return {"pixel_values": np.asarray(processed["pixel_values"][0], np.float32)}

    def ids_of(self, payload: Scene) -> Sequence[Sequence[int]]:
        """The texts of the labels."""
        texts: Sequence[Sequence[int]] = payload.wanted.texts
        return texts

    def padding_ratio(self, batch: list[Scenes]) -> float:
        """Share of padding in the texts of labels; the patches of pictures count as tokens."""
        texts = [text for group in batch for text in _texts_of(group.scenes)]
        seen = sum(patches(one.inputs["pixel_values"]) for group in batch for one in group.scenes)
        return padding_share(seen + sum(map(len, texts)), seen + len(texts) * self._longest)

    def forward(self, inputs: dict[str, torch.Tensor], scenes: Sequence[Scene]) -> Any:
        """Logits [boxes, labels] of each scene, and `pred_boxes` [n, boxes, 4]."""
        model = self._model
        grid = model.image_embedder(inputs["pixel_values"])[0]
        features = grid.flatten(1, 2)
        distinct = _texts_of(scenes)
        vectors, rows = self._text_vectors(distinct), {text: at for at, text in enumerate(distinct)}
        logits = []
        for at, scene in enumerate(scenes):
            queries = vectors[[rows[text] for text in scene.wanted.texts]][None]
            logits.append(model.class_predictor(features[at : at + 1], queries)[0][0].float())
        return SimpleNamespace(logits=logits, pred_boxes=model.box_predictor(features, grid))

    def _text_vectors(self, texts: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """[n, d] at unit length; texts are padded to the model's full length, as in training."""
        ids = np.full((len(texts), self._longest), self._tokenizer.pad_id, np.int64)
        mask = np.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text
            mask[row, : len(text)] = 1
        features = self._model.owlv2.get_text_features(
            input_ids=self.on_device(ids), attention_mask=self.on_device(mask)
        )
        return torch.nn.functional.normalize(features.pooler_output, dim=-1)

    def read(self, output: Any, scenes: Sequence[Scene]) -> list[list[Found]]:
        """The best label of each patch whose score reaches the threshold."""
        extractions = []
        for scene, logits, boxes in zip(scenes, output.logits, corners_of(output.pred_boxes), strict=True):
            best, label = torch.sigmoid(logits).max(dim=-1)
            certain = best >= scene.wanted.threshold
            columns = (
                label[certain].tolist(),
                best[certain].tolist(),
                (boxes[certain] * max(scene.size)).tolist(),
            )
            extractions.append(
                [Found(scene.wanted.labels[at], score, box) for at, score, box in zip(*columns, strict=True)]
            )
        return extractions


def _texts_of(scenes: Sequence[Scene]) -> list[tuple[int, ...]]:
    """The token ids of each distinct text of labels."""
    return list(dict.fromkeys(text for scene in scenes for text in scene.wanted.texts))


def _options(call: ExtractCall) -> tuple[float, str]:
    """Least score, and the text around a label. Raises `InvalidInput` for a text without a place for the label."""
    options = OptionReader(call)
    template = options.text("label_template", TEMPLATE, 200)
    if template.count("{label}") != 1:
        raise options.refused("label_template", template, "must hold {label} once")
    return options.threshold("score_threshold", 0.1), template
