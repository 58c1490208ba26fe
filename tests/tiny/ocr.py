"""Tiny language models that write down what stands on a page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from tests.tiny.detectors import save_spread
from tests.tiny.models import SIZES, WIDTH
from tests.tiny.towers import VISION_MARKS, chat_tokenizer

POSITIONS = 128
_SIDE = {"min_pixels": 28 * 28, "max_pixels": 112 * 112}
_TEXT = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": POSITIONS}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 14}


def lighton_ocr(directory: Path) -> None:
    """LightOnOCR: a Pixtral encoder, and Qwen3."""
    tokenizer = chat_tokenizer(directory)
    vision = {
        **_VISION,
        "model_type": "pixtral",
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    config = transformers.LightOnOcrConfig(
        text_config={**_TEXT, "model_type": "qwen3", "vocab_size": len(tokenizer)},
        vision_config={**vision, "image_size": 112},
        image_token_id=_marks(tokenizer)["image_token_id"],
    )
    _save(transformers.LightOnOcrForConditionalGeneration(config), tokenizer, directory)
    images = transformers.PixtralImageProcessorPil(
        size={"longest_edge": 112}, patch_size={"height": 28, "width": 28}
    )
    images.save_pretrained(str(directory))


def glm_ocr(directory: Path) -> None:
    """GLM-OCR: both halves have rotary positions of several dimensions."""
    tokenizer = chat_tokenizer(directory)
    text = {**_TEXT, "vocab_size": len(tokenizer)}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {**_VISION, "depth": 2, "num_heads": 2, "out_hidden_size": WIDTH, "image_size": 112}
    config = transformers.GlmOcrConfig(text_config=text, vision_config=vision, **_marks(tokenizer))
    _save(transformers.GlmOcrForConditionalGeneration(config), tokenizer, directory)
    transformers.Glm46VImageProcessorPil(
        size={"shortest_edge": 28 * 28 * 2, "longest_edge": 112 * 112 * 2}
    ).save_pretrained(str(directory))


def paddleocr_vl(directory: Path) -> None:
    """PaddleOCR-VL: a SigLIP encoder of any size, and Ernie 4.5."""
    tokenizer = chat_tokenizer(directory)
    text = {**_TEXT, "vocab_size": len(tokenizer), "tie_word_embeddings": False}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {**_VISION, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56}
    config = transformers.PaddleOCRVLConfig(text_config=text, vision_config=vision, **_marks(tokenizer))
    _save(transformers.PaddleOCRVLForConditionalGeneration(config), tokenizer, directory)
    transformers.PaddleOCRVLImageProcessorPil(**_SIDE).save_pretrained(str(directory))


BUILDERS: dict[str, Callable[[Path], None]] = {
    builder.__name__: builder for builder in (lighton_ocr, glm_ocr, paddleocr_vl)
}


def _marks(tokenizer: Any) -> dict[str, int]:
    """Ids of the tokens that stand for pictures and videos, by their names in a config."""
    names = ("image_token_id", "video_token_id")
    return dict(zip(names, tokenizer.convert_tokens_to_ids(list(VISION_MARKS[2:])), strict=True))


def _save(model: Any, tokenizer: Any, directory: Path) -> None:
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    save_spread(model, directory, 0.1)
