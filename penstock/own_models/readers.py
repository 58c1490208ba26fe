"""The catalog entry of a model as the model's own files give it, and where each part was read.

1. `families.choose` finds the family, unless the caller states the adapter.
2. One function for each kind of family fills the description. Layouts are read by the code that a load runs
   (`workers.adapters.shared.sentence_transformers_layout`), so that both agree.
3. Fields that the caller states are laid over what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.own_models.description import (
    Description,
    Fields,
    folder_of,
    guarded,
    last_dense,
    output_fields,
    places_of,
    read_length,
    read_prompts,
    tell_no_length,
    tell_width,
    transformer_of,
    width_of,
)
from penstock.own_models.families import POOLING_FILE, choose, kinds_of, labels_of
from penstock.own_models.files import CannotTell, ModelFiles, number_of, shown, text_of, undecided
from workers.adapters.shared.sentence_transformers_layout import (
    MODES,
    PROMPTS_FILE,
    ModelLayout,
    default_prompt,
    pooling_modes,
    read_classifier,
    read_late_layout,
    read_layout,
    read_static_layout,
    resolve_modes,
)
from workers.loading.quantized_files import read_scheme
from workers.loading.quantized_parts import QuantizedRefused

_ENCODER_CONFIG = "encoder_config/config.json"
_HEADS = ("sparse_linear.pt", "colbert_linear.pt")


def describe(files: ModelFiles, stated: Mapping[str, Any]) -> Description:
    """The description of a model; `stated` are fields of the entry that go before what the files say.

    Raises `CannotTell`.
    """
    family, where = (str(stated["adapter"]), "stated") if "adapter" in stated else choose(files)
    model = Description(files, stated, {"adapter": family})
    model.tell("family", shown(family), where)
    reader = _READERS.get(family)
    if reader is None:
        raise CannotTell(
            f"adapter {shown(family)}: no family whose files are read here; write the whole entry"
        )
    _read_packing(model)
    reader(model)
    if "auto_map" in files.object("config.json"):
        model.tell("own code", "runs only with worker.trust_remote_code", "config.json: auto_map")
    model.fields = laid_over(model.fields, stated)
    return model


def _read_packing(model: Description) -> None:
    """Tell how weights are quantised. Raises `CannotTell` for forms that are not read, of which a family reads none."""
    config = model.files.object("config.json")
    try:
        scheme = read_scheme(config)
    except QuantizedRefused as error:
        raise CannotTell(str(error)) from error
    if scheme is None:
        return
    family, where = model.fields["adapter"], f"quantization_config.quant_method {scheme.method}"
    if family != "causal":
        raise CannotTell(
            f"config.json: {where}: the family {shown(family)} reads no quantised weights; models that generate text "
            "do. Name the model that was quantised"
        )
    model.tell("weights", f"{scheme.bits} bits, turned into floats at load", f"config.json: {where}")


def laid_over(fields: Fields, stated: Mapping[str, Any]) -> Fields:
    """Fields with those that the caller states in their place, at every depth."""
    merged = dict(fields)
    for name, value in stated.items():
        before = merged.get(name)
        both = isinstance(value, dict) and isinstance(before, dict)
        merged[name] = laid_over(before, value) if both else value  # type: ignore[arg-type]
    return merged


def _dense(model: Description) -> None:
    places = places_of(model.files)
    layout = guarded(lambda: read_layout(model.files.root))
    config = transformer_of(model.files, folder_of(places))
    modes, pooled_in = _pooling(model, layout, places)
    normalized = any(module.kind == "Normalize" for module in layout.vector_modules)
    where = "modules.json"
    if not places:
        normalized, where = True, "no modules.json: the default"
    similarity = model.files.object(PROMPTS_FILE).get("similarity_fn_name")
    width = _width(config, layout, len(modes))
    model.offer(["text"], dense=output_fields(width, similarity="dot" if similarity == "dot" else "cosine"))
    model.tell("pooling", " and ".join(modes), pooled_in)
    model.tell("normalization", "yes" if normalized else "no", where)
    tell_width(model, width)
    if layout.truncate_dim is not None:
        truncation = f"the first {layout.truncate_dim} values of a vector"
        model.tell("truncation", truncation, f"{PROMPTS_FILE}: truncate_dim")
    read_prompts(model)
    read_length(model, config, folder_of(places))
    model.fields["loadtime"] = {
        "pooling": modes[0] if len(modes) == 1 else list(modes),
        "normalize": normalized,
    }


def _pooling(model: Description, layout: ModelLayout, places: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Pooling modes, and where they were read. Raises `CannotTell`."""
    given = model.stated.get("loadtime", {}).get("pooling")
    if given:
        try:
            return resolve_modes(given), "stated"
        except (TypeError, ValueError) as error:
            raise CannotTell(
                f"loadtime.pooling {shown(given)}: expected one or a list of {', '.join(MODES)}"
            ) from error
    if layout.pooling is not None:
        at = places[kinds_of(model.files).index("Pooling")]
        return layout.pooling, f"{at}/config.json" if at else "modules.json"
    stored = model.files.object(POOLING_FILE)
    if not stored:
        raise undecided(
            f"neither modules.json nor {POOLING_FILE} says how one vector is made of those of the tokens",
            "loadtime.pooling (cls, mean, lasttoken, max, weightedmean)",
        )
    return guarded(lambda: pooling_modes(stored)), POOLING_FILE


