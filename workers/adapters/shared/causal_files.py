"""Tokenizer and model of a causal language model, from safetensors or from a GGUF file."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from workers.adapters.base import LoadContext
from workers.adapters.shared import checkpoint
from workers.adapters.shared.linears import GENERATED_ROWS, lay_out_linears
from workers.loading.gguf_file import read_model


class CausalFiles:
    """The files of one load. GGUF files are read by modules that need the extra `gguf`."""

    def __init__(self, context: LoadContext) -> None:
        self._context = context
        self._stored = read_model(context.directory / context.gguf) if context.gguf else None

    def tokenizer(self) -> Any:
        """transformers' tokenizer, with the chat template."""
        if self._stored is None:
            return checkpoint.load_tokenizer(self._context)
        from workers.adapters.shared import gguf_weights

        tokenizer = gguf_weights.read_tokenizer(self._stored)
        checkpoint.refuse_without_words(tokenizer)
        self._context.progress("tokenizer", 1.0)
        return tokenizer

    def model(self) -> Any:
        """The model in eval mode on the device, whose generation settings name all tokens that end an answer."""
        context = self._context
        model = (
            checkpoint.load_model(context, AutoModelForCausalLM)
            if self._stored is None
            else self._from_gguf()
        )
        if context.device.type == "cpu":
            tell = partial(context.progress, "linear layers")
            lay_out_linears(model, GENERATED_ROWS, tell, context.findings)
        return model

    def _from_gguf(self) -> Any:
        from workers.adapters.shared import gguf_weights

        context, stored = self._context, self._stored
        assert stored is not None
        transformers_logging.disable_progress_bar()
        config = gguf_weights.config_of(stored)
        model = gguf_weights.load(stored, config, context.dtype, context.progress)
        model.config.use_cache = False
        model.generation_config.eos_token_id = gguf_weights.end_ids(stored) or None
        context.progress("weights", 1.0)
        return model.to(context.device).eval().requires_grad_(False)
