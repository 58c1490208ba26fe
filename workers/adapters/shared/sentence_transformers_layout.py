"""Read model directories in the layout of sentence-transformers (old names, and those since 5.4), PyLate or Stanford.

`read_layout`, for dense models:

1. `modules.json` lists the modules: a Transformer, token layers, a Pooling, vector layers.
2. Settings of the Transformer lie beside its weights in `sentence_bert_config.json` or a file of an older name.
3. `config_sentence_transformers.json` holds the prompts, and how many values of a vector are kept.

A directory without `modules.json` is a plain transformers checkpoint: mean pooling for encoders, last token for
decoders, normalised. Unknown modules are refused by name.

`read_late_layout`, for late-interaction (ColBERT) text models:

PyLate                modules.json with a Transformer and Dense layers; markers, lengths, expansion and skip list in
                      config_sentence_transformers.json
sentence-transformers the same with MultiVectorMask and Normalize; lengths and expansion beside the transformer, the
                      skip list beside the mask
Stanford              architectures [HF_ColBERT], the projection as `linear.weight` among the transformer's weights,
                      all else in artifact.metadata
"""

from __future__ import annotations

import json
import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workers.adapters.shared.pooling_modes import resolve_modes

PROMPTS_FILE = "config_sentence_transformers.json"
_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)

_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Flags of older pooling configs; vectors of several modes are concatenated in this order."""
_HEADS = frozenset({"Dense", "LayerNorm", "Normalize"})
_KINDS = _HEADS | {"Transformer", "Pooling", "Dropout"}
_DESCRIBED = frozenset({"Pooling", "Dense", "LayerNorm"})
"""Modules that nothing but their config.json describes."""
_PACKAGES = ("sentence_transformers", "pylate")
_NOT_STORED = frozenset(
    {
        *("trust_remote_code", "use_kernels", "allow_all_kernels", "kernel_config"),
        *("weights_only", "subfolder", "gguf_file", "cache_dir"),
    }
)
"""Arguments of transformers' loaders that a stored file may not set: code of others, and files elsewhere."""
_LATE_KINDS = ("Transformer", "Dense", "LayerNorm", "MultiVectorMask", "Normalize")
_DEFAULT_QUERY_LENGTH = 32


class UnsupportedLayoutError(ValueError):
    """The directory holds a module or a combination of modules that this family cannot run."""


