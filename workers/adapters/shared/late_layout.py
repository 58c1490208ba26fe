"""Read how a late-interaction (ColBERT) text model was stored: PyLate, sentence-transformers or Stanford layout.

PyLate               modules.json with a Transformer and Dense layers; markers, lengths, expansion and skip list in
                     config_sentence_transformers.json
sentence-transformers the same with MultiVectorMask and Normalize; lengths and expansion beside the transformer, the
                     skip list beside the mask
Stanford             architectures [HF_ColBERT], the projection as `linear.weight` among the transformer's weights,
                     the rest in artifact.metadata
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workers.adapters.shared.sentence_transformers_layout import (
    ModelLayout,
    ModuleConfig,
    UnsupportedLayoutError,
    read_json,
    read_modules,
    read_transformer,
)

_KINDS = ("Transformer", "Dense", "LayerNorm", "MultiVectorMask", "Normalize")
_DEFAULT_QUERY_LENGTH = 32


@dataclass(frozen=True, slots=True)
class LateLayout:
    """What is particular to a late-interaction model.

    heads               layers between the transformer and the token vectors; none: `linear.weight` (Stanford)
    *_prefix            marker token, or text, in front of every query or document
    *_length            longest query and document in tokens, or None for the model's length
    expansion           whether queries are filled up to their length with mask tokens
    attend_to_expansion whether attention sees those
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
    """Prefixes among `options` that begin with the name of a marker, with the marker's token in place of the name.

    Stanford's checkpoints write `[Q]` and `[D]` for tokens that the vocabulary has under other names.
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
    modules = read_modules(directory, _KINDS)
    heads = tuple(module for module in modules if module.kind in ("Dense", "LayerNorm"))
    if not heads:
        raise UnsupportedLayoutError("the model has no projection to token vectors: no Dense module")
    transformer = next((m.directory for m in modules if m.kind == "Transformer"), directory)
    mask = next((module.config for module in modules if module.kind == "MultiVectorMask"), None)
    stored = read_json(directory / "config_sentence_transformers.json")
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
    """The marker with the stored prompt after it, which may repeat the marker."""
    return (marker or "") + (prompt or "").removeprefix(marker or "")


def stanford_projection(directory: Path) -> Any:
    """`linear.weight` [dims, width] from the model's weights; raises UnsupportedLayoutError where it is missing."""
    from safetensors import safe_open

    index = read_json(directory / "model.safetensors.index.json").get("weight_map", {})
    with safe_open(str(directory / index.get("linear.weight", "model.safetensors")), "pt") as weights:
        if "linear.weight" not in weights.keys():  # noqa: SIM118
            raise UnsupportedLayoutError("the checkpoint has no projection: linear.weight is missing")
        return weights.get_tensor("linear.weight")
