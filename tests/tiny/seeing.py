"""Complete tiny chat models that see: `save("qwen2_5_vl", directory)`, one for each name in `FAMILIES`.

Every directory has the layout of the family's published checkpoints: configuration, weights, tokenizer, chat template,
image processor, processor. The processors' files are written as JSON, since some of their classes need torchvision.

Weights come from a fixed seed and are drawn wide, so that another picture gives another text. Pictures are small:
a placeholder stands for 16 x 16 pixels, a tile has 32 x 32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from tests.tiny import chat_tokenizers, vocabularies
from tests.tiny.models import SEED, write_json

CONTEXT = 4096
_GAIN, _LOGITS = 1.3, 4.0
"""Spread of the weights of unit-sized inputs, and of the logits."""
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_STEPS = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "do_convert_rgb": True,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
}
PLAIN = {**TEXT, "rope_parameters": _ROPE}
QWEN2 = {name: value for name, value in PLAIN.items() if name != "head_dim"} | {"model_type": "qwen2"}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "patch_size": 8, "vision_use_head": False}
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHATML_ROLES = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_QWEN_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
_QWEN_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "in_channels": 3,
}


def save(family: str, directory: Path) -> Path:
    """Write a whole model directory of a family, which is made; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    FAMILIES[family](directory)
    return directory


def qwen2_5_vl(directory: Path) -> None:
    """Qwen2.5-VL: windows of 4 x 4 placeholders in the first block of the tower, full attention in the second."""
    tokenizer = _qwen_tokenizer("qwen2_5_vl", directory)
    rope = {**_ROPE, "mrope_section": [2, 3, 3]}
    sight = {"window_size": 64, "fullatt_block_indexes": [1], "depth": 2}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text_options(tokenizer, {**QWEN2, "rope_parameters": rope}, model_type=None),
        vision_config={**_QWEN_TOWER, **sight},
        tie_word_embeddings=False,
        **_qwen_ids(tokenizer),
    )
    pixels = {"min_pixels": 1024, "max_pixels": 16384}
    _qwen(directory, tokenizer, config, "Qwen2_5_VL", {**pixels, **CLIP})


def qwen3_vl(directory: Path) -> None:
    """Qwen3-VL: outputs of blocks 0 and 1 of the tower are added behind text layers 0 and 1."""
    tokenizer = _qwen_tokenizer("qwen3_vl", directory)
    rope = {**_ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    sight = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1], "depth": 3}
    config = transformers.Qwen3VLConfig(
        text_config=text_options(tokenizer, {**TEXT, "rope_parameters": rope}),
        vision_config={**_QWEN_TOWER, **sight},
        tie_word_embeddings=False,
        **_qwen_ids(tokenizer),
    )
    size = {"shortest_edge": 1024, "longest_edge": 16384}
    _qwen(directory, tokenizer, config, "Qwen3VL", {"size": size, **HALF})


def gemma3(directory: Path) -> None:
    """Gemma 3: every picture takes 16 placeholders; sliding windows are shorter than prompts."""
    named = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    special = (*roles.values(), "<start_of_turn>", "<end_of_turn>", *named.values())
    tokenizer = make_tokenizer("gemma3", directory, special, named, **roles)
    image, begin, end = tokenizer.convert_tokens_to_ids(list(named.values()))
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    more = {"query_pre_attn_scalar": 16, "sliding_window": 24, "layer_types": layers}
    config = transformers.Gemma3Config(
        text_config=text_options(tokenizer, TEXT, **more),
        vision_config={**SIGLIP, "image_size": 64},
        mm_tokens_per_image=16,
        image_token_index=image,
        boi_token_index=begin,
        eoi_token_index=end,
    )
    empty = dict.fromkeys(("do_convert_rgb", "do_pan_and_scan", "pan_and_scan_max_num_crops"))
    images = {"image_seq_length": 16, "size": {"height": 64, "width": 64}, "resample": 2, **HALF, **empty}
    finish(directory, tokenizer, config, "Gemma3", images, {"image_seq_length": 16})


def smolvlm(directory: Path) -> None:
    """SmolVLM: the longest side becomes 128, tiles and one small whole picture take 4 placeholders each."""
    _idefics(directory, "smolvlm", "<|im_start|>", transformers.SmolVLMConfig, "SmolVLM")


def idefics3(directory: Path) -> None:
    """Idefics 3, with the pictures of SmolVLM."""
    _idefics(directory, "idefics3", "<|begin_of_text|>", transformers.Idefics3Config, "Idefics3")


