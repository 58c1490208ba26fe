"""Tiny models that find objects in pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.tiny import vocabularies
from tests.tiny.models import SIZES, redraw

CLASSES = ("cat", "dog", "person", "car")
_BACKBONE = {
    "embedding_size": 16,
    "hidden_sizes": [16, 24, 32, 48],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
_DECODER = {
    "decoder_attention_heads": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_NAMED = {"id2label": dict(enumerate(CLASSES)), "label2id": {name: at for at, name in enumerate(CLASSES)}}


def detr(directory: Path) -> None:
    """DETR over a small ResNet; its processor keeps the shape of pictures."""
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone_config=transformers.ResNetConfig(**_BACKBONE, out_features=["stage4"]),
        backbone=None,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        num_queries=10,
        **_DECODER,
        **_NAMED,
    )
    save_spread(transformers.DetrForObjectDetection(config), directory, 0.1)
    size = {"shortest_edge": 64, "longest_edge": 96}
    transformers.DetrImageProcessor(size=size).save_pretrained(str(directory))


def rtdetr(directory: Path) -> None:
    """RT-DETR, which sees every picture in one shape."""
    config = transformers.RTDetrConfig(
        backbone_config=transformers.RTDetrResNetConfig(
            **_BACKBONE, out_features=["stage2", "stage3", "stage4"]
        ),
        encoder_in_channels=[24, 32, 48],
        encoder_hidden_dim=32,
        d_model=32,
        num_queries=10,
        decoder_layers=1,
        decoder_in_channels=[32, 32, 32],
        anchor_image_size=None,
        num_denoising=0,
        **_DECODER,
        **_NAMED,
    )
    save_spread(transformers.RTDetrForObjectDetection(config), directory, 0.05)
    transformers.RTDetrImageProcessor(size={"height": 64, "width": 64}).save_pretrained(str(directory))


def owlv2(directory: Path) -> None:
    """OWLv2 with label texts of at most 24 tokens, nearly one per letter."""
    tokenizer = vocabularies.clip_letters(directory, 24)
    text = {**_TOWER, "vocab_size": len(tokenizer), "max_position_embeddings": 24, "pad_token_id": 0}
    text |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    vision = {**_TOWER, "patch_size": 8, "image_size": 64}
    config = transformers.Owlv2Config(text_config=text, vision_config=vision, projection_dim=32)
    save_spread(transformers.Owlv2ForObjectDetection(config), directory, 0.1)
    images = transformers.Owlv2ImageProcessor(size={"height": 64, "width": 64})
    transformers.Owlv2Processor(image_processor=images, tokenizer=tokenizer).save_pretrained(str(directory))


def grounding_dino(directory: Path) -> None:
    """Grounding DINO over a small Swin, which reads 32 tokens of labels."""
    size = vocabularies.wordpiece(directory)
    config = transformers.GroundingDinoConfig(
        backbone_config=transformers.SwinConfig(
            image_size=64,
            patch_size=4,
            embed_dim=16,
            depths=[1, 1, 1, 1],
            num_heads=[1, 2, 2, 2],
            window_size=4,
            out_indices=[2, 3, 4],
        ),
        text_config=transformers.BertConfig(**SIZES, vocab_size=size, max_position_embeddings=512),
        d_model=64,
        encoder_layers=1,
        decoder_layers=2,
        num_queries=12,
        num_feature_levels=4,
        max_text_len=32,
        use_timm_backbone=False,
        backbone=None,
        **_DECODER,
    )
    model: Any = transformers.GroundingDinoForObjectDetection(config)
    torch.nn.init.constant_(
        model.model.decoder.layer_norm.weight, 0.1
    )  # All chances would be near 1 otherwise.
    save_spread(model, directory, 0.05)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    images = transformers.GroundingDinoImageProcessor(size={"shortest_edge": 64, "longest_edge": 96})
    whole = transformers.GroundingDinoProcessor(image_processor=images, tokenizer=tokenizer)
    whole.save_pretrained(str(directory))


BUILDERS: dict[str, Callable[[Path], None]] = {
    builder.__name__: builder for builder in (detr, rtdetr, owlv2, grounding_dino)
}


def save_spread(model: Any, directory: Path, width: float) -> None:
    """Save a model whose matrices are drawn with this spread: where the usual one drives all scores to 0 or 1."""
    spread(model, width).save_pretrained(str(directory))


def spread(model: Any, width: float) -> Any:
    """The model with matrices of this spread."""
    redraw(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(width / 0.15)
    return model
