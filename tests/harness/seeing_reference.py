"""transformers' own processors of the tiny models that see, in their Pillow form and without torchvision.

`AutoProcessor` loads those families only that have no video processor. For the others the processor's class gets its
parts one by one, and no videos.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from PIL import Image
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.video_processing_utils import VideoProcessorMixin

from workers.generation.pictures.family import Family
from workers.generation.pictures.tiled import Llama4, Llama4Images


class _NoVideos(VideoProcessorMixin):  # type: ignore[misc, no-untyped-call]
    """A video processor for prompts without videos."""

    def __init__(self) -> None:
        pass


def processor(directory: Path, images: Any = None) -> Any:
    """The processor of a model directory; `images` replaces its image processor."""
    options = json.loads((directory / "processor_config.json").read_text(encoding="utf-8"))
    kind = _processor_class(options.pop("processor_class"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    found = images or AutoImageProcessor.from_pretrained(str(directory), backend="pil")
    parts = {"image_processor": found, "tokenizer": tokenizer}
    if "video_processor" in kind.get_attributes():
        parts["video_processor"] = _NoVideos()
    # NOTE: the check of the parts' classes fails without torchvision, too.
    unchecked = type(
        kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, part: None}
    )
    made = unchecked(**parts, **options)
    made.chat_template = tokenizer.chat_template
    return made


def _processor_class(name: str) -> Any:
    """The class of a processor. SmolVLM's needs num2words for videos; for pictures Idefics 3's does the same."""
    if name != "PixtralProcessor":
        return getattr(transformers, "Idefics3Processor" if name == "SmolVLMProcessor" else name)
    in_pillow = importlib.import_module("transformers.models.pixtral.image_processing_pil_pixtral")
    # NOTE: the module imports one function of the torchvision module, which stands in the Pillow module, too.
    with patch.dict(sys.modules, {"transformers.models.pixtral.image_processing_pixtral": in_pillow}):
        return importlib.import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor


def processor_of(family: Family, directory: Path) -> Any:
    """As `processor`; the tiles of Llama 4 are made by our `family`."""
    return processor(directory, Llama4Shapes(family.images) if isinstance(family, Llama4) else None)


class Llama4Shapes:
    """Stands in for the image processor of Llama 4, which transformers has for torchvision only.

    The pixels are ours (`test_llama4_pictures.py` compares these); ids and features are those of transformers.
    """

    def __init__(self, images: Llama4Images) -> None:
        self._images = images

    def fetch_images(self, images: Any) -> Any:
        return images

    def __call__(self, images: Any, **options: Any) -> dict[str, Any]:
        upright = [image.convert("RGBA") for image in images]
        laid = [Image.alpha_composite(Image.new("RGBA", image.size, "white"), image) for image in upright]
        tiles = [self._images.tiles(image.convert("RGB")) for image in laid]
        canvases = [self._images.canvas(image.height, image.width) for image in images]
        ratios = [torch.tensor(canvas) // self._images.side for canvas in canvases]
        return {"pixel_values": torch.cat(tiles), "aspect_ratios": torch.stack(ratios)}
