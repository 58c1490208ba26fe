"""Load a transformers model from a local directory: explicit dtype, no pickled code, nothing left random.

transformers fills weights that a checkpoint lacks with random numbers, leaves out layers that config.json does not
count, and only warns of both. Here each is an error (`refuse_unfitting`), except for the pooler, which no family of
ours reads, and for layers that the model's own files leave out beside config.json. A missing vocabulary is an error
too: transformers makes a tokenizer of special tokens alone, to which all texts are the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForTextEncoding,
    AutoTokenizer,
)
from transformers.utils import logging as transformers_logging

from workers.adapters.base import LoadContext
from workers.adapters.shared.building import BUILDING
from workers.adapters.shared.packing import COUNTED, Positions
from workers.adapters.shared.transformer_settings import scaled_positions
from workers.device.oom import is_out_of_memory
from workers.loading.reading import safe_open
from workers.loading.stored_files import PICKLED, is_plain

_OURS = frozenset(
    {"dtype", "torch_dtype", "attn_implementation", "local_files_only", "device_map", "use_safetensors"}
)
"""Arguments of from_pretrained that a stored file may not set."""
_NO_LIMIT = 10**9
"""transformers marks "no limit stored" with a larger number."""
_DEFAULT_LENGTH = 512
_MOST_SHARED = 1000
"""Layers that a model may have whatever its weights are."""
_NUMBER = re.compile(r"\.(\d+)(?=\.)")
_LEAST_WORDS = 8
"""A vocabulary has at least as many tokens that are not special."""


class CheckpointError(ValueError):
    """The weights in the directory do not make up the model that its config describes."""


def build_model(
    context: LoadContext, factory: Any = None, directory: Path | None = None, **arguments: Any
) -> Any:
    """`build_transformer` of the context's directory, or of `directory` inside; reports the phase "weights"."""
    model = build_transformer(
        directory or context.directory,
        device=context.device,
        dtype=context.dtype,
        trust_remote_code=context.trust_remote_code,
        factory=factory,
        **arguments,
    )
    context.progress("weights", 1.0)
    return model


def tokenizer_of(
    context: LoadContext, directory: Path | None = None, arguments: Mapping[str, Any] | None = None
) -> Any:
    """`read_tokenizer` of the context's directory, or of `directory` inside; reports the phase "tokenizer"."""
    tokenizer = read_tokenizer(
        directory or context.directory, trust_remote_code=context.trust_remote_code, arguments=arguments
    )
    context.progress("tokenizer", 1.0)
    return tokenizer


def read_tokenizer(
    directory: Path, *, trust_remote_code: bool = False, arguments: Mapping[str, Any] | None = None
) -> Any:
    """The transformers tokenizer of a directory; `arguments` go to AutoTokenizer.

    Raises CheckpointError for files that are missing or damaged.
    """
    ours = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), **{**(arguments or {}), **ours})
    except json.JSONDecodeError as error:
        raise CheckpointError(f"a JSON file of the tokenizer is damaged: {error}") from error
    refuse_without_words(tokenizer)
    return tokenizer


def refuse_without_words(tokenizer: Any) -> None:
    """Raise CheckpointError for a tokenizer that transformers has made without a vocabulary."""
    if len(tokenizer) - len(set(tokenizer.all_special_ids)) < _LEAST_WORDS:
        raise CheckpointError(
            "the tokenizer has no vocabulary: tokenizer.json, or the files of the vocabulary, are missing"
        )


