"""Read model directories in the layout of sentence-transformers: old names, and those since 5.4.

`read_layout`, for dense models:

1. `modules.json` lists the modules: a Transformer, token layers, a Pooling, vector layers.
2. Settings of the Transformer lie beside its weights (`workers.adapters.shared.transformer_settings`).
3. `config_sentence_transformers.json` holds the prompts, and how many values of a vector are kept.

A directory without `modules.json` is a plain transformers checkpoint: mean pooling for encoders, last token for
decoders, normalised. Unknown modules are refused by name.

`MODES` names the ways to make one vector of a text's token vectors, as sentence-transformers 6.2 has them.

`read_late_layout`, for late-interaction (ColBERT) text models, knows three layouts:

PyLate                modules.json with a Transformer and Dense layers; markers, lengths, expansion and skip list in
                      config_sentence_transformers.json. Vectors are normalised.
sentence-transformers the same with MultiVectorMask and Normalize; lengths and expansion beside the transformer, the
                      skip list beside the mask
Stanford              architectures [HF_ColBERT], the projection as `linear.weight` among the transformer's weights,
                      all else in artifact.metadata

Keys and defaults are those of `MultiVectorEncoder` (sentence-transformers 6.2).
"""

from __future__ import annotations

import json
import string
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from workers.adapters.shared.transformer_settings import (
    TransformerSettings,
    UnsupportedLayoutError,
    read_json,
    read_settings,
    whole,
)

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
_ALIASES = {"last": "lasttoken", "last_token": "lasttoken", "mean_sqrt_len": "mean_sqrt_len_tokens"}
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
_LATE_KINDS = ("Transformer", "Dense", "LayerNorm", "MultiVectorMask", "Normalize")
_DEFAULT_QUERY_LENGTH = 32
_MARKERS_OF_PYLATE = (
    *(
        "query_length",
        "document_length",
        "query_expansion",
        "do_query_expansion",
        "attend_to_expansion_tokens",
    ),
    *("attend_to_mask_tokens", "query_prefix", "document_prefix", "skiplist_words"),
)
"""Keys of which PyLate stores some. With one of them queries are expanded unless a key says otherwise."""
_METADATA = "artifact.metadata"


def resolve_modes(names: str | Iterable[str]) -> tuple[str, ...]:
    """Canonical mode names; raises ValueError for an unknown one."""
    given = (names,) if isinstance(names, str) else tuple(names)
    modes = tuple(_ALIASES.get(name, name) for name in given)
    unknown = [name for name in modes if name not in MODES]
    if unknown or not modes:
        raise ValueError(
            f"unknown pooling {', '.join(unknown) or '(none)'}: use {', '.join((*MODES, 'last'))}"
        )
    return modes


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


