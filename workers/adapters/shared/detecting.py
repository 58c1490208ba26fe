"""What the object detectors share: pictures through the model's own processor, boxes back into pixels of the original.

1. `prepare` decodes and processes each picture alone; its size and what the request wants stay beside it.
2. `collate` stacks pictures of equal processed shape: padding to a common shape would move the scores of some models.
3. `extract` runs one forward pass per shape and keeps, per item, what is likely enough and wanted.

What lies wholly outside of the picture (in the padding of a model that pads) is left out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ipc.wire.extraction import DetectedObject, Extraction
from ipc.wire.messages import InputItem
from workers.adapters.base import ItemFailure, Prepared
from workers.adapters.shared.extracting import NOT_FINITE
from workers.adapters.shared.image_extracting import ImageExtractAdapter, Size, patches, pixel_box, size_of


@dataclass(frozen=True, slots=True)
class Scene:
    """One prepared picture; `wanted` is what its request asks for, in the family's own form."""

    inputs: Mapping[str, np.ndarray]
    size: Size
    wanted: Any


class Found(NamedTuple):
    """One detection: label, score, and corners (left, top, right, bottom) in pixels of the original picture."""

    label: str
    score: float
    corners: Sequence[float]


@dataclass(frozen=True, slots=True)
class Scenes:
    """Scenes of one processed shape, and their places in the batch."""

    scenes: list[Scene]
    places: list[int]


class Detector(ImageExtractAdapter):
    """Base of the object detectors."""

    @abstractmethod
    def inputs_of(self, image: Any, wanted: Any) -> Mapping[str, np.ndarray]:
        """Model inputs of one RGB picture, without the batch dimension; `pixel_values` [3, h, w] is among them."""

    def forward(self, inputs: dict[str, torch.Tensor], scenes: Sequence[Scene]) -> Any:
        """Run the model on stacked inputs: `pred_boxes` [n, boxes, 4] and `logits`, n of [boxes, classes]."""
        return self._model(**inputs)

    @abstractmethod
    def read(self, output: Any, scenes: Sequence[Scene]) -> list[list[Found]]:
        """All detections of each scene that it wants."""

    def prepared(self, image: Any, item: InputItem, wanted: Any) -> Prepared | ItemFailure:
        """Model inputs of one picture."""
        inputs = self.inputs_of(image, wanted)
        return Prepared(Scene(inputs, size_of(image), wanted), patches(inputs["pixel_values"]))

    def collate(self, prepared: Sequence[Prepared]) -> list[Scenes]:
        """Scenes by processed shape."""
        groups: dict[Any, Scenes] = {}
        for at, item in enumerate(prepared):
            shape = tuple(sorted((name, array.shape) for name, array in item.payload.inputs.items()))
            group = groups.setdefault(shape, Scenes([], []))
            group.scenes.append(item.payload)
            group.places.append(at)
        return list(groups.values())

    @torch.inference_mode()
    def extract(self, batch: list[Scenes]) -> list[Extraction | ItemFailure]:
        """Objects of each picture, the likeliest first."""
        found: dict[int, Extraction | ItemFailure] = {}
        for group in batch:
            output = self.forward(self._stacked(group.scenes), group.scenes)
            broken = _broken(output)
            detections = self.read(output, group.scenes)
            for at, place in enumerate(group.places):
                size = group.scenes[at].size
                found[place] = NOT_FINITE if broken[at] else _extraction(detections[at], size)
        return [found[place] for place in sorted(found)]

    def _stacked(self, scenes: Sequence[Scene]) -> dict[str, torch.Tensor]:
        return {
            name: self.on_device(np.stack([one.inputs[name] for one in scenes])) for name in scenes[0].inputs
        }


def corners_of(boxes: torch.Tensor) -> torch.Tensor:
    """float32 [..., 4] left, top, right, bottom of boxes given as centre, width and height."""
    centre, extent = boxes[..., :2].float(), boxes[..., 2:].float()
    return torch.cat([centre - extent / 2, centre + extent / 2], dim=-1)


def _broken(output: Any) -> list[bool]:
    """Which scenes have values that are none; minus infinity marks places of the text that are not used."""
    boxes: list[bool] = (~torch.isfinite(output.pred_boxes)).flatten(1).any(1).tolist()
    return [bool(torch.isnan(logits).any()) or box for logits, box in zip(output.logits, boxes, strict=True)]


def _extraction(objects: Sequence[Found], size: Size) -> Extraction:
    seen = sorted((one for one in objects if _is_inside(one.corners, size)), key=lambda one: -one.score)
    return Extraction(
        objects=[DetectedObject(one.label, one.score, pixel_box(one.corners, size)) for one in seen]
    )


def _is_inside(corners: Sequence[float], size: Size) -> bool:
    left, top, right, bottom = corners
    return left < size.width and top < size.height and right > 0 and bottom > 0
