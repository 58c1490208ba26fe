"""Conversations with pictures as transformers alone would read them: written by hand, tokenized one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image

PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
"""What the template of the tiny models writes for a picture."""
_LIGHTON_SIDE = 28


def token_ids(
    tokenizer: Any, images: Any, turns: Sequence[tuple[str, str]], pictures: Sequence[Image.Image]
) -> tuple[Any, dict[str, Any]]:
    """Token ids [1, t] of (role, text) turns up to the answer, and the model's arguments for their pictures."""
    text = (
        "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns) + "<|im_start|>assistant\n"
    )
    seen = dict(images(images=list(pictures), return_tensors="pt")) if pictures else {}
    for grid in seen.get("image_grid_thw", []):
        text = text.replace("<|image_pad|>", "<seen>" * int(grid.prod() // 4), 1)
    for height, width in seen.get("image_sizes", []):
        tokens = int(height // _LIGHTON_SIDE * (width // _LIGHTON_SIDE))
        text = text.replace("<|image_pad|>", "<seen>" * tokens, 1)
    return tokenizer(text.replace("<seen>", "<|image_pad|>"), return_tensors="pt")["input_ids"], seen
