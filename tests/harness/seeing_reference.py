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

import transformers
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.video_processing_utils import VideoProcessorMixin


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
    return unchecked(**parts, chat_template=tokenizer.chat_template, **options)


def _processor_class(name: str) -> Any:
    """The class of a processor. SmolVLM's needs num2words for videos; for pictures Idefics 3's does the same."""
    if name != "PixtralProcessor":
        return getattr(transformers, "Idefics3Processor" if name == "SmolVLMProcessor" else name)
    in_pillow = importlib.import_module("transformers.models.pixtral.image_processing_pil_pixtral")
    # NOTE: the module imports one function of the torchvision module, which stands in the Pillow module, too.
    with patch.dict(sys.modules, {"transformers.models.pixtral.image_processing_pixtral": in_pillow}):
        return importlib.import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor
