"""The tokenizer in a GGUF file: transformers' tokenizer with the vocabulary, merges, template and end tokens stored.

1. transformers makes the tokenizer from vocabulary, merges and types of tokens.
2. `tokenizer.ggml.pre` names how a text is cut into words before the merges. transformers knows some of the names and
   takes GPT-2's way for all others, with other tokens as the result; so the other known ways stand here, and a name
   that nobody knows is refused.
3. An answer ends with the stored end tokens and with control tokens whose spelling says so, as in llama.cpp.
"""

from __future__ import annotations

import logging
from typing import Any

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_TOKENIZER_MAPPING,
    convert_gguf_tokenizer,
)

from workers.loading.gguf_file import GgufModel, GgufRefused

log = logging.getLogger(__name__)

_FIELD = "tokenizer.ggml."
_AS_GPT2 = ("gpt-2", "olmo", "mpt", "phi-2", "jais", "jina-v2-de", "jina-v2-es", "gigachat", "mellum")
"""Names of GPT-2's way to cut a text."""
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Names of GPT-2's way after each digit was made a word of its own."""
_UNNAMED = ("default", "")
_ENDS = ("eos", "eot", "eom")
_SPELLED_ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "<|end_of_text|>",
    )
)
"""Control tokens that end an answer in every model that has them."""
_CONTROL = 3
"""The type of control tokens in `tokenizer.ggml.token_type`."""
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def read_tokenizer(model: GgufModel) -> Any:
    """The tokenizer of a file. Raises `GgufRefused` for missing fields, and for an unknown way to cut texts."""
    fields = model.fields
    stated = {
        ours: fields[f"tokenizer.{name}"]
        for name, ours in GGUF_TOKENIZER_MAPPING["tokenizer"].items()
        if f"tokenizer.{name}" in fields
    }
    byte_level = stated["tokenizer_type"] == "gpt2"
    if byte_level and "merges" not in stated:
        raise GgufRefused(f"{model.name}: there is no {_FIELD}merges")
    if not byte_level and not ("merges" in stated or "scores" in stated):
        raise GgufRefused(f"{model.name}: there is neither {_FIELD}merges nor {_FIELD}scores")
    backend, _ = convert_gguf_tokenizer(model.architecture, stated)
    if byte_level:
        _cut_as_named(model, backend, str(stated.get("pre_tokenizer_type", "")))
    elif stated.get("add_prefix_space") is False and isinstance(
        backend.pre_tokenizer, pre_tokenizers.Metaspace
    ):
        backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="never", split=False)
    kind: Any = PreTrainedTokenizerFast
    tokenizer = kind(
        tokenizer_object=backend,
        # NOTE: a SentencePiece vocabulary begins a text with its first token unless the file says otherwise.
        add_bos_token=fields.get(f"{_FIELD}add_bos_token", not byte_level),
        add_eos_token=fields.get(f"{_FIELD}add_eos_token", False),
        clean_up_tokenization_spaces=False,
        model_max_length=model.get("context_length"),
        **{name: _token(model, f"{field}_token_id") for name, field in _NAMED.items()},
    )
    tokenizer.chat_template = _template(fields)
    return tokenizer


def _cut_as_named(model: GgufModel, backend: Any, name: str) -> None:
    """Let `backend` cut texts in the way called `name`. Raises `GgufRefused` for a name that is not known."""
    if name in GGUF_PRE_TOKENIZER_SPLITS:
        return
    if name not in (*_AS_GPT2, *_SINGLE_DIGITS, *_UNNAMED):
        raise GgufRefused(
            f"{model.name}: {_FIELD}pre {name[:50]!r}: nobody knows here how texts are cut into words"
        )
    if name in _UNNAMED:
        log.warning("%s does not say how texts are cut into words; GPT-2's way is taken", model.name)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if name in _SINGLE_DIGITS else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, words])


def _token(model: GgufModel, field: str) -> str | None:
    """The token whose id stands in a field, None without the field. Raises `GgufRefused` for an id that is no token."""
    tokens, place = model.fields[f"{_FIELD}tokens"], model.fields.get(f"{_FIELD}{field}")
    if place is None:
        return None
    if not (isinstance(place, int) and 0 <= place < len(tokens)):
        raise GgufRefused(f"{model.name}: {_FIELD}{field} {place!r}: there are {len(tokens)} tokens")
    return str(tokens[place])


def _template(fields: dict[str, Any]) -> str | dict[str, str] | None:
    """The chat template, or all of them by name where the file has several."""
    main = fields.get("tokenizer.chat_template")
    names = fields.get("tokenizer.chat_templates") or ()
    others = {name: found for name in names if (found := fields.get(f"tokenizer.chat_template.{name}"))}
    return {"default": main, **others} if main and others else main


def end_ids(model: GgufModel) -> list[int]:
    """Tokens that end an answer."""
    stored = (model.fields.get(f"{_FIELD}{name}_token_id") for name in _ENDS)
    tokens, kinds = model.fields[f"{_FIELD}tokens"], model.fields.get(f"{_FIELD}token_type") or ()
    pairs = enumerate(zip(tokens, kinds, strict=False))
    spelled = {at for at, (token, kind) in pairs if kind == _CONTROL and token in _SPELLED_ENDS}
    return sorted(spelled | {found for found in stored if isinstance(found, int)})
