"""The families by the type of a model's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workers.generation.pictures.family import Family
from workers.generation.pictures.llama4 import Llama4
from workers.generation.pictures.tiled import Idefics3, InternVL, LlavaOnevision
from workers.generation.pictures.whole import Gemma3, Mistral3, Qwen

FAMILIES: dict[str, type[Family]] = {
    "qwen2_vl": Qwen,
    "qwen2_5_vl": Qwen,
    "qwen3_vl": Qwen,
    "qwen3_vl_moe": Qwen,
    "gemma3": Gemma3,
    "smolvlm": Idefics3,
    "idefics3": Idefics3,
    "llava_onevision": LlavaOnevision,
    "mistral3": Mistral3,
    "internvl": InternVL,
    "llama4": Llama4,
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
    images = family.load_images(directory, trust_remote_code=trust_remote_code)
    return family(config, tokenizer, images)


def stored_template(directory: Path) -> str:
    """The chat template that older releases store for a processor; empty where the tokenizer has the right one.

    NOTE: checkpoints of those releases may have another template in `tokenizer_config.json`, which knows no pictures.
    """
    older = directory / "chat_template.json"
    if (directory / "chat_template.jinja").exists() or not older.exists():
        return ""
    found = json.loads(older.read_text(encoding="utf-8")).get("chat_template")
    return found if isinstance(found, str) else ""