def _width(config: Fields, layout: ModelLayout, modes: int) -> int | None:
    """Width of the vector: that of the last Dense, else of the transformer, once for each pooling; cut where stored."""
    tokens = last_dense(layout.token_modules) or width_of(config)
    whole = last_dense(layout.vector_modules) or (tokens * modes if tokens else None)
    return whole and min(whole, layout.truncate_dim or whole)


def _static_embedding(model: Description) -> None:
    places_of(model.files)
    layout = guarded(lambda: read_static_layout(model.files.root))
    normalized = any(module.kind == "Normalize" for module in layout.vector_modules)
    similarity = model.files.object(PROMPTS_FILE).get("similarity_fn_name")
    width = last_dense(layout.vector_modules) or _table_width(layout.transformer)
    width = width and min(width, layout.truncate_dim or width)
    model.offer(["text"], dense=output_fields(width, similarity="dot" if similarity == "dot" else "cosine"))
    where = "modules.json" if "modules.json" in model.files.names else "config.json"
    model.tell("normalization", "yes" if normalized else "no", where)
    tell_width(model, width)
    read_prompts(model)
    tell_no_length(model)
    model.fields["loadtime"] = {"normalize": normalized}


def _table_width(directory: Path) -> int | None:
    """Width of the table in a directory, by the header of its file; None for a file that is elsewhere or damaged."""
    from workers.loading.stored_files import DamagedWeightsError, tensor_shapes

    try:
        shapes = tensor_shapes(directory / "model.safetensors")
    except (OSError, DamagedWeightsError):
        return None
    shape = shapes.get("embedding.weight") or shapes.get("embeddings") or []
    return shape[1] if len(shape) == 2 else None


def _bge_m3(model: Description) -> None:
    places_of(model.files)
    config = model.files.object("config.json")
    width, vocabulary = number_of(config, "hidden_size"), number_of(config, "vocab_size")
    model.offer(
        ["text"], dense=output_fields(width), sparse=output_fields(vocabulary), multivector={}, score={}
    )
    model.source["files"] = list(_HEADS)
    tell_width(model, width)
    read_prompts(model)
    read_length(model, config)


def _splade(model: Description) -> None:
    files, places = model.files, places_of(model.files)
    within = "document_0_MLMTransformer/" if "document_0_MLMTransformer/config.json" in files.names else ""
    folder = within or folder_of(places)
    config = transformer_of(files, folder)
    model.offer(["text"], sparse=output_fields(number_of(config, "vocab_size"), similarity="dot"))
    if "Router" in kinds_of(files):
        if "idf.json" not in files.names:
            raise CannotTell(
                "modules.json: queries have a module of their own, and there is no idf.json for them"
            )
        model.fields["loadtime"] = {"query_encoding": "idf"}
        model.tell("queries", "looked up, without inference", "modules.json: Router, idf.json")
    read_prompts(model)
    read_length(model, config, folder)


def _colbert(model: Description) -> None:
    files, folder = model.files, folder_of(places_of(model.files))
    layout = guarded(lambda: read_late_layout(files.root, {}))
    stored = files.object("artifact.metadata")
    width = last_dense(layout.heads) or number_of(stored, "dim")
    model.offer(["text"], multivector=output_fields(width, similarity="maxsim"), score={})
    where = "artifact.metadata" if stored else PROMPTS_FILE
    model.tell(
        "prompts", f"query {shown(layout.query_prefix)!r}, document {shown(layout.document_prefix)!r}", where
    )
    queries = layout.expansion.length if layout.expansion else layout.query_length
    lengths = (queries, layout.document_length)
    query, document = (shown(length or "any") for length in lengths)
    model.tell("lengths", f"query {query}, document {document}", where)
    tell_width(model, width)
    read_length(model, transformer_of(files, folder), folder, lengths)