@dataclass(frozen=True, slots=True)
class ModuleConfig:
    """One Dense, LayerNorm or Normalize: its kind, directory and config.json."""

    kind: str
    directory: Path
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The settings in a model directory. Without a stored pooling, `pooling` is None.

    `*_arguments` go to the loaders of transformers. Of each vector the first `truncate_dim` values are kept, after all
    layers, as sentence-transformers 6.2 does (`sentence_transformer/model.py`); None keeps all.
    """

    transformer: Path
    max_sequence_length: int | None = None
    lower_case: bool = False
    model_arguments: Mapping[str, Any] = field(default_factory=dict)
    config_arguments: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_arguments: Mapping[str, Any] = field(default_factory=dict)
    token_modules: tuple[ModuleConfig, ...] = ()
    pooling: tuple[str, ...] | None = None
    include_prompt: bool = True
    vector_modules: tuple[ModuleConfig, ...] = ()
    truncate_dim: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None


def read_layout(directory: Path) -> ModelLayout:
    """The layout of `directory`. Raises UnsupportedLayoutError that names the module that cannot be run."""
    modules = read_modules(directory, _KINDS)
    if not modules:
        return ModelLayout(transformer=directory)
    kinds = [module.kind for module in modules]
    if kinds[:1] != ["Transformer"] or kinds.count("Transformer") != 1 or kinds.count("Pooling") != 1:
        raise UnsupportedLayoutError(
            f"unsupported module order {' > '.join(kinds)}: one Transformer, one Pooling"
        )
    at = kinds.index("Pooling")
    pooling = modules[at].config
    return replace(
        read_transformer(directory, modules[0].directory),
        token_modules=_heads(modules[1:at], "token_embeddings"),
        pooling=pooling_modes(pooling),
        include_prompt=bool(pooling.get("include_prompt", True)),
        vector_modules=_heads(modules[at + 1 :], "sentence_embedding"),
        truncate_dim=_truncate_dim(read_json(directory / PROMPTS_FILE)),
    )


def _truncate_dim(stored: Mapping[str, Any]) -> int | None:
    width = stored.get("truncate_dim")
    if width is None or (type(width) is int and width > 0):
        return width
    raise UnsupportedLayoutError(
        f"{PROMPTS_FILE}: truncate_dim: expected a whole number above 0, got {width!r:.64}"
    )


def read_transformer(directory: Path, transformer: Path, task: str = "feature-extraction") -> ModelLayout:
    """The layout of the transformer in `transformer`, a part of the model in `directory`, with the model's prompts.

    Raises UnsupportedLayoutError when it was stored for another task.
    """
    stored = read_json(directory / PROMPTS_FILE)
    return ModelLayout(
        **_transformer_settings(transformer, task),
        prompts={name: text for name, text in (stored.get("prompts") or {}).items() if text is not None},
        default_prompt_name=stored.get("default_prompt_name"),
    )


def read_modules(directory: Path, kinds: Collection[str]) -> list[ModuleConfig]:
    """The modules in modules.json, none without the file. Raises UnsupportedLayoutError for other kinds."""
    stored = directory / "modules.json"
    if not stored.is_file():
        return []
    return [_module(directory, entry, kinds) for entry in json.loads(stored.read_text(encoding="utf-8"))]


def _module(directory: Path, entry: Mapping[str, Any], kinds: Collection[str]) -> ModuleConfig:
    """One entry of modules.json. The last word of the type is the class, in the old and in the new spelling."""
    dotted = str(entry["type"])
    kind = dotted.rpartition(".")[2]
    if dotted.partition(".")[0] not in _PACKAGES or kind not in kinds:
        raise UnsupportedLayoutError(f"unsupported module {dotted!r} in modules.json")
    place = (directory / str(entry.get("path", ""))).resolve()
    if not place.is_relative_to(directory.resolve()):
        raise UnsupportedLayoutError(f"module path {entry['path']!r} leaves the model directory")
    config = {} if kind == "Transformer" else read_json(place / "config.json")
    if kind in _DESCRIBED and not config:
        raise UnsupportedLayoutError(f"{place.name}/config.json is missing, which describes a {kind}")
    return ModuleConfig(kind, place, config)


def _heads(modules: list[ModuleConfig], reads: str) -> tuple[ModuleConfig, ...]:
    """The layers of one stage, without Dropout. Raises UnsupportedLayoutError for a layer of another stage."""
    heads = tuple(module for module in modules if module.kind != "Dropout")
    for head in heads:
        source = head.config.get("module_input_name") or "sentence_embedding"
        target = head.config.get("module_output_name") or source
        if source != reads or target != reads:
            raise UnsupportedLayoutError(f"unsupported {head.kind} from {source!r} to {target!r}")
    return heads


def _transformer_settings(directory: Path, wanted_task: str) -> dict[str, Any]:
    """Fields of `ModelLayout` about the transformer, from the first settings file that exists."""
    found = next((directory / name for name in _TRANSFORMER_CONFIGS if (directory / name).is_file()), None)
    config = read_json(found) if found else {}
    task = config.get("transformer_task", wanted_task)
    if task != wanted_task:
        raise UnsupportedLayoutError(f"unsupported transformer task {task!r}")

    def arguments(new: str, old: str) -> dict[str, Any]:
        """Arguments of a loader, but those that lead to code or to unchecked files."""
        stored = dict(config.get(new) or config.get(old) or {})
        return {name: value for name, value in stored.items() if name not in _NOT_STORED}

    length = config.get("max_seq_length")
    return {
        "transformer": directory,
        "max_sequence_length": int(length) if length else None,
        "lower_case": bool(config.get("do_lower_case", False)),
        "model_arguments": arguments("model_kwargs", "model_args"),
        "config_arguments": arguments("config_kwargs", "config_args"),
        "tokenizer_arguments": arguments("processor_kwargs", "tokenizer_args"),
    }


def pooling_modes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Pooling modes from the newer `pooling_mode` or the older flags; mean where neither says anything."""
    if "pooling_mode" in config:
        return resolve_modes(config["pooling_mode"])
    return tuple(mode for flag, mode in _POOLING_FLAGS.items() if config.get(flag)) or ("mean",)


def read_json(path: Path) -> dict[str, Any]:
    """The object stored at `path`; empty without the file."""
    if not path.is_file():
        return {}
    loaded = json.loads(path.read_text(encoding="utf-8"))
    return loaded if isinstance(loaded, dict) else {}


def default_prompt(stored: Mapping[str, Any]) -> str:
    """The prompt that a `config_sentence_transformers.json` puts before each query that names none."""
    return str((stored.get("prompts") or {}).get(stored.get("default_prompt_name")) or "")


@dataclass(frozen=True, slots=True)
class LateLayout:
    """The layout of a late-interaction model.

    heads               layers after the transformer; none in Stanford's layout, which has `linear.weight`
    *_prefix            marker token, or text, before every query or document
    *_length            longest query and document in tokens, or None for the model's length
    expansion           whether queries are filled up to their length with mask tokens
    attend_to_expansion whether attention sees these mask tokens
    skip_words          tokens whose vectors documents leave out
    """

    model: ModelLayout
    heads: tuple[ModuleConfig, ...] = ()
    query_prefix: str = ""
    document_prefix: str = ""
    query_length: int | None = None
    document_length: int | None = None
    expansion: bool = False
    attend_to_expansion: bool = False
    skip_words: tuple[str, ...] = ()


