"""Read model directories in the layout of sentence-transformers: old names, and those since 5.4.

`read_layout`, for dense models:

1. `modules.json` lists the modules: a Transformer, token layers, a Pooling, vector layers.
2. Settings of the Transformer lie beside its weights (`workers.adapters.shared.transformer_settings`).
3. `config_sentence_transformers.json` holds the prompts, and how many values of a vector are kept.

A directory without `modules.json` is a plain transformers checkpoint: mean pooling for encoders, last token for
decoders, normalised. Unknown modules are refused by name.

`workers.adapters.shared.late_layout` reads late-interaction models.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from workers.adapters.shared.pooling_modes import resolve_modes
from workers.adapters.shared.transformer_settings import (
    TransformerSettings,
    UnsupportedLayoutError,
    read_json,
    read_settings,
    whole,
)

PROMPTS_FILE = "config_sentence_transformers.json"
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


@dataclass(frozen=True, slots=True)
class ModuleConfig:
    """One Dense, LayerNorm or Normalize: its kind, directory and config.json."""

    kind: str
    directory: Path
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelLayout(TransformerSettings):
    """The settings in a model directory. Without a stored pooling, `pooling` is None.

    Of each vector the first `truncate_dim` values are kept, after all
    layers, as sentence-transformers 6.2 does (`sentence_transformer/model.py`); None keeps all.
    """

    token_modules: tuple[ModuleConfig, ...] = ()
    pooling: tuple[str, ...] | None = None
    include_prompt: bool = True
    vector_modules: tuple[ModuleConfig, ...] = ()
    truncate_dim: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""


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
        truncate_dim=whole(read_json(directory / PROMPTS_FILE), "truncate_dim", PROMPTS_FILE),
    )


def read_transformer(directory: Path, transformer: Path, task: str = "feature-extraction") -> ModelLayout:
    """The layout of the transformer in `transformer`, a part of the model in `directory`, with the model's prompts.

    Raises UnsupportedLayoutError when it was stored for another task.
    """
    stored = read_json(directory / PROMPTS_FILE)
    prompts: dict[str, str | None] = stored.get("prompts") or {}
    return ModelLayout(
        **asdict(read_settings(transformer, task)),
        prompts={name: text for name, text in prompts.items() if text is not None},
        default_prompt=default_prompt(stored),
    )


def read_classifier(directory: Path) -> ModelLayout:
    """The layout of a classifier, which sentence-transformers may have saved as a CrossEncoder.

    Raises UnsupportedLayoutError for modules beside the transformer.
    """
    modules = read_modules(directory, {"Transformer"})
    if not modules:
        return ModelLayout(directory)
    if len(modules) > 1:
        raise UnsupportedLayoutError(f"a classifier of {len(modules)} modules; one Transformer is served")
    return read_transformer(directory, modules[0].directory, "sequence-classification")


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


def pooling_modes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Pooling modes from the newer `pooling_mode` or the older flags; mean where neither says anything."""
    if "pooling_mode" in config:
        return resolve_modes(config["pooling_mode"])
    return tuple(mode for flag, mode in _POOLING_FLAGS.items() if config.get(flag)) or ("mean",)


def default_prompt(stored: Mapping[str, Any]) -> str:
    """The prompt of a `config_sentence_transformers.json` for texts of a request that chooses none.

    Raises UnsupportedLayoutError for a name that is no stored prompt.
    """
    name, prompts = stored.get("default_prompt_name"), stored.get("prompts") or {}
    if name is not None and name not in (*prompts, "query", "document"):
        known = ", ".join(map(str, prompts)) or "none"
        raise UnsupportedLayoutError(
            f"{PROMPTS_FILE}: default_prompt_name: {name!r:.64} is no stored prompt, those are: {known:.300}"
        )
    return str(prompts.get(name) or "")
