"""Tiny models that read pictures of documents: by writing what they see, or by pointing at words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.tiny import vocabularies
from tests.tiny.detectors import save_spread, spread
from tests.tiny.models import SEED, SIZES, WIDTH, redraw

_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_QUAD = "(.+?)" + "".join([r"<loc_(\d+)>"] * 8)
DONUT_TAGS = (
    "<s_cord-v2>",
    "<s_docvqa>",
    *(f"<{slash}s_{name}>" for name in ("question", "answer", "menu", "nm", "price") for slash in ("", "/")),
    "<sep/>",
)


def florence2(directory: Path) -> None:
    """Florence-2 over a small DaViT: 65 places for a picture, 256 positions."""
    vocabulary, merges = vocabularies.byte_pairs(_SPECIAL)
    made = transformers.BartTokenizer(
        vocab=vocabulary,
        merges=merges,
        model_max_length=256,
        extra_special_tokens={"image_token": "<image>"},
    )
    made.add_tokens([f"<loc_{place}>" for place in range(1000)])
    made.save_pretrained(str(directory))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    config = transformers.Florence2Config(
        vision_config={
            "depths": [1, 1],
            "patch_size": [7, 3],
            "patch_stride": [4, 2],
            "patch_padding": [3, 1],
            "patch_prenorm": [False, True],
            "embed_dim": [16, 32],
            "num_heads": [2, 2],
            "num_groups": [2, 2],
            "window_size": 4,
            "projection_dim": WIDTH,
        },
        text_config={
            "model_type": "bart",
            "vocab_size": len(tokenizer),
            "d_model": WIDTH,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "max_position_embeddings": 256,
            "bos_token_id": 0,
            "pad_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": 2,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    model: Any = spread(transformers.Florence2ForConditionalGeneration(config), 0.08)
    places = [tokenizer.convert_tokens_to_ids(f"<loc_{place}>") for place in range(1000)]
    words = [at for piece, at in vocabulary.items() if piece.isalpha()]
    ends = [*words[:4], tokenizer.eos_token_id]
    _guide(model.model.language_model.decoder, [words, ends] + [places] * 8, 4.0)
    model.save_pretrained(str(directory))
    side = {"height": 64, "width": 64}
    images = transformers.CLIPImageProcessor(size=side, do_center_crop=False, crop_size=side)
    images.image_seq_length = 65
    kinds = ("pure_text", "description_with_bboxes", "description_with_polygons", "polygons", "bboxes")
    known = {
        "ocr": {"pattern": _QUAD, "area_threshold": 0.0},
        "phrase_grounding": {"banned_grounding_tokens": ["it"]},
        "description_with_bboxes_or_polygons": {},
        **{kind: {} for kind in kinds},
    }
    whole = transformers.Florence2Processor(
        image_processor=images, tokenizer=tokenizer, post_processor_config=known
    )
    whole.save_pretrained(str(directory))


def donut(directory: Path) -> None:
    """Donut: a small Swin, and an MBart with 128 positions."""
    vocabularies.unigram(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    tokenizer.add_special_tokens({"additional_special_tokens": list(DONUT_TAGS)})
    sees = transformers.DonutSwinConfig(
        image_size=[64, 64], patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[1, 2], window_size=4
    )
    writes = transformers.MBartConfig(
        vocab_size=len(tokenizer),
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=128,
        max_position_embeddings=128,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        is_decoder=True,
        add_cross_attention=True,
        add_final_layer_norm=True,
        scale_embedding=True,
    )
    both = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(sees, writes)
    model = transformers.VisionEncoderDecoderModel(both)
    start = tokenizer.convert_tokens_to_ids("<s_docvqa>")
    for config in (model.config, model.generation_config):
        config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = start, 1, 2
    spread(model, 0.08)
    words = [at for piece, at in tokenizer.get_vocab().items() if piece.lstrip("\u2581").isalpha()]
    tags = [[tokenizer.convert_tokens_to_ids(tag)] for tag in DONUT_TAGS]
    cycle = [tags[6], tags[8], words, tags[9], tags[10], [*words, 2], tags[11], tags[7]]
    _guide(model.decoder.model.decoder, cycle, 40.0)
    model.save_pretrained(str(directory))
    images = transformers.DonutImageProcessor(size={"height": 64, "width": 64})
    transformers.DonutProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(str(directory))


def layoutlmv3(directory: Path) -> None:
    """LayoutLMv3 with windows of 64 tokens."""
    vocabulary, merges = vocabularies.byte_pairs(_SPECIAL)
    tokenizer = transformers.LayoutLMv3Tokenizer(vocab=vocabulary, merges=merges, model_max_length=64)
    config = transformers.LayoutLMv3Config(
        **SIZES,
        vocab_size=len(tokenizer),
        max_position_embeddings=66,
        input_size=32,
        patch_size=8,
        coordinate_size=8,
        shape_size=16,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        type_vocab_size=1,
    )
    save_spread(transformers.LayoutLMv3ForQuestionAnswering(config), directory, 0.1)
    images = transformers.LayoutLMv3ImageProcessor(size={"height": 32, "width": 32}, apply_ocr=False)
    transformers.LayoutLMv3Processor(image_processor=images, tokenizer=tokenizer).save_pretrained(
        str(directory)
    )


def layoutlm(directory: Path) -> None:
    """LayoutLM, which reads words and places only, with windows of 64 tokens."""
    size = vocabularies.wordpiece(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    tokenizer.model_max_length = 64
    tokenizer.save_pretrained(str(directory))
    config = transformers.LayoutLMConfig(
        **SIZES, vocab_size=size, max_position_embeddings=64, max_2d_position_embeddings=1024
    )
    redraw(transformers.LayoutLMForQuestionAnswering(config)).save_pretrained(str(directory))


def _guide(decoder: Any, cycle: Sequence[Sequence[int]], strength: float) -> None:
    """Let a decoder write tokens of these sets in turn, by its positions; which one of a set, the picture has a say in.

    Random weights alone repeat one token for ever, and a test of what is read from it would pass on anything.
    """
    generator = torch.Generator().manual_seed(SEED + 2)
    words, places = decoder.embed_tokens.weight, decoder.embed_positions.weight
    kinds = {tuple(kind): _direction(generator) for kind in cycle}
    with torch.no_grad():
        for kind, direction in kinds.items():
            words[list(kind)] += 2 * direction
        for step in range(len(places) - 2):
            own = kinds[tuple(cycle[step % len(cycle)])] + _direction(generator)
            places[step + 2] += strength * own


def _direction(generator: torch.Generator) -> torch.Tensor:
    """A unit vector."""
    return torch.nn.functional.normalize(torch.randn(WIDTH, generator=generator), dim=0)


BUILDERS: dict[str, Callable[[Path], None]] = {
    builder.__name__: builder for builder in (florence2, donut, layoutlmv3, layoutlm)
}