def read_static_layout(directory: Path) -> ModelLayout:
    """The layout of a table of vectors, `transformer` being the directory of the table and its tokenizer.

    Without modules.json the directory is one that model2vec has saved, whose config.json says whether vectors are
    normalised. Raises UnsupportedLayoutError.
    """
    modules = read_modules(directory, _HEADS | {"Dropout", "StaticEmbedding"})
    kinds = [module.kind for module in modules]
    if not modules:
        ends = ("Normalize",) if read_json(directory / "config.json").get("normalize") else ()
        heads = tuple(ModuleConfig(kind, directory, {}) for kind in ends)
        return ModelLayout(transformer=directory, vector_modules=heads)
    if kinds[0] != "StaticEmbedding" or kinds.count("StaticEmbedding") != 1:
        raise UnsupportedLayoutError(f"unsupported module order {' > '.join(kinds)}: one StaticEmbedding")
    return replace(
        read_transformer(directory, modules[0].directory),
        vector_modules=_heads(modules[1:], "sentence_embedding"),
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
    config = {} if kind in ("Transformer", "StaticEmbedding") else read_json(place / "config.json")
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


@dataclass(frozen=True, slots=True)
class Expansion:
    """How queries are filled up to `length` tokens.

    attend  whether attention sees the filling
    token   the filling token; None for the mask token, or the end marker of a tokenizer without one
    cuts    whether longer queries are cut to `length`
    scored  whether filling that attention does not see gives vectors, as filling that attention sees always does
    """

    length: int
    attend: bool = False
    token: str | None = None
    cuts: bool = True
    scored: bool = True


@dataclass(frozen=True, slots=True)
class LateLayout:
    """The layout of a late-interaction model.

    heads            layers after the transformer; none in Stanford's layout, which has `linear.weight`
    *_prefix         marker token, or text, before every query or document
    *_length         longest query and document in tokens, or None for the model's length
    expansion        the filling of queries, None without
    skip_words       tokens that give no vectors, in texts of the sides `skip_sides`
    kept_ids         the only tokens of documents that give vectors, None for all
    normalized       whether vectors have length 1
    mean             whether a score is divided by the number of query vectors (MeanMaxSim)
    """

    model: ModelLayout
    heads: tuple[ModuleConfig, ...] = ()
    query_prefix: str = ""
    document_prefix: str = ""
    query_length: int | None = None
    document_length: int | None = None
    expansion: Expansion | None = None
    skip_words: tuple[str, ...] = ()
    skip_sides: tuple[str, ...] = ("document",)
    kept_ids: tuple[int, ...] | None = None
    normalized: bool = True
    mean: bool = False


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
    if options.get("skip_punctuation") is not None:
        changed["skip_words"] = tuple(string.punctuation) if options["skip_punctuation"] else ()
    return replace(layout, **changed, expansion=_chosen_expansion(layout, options))


def _chosen_expansion(layout: LateLayout, options: Mapping[str, Any]) -> Expansion | None:
    """The stored expansion with the catalog's options laid over it."""
    wanted, length = options.get("query_expansion"), options.get("query_length")
    if not (layout.expansion is not None if wanted is None else wanted):
        return None
    expansion = layout.expansion or Expansion(layout.query_length or _DEFAULT_QUERY_LENGTH)
    attend = options.get("attend_to_expansion")
    return replace(
        expansion,
        length=expansion.length if length is None else length,
        attend=expansion.attend if attend is None else bool(attend),
        scored=expansion.scored or wanted is not None,
    )


def _named_markers(directory: Path, options: Mapping[str, Any]) -> dict[str, str]:
    """Replace the marker names `[Q]` and `[D]` at the beginning of the catalog's prefixes by the tokens of the markers.

    The vocabulary of Stanford's checkpoints has these tokens under other names.
    """
    stored = read_json(directory / _METADATA)
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
    stored = read_json(directory / _METADATA)
    if stored.get("similarity", "cosine") != "cosine":
        raise UnsupportedLayoutError(
            f"{_METADATA}: similarity {stored['similarity']!r:.64}: only cosine is served"
        )
    length = whole(stored, "query_maxlen", _METADATA) or _DEFAULT_QUERY_LENGTH
    return LateLayout(
        model=read_transformer(directory, directory),
        query_prefix=stored.get("query_token_id") or "[unused0]",
        document_prefix=stored.get("doc_token_id") or "[unused1]",
        document_length=whole(stored, "doc_maxlen", _METADATA),
        expansion=Expansion(length, bool(stored.get("attend_to_mask_tokens"))),
        skip_words=tuple(string.punctuation) if stored.get("mask_punctuation", True) else (),
    )


def _read_modules(directory: Path) -> LateLayout:
    modules = read_modules(directory, _LATE_KINDS)
    heads = tuple(module for module in modules if module.kind in ("Dense", "LayerNorm"))
    if not heads:
        raise UnsupportedLayoutError("the model has no projection to token vectors: no Dense module")
    transformer = next((m.directory for m in modules if m.kind == "Transformer"), directory)
    model = read_transformer(directory, transformer)
    mask = next((module.config for module in modules if module.kind == "MultiVectorMask"), None)
    stored = read_json(directory / PROMPTS_FILE)
    inline = mask is None and stored.get("model_type") != "MultiVectorEncoder"
    # NOTE: without a mask sentence-transformers scores what attention sees: no filling beside it, and all words.
    masked = mask if mask is not None or not inline else stored
    words = (masked or {}).get("skiplist_words")
    tasks = (mask or {}).get("skiplist_tasks") or ("document",)
    only_ids = (mask or {}).get("keep_only_token_ids")
    prompts = stored.get("prompts") or {}
    documents = next((prompts[name] for name in ("document", "passage", "corpus") if prompts.get(name)), None)
    expansion = _stored_expansion(model, stored)
    if expansion is not None:
        expansion = replace(expansion, scored=masked is not None)
    query_length = model.query_length or whole(stored, "query_length", PROMPTS_FILE)
    return LateLayout(
        model=replace(model, prompts={}, default_prompt="", query_length=None, document_length=None),
        heads=heads,
        query_prefix=_prefix(stored.get("query_prefix"), prompts.get("query")),
        document_prefix=_prefix(stored.get("document_prefix"), documents),
        query_length=query_length if expansion is None or not expansion.cuts else None,
        document_length=model.document_length or whole(stored, "document_length", PROMPTS_FILE),
        expansion=expansion,
        skip_words=tuple((string.punctuation if inline else ()) if words is None else words),
        skip_sides=(tasks,) if isinstance(tasks, str) else tuple(tasks),
        kept_ids=None if not only_ids else tuple(only_ids),
        normalized=inline or any(module.kind == "Normalize" for module in modules),
        mean=stored.get("similarity_fn_name") == "meanmaxsim",
    )


def _stored_expansion(model: ModelLayout, stored: Mapping[str, Any]) -> Expansion | None:
    """The expansion that the transformer states, else the file of prompts, else that of PyLate by default."""
    if model.query_expansion is not None:
        return _expansion_of(model.query_expansion)
    if "query_expansion" in stored:
        return None if stored["query_expansion"] is None else _expansion_of(stored["query_expansion"])
    if stored.get("do_query_expansion") is False or not any(key in stored for key in _MARKERS_OF_PYLATE):
        return None
    attend = stored.get("attend_to_expansion_tokens", stored.get("attend_to_mask_tokens"))
    length = whole(stored, "query_length", PROMPTS_FILE) or _DEFAULT_QUERY_LENGTH
    return Expansion(length, bool(attend))


def _expansion_of(stored: Mapping[str, Any]) -> Expansion:
    """`query_expansion` as sentence-transformers stores it. Raises UnsupportedLayoutError for an unknown strategy."""
    strategy, length = stored.get("strategy"), whole(stored, "length", "query_expansion")
    if strategy not in ("fixed", "min") or length is None:
        raise UnsupportedLayoutError(
            f"query_expansion: expected the strategy fixed or min and a length, got {dict(stored)!r:.200}"
        )
    return Expansion(length, bool(stored.get("attend")), stored.get("token"), strategy == "fixed")


def _prefix(marker: str | None, prompt: str | None) -> str:
    """The marker and then the stored prompt, which may begin with the marker."""
    return (marker or "") + (prompt or "").removeprefix(marker or "")


def stanford_projection(directory: Path) -> Any:
    """`linear.weight` [dims, width] of the model. Raises UnsupportedLayoutError for a model without."""
    from workers.loading.reading import safe_open

    index = read_json(directory / "model.safetensors.index.json").get("weight_map", {})
    with safe_open(str(directory / index.get("linear.weight", "model.safetensors")), "pt") as weights:
        if "linear.weight" not in weights.keys():  # noqa: SIM118
            raise UnsupportedLayoutError("the checkpoint has no projection: linear.weight is missing")
        return weights.get_tensor("linear.weight")
