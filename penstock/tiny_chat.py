"""`python -m penstock.tiny_chat DIRECTORY`: a tiny chat model for trying the routes of chat without a download.

1. Train a byte-level BPE over the sources of the command line, and give it the control tokens of ChatML.
2. Draw the weights of a Llama of 2 M parameters from a fixed seed. Nothing is trained, so the words mean nothing.
3. Write a catalog entry beside the weights: `penstock serve --catalog DIRECTORY` serves the model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODEL = "penstock/tiny-chat"
NOTE = "the weights of this model are random numbers: its words mean nothing"
_ENTRY = f"""id: {MODEL}
description: Random weights of a fixed seed for trying the routes of chat; the words mean nothing.
source: {{kind: directory, path: weights}}
adapter: causal
inputs: [text]
outputs:
  chat: {{}}
loadtime: {{tool_format: qwen}}
"""
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nFunctions:' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{{- '\\nCall one by <tool_call>{"name": name, "arguments": arguments}</tool_call>.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_VOCABULARY, _CONTEXT, _SEED = 2048, 2048, 7


def write(directory: Path) -> None:
    """Write weights, tokenizer and catalog entry below `directory`, which is made."""
    import torch
    import transformers

    weights = directory / "weights"
    weights.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(str(weights))
    torch.manual_seed(_SEED)
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=160,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_CONTEXT,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    kind: Any = transformers.AutoModelForCausalLM
    kind.from_config(config).save_pretrained(str(weights))
    (directory / "tiny-chat.yaml").write_text(_ENTRY, encoding="utf-8")


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        show_progress=False,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    backend.train_from_iterator([path.read_text(encoding="utf-8") for path in sources], trainer)
    kind: Any = PreTrainedTokenizerFast
    tokenizer = kind(
        tokenizer_object=backend,
        eos_token=_SPECIAL[2],
        pad_token=_SPECIAL[0],
        additional_special_tokens=[_SPECIAL[1]],
        clean_up_tokenization_spaces=False,
        model_max_length=_CONTEXT,
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def main(arguments: Sequence[str]) -> int:
    """Write the model into the directory that is the only argument; returns the exit code."""
    [place] = map(Path, arguments)
    write(place)
    print(f"{MODEL} is in {place}; {NOTE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
