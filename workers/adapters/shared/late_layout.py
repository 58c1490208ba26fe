"""Read the directories of late-interaction (ColBERT) text models, in three layouts.

PyLate                modules.json with a Transformer and Dense layers; markers, lengths, expansion and skip list in
                      config_sentence_transformers.json. Vectors are normalised.
sentence-transformers the same with MultiVectorMask and Normalize; lengths and expansion beside the transformer, the
                      skip list beside the mask
Stanford              architectures [HF_ColBERT], the projection as `linear.weight` among the transformer's weights,
                      all else in artifact.metadata

Keys and defaults are those of `MultiVectorEncoder` (sentence-transformers 6.2).
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workers.adapters.shared.sentence_transformers_layout import (
    PROMPTS_FILE,
    ModelLayout,
    ModuleConfig,
    read_modules,
    read_transformer,
)
from workers.adapters.shared.transformer_settings import UnsupportedLayoutError, read_json, whole

_KINDS = ("Transformer", "Dense", "LayerNorm", "MultiVectorMask", "Normalize")
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


@dataclass(frozen=True, slots=True)
class Expansion:
    """How queries are filled up to `length` tokens.

    attend  whether attention sees the filling
    token   the filling token; None for the mask token, or the end marker of a tokenizer without one
    cuts    whether longer queries are cut to `length`
    """

    length: int
    attend: bool = False
    token: str | None = None
    cuts: bool = True


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
    modules = read_modules(directory, _KINDS)
    heads = tuple(module for module in modules if module.kind in ("Dense", "LayerNorm"))
    if not heads:
        raise UnsupportedLayoutError("the model has no projection to token vectors: no Dense module")
    transformer = next((m.directory for m in modules if m.kind == "Transformer"), directory)
    model = read_transformer(directory, transformer)
    mask = next((module.config for module in modules if module.kind == "MultiVectorMask"), None)
    stored = read_json(directory / PROMPTS_FILE)
    inline = mask is None and stored.get("model_type") != "MultiVectorEncoder"
    words = (stored if mask is None else mask).get("skiplist_words")
    tasks = (mask or {}).get("skiplist_tasks") or ("document",)
    kept = (mask or {}).get("keep_only_token_ids")
    prompts = stored.get("prompts") or {}
    documents = next((prompts[name] for name in ("document", "passage", "corpus") if prompts.get(name)), None)
    expansion = _stored_expansion(model, stored)
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
        kept_ids=None if not kept else tuple(kept),
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
