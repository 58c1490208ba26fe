"""The files of a model that continues texts: configuration, tokenizer, weights, and what reads its pictures.

A checkpoint is loaded by transformers' `AutoModelForImageTextToText` where its configuration has a part for pictures,
else by `AutoModelForCausalLM`. GGUF files are read by modules that need the extra `gguf`. Quantised weights become
numbers at the load (`quantized_weights`), unless the precision of the entry keeps weights quantised (`quantizing`).
"""

from __future__ import annotations

import inspect
import logging
from functools import partial
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.utils import logging as transformers_logging

from workers.adapters.base import Held, LoadContext
from workers.adapters.shared import checkpoint, quantized_weights
from workers.adapters.shared.building import parameter_count
from workers.adapters.shared.linears import GENERATED_ROWS, lay_out_linears
from workers.adapters.shared.quantizing import Quantizer, merged
from workers.generation.decoder import Decoder
from workers.generation.joined import join
from workers.generation.pictures import families, foreign
from workers.generation.pictures.family import Family
from workers.generation.pictures.foreign import Foreign, ForeignReader
from workers.generation.pictures.reading import PictureReader, PromptReader
from workers.generation.templates import ChatTemplate
from workers.image_settings import NotServed
from workers.loading.gguf_file import read_model
from workers.loading.quantized_files import plain_plan, read_plan

log = logging.getLogger(__name__)


def is_seeing(config: Any) -> bool:
    """Whether a model reads pictures beside text, by the type of its configuration."""
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return False
    return config.get_text_config() is not config or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING


def refuse_without_chats(config: Any) -> None:
    """Raise ValueError for a model that sees and cannot continue a prompt without a picture."""
    kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    if config.is_encoder_decoder or config.get_text_config().is_encoder_decoder:
        raise ValueError(
            f"{kind.__name__} gives prompts to an encoder, and the text models here continue a prompt"
        )
    needed = [
        name
        for name, parameter in inspect.signature(kind.forward).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and name not in ("self", "input_ids")
    ]
    if needed:
        raise ValueError(
            f"{kind.__name__} answers nothing without {' and '.join(needed)}, and conversations have requests "
            "without pictures"
        )


class CausalFiles:
    """The files of one load."""

    def __init__(self, context: LoadContext) -> None:
        self._context = context
        self._stored = read_model(context.directory / context.gguf, last=True) if context.gguf else None
        self._config = None if context.gguf else checkpoint.read_config(context)
        kind = context.quantization
        self._quantizer = Quantizer(kind, context.dtype, context.device) if kind else None
        self.described = Held()
        """What `model` has loaded, without memory."""

    def tokenizer(self) -> Any:
        """transformers' tokenizer, with the chat template."""
        if self._stored is None:
            return checkpoint.tokenizer_of(self._context)
        from workers.adapters.shared import gguf_weights

        tokenizer = gguf_weights.read_tokenizer(self._stored)
        checkpoint.refuse_without_words(tokenizer)
        self._context.progress("tokenizer", 1.0)
        return tokenizer

    def model(self) -> Any:
        """The model in eval mode on the device, whose generation settings name all tokens that end an answer."""
        context = self._context
        model = self._from_checkpoint() if self._stored is None else self._from_gguf()
        self.described = Held(
            architecture=str(model.config.model_type),
            parameters=parameter_count(model),
            stored=self._stored.kind if self._stored is not None else "",
        )
        if context.device.type == "cpu":
            tell = partial(context.progress, "linear layers")
            if Decoder.knows(model):
                join(model.model.layers, merged)
            lay_out_linears(model, GENERATED_ROWS, tell, context.findings)
        return model

    def family(self, tokenizer: Any) -> Family | Foreign | None:
        """What reads pictures for the model; None for a model that does not see, which the log says.

        transformers' own processor reads the pictures of a model without a family. Raises ValueError for options that
        the model does not have and for a model that answers no texts, and `DamagedFile` for files that make no image
        processor.
        """
        context = self._context
        pixels = families.pixels_of(self._config, context.options)
        if not is_seeing(self._config):
            return None
        refuse_without_chats(self._config)
        directory, config, trust = context.directory, self._config, context.trust_remote_code
        try:
            if getattr(config, "model_type", "") not in families.FAMILIES:
                return foreign.load(directory, config, tokenizer, trust_remote_code=trust)
            return families.load(directory, config, tokenizer, trust_remote_code=trust, pixels=pixels)
        except (NotServed, OSError, ImportError) as error:
            log.warning("%s is served without pictures: %s", type(self._config).__name__, error)
            return None

    def template(self, tokenizer: Any, family: Family | Foreign | None) -> ChatTemplate:
        """The chat template of the options, else the one that is stored for pictures, else that of the tokenizer."""
        chosen = str(self._context.options.get("chat_template", ""))
        if family is None:
            return ChatTemplate(tokenizer, chosen)
        return ChatTemplate(
            tokenizer, chosen or families.stored_template(self._context.directory), family.words
        )

    def reader(self, family: Family | Foreign, template: ChatTemplate) -> PromptReader | None:
        """The reader of prompts with pictures; None if the chat template shows none, which the log says."""
        reader = (
            ForeignReader(family, template)
            if isinstance(family, Foreign)
            else PictureReader(family, template)
        )
        try:
            reader.check()
        except ValueError as error:
            log.warning("%s is served without pictures: %s", type(self._config).__name__, error)
            return None
        return reader

    def _from_checkpoint(self) -> Any:
        context, sees, quantizer = self._context, is_seeing(self._config), self._quantizer
        plan = read_plan(context.directory)
        if plan is None and quantizer is not None and quantized_weights.brings(self._config, sees=sees):
            plan = plain_plan(context.directory)
        if plan is not None:
            return quantized_weights.build(context, plan, self._config, sees=sees, quantizer=quantizer)
        model = checkpoint.build_model(context, AutoModelForImageTextToText if sees else AutoModelForCausalLM)
        if quantizer is not None:
            quantizer.finish(model)
        return model

    def _from_gguf(self) -> Any:
        from workers.adapters.shared import gguf_weights

        context, stored = self._context, self._stored
        assert stored is not None
        transformers_logging.disable_progress_bar()
        config = gguf_weights.config_of(stored)
        model = gguf_weights.build(
            stored, config, context.dtype, context.progress, self._quantizer, context.ahead
        )
        model.config.use_cache = False
        model.generation_config.eos_token_id = gguf_weights.end_ids(stored) or None
        context.progress("weights", 1.0)
        return model.to(context.device).eval().requires_grad_(False)