def build_transformer(
    directory: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    config_arguments: Mapping[str, Any] | None = None,
    model_arguments: Mapping[str, Any] | None = None,
    factory: Any = None,
) -> Any:
    """The model of `directory`, in eval mode on `device`, with torch's SDPA where the model offers it.

    `factory` is a model class or one of transformers' Auto classes that adds a head; without it the bare encoder is
    loaded, of T5 and its kin only the encoder half.  Raises CheckpointError for missing weights or weights in
    another format than safetensors, OSError for missing files, ImportError for missing packages.
    """
    safe = any(directory.glob("*.safetensors"))
    if not safe and not any(is_plain(path) for path in directory.glob(PICKLED)):
        raise CheckpointError("the checkpoint has no safetensors weights; other formats are not loaded")
    transformers_logging.disable_progress_bar()
    trust = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    described = {**(config_arguments or {}), **trust}
    config = AutoConfig.from_pretrained(str(directory), **described)
    own = getattr(factory, "config_class", None)
    if own is not None and not isinstance(config, own):
        # NOTE: some checkpoints name the type of a relative. LightOnOCR-2 is stored as mistral3.
        config = own.from_pretrained(str(directory), **{**(config_arguments or {}), "local_files_only": True})
    refuse_layers_without_weights(config, directory)
    if factory is None:
        encodes_text = type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING
        factory = AutoModelForTextEncoding if encodes_text else AutoModel
    extra = {name: value for name, value in (model_arguments or {}).items() if name not in _OURS}
    arguments = {**extra, **trust, "config": config, "dtype": dtype, "use_safetensors": safe}
    try:
        model, report = _built(factory, directory, arguments, "sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        # NOTE: each part of the model chooses its attention. In Grounding DINO the text tower offers SDPA, and "eager"
        # would misread its mask. The first attempt has written into the config, so the config is read again.
        arguments["config"] = AutoConfig.from_pretrained(str(directory), **described)
        model, report = _built(factory, directory, arguments, None)
    refuse_unfitting(model, report, left_out=_left_out(config, directory, config_arguments or {}, trust))
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model.to(device).eval().requires_grad_(False)


def read_config(context: LoadContext) -> Any:
    """The configuration of the context's directory."""
    return AutoConfig.from_pretrained(
        str(context.directory), local_files_only=True, trust_remote_code=context.trust_remote_code
    )


def _left_out(config: Any, directory: Path, arguments: Mapping[str, Any], trust: Mapping[str, Any]) -> range:
    """Numbers of the layers that config.json counts and that `config`, with stored `arguments` over it, does not."""
    if not arguments:
        return range(0)
    counted = _layers_of(AutoConfig.from_pretrained(str(directory), **trust))
    kept = _layers_of(config)
    return range(kept, counted) if isinstance(kept, int) and isinstance(counted, int) else range(0)


def refuse_unfitting(model: Any, report: Mapping[str, Any], left_out: range = range(0)) -> None:
    """Raise CheckpointError for a model that is not made of its weights alone, and of all layers but `left_out`.

    `report` is that of `from_pretrained` with `output_loading_info` and `ignore_mismatched_sizes`.
    """
    unfitting = sorted(report["mismatched_keys"])
    if unfitting:
        name, stored, expected = unfitting[0]
        raise CheckpointError(
            f"config.json does not fit the weights: {name} is {list(stored)} in the weights and {list(expected)} by "
            f"config.json{_and_more(len(unfitting) - 1)}"
        )
    missing = sorted(name for name in report["missing_keys"] if "pooler." not in name)
    if missing:
        listed = ", ".join(missing[:3])
        raise CheckpointError(f"the checkpoint lacks weights: {listed}{_and_more(len(missing) - 3)}")
    spare = _spare(model, report["unexpected_keys"], left_out)
    if spare:
        raise CheckpointError(
            f"config.json does not fit the weights: it counts fewer layers than there are, and has no place for "
            f"{spare[0]}{_and_more(len(spare) - 1)}"
        )


def _spare(model: Any, names: Iterable[str], left_out: range) -> list[str]:
    """The weights among `names` of layers that the model lacks, but for `left_out`, and that are like its own, sorted.

    A model that drops weights of a layer on purpose has that layer. Layers that predict tokens ahead may stand behind
    the others, and only config.json says how many there are.
    """
    alike = {_NUMBER.sub(".*", name) for name, _ in model.named_parameters(remove_duplicate=False)}
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    config = model.config.get_text_config()
    first, ahead = (getattr(config, key, None) for key in ("num_hidden_layers", "num_nextn_predict_layers"))
    predicting = range(first, first + ahead) if isinstance(first, int) and isinstance(ahead, int) else ()

    def is_spare(name: str) -> bool:
        if _NUMBER.sub(".*", name) not in alike:
            return False
        lacking = [each for each in _NUMBER.finditer(name) if name[: each.end()] not in modules]
        if not lacking:
            return False
        number = int(lacking[0][1])
        return number not in predicting and number not in left_out

    # NOTE: a checkpoint of a model with a head has another part before all names.
    prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    return sorted(name for name in names if is_spare(name) or is_spare(name.removeprefix(prefix)))


def _and_more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def _layers_of(config: Any) -> Any:
    """The number of layers by a configuration as transformers reads it, whatever was stored for the number."""
    return getattr(config.get_text_config(), "num_hidden_layers", None)


def refuse_layers_without_weights(config: Any, directory: Path) -> None:
    """Raise CheckpointError for many more layers than tensors: making these takes all time and memory.

    Layers may share their tensors, as in ALBERT, so some layers are always allowed.
    """
    layers = _layers_of(config)
    if not isinstance(layers, int) or layers <= _MOST_SHARED:
        return
    tensors = 0
    for path in directory.glob("*.safetensors"):
        with safe_open(str(path), "pt") as weights:
            tensors += len(weights.keys())
    if layers > tensors:
        raise CheckpointError(
            f"config.json: num_hidden_layers: {layers}, and the weights have {tensors} tensors"
        )


def _built(
    factory: Any, directory: Path, arguments: Mapping[str, Any], attention: str | None
) -> tuple[Any, dict[str, Any]]:
    """The model and transformers' loading report; `attention` None leaves the choice to each part."""
    with BUILDING:
        loaded: tuple[Any, dict[str, Any]] = factory.from_pretrained(
            str(directory),
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **arguments,
        )
    return loaded


def position_offset(model: torch.nn.Module) -> int:
    """The position id of a text's first token: pad id + 1 in RoBERTa's family, else 0.

    That family alone gives its table of learned positions a padding row.
    """
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and isinstance(padding, int):
            return padding + 1
    return 0


def positions_of(model: Any) -> Positions:
    """How a model with learned positions numbers the tokens of a sequence, as the model itself does with a short one.

    RoBERTa's family leaves padding ids out, wherever they stand. For rotary and relative positions, and where the model
    shows none, tokens are counted from 0.
    """
    table = _position_table(model)
    if table is None:
        return COUNTED
    padding = getattr(table, "padding_idx", None)
    pad = padding if isinstance(padding, int) else getattr(model.config, "pad_token_id", None)
    ordinary = next(token for token in range(2) if token != pad)
    ids = [ordinary, ordinary, ordinary if pad is None else pad, ordinary]
    given = _positions_given(model, table, ids)
    if not given:
        return Positions(position_offset(model), padding if isinstance(padding, int) else None)
    return Positions(given[0], pad if given[2] < given[1] else None)


def _position_table(model: torch.nn.Module) -> torch.nn.Module | None:
    """The table of learned positions."""
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    return next(tables, None)


def _positions_given(model: Any, table: torch.nn.Module, ids: list[int]) -> list[int]:
    """The positions that a model asks of its table for a sequence; empty where the model asks in another way."""
    seen: list[int] = []

    class Seen(Exception):
        """Ends the pass, of which nothing else is needed."""

    def note(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        positions = inputs[0] if inputs else None
        if (
            isinstance(positions, torch.Tensor)
            and not positions.is_floating_point()
            and positions.numel() == len(ids)
        ):
            seen.extend(positions.flatten().tolist())
        raise Seen

    handle = table.register_forward_pre_hook(note)
    try:
        with torch.inference_mode():
            model(input_ids=torch.tensor([ids], device=model.device))
    # NOTE: code outside ours may raise anything; the proof of the packed way tells whether the rule is right.
    except Exception as failure:
        if is_out_of_memory(failure):
            raise
    finally:
        handle.remove()
    return seen


def position_limit(model: Any, *, scaled: bool = False) -> int | None:
    """How many tokens the model has positions for. None where the number is unbounded or not stated.

    `scaled` counts also the positions that a scaled rope adds.
    """
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    if scaled:
        return scaled_positions(config.to_dict(), positions) - position_offset(model)
    return positions - position_offset(model)


def text_limit(model: Any, *stated: int | None) -> int:
    """The longest text in tokens: the least stated length within the positions that a scaled rope reaches.

    Without a stated length all positions; 512 where neither is known.
    """
    known = [length for length in stated if length is not None]
    if not known:
        return shortest(position_limit(model))
    return shortest(*known, position_limit(model, scaled=True))


def attends_causally(model: torch.nn.Module) -> bool:
    """Whether a token sees only the tokens before it, as in decoder-only models."""
    if getattr(getattr(model, "config", None), "is_causal", None) is False:
        return False
    return any(getattr(module, "is_causal", False) is True for module in model.modules())


def stored_limit(tokenizer: Any) -> int | None:
    """The longest text in tokens as stored with a transformers tokenizer, or None."""
    limit = tokenizer.model_max_length
    return int(limit) if limit and limit < _NO_LIMIT else None


def shortest(*limits: int | None) -> int:
    """The least of the limits that are known, in tokens; 512 where none is."""
    return min((limit for limit in limits if limit is not None), default=_DEFAULT_LENGTH)
