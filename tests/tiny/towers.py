"""Tiny models that give vectors of texts and images in one space, and token vectors of queries and pages."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken

from tests.tiny import vocabularies
from tests.tiny.detectors import save_spread
from tests.tiny.models import SIZES, WIDTH, save
from tests.tiny.texts import sentences

PIXELS = 32
"""Side of what CLIP, SigLIP and ColPali see."""
TEXT_TOKENS = 32
"""Longest text of CLIP and SigLIP."""
QUERY_TOKENS = 96
"""Longest query of ColPali and ColQwen2, prefix and augmentation included."""
CHAT_TOKENS = 224
"""Longest conversation of Qwen3-VL."""
TOKEN_WIDTH = 128
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_VISION = {**_TOWER, "patch_size": 8, "image_size": PIXELS}
_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def clip(directory: Path) -> None:
    """CLIP, whose tokens are letters."""
    tokenizer = vocabularies.clip_letters(directory, TEXT_TOKENS)
    text = {**_TOWER, "vocab_size": len(tokenizer), "max_position_embeddings": TEXT_TOKENS, "pad_token_id": 0}
    text |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = transformers.CLIPConfig(text_config=text, vision_config=_VISION, projection_dim=32)
    save(transformers.CLIPModel(config), directory)
    images = transformers.CLIPImageProcessor(
        size={"shortest_edge": PIXELS}, crop_size={"height": PIXELS, "width": PIXELS}
    )
    transformers.CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(str(directory))


def siglip(directory: Path) -> None:
    """SigLIP with a SentencePiece tokenizer, which is written in Python."""
    pieces = directory / "spiece.model"
    pieces.write_bytes(_sentencepiece(300))
    tokenizer = transformers.SiglipTokenizer(vocab_file=str(pieces), model_max_length=TEXT_TOKENS)
    text = {**_TOWER, "vocab_size": len(tokenizer), "max_position_embeddings": TEXT_TOKENS}
    text |= {"pad_token_id": 1, "bos_token_id": None, "eos_token_id": 1}
    config = transformers.SiglipConfig(text_config=text, vision_config=_VISION)
    save(transformers.SiglipModel(config), directory)
    images = transformers.SiglipImageProcessor(size={"height": PIXELS, "width": PIXELS})
    transformers.SiglipProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(str(directory))


def colpali(directory: Path) -> None:
    """ColPali: a page is 16 patches, whatever its size."""
    tokenizer = _gemma(directory)
    images = transformers.SiglipImageProcessor(size={"height": PIXELS, "width": PIXELS})
    images.image_seq_length = (PIXELS // _VISION["patch_size"]) ** 2
    processor = transformers.ColPaliProcessor(image_processor=images, tokenizer=tokenizer)
    text = {
        **SIZES,
        "model_type": "gemma",
        "vocab_size": len(tokenizer),
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    text |= {"max_position_embeddings": QUERY_TOKENS, "pad_token_id": tokenizer.pad_token_id}
    text |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    vision = {
        **_VISION,
        "model_type": "siglip_vision_model",
        "projection_dim": WIDTH,
        "vision_use_head": False,
    }
    whole = transformers.PaliGemmaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=WIDTH,
        hidden_size=WIDTH,
    )
    config = transformers.ColPaliConfig(vlm_config=whole, embedding_dim=TOKEN_WIDTH)
    save_spread(transformers.ColPaliForRetrieval(config), directory, 0.1)
    processor.save_pretrained(str(directory))


def colqwen2(directory: Path) -> None:
    """ColQwen2: pages of one to four patches, by their shape."""
    tokenizer = _qwen(directory)
    images = transformers.Qwen2VLImageProcessor(
        min_pixels=28 * 28, max_pixels=56 * 56, patch_size=14, merge_size=2, temporal_patch_size=2
    )
    text = {**SIZES, "vocab_size": len(tokenizer), "num_key_value_heads": 2}
    text |= {"max_position_embeddings": QUERY_TOKENS, "pad_token_id": tokenizer.pad_token_id}
    text |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": WIDTH, "num_heads": 2, "mlp_ratio": 2}
    vision |= {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    whole = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **_vision_ids(tokenizer))
    config = transformers.ColQwen2Config(vlm_config=whole, embedding_dim=TOKEN_WIDTH)
    save_spread(transformers.ColQwen2ForRetrieval(config), directory, 0.1)
    processor = transformers.ColQwen2Processor(image_processor=images, tokenizer=tokenizer)
    processor.save_pretrained(str(directory))


def qwen3_vl(directory: Path) -> None:
    """Qwen3-VL with a head, for vectors and for answers; pictures have one token for every 32 x 32 pixels."""
    tokenizer = chat_tokenizer(directory)
    images = transformers.Qwen2VLImageProcessor(patch_size=16, merge_size=2, temporal_patch_size=2)
    images.save_pretrained(str(directory))
    text = {**SIZES, "vocab_size": len(tokenizer), "num_key_value_heads": 2, "head_dim": 16}
    text |= {"max_position_embeddings": CHAT_TOKENS, "tie_word_embeddings": True}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": WIDTH,
        "num_heads": 2,
        "intermediate_size": 64,
    }
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, **_vision_ids(tokenizer)
    )
    save_spread(transformers.Qwen3VLForConditionalGeneration(config), directory, 0.1)


def chat_tokenizer(directory: Path) -> Any:
    """A Qwen tokenizer with a chat template and the words that answer."""
    tokenizer = _qwen(directory)
    tokenizer.add_tokens(
        [AddedToken(word, single_word=True, normalized=False) for word in ("yes", "no")], special_tokens=False
    )
    tokenizer.chat_template = _CHAT
    tokenizer.save_pretrained(str(directory))
    return tokenizer


BUILDERS: dict[str, Callable[[Path], None]] = {
    builder.__name__: builder for builder in (clip, siglip, colpali, colqwen2, qwen3_vl)
}


def _vision_ids(tokenizer: Any) -> dict[str, int]:
    """Ids of the marks of pictures, by their names in a config."""
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, tokenizer.convert_tokens_to_ids(list(VISION_MARKS)), strict=True))


def _sentencepiece(size: int) -> bytes:
    """A SentencePiece model as T5 has it: pad, end and unknown first."""
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences()),
        model_writer=out,
        vocab_size=size,
        model_type="unigram",
        minloglevel=2,
        hard_vocab_limit=False,
        num_threads=1,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        eos_piece="</s>",
    )
    return out.getvalue()


def _gemma(directory: Path) -> Any:
    """A Gemma tokenizer without merges: one token per letter, bytes for what it has no letter for."""
    letters = sorted({letter for text in sentences() for letter in text.replace(" ", "▁")})
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: at for at, piece in enumerate(dict.fromkeys([*special, *letters]))}
    tokenizer = transformers.GemmaTokenizer(vocab=vocabulary, merges=[], model_max_length=2048)
    tokenizer.save_pretrained(str(directory))
    return tokenizer


def _qwen(directory: Path) -> Any:
    """A Qwen tokenizer with the marks of chats and of images."""
    vocabulary, merges = vocabularies.byte_pairs()
    tokenizer: Any = transformers.Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=2048,
        padding_side="left",
        additional_special_tokens=[*_MARKS[1:], *VISION_MARKS],
    )
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in (*_MARKS, *VISION_MARKS)])
    tokenizer.save_pretrained(str(directory))
    return tokenizer
