"""Bases of the families that find something in a picture: `ImageExtractAdapter`, and `Detector` for objects.

Processors scale short sides up or pad to squares, so a picture of one pixel by fifty thousand would grow to gigabytes;
such strips fail alone. Boxes are [x, y, width, height] in whole pixels of the upright picture.

Detectors:

1. `prepare` decodes and processes each picture alone, and keeps its size and the options of the request.
2. `collate` stacks pictures of equal processed shape. Padding to a common shape would change the scores of some models.
3. `extract` runs one forward pass per shape, and keeps the objects of each item that pass its thresholds and labels.

Objects wholly outside of the picture, in the padding of a model that pads, are left out.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch

from ipc.errors import InputTooLong
from ipc.wire.extraction import DetectedObject, Extraction
from ipc.wire.messages import Call, ExtractCall, InputItem
from workers.adapters.base import ItemFailure, LoadContext, Prepared
from workers.adapters.shared.building import parameter_bytes
from workers.adapters.shared.checkpoint import build_model
from workers.adapters.shared.extracting import NOT_FINITE, ExtractAdapter
from workers.adapters.shared.images import first_image
from workers.images import load_image_processor, require_vision

log = logging.getLogger(__name__)

MOST_ASPECT = 20
"""Most times that one side of a picture is longer than the other."""
_PATCH_PIXELS = 256
CHARACTERS_PER_TOKEN = 40


class Size(NamedTuple):
    """Height and width of a picture in pixels, in the order of transformers' processors."""

    height: int
    width: int


class ImageExtractAdapter(ExtractAdapter):
    """Base of the families that read the first image of an item.

    model_class  transformers class of the model
    reads_words  whether its processor has a tokenizer beside the image processor
    """

    model_class: ClassVar[str]
    reads_words: ClassVar[bool] = True

    def __init__(self, model: Any, processor: Any) -> None:
        """Take over a loaded model and its processor."""
        self._model, self._processor = model, processor

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """Load processor and weights; progress phases are "processor" and "weights".

        Raises ImportError that names the extra `vision`, or a package that the checkpoint needs.
        """
        require_vision()
        import transformers

        trust = context.trust_remote_code
        images = partial(load_image_processor, context.directory, trust_remote_code=trust)
        if not cls.reads_words:
            processor = images()
        else:
            processor = transformers.AutoProcessor.from_pretrained(
                str(context.directory), trust_remote_code=trust, local_files_only=True
            )
            # NOTE: a tokenizer alone reads pages whose words have been found before.
            if hasattr(processor, "image_processor"):
                processor.image_processor = images()
        context.progress("processor", 1.0)
        model = build_model(context, getattr(transformers, cls.model_class))
        return cls.build(model, processor, context)

    @classmethod
    def build(cls, model: Any, processor: Any, context: LoadContext) -> Self:
        """The adapter around a loaded model; families that need more of the context override this method."""
        return cls(model, processor)

    @property
    def max_sequence_length(self) -> int:
        """Pictures have no length in tokens."""
        return 0

    @property
    def memory_bytes(self) -> int:
        """Bytes held by weights and buffers."""
        return parameter_bytes(self._model)

    @abstractmethod
    def prepared(self, image: Any, item: InputItem, wanted: Any) -> Prepared | ItemFailure:
        """One decoded picture (PIL, RGB, upright) ready for the device."""

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Decode and process the first image of each item."""
        assert isinstance(call, ExtractCall)
        wanted = self.wanted_of(call)
        return [self._one(item, wanted) for item in items]

    def _one(self, item: InputItem, wanted: Any) -> Prepared | ItemFailure:
        if not item.images:
            return ItemFailure("INVALID_INPUT", "images: missing")
        image = first_image(item)
        if isinstance(image, ItemFailure):
            return image
        if max(image.size) > MOST_ASPECT * min(image.size):
            sides = f"{image.width} x {image.height} pixels"
            return ItemFailure(
                "INVALID_INPUT", f"images[0]: {sides}, one side may be {MOST_ASPECT} times the other at most"
            )
        try:
            return self.prepared(image, item, wanted)
        except (ValueError, TypeError, OverflowError) as error:
            log.warning(
                "a picture of %s pixels could not be processed (%s)", image.size, type(error).__name__
            )
            return ItemFailure("INVALID_INPUT", "images[0]: this model's processor cannot use this picture")

    def on_device(self, array: Any) -> torch.Tensor:
        """A host array on the model's device; floating-point arrays in the model's dtype."""
        tensor = torch.from_numpy(array)
        return tensor.to(self._model.device, self._model.dtype if tensor.is_floating_point() else None)


def refuse_endless(text: str | None, longest: int) -> None:
    """Raise `InputTooLong` for an instruction far longer than `longest` tokens, without tokenizing the text."""
    most = CHARACTERS_PER_TOKEN * longest
    if text is not None and len(text) > most:
        raise InputTooLong(f"params.instruction: {len(text)} characters, this model reads {most} at most")


def size_of(image: Any) -> Size:
    """Size of a PIL image."""
    return Size(image.height, image.width)


def patches(pixel_values: Any) -> int:
    """The cost of a picture [3, h, w] in tokens."""
    return max(1, pixel_values.shape[-1] * pixel_values.shape[-2] // _PATCH_PIXELS)


def pixel_box(corners: Sequence[float], size: Size) -> list[int]:
    """[x, y, width, height] in whole pixels, inside an image of `size`, of (left, top, right, bottom)."""
    left, right = (min(max(round(x), 0), size.width) for x in (corners[0], corners[2]))
    top, bottom = (min(max(round(y), 0), size.height) for y in (corners[1], corners[3]))
    return [left, top, max(0, right - left), max(0, bottom - top)]


def around(points: Sequence[float], size: Size) -> list[int]:
    """The box around points given as x, y, x, y, ..."""
    across, down = points[0::2], points[1::2]
    return pixel_box((min(across), min(down), max(across), max(down)), size)


@dataclass(frozen=True, slots=True)
class Scene:
    """One prepared picture; `wanted` holds labels and options of the request, in the family's own form."""

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
        """The detections of each scene that pass its thresholds and labels."""

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
        extractions: dict[int, Extraction | ItemFailure] = {}
        for group in batch:
            output = self.forward(self._stacked(group.scenes), group.scenes)
            broken = _broken(output)
            detections = self.read(output, group.scenes)
            for at, place in enumerate(group.places):
                size = group.scenes[at].size
                extractions[place] = NOT_FINITE if broken[at] else _extraction(detections[at], size)
        return [extractions[place] for place in sorted(extractions)]

    def _stacked(self, scenes: Sequence[Scene]) -> dict[str, torch.Tensor]:
        return {
            name: self.on_device(np.stack([one.inputs[name] for one in scenes])) for name in scenes[0].inputs
        }


def corners_of(boxes: torch.Tensor) -> torch.Tensor:
    """float32 [..., 4] left, top, right, bottom of boxes given as centre, width and height."""
    centre, extent = boxes[..., :2].float(), boxes[..., 2:].float()
    return torch.cat([centre - extent / 2, centre + extent / 2], dim=-1)


def _broken(output: Any) -> list[bool]:
    """Whether each scene has values that are no numbers. Minus infinity in logits marks unused places of the text."""
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
