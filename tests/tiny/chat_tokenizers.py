"""Tiny fast tokenizers of chat models: `save("qwen3", directory)`.

1. Train a byte-level BPE over fixed sentences and pieces of JSON, so that all texts pass through unchanged.
2. Add the control tokens of the model family, special or not as its published tokenizers have them.
3. Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` beside each other.

The templates in `chat_templates/` write the same control tokens at the same places as those of the families.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AddedToken, PreTrainedTokenizerFast

from tests.tiny.texts import sentences

SIZE = 1024
"""Most tokens of a vocabulary, control tokens included."""
CONTEXT = 4096
"""Tokens of the longest text, where a test asks for no more."""
_TEMPLATES = Path(__file__).parent / "chat_templates"
_JSON = tuple(
    json.dumps({"name": name, "arguments": {key: value}, "parameters": [1, 20, True, None]})
    for name in ("get_weather", "add")
    for key, value in (("city", "Paris"), ("numbers", [1.5, 2]))
)


class Kind(NamedTuple):
    """The control tokens of a family: begin and end of text, end tokens of a turn, special tokens, other added ones."""

    bos: str | None
    eos: str
    ends: tuple[str, ...]
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    begins: bool = False


_QWEN_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_LLAMA = ("<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
_MISTRAL = (
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
_DEEPSEEK = tuple(
    f"<｜{name}｜>"
    for name in (
        "User",
        "Assistant",
        "tool▁calls▁begin",
        "tool▁calls▁end",
        "tool▁call▁begin",
        "tool▁call▁end",
        "tool▁sep",
        "tool▁output▁begin",
        "tool▁output▁end",
    )
)
_GEMMA4 = (
    "<|turn>",
    "<turn|>",
    "<|think|>",
    "<|channel>",
    "<channel|>",
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
)
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
_CHATML = ("<|im_start|>", "<|im_end|>")

KINDS: dict[str, Kind] = {
    "chatml": Kind(None, "<|im_end|>", ("<|im_end|>",), ("<|endoftext|>", *_CHATML)),
    "qwen3": Kind(
        None, "<|im_end|>", ("<|im_end|>", "<|endoftext|>"), ("<|endoftext|>", *_CHATML), _QWEN_TAGS
    ),
    "qwen3_coder": Kind(
        None, "<|im_end|>", ("<|im_end|>", "<|endoftext|>"), ("<|endoftext|>", *_CHATML), _QWEN_TAGS
    ),
    "llama3": Kind(
        "<|begin_of_text|>",
        "<|eot_id|>",
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        ("<|end_of_text|>", *_LLAMA),
        begins=True,
    ),
    "mistral": Kind("<s>", "</s>", ("</s>",), _MISTRAL, begins=True),
    "mistral3": Kind(
        "<s>",
        "</s>",
        ("</s>",),
        (*_MISTRAL, "[ARGS]", "[THINK]", "[/THINK]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        begins=True,
    ),
    "deepseek": Kind(
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        ("<｜end▁of▁sentence｜>",),
        plain=(*_DEEPSEEK, "<think>", "</think>"),
        begins=True,
    ),
    "gemma": Kind(
        "<bos>", "<eos>", ("<eos>", "<end_of_turn>"), ("<start_of_turn>", "<end_of_turn>"), begins=True
    ),
    "gemma4": Kind("<bos>", "<eos>", ("<eos>", "<turn|>"), _GEMMA4, begins=True),
    "harmony": Kind(
        "<|startoftext|>",
        "<|return|>",
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        ("<|endoftext|>", *_HARMONY),
    ),
    "phi3": Kind(
        "<s>",
        "<|endoftext|>",
        ("<|endoftext|>", "<|end|>"),
        ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>"),
    ),
}
"""Facts of each kind; its template is `chat_templates/<kind>.jinja`."""


def template(kind: str) -> str:
    """The chat template of a kind."""
    return (_TEMPLATES / f"{kind}.jinja").read_text(encoding="utf-8")


def build(kind: str, chat_template: str | dict[str, str] | None = None) -> Any:
    """The tokenizer of a kind, with another template if one is given."""
    facts = KINDS[kind]
    special = [token for token in (facts.bos, facts.eos, *facts.special) if token]
    backend = _trained(SIZE - len(set(special)) - len(facts.plain))
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=facts.bos,
        eos_token=facts.eos,
        pad_token=special[-1],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in dict.fromkeys(special)]
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in facts.plain])
    if facts.begins:
        begin_id = tokenizer.convert_tokens_to_ids(facts.bos)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{facts.bos} $A", pair=f"{facts.bos} $A $B", special_tokens=[(facts.bos, begin_id)]
        )
    tokenizer.chat_template = template(kind) if chat_template is None else chat_template
    return tokenizer


def save(kind: str, directory: Path, context: int = CONTEXT) -> Any:
    """Write the tokenizer of a kind, for texts of `context` tokens, and its template; returns the tokenizer."""
    tokenizer = build(kind)
    tokenizer.model_max_length = context
    tokenizer.save_pretrained(str(directory))
    return tokenizer


def end_ids(kind: str, tokenizer: Any) -> list[int]:
    """Ids of the tokens that end a turn of the model, as `generation_config.json` lists them."""
    return [int(tokenizer.convert_tokens_to_ids(token)) for token in KINDS[kind].ends]


def _trained(size: int) -> Tokenizer:
    """A byte-level BPE of at most `size` tokens; the first 256 are the bytes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator([*sentences(), *_JSON], trainer)
    return backend