def llava_onevision(directory: Path) -> None:
    """LLaVA-OneVision: the best of nine canvases, more than four tiles are shrunk, padding rows are cut away."""
    tokenizer = make_tokenizer("llava_onevision", directory, (*CHATML, "<image>", "<video>"), **CHATML_ROLES)
    image, video = tokenizer.convert_tokens_to_ids(["<image>", "<video>"])
    canvases = [[height, width] for height in (32, 64, 96) for width in (32, 64, 96)]
    config = transformers.LlavaOnevisionConfig(
        text_config=text_options(tokenizer, QWEN2),
        vision_config={**SIGLIP, "image_size": 32},
        image_token_index=image,
        video_token_index=video,
        image_grid_pinpoints=canvases,
        vision_aspect_ratio="anyres_max_4",
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    size = {"height": 32, "width": 32}
    images = {"size": size, "image_grid_pinpoints": canvases, "do_pad": True, "resample": 3, **HALF}
    processor = {
        "num_image_tokens": 16,
        "vision_feature_select_strategy": "full",
        "image_token": "<image>",
        "video_token": "<video>",
        "vision_aspect_ratio": "anyres_max_4",
    }
    finish(directory, tokenizer, config, "LlavaOnevision", images, processor)


def mistral3(directory: Path) -> None:
    """Mistral 3: the longest side is 96 at most, a row of placeholders ends with a token of its own."""
    special = (
        "[INST]",
        "[/INST]",
        "[IMG]",
        "[IMG_BREAK]",
        "[IMG_END]",
        "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]",
    )
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = make_tokenizer("mistral3", directory, (*roles.values(), *special), **roles)
    sight = {**TOWER, "model_type": "pixtral", "head_dim": 16, "image_size": 96, "patch_size": 8}
    config = transformers.Mistral3Config(
        text_config=text_options(tokenizer, {**PLAIN, "model_type": "mistral", "sliding_window": None}),
        vision_config={**sight, "hidden_act": "silu", "rope_parameters": dict(_ROPE)},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
        vision_feature_layer=-1,
        multimodal_projector_bias=False,
        tie_word_embeddings=False,
    )
    patch = {"height": 8, "width": 8}
    images = {"size": {"longest_edge": 96}, "patch_size": patch, "resample": 3, **CLIP}
    processor = {
        "patch_size": 8,
        "spatial_merge_size": 2,
        "image_token": "[IMG]",
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
    }
    finish(directory, tokenizer, config, "Pixtral", images, processor)


def internvl(directory: Path) -> None:
    """InternVL: one to six tiles, and a small whole picture if there is more than one, 4 placeholders each."""
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = make_tokenizer("internvl", directory, (*CHATML, *named.values()), named, **CHATML_ROLES)
    sight = {**TOWER, "image_size": [32, 32], "patch_size": [8, 8], "attention_bias": True}
    config = transformers.InternVLConfig(
        text_config=text_options(tokenizer, QWEN2),
        vision_config=sight,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    tiles = {"crop_to_patches": False, "min_patches": 1, "max_patches": 6}
    images = {"size": {"height": 32, "width": 32}, "resample": 3, **tiles, **CLIP}
    finish(directory, tokenizer, config, "InternVL", images, {"image_seq_length": 4}, image_class="GotOcr2")


def llama4(directory: Path) -> None:
    """Llama 4: up to six tiles with 4 placeholders each; chunks of 40 tokens, four experts."""
    marks = (
        "<|image_start|>",
        "<|image_end|>",
        "<|image|>",
        "<|patch|>",
        "<|tile_x_separator|>",
        "<|tile_y_separator|>",
    )
    turns = ("<|header_start|>", "<|header_end|>", "<|python_start|>", "<|python_end|>")
    roles = {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot|>",
        "pad_token": "<|finetune_right_pad|>",
    }
    tokenizer = make_tokenizer("llama4", directory, (*roles.values(), *turns, *marks), **roles)
    begin, end, patch = tokenizer.convert_tokens_to_ids([*marks[:2], marks[3]])
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
    chunks = {
        "num_hidden_layers": 4,
        "attention_chunk_size": 40,
        "floor_scale": 64,
        "intermediate_size_mlp": 96,
    }
    widths = dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 64)
    sight = {**TOWER, **widths, "intermediate_size": 128, "image_size": 32, "patch_size": 8}
    config = transformers.Llama4Config(
        text_config=text_options(tokenizer, PLAIN, **experts, **chunks),
        vision_config={**sight, "pixel_shuffle_ratio": 0.5, "rope_parameters": dict(_ROPE)},
        image_token_index=patch,
        boi_token_index=begin,
        eoi_token_index=end,
        tie_word_embeddings=False,
    )
    tiles = {"max_patches": 6, "resize_to_max_canvas": False}
    images = {"size": {"height": 32, "width": 32}, "resample": 2, **tiles, **HALF}
    finish(directory, tokenizer, config, "Llama4", images, {"patch_size": 8, "pixel_shuffle_ratio": 0.5})


FAMILIES: dict[str, Callable[[Path], None]] = {
    builder.__name__: builder
    for builder in (
        qwen2_5_vl,
        qwen3_vl,
        gemma3,
        smolvlm,
        idefics3,
        llava_onevision,
        mistral3,
        internvl,
        llama4,
    )
}


def _qwen_tokenizer(family: str, directory: Path) -> Any:
    return make_tokenizer(family, directory, (*CHATML, *_QWEN_MARKS), **CHATML_ROLES)


def _qwen_ids(tokenizer: Any) -> dict[str, int]:
    marks = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    marks |= {"vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"}
    return {name: tokenizer.convert_tokens_to_ids(f"<|{mark}|>") for name, mark in marks.items()}


def _qwen(directory: Path, tokenizer: Any, config: Any, name: str, pixels: Mapping[str, Any]) -> None:
    sizes = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "resample": 3}
    finish(directory, tokenizer, config, name, {**sizes, **pixels}, {}, image_class="Qwen2VL")


