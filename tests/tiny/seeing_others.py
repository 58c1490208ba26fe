"""Complete tiny chat models that see and have no family of ours: `save("llava", directory)`, one for each of `OTHERS`.

They lie on the disk as those of `tests.tiny.seeing` do, and come from the same seed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from tests.tiny.seeing import (
    CHATML,
    CHATML_ROLES,
    CLIP,
    HALF,
    PLAIN,
    SIGLIP,
    TEXT,
    TOWER,
    finish,
    make_tokenizer,
    text_options,
)

_LLAMA = {**PLAIN, "model_type": "llama"}
_SENTENCES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def save(name: str, directory: Path) -> Path:
    """Write a whole model directory, which is made; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    OTHERS[name](directory)
    return directory


def llava(directory: Path) -> None:
    """LLaVA 1.5: the middle square of every picture takes 16 placeholders."""
    tokenizer = make_tokenizer("llava", directory, (*_SENTENCES.values(), "<image>"), **_SENTENCES)
    config = transformers.LlavaConfig(
        text_config=text_options(tokenizer, _LLAMA),
        vision_config={**TOWER, "model_type": "clip_vision_model", "image_size": 32, "patch_size": 8},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}, "do_center_crop": True}
    strategy = {
        "patch_size": 8,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    finish(
        directory, tokenizer, config, "Llava", {**size, "resample": 3, **CLIP}, strategy, image_class="CLIP"
    )


def llava_next(directory: Path) -> None:
    """LLaVA-NeXT: the best of five canvases, tiles and the whole picture, rows with ends."""
    tokenizer = make_tokenizer("llava_next", directory, (*_SENTENCES.values(), "<image>"), **_SENTENCES)
    canvases = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]
    config = transformers.LlavaNextConfig(
        text_config=text_options(tokenizer, _LLAMA),
        vision_config={**TOWER, "model_type": "clip_vision_model", "image_size": 32, "patch_size": 8},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=canvases,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    crop = {"crop_size": {"height": 32, "width": 32}, "do_center_crop": True, "do_pad": True}
    images = {"size": {"shortest_edge": 32}, **crop, "image_grid_pinpoints": canvases, "resample": 3, **CLIP}
    strategy = {
        "patch_size": 8,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    finish(directory, tokenizer, config, "LlavaNext", images, strategy)


def aya_vision(directory: Path) -> None:
    """Aya Vision: one to six tiles with names, and the whole picture, 4 placeholders each."""
    marks = (
        "<image>",
        "<|START_OF_IMG|>",
        "<|END_OF_IMG|>",
        "<|IMG_PATCH|>",
        "<|IMG_LINE_BREAK|>",
        "TILE",
        "TILE_GLOBAL",
        *(f"TILE_{number}" for number in range(1, 7)),
    )
    tokenizer = make_tokenizer("aya_vision", directory, (*CHATML, *marks), **CHATML_ROLES)
    text = {**PLAIN, "model_type": "cohere2", "sliding_window": 24, "tie_word_embeddings": False}
    config = transformers.AyaVisionConfig(
        text_config=text_options(tokenizer, text),
        vision_config={**SIGLIP, "image_size": 32},
        image_token_index=tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>"),
        downsample_factor=2,
        adapter_layer_norm_eps=1e-6,
        alignment_intermediate_size=64,
        tie_word_embeddings=False,
    )
    size = {"height": 32, "width": 32}
    images = {
        "size": size,
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 6,
        "resample": 3,
        **HALF,
    }
    sizes = {"patch_size": 8, "img_size": 32, "downsample_factor": 2}
    finish(directory, tokenizer, config, "AyaVision", images, sizes, image_class="GotOcr2")


def idefics2(directory: Path) -> None:
    """Idefics 2: 4 placeholders between marks; neighbours share a mark, small pictures have a mask."""
    marks = ("<fake_token_around_image>", "<image>", "<end_of_utterance>")
    roles = {**_SENTENCES, "eos_token": "<end_of_utterance>"}
    tokenizer = make_tokenizer("idefics2", directory, (*_SENTENCES.values(), *marks), **roles)
    sizes = {"resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 16}
    config = transformers.Idefics2Config(
        text_config=text_options(tokenizer, {**PLAIN, "model_type": "mistral", "sliding_window": None}),
        vision_config={**TOWER, "image_size": 64, "patch_size": 8},
        perceiver_config={**sizes, "num_key_value_heads": 1, "hidden_size": 64},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    size = {"longest_edge": 64, "shortest_edge": 32}
    images = {"size": size, "do_image_splitting": False, "do_pad": True, "resample": 2, **HALF}
    finish(directory, tokenizer, config, "Idefics2", images, {"image_seq_len": 4})


def paligemma(directory: Path) -> None:
    """PaliGemma: 16 placeholders before the text, all tokens of a prompt see each other."""
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    places = [f"<loc{number:04}>" for number in range(1024)] + [f"<seg{number:03}>" for number in range(128)]
    tokenizer = make_tokenizer("paligemma", directory, (*roles.values(), "<image>", *places), **roles)
    config = transformers.PaliGemmaConfig(
        text_config=text_options(tokenizer, {**TEXT, "model_type": "gemma", "tie_word_embeddings": False}),
        vision_config={**SIGLIP, "image_size": 32, "projection_dim": 64},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=64,
        tie_word_embeddings=False,
    )
    images = {"image_seq_length": 16, "size": {"height": 32, "width": 32}, "resample": 3, **HALF}
    finish(directory, tokenizer, config, "PaliGemma", images, {}, image_class="Siglip")


def glm4v(directory: Path) -> None:
    """GLM-4V: positions in three axes, one placeholder for 16 x 16 pixels."""
    marks = (
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|image|>",
        "<|begin_of_video|>",
        "<|end_of_video|>",
        "<|video|>",
    )
    tokenizer = make_tokenizer("glm4v", directory, (*CHATML, *marks), **CHATML_ROLES)
    ids = dict(zip(marks, tokenizer.convert_tokens_to_ids(list(marks)), strict=True))
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 3, 3],
        "partial_rotary_factor": 1.0,
    }
    config = transformers.Glm4vConfig(
        text_config=text_options(tokenizer, {**TEXT, "rope_parameters": rope}),
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 8,
            "image_size": 64,
            "out_hidden_size": 64,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        image_token_id=ids["<|image|>"],
        video_token_id=ids["<|video|>"],
        image_start_token_id=ids["<|begin_of_image|>"],
        image_end_token_id=ids["<|end_of_image|>"],
        video_start_token_id=ids["<|begin_of_video|>"],
        video_end_token_id=ids["<|end_of_video|>"],
        tie_word_embeddings=False,
    )
    size = {"shortest_edge": 1024, "longest_edge": 16384}
    images = {"size": size, "patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "resample": 3, **CLIP}
    finish(directory, tokenizer, config, "Glm4v", images, {})


def mllama(directory: Path) -> None:
    """Llama 3.2 Vision: one word for a picture, which cross-attention layers read beside the text."""
    tokenizer = make_tokenizer("mllama", directory, (*_SENTENCES.values(), "<|image|>"), **_SENTENCES)
    layers = {"num_hidden_layers": 4, "cross_attention_layers": [1, 3], "tie_word_embeddings": False}
    text = {name: value for name, value in PLAIN.items() if name != "head_dim"}
    sight = {"num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 64}
    canvases = [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]
    config = transformers.MllamaConfig(
        text_config=text_options(tokenizer, text, **layers),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "image_size": 32,
            "patch_size": 8,
            "intermediate_layers_indices": [0],
            "max_num_tiles": 4,
            "supported_aspect_ratios": canvases,
            **sight,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<|image|>"),
    )
    size = {"height": 32, "width": 32}
    finish(
        directory,
        tokenizer,
        config,
        "Mllama",
        {"size": size, "max_image_tiles": 4, "resample": 2, **CLIP},
        {},
    )


def chameleon(directory: Path) -> None:
    """Chameleon: a quantizer makes 64 words of the vocabulary of every picture; one configuration for all parts."""
    marks = {"image_token": "<image>", "boi_token": "<racm3:break>", "eoi_token": "<eoss>"}
    tokenizer = make_tokenizer(
        "llava", directory, (*_SENTENCES.values(), *marks.values()), marks, **_SENTENCES
    )
    words = len(tokenizer)
    codes = {
        f"IMGIMG{''.join(chr(ord('A') + int(digit)) for digit in str(at))}Z": words + at for at in range(16)
    }
    text = {name: value for name, value in PLAIN.items() if name != "head_dim"}
    config = transformers.ChameleonConfig(
        **text_options(tokenizer, text, num_key_value_heads=4) | {"vocab_size": words + len(codes)},
        vq_config={
            "embed_dim": 16,
            "num_embeddings": len(codes),
            "latent_channels": 16,
            "resolution": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1],
            "num_res_blocks": 1,
        },
        vocabulary_map=codes | {"<image>": tokenizer.convert_tokens_to_ids("<image>")},
        tie_word_embeddings=False,
    )
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}, "do_center_crop": True}
    finish(
        directory, tokenizer, config, "Chameleon", {**size, "resample": 1, **HALF}, {"image_seq_length": 64}
    )


OTHERS: dict[str, Callable[[Path], Any]] = {
    builder.__name__: builder
    for builder in (llava, llava_next, aya_vision, idefics2, paligemma, glm4v, mllama, chameleon)
}