def read_late_layout(directory: Path, options: Mapping[str, Any]) -> LateLayout:
    """The layout of `directory` with the catalog's `options` laid over it."""
    config = read_json(directory / "config.json")
    if "HF_ColBERT" in (config.get("architectures") or []):
        layout = _read_stanford(directory)
        options = {**options, **_named_markers(directory, options)}
    else:
        layout = _read_modules(directory)
    names = ("query_prefix", "document_prefix", "query_length", "document_length")
    changed = {name: options[name] for name in names if options.get(name) is not None}
    if options.get("query_expansion") is not None:
        changed["expansion"] = bool(options["query_expansion"])
    if options.get("attend_to_expansion") is not None:
        changed["attend_to_expansion"] = bool(options["attend_to_expansion"])
    if options.get("skip_punctuation") is not None:
        changed["skip_words"] = tuple(string.punctuation) if options["skip_punctuation"] else ()
    layout = replace(layout, **changed)
    if layout.expansion and layout.query_length is None:
        layout = replace(layout, query_length=_DEFAULT_QUERY_LENGTH)
    return layout


def _named_markers(directory: Path, options: Mapping[str, Any]) -> dict[str, str]:
    """Replace the marker names `[Q]` and `[D]` at the beginning of the catalog's prefixes by the tokens of the markers.

    The vocabulary of Stanford's checkpoints has these tokens under other names.
    """
    stored = read_json(directory / "artifact.metadata")
    changed = {}
    for prefix, side, name, token in (
        ("query_prefix", "query", "[Q]", "[unused0]"),
        ("document_prefix", "doc", "[D]", "[unused1]"),
    ):
        given = str(options.get(prefix) or "").lstrip()
        name = stored.get(f"{side}_token") or name
        if given.startswith(name):
            changed[prefix] = (stored.get(f"{side}_token_id") or token) + given.removeprefix(name)
    return changed


def _read_stanford(directory: Path) -> LateLayout:
    stored = read_json(directory / "artifact.metadata")
    return LateLayout(
        model=read_transformer(directory, directory),
        query_prefix=stored.get("query_token_id") or "[unused0]",
        document_prefix=stored.get("doc_token_id") or "[unused1]",
        query_length=stored.get("query_maxlen") or _DEFAULT_QUERY_LENGTH,
        document_length=stored.get("doc_maxlen"),
        expansion=True,
        attend_to_expansion=bool(stored.get("attend_to_mask_tokens")),
        skip_words=tuple(string.punctuation) if stored.get("mask_punctuation", True) else (),
    )


def _read_modules(directory: Path) -> LateLayout:
    modules = read_modules(directory, _LATE_KINDS)
    heads = tuple(module for module in modules if module.kind in ("Dense", "LayerNorm"))
    if not heads:
        raise UnsupportedLayoutError("the model has no projection to token vectors: no Dense module")
    transformer = next((m.directory for m in modules if m.kind == "Transformer"), directory)
    mask = next((module.config for module in modules if module.kind == "MultiVectorMask"), None)
    stored = read_json(directory / PROMPTS_FILE)
    beside = read_json(transformer / "sentence_bert_config.json")
    settings = {**stored, **{name: value for name, value in beside.items() if value is not None}}
    expansion = settings.get("query_expansion")
    legacy = mask is None
    if expansion is None and legacy and settings.get("do_query_expansion", True):
        attend = bool(settings.get("attend_to_expansion_tokens"))
        expansion = {"attend": attend, "length": settings.get("query_length") or _DEFAULT_QUERY_LENGTH}
    words = (mask or stored).get("skiplist_words")
    if words is None:
        words = list(string.punctuation) if legacy else []
    prompts = stored.get("prompts") or {}
    return LateLayout(
        model=replace(read_transformer(directory, transformer), prompts={}),
        heads=heads,
        query_prefix=_prefix(stored.get("query_prefix"), prompts.get("query")),
        document_prefix=_prefix(stored.get("document_prefix"), prompts.get("document")),
        query_length=expansion["length"] if expansion else settings.get("query_length"),
        document_length=settings.get("document_length"),
        expansion=bool(expansion),
        attend_to_expansion=bool(expansion and expansion.get("attend")),
        skip_words=tuple(words),
    )


def _prefix(marker: str | None, prompt: str | None) -> str:
    """The marker and then the stored prompt, which may begin with the marker."""
    return (marker or "") + (prompt or "").removeprefix(marker or "")


def stanford_projection(directory: Path) -> Any:
    """`linear.weight` [dims, width] of the model. Raises UnsupportedLayoutError for a model without."""
    from safetensors import safe_open

    index = read_json(directory / "model.safetensors.index.json").get("weight_map", {})
    with safe_open(str(directory / index.get("linear.weight", "model.safetensors")), "pt") as weights:
        if "linear.weight" not in weights.keys():  # noqa: SIM118
            raise UnsupportedLayoutError("the checkpoint has no projection: linear.weight is missing")
        return weights.get_tensor("linear.weight")