def _towers(model: Description) -> None:
    config = model.files.object("config.json")
    width = number_of(config, "projection_dim")
    model.offer(["text", "image"], dense=output_fields(width, similarity="cosine"))
    model.fields["loadtime"] = {"normalize": True}
    model.tell("normalization", "yes", "the default of the family")
    read_length(model, config)


def _pages(model: Description) -> None:
    width = number_of(model.files.object("config.json"), "embedding_dim")
    model.offer(["text", "image"], multivector=output_fields(width, similarity="maxsim"), score={})


def _scorer(model: Description) -> None:
    model.offer(["text"], score={})
    stored = model.files.object(PROMPTS_FILE)
    if prompt := guarded(lambda: default_prompt(stored)):
        model.tell("prompt", f"query {shown(prompt)!r}", PROMPTS_FILE)
    if model.fields["adapter"] == "cross_encoder":
        places_of(model.files)
        guarded(lambda: read_classifier(model.files.root))
    read_length(model, model.files.object("config.json"))


def _extractor(model: Description) -> None:
    config = model.files.object("config.json")
    model.offer(["text"], json={})
    if model.fields["adapter"] in ("ner", "text_classification"):
        model.tell("labels", shown(", ".join(labels_of(config))), "config.json")
    read_length(model, config)


def _gliner(model: Description) -> None:
    config = model.files.object("gliner_config.json")
    model.offer(["text"], json={})
    longest = number_of(config, "max_len")
    if longest:
        model.fields["max_sequence_length"] = longest
        model.tell("length", f"{longest} words", "gliner_config.json: max_len")
    borrowed = text_of(config, "labels_encoder", "gliner_config.json")
    if not borrowed and not ("tokenizer.json" in model.files.names and config.get("encoder_config")):
        borrowed = text_of(config, "model_name", "gliner_config.json")
    if borrowed:
        model.source["tokenizer_repo"] = borrowed
        model.tell("tokenizer", f"of {shown(borrowed)}", "gliner_config.json")


def _gliner2(model: Description) -> None:
    model.offer(["text"], json={})
    if _ENCODER_CONFIG in model.files.names:
        model.source["files"] = [_ENCODER_CONFIG]
    tell_no_length(model)


def _picture_reader(model: Description) -> None:
    model.offer(["image"], json={})


def _vision_language(model: Description) -> None:
    config = model.files.object("config.json")
    if model.fields["adapter"] == "qwen3_vl_reranker":
        model.offer(["text", "image"], score={})
    else:
        model.offer(["text", "image"], dense=output_fields(width_of(config), similarity="cosine"))
    read_length(model, config)


def _causal(model: Description) -> None:
    files = model.files
    model.offer(["text"], chat={})
    stored = files.object("tokenizer_config.json").get("chat_template")
    if "chat_template.jinja" in files.names:
        model.tell("chat template", "stored", "chat_template.jinja")
    elif stored:
        model.tell("chat template", "stored", "tokenizer_config.json")
    else:
        model.tell("chat template", "none: completions only", "none is stored")
    read_length(model, files.object("config.json"))


_READERS: dict[str, Callable[[Description], None]] = {
    "dense": _dense,
    "static_embedding": _static_embedding,
    "bge_m3": _bge_m3,
    "splade": _splade,
    "colbert": _colbert,
    "clip": _towers,
    "siglip": _towers,
    "colpali": _pages,
    "colqwen2": _pages,
    "cross_encoder": _scorer,
    "qwen3_reranker": _scorer,
    "causal": _causal,
    "ner": _extractor,
    "text_classification": _extractor,
    "nli_zero_shot": _extractor,
    "gliclass": _extractor,
    "gliner": _gliner,
    "gliner2": _gliner2,
    "detection": _picture_reader,
    "owlv2": _picture_reader,
    "grounding_dino": _picture_reader,
    "florence2": _picture_reader,
    "donut": _picture_reader,
    "document_qa": _picture_reader,
    "lighton_ocr": _picture_reader,
    "glm_ocr": _picture_reader,
    "paddleocr_vl": _picture_reader,
    "qwen3_vl_embedding": _vision_language,
    "qwen3_vl_reranker": _vision_language,
}
