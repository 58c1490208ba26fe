"""The families by the type of a model's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers import image_settings
from workers.generation.pictures.family import Family
from workers.generation.pictures.tiled import Idefics3, InternVL, Llama4, LlavaOnevision
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
PIXELS = ("min_pixels", "max_pixels")
"""Options of a load that bound the area of a picture in pixels, for the families of Qwen."""


def load(
    directory: Path,
    config: Any,
    tokenizer: Any,
    *,
    trust_remote_code: bool = False,
    pixels: Mapping[str, int] | None = None,
) -> Family:
    """The pictures of the model in a directory. `pixels` are options of `PIXELS`, over the stored ones.

    Raises `NotServed` for an architecture without a family and for settings that are not served, `DamagedFile` for a
    file that makes no image processor, OSError without the file of the image processor, ImportError without pillow.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise image_settings.NotServed(
            f"pictures of the architecture {config.model_type!r} are not read; those of {', '.join(FAMILIES)} are"
        )
    name = image_settings.check(directory)
    with image_settings.trying(name):
        images = family.load_images(directory, trust_remote_code=trust_remote_code, **(pixels or {}))
        images_of = family(config, tokenizer, images)
        images_of.file = name
        images_of.try_out()
    return images_of


def pixels_of(config: Any, options: Mapping[str, Any]) -> dict[str, int]:
    """The bounds on the area of a picture among the options of a load.

    Raises ValueError for a bound that is no positive number, bounds that no size meets, and a model of another family.
    """
    pixels = {name: options[name] for name in PIXELS if name in options}
    for name, value in pixels.items():
        if FAMILIES.get(getattr(config, "model_type", "")) is not Qwen:
            raise ValueError(f"{name}: only models of Qwen that see have this option")
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: {value!r} is no number of pixels")
    if len(pixels) == len(PIXELS) and pixels["min_pixels"] > pixels["max_pixels"]:
        raise ValueError(f"min_pixels: {pixels['min_pixels']} is over max_pixels, {pixels['max_pixels']}")
    return pixels


def stored_template(directory: Path) -> str:
    """The chat template that older releases store for a processor; empty where the tokenizer has the right one.

    NOTE: checkpoints of those releases may have another template in `tokenizer_config.json`, which knows no pictures.
    """
    older = directory / "chat_template.json"
    if (directory / "chat_template.jinja").exists() or not older.exists():
        return ""
    template = json.loads(older.read_text(encoding="utf-8")).get("chat_template")
    return template if isinstance(template, str) else ""
