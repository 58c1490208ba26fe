"""The families by the type of a model's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workers.generation.pictures.family import Family
from workers.generation.pictures.qwen import Qwen
from workers.images import load_image_processor

FAMILIES: dict[str, type[Family]] = {
    "qwen2_vl": Qwen,
    "qwen2_5_vl": Qwen,
    "qwen3_vl": Qwen,
    "qwen3_vl_moe": Qwen,
}
"""Families by `model_type`."""


def load(directory: Path, config: Any, tokenizer: Any, *, trust_remote_code: bool = False) -> Family:
    """The pictures of the model in a directory.

    Raises ValueError for an architecture without a family and for settings that are not served, OSError without the
    file of the image processor, and ImportError without pillow.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"pictures of the architecture {config.model_type!r} are not read; those of {', '.join(FAMILIES)} are"
        )
    images = load_image_processor(directory, trust_remote_code=trust_remote_code)
    return family(config, tokenizer, images)
