"""Whether the configuration of a model describes the weights beside it, by the headers of the weight files.

1. Each `config.json` with weights in its folder is read, and the parts in it, such as `text_config`.
2. `_SIZES` says which fields give the sizes of a tensor, by its name. A tensor must have the shape that one part
   gives that states both fields. Where the name has the word of a part, such as `text`, only such parts count.
3. Stacks of layers are counted in the names of tensors. One stack must have as many layers as the configuration says.
   Of several stacks one is refused only if a number of layers that the configuration states is left over.

A model of code of its own (`auto_map`) names its fields as it likes, and quantised weights (`quantization_config`) are
packed; both are not compared. Quantised weights are held against their format (`quantized_files`) instead. The load
compares all tensors with those of the model that transformers builds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.own_models.files import CannotTell, ModelFiles, number_of, shown
from workers.loading import quantized_files, stored_files
from workers.loading.quantized_parts import QuantizedRefused

_UNCOMPARED = {"auto_map", "quantization_config"}
_CONFIG = re.compile(r"(?:[^/]+/)?config\.json")
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim")
_INNER = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "ffn_dim",
    "hidden_dim",
    "d_ff",
    "n_inner",
)
_TABLE_WIDTHS = ("embedding_size", "word_embed_proj_dim", *_WIDTHS)
_SIZES: tuple[tuple[re.Pattern[str], Sequence[str], Sequence[str]], ...] = (
    (
        re.compile(
            r"(?:(?:word_embeddings|(?:embed|tok)_(?:tokens|embeddings)|token_embedding|wte)|(?:^|\.)shared)\.weight$"
        ),
        ("vocab_size",),
        _TABLE_WIDTHS,
    ),
    (re.compile(r"\btoken_type_embeddings\.weight$"), ("type_vocab_size",), _TABLE_WIDTHS),
    (
        re.compile(
            r"\.(?:layer\.\d+\.intermediate\.dense|mlp\.(?:gate|up)_proj|layers\.\d+\.(?:mlp\.)?fc1)\.weight$"
        ),
        _INNER,
        _WIDTHS,
    ),
    (
        re.compile(r"\.(?:layer\.\d+\.output\.dense|mlp\.down_proj|layers\.\d+\.(?:mlp\.)?fc2)\.weight$"),
        _WIDTHS,
        _INNER,
    ),
)
"""Names of tensors, and for rows and columns the fields that give their number."""
_LAYER = re.compile(r"(.*?(?:^|\.)(?:layers?|h|blocks?))\.(0|[1-9][0-9]{0,8})\.")
_ATTENTION = re.compile(r"att(?:n|ention)", re.IGNORECASE)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_SIDES = ("encoder_layers", "decoder_layers")
_MORE = ("num_decoder_layers", "depth")
_MOST_DEPTH = 8


def refuse_unfitting(name: str, files: ModelFiles) -> None:
    """Raise `CannotTell` for a config.json that contradicts the weights beside it, with the tensor and both shapes.

    Weights that are not here are not compared.
    """
    folders = {file.removesuffix("config.json") for file in files.names if _CONFIG.fullmatch(file)}
    for folder in sorted(folders):
        config = files.object(f"{folder}config.json")
        if "model_type" not in config or _UNCOMPARED & config.keys():
            continue
        shapes: dict[str, list[int]] = {}
        for path in sorted((files.root / folder).glob("*.safetensors")):
            shapes |= _shapes_of(name, path)
        parts = list(_parts(config))
        for unfitting in (_unfitting_size(parts, shapes), _unfitting_layers(config, parts, shapes)):
            if unfitting:
                raise CannotTell(f"{name}: {folder}config.json does not fit the weights: {unfitting}")


def refuse_unfitting_quantized(name: str, files: ModelFiles) -> None:
    """Raise `CannotTell` for quantised weights, all of them here, that do not fit their format."""
    try:
        plan = quantized_files.read_plan(files.root)
        if plan is not None:
            quantized_files.refuse_numbers(plan)
    except QuantizedRefused as error:
        raise CannotTell(f"{name}: {error}") from error
    except OSError as error:
        raise CannotTell(f"{name}: quantised weights cannot be read: {error.strerror}") from error


def _shapes_of(name: str, path: Path) -> dict[str, list[int]]:
    try:
        return stored_files.tensor_shapes(path)
    except stored_files.DamagedWeightsError as error:
        raise CannotTell(f"{name}: {error}") from error
    except OSError as error:
        raise CannotTell(f"{name}: {path.name} cannot be read: {error.strerror}") from error


class _Part(NamedTuple):
    """A configuration inside of others; `words` name the ones around and itself, `text` for `text_config`."""

    words: tuple[str, ...]
    fields: dict[str, Any]


def _parts(config: dict[str, Any], words: tuple[str, ...] = ()) -> Iterator[_Part]:
    """A configuration, and the configurations in it."""
    yield _Part(words, config)
    for name, value in config.items() if len(words) < _MOST_DEPTH else ():
        if isinstance(value, dict) and "model_type" in value:
            yield from _parts(value, (*words, name.removesuffix("_config")))


def _unfitting_size(parts: Sequence[_Part], shapes: Mapping[str, list[int]]) -> str:
    """How a tensor contradicts a configuration; empty if none does."""
    for tensor in sorted(shapes):
        fields = next((fields for name, *fields in _SIZES if name.search(tensor)), None)
        if fields is None or len(shapes[tensor]) != 2:
            continue
        of_tensor = [part for part in parts if any(word in tensor for word in part.words)] or parts
        described = [found for part in of_tensor if (found := _described(part, fields, shapes[tensor]))]
        if described and shapes[tensor] not in described:
            return f"{shown(tensor)} is {shapes[tensor]} in the weights and {described[0]} by config.json"
    return ""


def _described(part: _Part, fields: Sequence[Sequence[str]], shape: list[int]) -> list[int]:
    """The shape that a part gives a tensor, as near as possible to `shape`; empty where the part does not say."""
    stated = [[number for name in names if (number := number_of(part.fields, name))] for names in fields]
    return [
        size if size in known else known[0] for size, known in zip(shape, stated, strict=True) if all(stated)
    ]


def _unfitting_layers(config: dict[str, Any], parts: Sequence[_Part], shapes: Mapping[str, list[int]]) -> str:
    """How the number of layers contradicts a configuration; empty if it does not.

    Layers beyond may be those that guess the next tokens (`num_nextn_predict_layers`), which are not run.
    """
    matches = [match for tensor in shapes if (match := _LAYER.match(tensor))]
    stacks = {match[1]: 0 for match in matches}
    for match in matches:
        stacks[match[1]] = max(stacks[match[1]], 1 + int(match[2]))
    if any("nextn" in name for part in parts for name in part.fields):
        return ""
    key = next((key for key in _LAYERS if number_of(config, key)), "")
    if key and len(stacks) == 1:
        [(stack, stored)] = stacks.items()
        return "" if stored == config[key] else _told_layers(key, config[key], stack, stored, shapes)
    attending = {match[1] for match in matches if _ATTENTION.search(match.string[match.end() :])}
    counts = [each for part in parts for each in _counts(part.fields)]
    extra = Counter(stacks[stack] for stack in attending) - Counter(number for _, number in counts)
    left = Counter(number for _, number in counts) - Counter(stacks.values())
    if not extra or not left:
        return ""
    stack = min(stack for stack in attending if stacks[stack] in extra)
    key, number = next(each for each in counts if each[1] in left)
    return _told_layers(key, number, stack, stacks[stack], shapes)


def _counts(fields: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The numbers of layers that a configuration states, by field: of one stack, or of an encoder and a decoder."""
    sides, one, more = (
        [(key, number) for key in keys if (number := number_of(fields, key))]
        for keys in (_SIDES, _LAYERS, _MORE)
    )
    yield from [*(sides or one[:1]), *more]


def _told_layers(key: str, number: int, stack: str, stored: int, shapes: Mapping[str, list[int]]) -> str:
    last = max((tensor for tensor in shapes if tensor.startswith(f"{stack}.{stored - 1}.")), key=len)
    return f"{key} is {number}, and the weights have {stored} layers, the last with {shown(last)}"