def _idefics(directory: Path, family: str, begin: str, config_class: Any, name: str) -> None:
    special = (
        *CHATML,
        "<|begin_of_text|>",
        "<fake_token_around_image>",
        "<image>",
        "<end_of_utterance>",
        "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    )
    roles = {"bos_token": begin, "eos_token": "<end_of_utterance>", "pad_token": "<|endoftext|>"}
    tokenizer = make_tokenizer(family, directory, special, **roles)
    config = config_class(
        text_config=text_options(tokenizer, {**PLAIN, "model_type": "llama"}),
        vision_config={**TOWER, "image_size": 32, "patch_size": 8},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    images = {
        "size": {"longest_edge": 128},
        "max_image_size": {"longest_edge": 32},
        "do_image_splitting": True,
        "do_pad": True,
        "resample": 1,
        **HALF,
    }
    finish(directory, tokenizer, config, name, images, {"image_seq_len": 4})


def make_tokenizer(
    family: str,
    directory: Path,
    special: Sequence[str],
    named: Mapping[str, str] | None = None,
    **roles: str,
) -> Any:
    """A byte-level BPE with the family's special tokens and template; `named` are attributes of the tokenizer."""
    vocabulary, merges = vocabularies.byte_pairs()
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        extra_special_tokens=dict(named or {}),
        **roles,
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.chat_template = chat_tokenizers.template(f"seeing_{family}")
    tokenizer.save_pretrained(str(directory))
    return tokenizer


def text_options(tokenizer: Any, sizes: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Options of the text model."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    given = copy.deepcopy({**sizes, **more}) | {"vocab_size": len(tokenizer)}
    given |= {name: getattr(tokenizer, name) for name in names}
    return {name: value for name, value in given.items() if name != "model_type" or value is not None}


def finish(
    directory: Path,
    tokenizer: Any,
    config: Any,
    name: str,
    images: Mapping[str, Any],
    processor: Mapping[str, Any],
    image_class: str | None = None,
) -> None:
    """Write the weights and the files of the processors."""
    model = transformers.AutoModelForImageTextToText.from_config(config)
    _spread(model, tokenizer).eval().save_pretrained(str(directory))
    own = {"processor_class": f"{name}Processor"}
    kind = {"image_processor_type": f"{image_class or name}ImageProcessor", **own}
    write_json(directory / "preprocessor_config.json", {**_STEPS, **kind, **images})
    write_json(directory / "processor_config.json", {**own, **processor})
    transformers.GenerationConfig(
        do_sample=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id],
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(str(directory))


def _spread(model: Any, tokenizer: Any) -> Any:
    """The model with weights drawn by their names: rows of unit size stay so, logits have a spread of `_LOGITS`.

    Tokens that are no readable text never win: their rows of the output matrix are zero. Where embeddings are tied to
    that matrix, theirs are small.
    """
    generator = torch.Generator().manual_seed(SEED)
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    width = model.config.get_text_config().hidden_size
    # PERF: the tokenizer makes the whole table anew each time.
    added = set(tokenizer.added_tokens_decoder)
    unreadable = [
        number for number in range(len(tokenizer)) if number in added or not _is_readable(tokenizer, number)
    ]
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            drawn = torch.randn(weight.shape, generator=generator)
            if "lm_head" in name:
                weight.copy_(drawn * _LOGITS / width**0.5)
                weight[unreadable] = 0
            elif "embed_tokens" in name:
                weight.copy_(drawn * (width**-0.5 if tied else 1.0))
                if tied:
                    weight[unreadable] *= 0.3
            else:
                weight.copy_(_drawn(name, weight, drawn, tied))
    return model


def _drawn(name: str, weight: torch.Tensor, drawn: torch.Tensor, tied: bool) -> torch.Tensor:
    """The values of a weight that belongs to no token."""
    if "norm" in name.lower() and weight.dim() == 1:
        # NOTE: with tied embeddings every token would repeat itself, but for signs in the last norm.
        last = tied and name.endswith("language_model.norm.weight")
        return _LOGITS * drawn - 1 if last else weight + 0.1 * drawn + 1.5 * ("q_norm" in name)
    if any(part in name for part in ("position", "class_embedding", "cls_token", "newline")):
        return 0.3 * drawn
    if name.endswith("bias"):
        return 0.1 * drawn
    if "lambda" in name or weight.dim() == 1:
        return weight + 0.1 * drawn
    if "experts" in name and weight.dim() == 3:
        return drawn * _GAIN / weight.shape[1] ** 0.5
    return drawn * _GAIN / weight[0].numel() ** 0.5


def _is_readable(tokenizer: Any, number: int) -> bool:
    text = tokenizer.decode([number])
    return text.isprintable() and "\ufffd" not in text
