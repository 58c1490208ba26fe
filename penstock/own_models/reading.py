"""The catalog entry of a model as the model's own files give it, and where each part was read.

1. `families.choose` finds the family, unless the caller states the adapter.
2. One function for each kind of family reads outputs, widths, pooling, prompts and length. Layouts are read by the code
   that a load runs (`workers.adapters.shared.sentence_transformers_layout`), so that both agree.
3. Fields that the caller states are laid over what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeVar

from penstock.own_models.families import POOLING_FILE, choose, kinds_of, labels_of
from penstock.own_models.files import CannotTell, ModelFiles, number_of, shown, text_of, undecided
from workers.adapters.shared.pooling_modes import MODES, resolve_modes
from workers.adapters.shared.sentence_transformers_layout import (
    PROMPTS_FILE,
    ModelLayout,
    ModuleConfig,
    default_prompt,
    pooling_modes,
    read_late_layout,
    read_layout,
)

Fields = dict[str, Any]
T = TypeVar("T")
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim")
_OFFSET_BY_PADDING = ("roberta", "camembert", "mpnet")
"""Parts of the types of models whose table of positions begins with a row of padding."""
_MOST_PROMPTS = 1000
_ENCODER_CONFIG = "encoder_config/config.json"
_HEADS = ("sparse_linear.pt", "colbert_linear.pt")


class Told(NamedTuple):
    """One line for the operator: what was chosen, its value, and where that was read."""

    what: str
    value: str
    where: str


@dataclass(slots=True)
class Description:
    """A model as its `files` describe the model.

    `fields` are those of a catalog entry, without `id` and `source`; `source` are further fields of a hub source.
    `stated` are fields that the caller gives. `told` has the lines for the operator.
    """

    files: ModelFiles
    stated: Mapping[str, Any]
    fields: Fields = field(default_factory=dict)
    source: Fields = field(default_factory=dict)
    told: list[Told] = field(default_factory=list)

    def tell(self, what: str, value: str, where: str) -> None:
        """Add a line for the operator."""
        self.told.append(Told(what, value, where))

    def offer(self, inputs: list[str], **outputs: Fields) -> None:
        """The model takes these inputs and gives these outputs, each with its fields."""
        self.fields |= {"inputs": inputs, "outputs": outputs}


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
    reader(model)
    if "auto_map" in files.object("config.json"):
        model.tell("own code", "runs only with worker.trust_remote_code", "config.json: auto_map")
    model.fields = _laid_over(model.fields, stated)
    return model


def _laid_over(fields: Fields, stated: Mapping[str, Any]) -> Fields:
    merged = dict(fields)
    for name, value in stated.items():
        before = merged.get(name)
        both = isinstance(value, dict) and isinstance(before, dict)
        merged[name] = _laid_over(before, value) if both else value  # type: ignore[arg-type]
    return merged


def _guarded(read: Callable[[], T]) -> T:
    """What a reader of layouts gives. Raises `CannotTell` for files that the reader cannot take."""
    try:
        return read()
    except CannotTell:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError) as error:
        raise CannotTell(f"the layout of the model cannot be read: {shown(error)}") from error


def _check_bounds(files: ModelFiles) -> list[str]:
    """Places of the modules, once every file that a layout is read from is known to be within bounds."""
    places = []
    for module in files.list("modules.json"):
        path = PurePosixPath(text_of(module, "path", "modules.json"))
        if len(path.parts) > 1 or ".." in path.parts or path.is_absolute():
            raise CannotTell(f"modules.json: path {shown(path)}: expected a directory of the model")
        places.append(str(path) if path.parts else "")
    small = [n for n in files.names if n.endswith((".json", ".metadata")) and n.rpartition("/")[0] in places]
    for name in {*small, PROMPTS_FILE, "config.json", "artifact.metadata"}:
        if (
            name.rpartition("/")[2] in ("config.json", PROMPTS_FILE, "artifact.metadata")
            or "sentence_" in name
        ):
            files.object(name)
    return places


def _transformer(files: ModelFiles, beside: str) -> Fields:
    """The configuration of the transformer in `beside`, "" or "name/". Raises `CannotTell` without one."""
    config = files.object(f"{beside}config.json")
    if not config:
        raise CannotTell(
            f"{shown(beside)}config.json is missing, empty or no file; the file describes the transformer"
        )
    return config


def _beside(places: Sequence[str]) -> str:
    """The directory of the first module, as "name/"; "" for the directory of the model."""
    return f"{places[0]}/" if places and places[0] else ""


def _dims(width: int | None, **others: str) -> Fields:
    """Fields of an output: its width, if known, and others."""
    return {**({"dims": width} if width else {}), **others}


def _dense(model: Description) -> None:
    places = _check_bounds(model.files)
    layout = _guarded(lambda: read_layout(model.files.root))
    config = _transformer(model.files, _beside(places))
    modes, pooled_in = _pooling(model, layout, places)
    normalized = any(module.kind == "Normalize" for module in layout.vector_modules)
    where = "modules.json"
    if not places:
        normalized, where = True, "no modules.json: the default"
    similarity = model.files.object(PROMPTS_FILE).get("similarity_fn_name")
    width = _width(config, layout, len(modes))
    model.offer(["text"], dense=_dims(width, similarity="dot" if similarity == "dot" else "cosine"))
    model.tell("pooling", " and ".join(modes), pooled_in)
    model.tell("normalization", "yes" if normalized else "no", where)
    _tell_width(model, width)
    if layout.truncate_dim is not None:
        kept = f"the first {layout.truncate_dim} values of a vector"
        model.tell("truncation", kept, f"{PROMPTS_FILE}: truncate_dim")
    _prompts(model)
    _length(model, config, _beside(places))
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
    return _guarded(lambda: pooling_modes(stored)), POOLING_FILE


def _width(config: Fields, layout: ModelLayout, modes: int) -> int | None:
    """Width of the vector: that of the last Dense, else of the transformer, once for each pooling; cut where stored."""
    tokens = _last_dense(layout.token_modules) or _width_of(config)
    whole = _last_dense(layout.vector_modules) or (tokens * modes if tokens else None)
    return whole and min(whole, layout.truncate_dim or whole)


def _width_of(config: Fields) -> int | None:
    """Width of the transformer, or of its part that reads texts."""
    inner = config.get("text_config")
    return number_of(config, *_WIDTHS) or number_of(inner if isinstance(inner, dict) else {}, *_WIDTHS)


def _last_dense(modules: tuple[ModuleConfig, ...]) -> int | None:
    widths = [number_of(dict(module.config), "out_features") for module in modules if module.kind == "Dense"]
    return widths[-1] if widths else None


def _tell_width(model: Description, width: int | None) -> None:
    if width:
        model.tell("width", str(width), "the configuration of the layers")


def _prompts(model: Description) -> None:
    stored = model.files.object(PROMPTS_FILE).get("prompts")
    if stored is not None and not isinstance(stored, dict):
        raise CannotTell(f"{PROMPTS_FILE}: prompts: expected an object, got {shown(stored)}")
    prompts = {name: text for name, text in (stored or {}).items() if text is not None}
    if len(prompts) > _MOST_PROMPTS or not all(isinstance(text, str) for text in prompts.values()):
        raise CannotTell(f"{PROMPTS_FILE}: prompts: expected at most {_MOST_PROMPTS} texts")
    listed = ", ".join(f"{name} {shown(text)!r}" for name, text in prompts.items() if text)
    model.tell("prompts", listed or "none", PROMPTS_FILE if stored else "none is stored")
    if any(prompts.values()):
        model.fields["runtime"] = {"prompts": prompts}


def _length(model: Description, config: Fields, beside: str = "", sides: Sequence[Any] = ()) -> None:
    """The longest text in tokens: what the layout or the tokenizer states, at most what there are positions for.

    `sides` are lengths of queries and documents. The model reads the longest of them.
    """
    limit, where = _stated_length(model.files, beside)
    longest = max((side for side in sides if isinstance(side, int)), default=0)
    if longest > limit:
        limit, where = longest, "the lengths above"
    positions = _positions(config)
    if positions and not 0 < limit < positions:
        limit, where = positions, f"{beside}config.json"
    if limit:
        model.fields["max_sequence_length"] = limit
        model.tell("length", f"{limit} tokens", where)
    else:
        _tell_no_length(model)


def _tell_no_length(model: Description) -> None:
    model.tell("length", "found by the load", "no file states a length")


def _stated_length(files: ModelFiles, beside: str) -> tuple[int, str]:
    """The length that the layout states, else the tokenizer, and in which file; (0, "") if neither does."""
    layouts = sorted(
        n for n in files.names if n.startswith(f"{beside}sentence_") and n.endswith("_config.json")
    )
    fields = [(name, "max_seq_length") for name in layouts]
    fields.append((f"{beside}tokenizer_config.json", "model_max_length"))
    lengths = ((number_of(files.object(name), field), name) for name, field in fields)
    return next(((length, name) for length, name in lengths if length), (0, ""))


def _positions(config: Fields) -> int | None:
    """How many tokens there are positions for. Raises `CannotTell` where that is none."""
    inner = config.get("text_config")
    places = {**config, **inner} if isinstance(inner, dict) else config
    positions = number_of(places, "max_position_embeddings", "n_positions")
    padding = places.get("pad_token_id")
    offset = any(part in str(places.get("model_type")) for part in _OFFSET_BY_PADDING)
    if not positions or not offset or not isinstance(padding, int):
        return positions
    if padding >= positions - 1:
        raise CannotTell(
            f"config.json: pad_token_id {padding} leaves none of {positions} positions (max_position_embeddings)"
        )
    return positions - padding - 1


def _bge_m3(model: Description) -> None:
    _check_bounds(model.files)
    config = model.files.object("config.json")
    width, vocabulary = number_of(config, "hidden_size"), number_of(config, "vocab_size")
    model.offer(["text"], dense=_dims(width), sparse=_dims(vocabulary), multivector={}, score={})
    model.source["files"] = list(_HEADS)
    _tell_width(model, width)
    _prompts(model)
    _length(model, config)


def _splade(model: Description) -> None:
    files, places = model.files, _check_bounds(model.files)
    within = "document_0_MLMTransformer/" if "document_0_MLMTransformer/config.json" in files.names else ""
    beside = within or _beside(places)
    config = _transformer(files, beside)
    model.offer(["text"], sparse=_dims(number_of(config, "vocab_size"), similarity="dot"))
    if "Router" in kinds_of(files):
        if "idf.json" not in files.names:
            raise CannotTell(
                "modules.json: queries have a module of their own, and there is no idf.json for them"
            )
        model.fields["loadtime"] = {"query_encoding": "idf"}
        model.tell("queries", "looked up, without inference", "modules.json: Router, idf.json")
    _prompts(model)
    _length(model, config, beside)


def _colbert(model: Description) -> None:
    files, beside = model.files, _beside(_check_bounds(model.files))
    layout = _guarded(lambda: read_late_layout(files.root, {}))
    stored = files.object("artifact.metadata")
    width = _last_dense(layout.heads) or number_of(stored, "dim")
    model.offer(["text"], multivector=_dims(width, similarity="maxsim"), score={})
    where = "artifact.metadata" if stored else PROMPTS_FILE
    model.tell(
        "prompts", f"query {shown(layout.query_prefix)!r}, document {shown(layout.document_prefix)!r}", where
    )
    lengths = (layout.query_length, layout.document_length)
    query, document = (shown(length or "any") for length in lengths)
    model.tell("lengths", f"query {query}, document {document}", where)
    _tell_width(model, width)
    _length(model, _transformer(files, beside), beside, lengths)


def _towers(model: Description) -> None:
    config = model.files.object("config.json")
    width = number_of(config, "projection_dim")
    model.offer(["text", "image"], dense=_dims(width, similarity="cosine"))
    model.fields["loadtime"] = {"normalize": True}
    model.tell("normalization", "yes", "the default of the family")
    _length(model, config)


def _pages(model: Description) -> None:
    width = number_of(model.files.object("config.json"), "embedding_dim")
    model.offer(["text", "image"], multivector=_dims(width, similarity="maxsim"), score={})


def _scorer(model: Description) -> None:
    model.offer(["text"], score={})
    stored = model.files.object(PROMPTS_FILE)
    if prompt := _guarded(lambda: default_prompt(stored)):
        model.tell("prompt", f"query {shown(prompt)!r}", PROMPTS_FILE)
    _length(model, model.files.object("config.json"))


def _extractor(model: Description) -> None:
    config = model.files.object("config.json")
    model.offer(["text"], json={})
    if model.fields["adapter"] in ("ner", "text_classification"):
        model.tell("labels", shown(", ".join(labels_of(config))), "config.json")
    _length(model, config)


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
    _tell_no_length(model)


def _picture_reader(model: Description) -> None:
    model.offer(["image"], json={})


def _vision_language(model: Description) -> None:
    config = model.files.object("config.json")
    if model.fields["adapter"] == "qwen3_vl_reranker":
        model.offer(["text", "image"], score={})
    else:
        model.offer(["text", "image"], dense=_dims(_width_of(config), similarity="cosine"))
    _length(model, config)


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
    _length(model, files.object("config.json"))


_READERS: dict[str, Callable[[Description], None]] = {
    "dense": _dense,
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
