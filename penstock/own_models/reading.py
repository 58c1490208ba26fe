"""The catalog entry of a model as the model's own files give it, and where each part was read.

1. `families.choose` finds the family, unless the caller states the adapter.
2. One function for each kind of family reads outputs, widths, pooling, prompts and length. Layouts are read by the code
   that a load runs (`workers.adapters.shared.sentence_transformers_layout`), so that both agree.
3. Fields that the caller states are laid over what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    """Fields of a catalog entry, without `id` and `source`; further fields of a hub source; and the lines."""

    fields: Fields
    source: Fields
    told: list[Told]


def describe(files: ModelFiles, stated: Mapping[str, Any] | None = None) -> Description:
    """The description of a model; `stated` are fields of the entry that go before what the files say.

    Raises `CannotTell`.
    """
    stated = stated or {}
    family, where = (str(stated["adapter"]), "stated") if "adapter" in stated else choose(files)
    made = Description({"adapter": family}, {}, [Told("family", shown(family), where)])
    reader = _READERS.get(family)
    if reader is None:
        raise CannotTell(
            f"adapter {shown(family)}: no family whose files are read here; write the whole entry"
        )
    reader(files, stated, made)
    config = files.object("config.json")
    if "auto_map" in config:
        made.told.append(Told("own code", "runs only with worker.trust_remote_code", "config.json: auto_map"))
    made.fields = _laid_over(made.fields, stated)
    return made


def _laid_over(fields: Fields, stated: Mapping[str, Any]) -> Fields:
    found = dict(fields)
    for name, value in stated.items():
        before = found.get(name)
        both = isinstance(value, dict) and isinstance(before, dict)
        found[name] = _laid_over(before, value) if both else value  # type: ignore[arg-type]
    return found


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


def _dense(files: ModelFiles, stated: Mapping[str, Any], made: Description) -> None:
    places = _check_bounds(files)
    layout = _guarded(lambda: read_layout(files.root))
    beside = f"{places[0]}/" if places and places[0] else ""
    config = _transformer(files, beside)
    modes, pooled_in = _pooling(files, stated, layout, places)
    normalized = any(module.kind == "Normalize" for module in layout.vector_modules)
    where = "modules.json"
    if not places:
        normalized, where = True, "no modules.json: the default"
    made.fields |= {
        "inputs": ["text"],
        "outputs": {"dense": _output(files, _width(config, layout, len(modes)))},
    }
    made.told.append(Told("pooling", " and ".join(modes), pooled_in))
    made.told.append(Told("normalization", "yes" if normalized else "no", where))
    _tell_width(made, "dense")
    if layout.truncate_dim is not None:
        kept = f"the first {layout.truncate_dim} values of a vector"
        made.told.append(Told("truncation", kept, f"{PROMPTS_FILE}: truncate_dim"))
    _prompts(files, made)
    _length(files, made, config, beside)
    made.fields["loadtime"] = {
        "pooling": modes[0] if len(modes) == 1 else list(modes),
        "normalize": normalized,
    }


def _pooling(
    files: ModelFiles, stated: Mapping[str, Any], layout: ModelLayout, places: list[str]
) -> tuple[tuple[str, ...], str]:
    """Pooling modes, and where they were read. Raises `CannotTell`."""
    given = stated.get("loadtime", {}).get("pooling")
    if given:
        try:
            return resolve_modes(given), "stated"
        except (TypeError, ValueError) as error:
            raise CannotTell(
                f"loadtime.pooling {shown(given)}: expected one or a list of {', '.join(MODES)}"
            ) from error
    if layout.pooling is not None:
        at = places[kinds_of(files).index("Pooling")]
        return layout.pooling, f"{at}/config.json" if at else "modules.json"
    stored = files.object(POOLING_FILE)
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


def _output(files: ModelFiles, width: int | None) -> Fields:
    """Width and similarity of a dense output."""
    similarity = files.object(PROMPTS_FILE).get("similarity_fn_name")
    found: Fields = {"dims": width} if width else {}
    return found | {"similarity": "dot" if similarity == "dot" else "cosine"}


def _tell_width(made: Description, output: str) -> None:
    width = made.fields["outputs"][output].get("dims")
    if width:
        made.told.append(Told("width", str(width), "the configuration of the layers"))


def _prompts(files: ModelFiles, made: Description) -> None:
    stored = files.object(PROMPTS_FILE).get("prompts")
    if stored is not None and not isinstance(stored, dict):
        raise CannotTell(f"{PROMPTS_FILE}: prompts: expected an object, got {shown(stored)}")
    prompts = {name: text for name, text in (stored or {}).items() if text is not None}
    if len(prompts) > _MOST_PROMPTS or not all(isinstance(text, str) for text in prompts.values()):
        raise CannotTell(f"{PROMPTS_FILE}: prompts: expected at most {_MOST_PROMPTS} texts")
    told = ", ".join(f"{name} {shown(text)!r}" for name, text in prompts.items() if text)
    made.told.append(Told("prompts", told or "none", PROMPTS_FILE if stored else "none is stored"))
    if any(prompts.values()):
        made.fields["runtime"] = {"prompts": prompts}


def _length(
    files: ModelFiles, made: Description, config: Fields, beside: str = "", sides: Sequence[Any] = ()
) -> None:
    """The longest text in tokens: what the layout or the tokenizer states, at most what there are positions for.

    `sides` are lengths of queries and documents. The model reads the longest of them.
    """
    stated = sorted(
        name
        for name in files.names
        if name.startswith(f"{beside}sentence_") and name.endswith("_config.json")
    )
    found = [(number_of(files.object(name), "max_seq_length"), name) for name in stated]
    name = f"{beside}tokenizer_config.json"
    found.append((number_of(files.object(name), "model_max_length"), name))
    first = next(((limit, where) for limit, where in found if limit), (None, ""))
    longest = max((side for side in sides if isinstance(side, int)), default=0)
    first = (longest, "the lengths above") if longest > (first[0] or 0) else first
    limit, where = min(
        (each for each in (first, (_positions(config), f"{beside}config.json")) if each[0]),
        default=(None, ""),
    )
    if limit is not None:
        made.fields["max_sequence_length"] = limit
        made.told.append(Told("length", f"{limit} tokens", where))
    else:
        made.told.append(Told("length", "found by the load", "no file states a length"))


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


def _bge_m3(files: ModelFiles, stated: Mapping[str, Any], made: Description) -> None:
    _check_bounds(files)
    config = files.object("config.json")
    width, vocabulary = number_of(config, "hidden_size"), number_of(config, "vocab_size")
    made.fields |= {
        "inputs": ["text"],
        "outputs": {
            "dense": {"dims": width} if width else {},
            "sparse": {"dims": vocabulary} if vocabulary else {},
            "multivector": {},
            "score": {},
        },
    }
    made.source["files"] = list(_HEADS)
    _tell_width(made, "dense")
    _prompts(files, made)
    _length(files, made, config)


def _splade(files: ModelFiles, stated: Mapping[str, Any], made: Description) -> None:
    places = _check_bounds(files)
    within = "document_0_MLMTransformer/" if "document_0_MLMTransformer/config.json" in files.names else ""
    beside = within or (f"{places[0]}/" if places and places[0] else "")
    config = _transformer(files, beside)
    vocabulary = number_of(config, "vocab_size")
    made.fields |= {
        "inputs": ["text"],
        "outputs": {"sparse": {"similarity": "dot"} | ({"dims": vocabulary} if vocabulary else {})},
    }
    if "Router" in kinds_of(files):
        if "idf.json" not in files.names:
            raise CannotTell(
                "modules.json: queries have a module of their own, and there is no idf.json for them"
            )
        made.fields["loadtime"] = {"query_encoding": "idf"}
        made.told.append(Told("queries", "looked up, without inference", "modules.json: Router, idf.json"))
    _prompts(files, made)
    _length(files, made, config, beside)


def _colbert(files: ModelFiles, stated: Mapping[str, Any], made: Description) -> None:
    places = _check_bounds(files)
    beside = f"{places[0]}/" if places and places[0] else ""
    layout = _guarded(lambda: read_late_layout(files.root, {}))
    stored = files.object("artifact.metadata")
    width = _last_dense(layout.heads) or number_of(stored, "dim")
    output: Fields = {"similarity": "maxsim"} | ({"dims": width} if width else {})
    made.fields |= {"inputs": ["text"], "outputs": {"multivector": output, "score": {}}}
    where = "artifact.metadata" if stored else PROMPTS_FILE
    sides = f"query {shown(layout.query_prefix)!r}, document {shown(layout.document_prefix)!r}"
    made.told.append(Told("prompts", sides, where))
    lengths = (layout.query_length, layout.document_length)
    query, document = (shown(length or "any") for length in lengths)
    made.told.append(Told("lengths", f"query {query}, document {document}", where))
    _tell_width(made, "multivector")
    _length(files, made, _transformer(files, beside), beside, lengths)


def _towers(files: ModelFiles, stated: Mapping[str, Any], made: Description) -> None:
    config = files.object("config.json")
    width = number_of(config, "projection_dim")
    output: Fields = {"similarity": "cosine"} | ({"dims": width} if width else {})
    made.fields |= {"inputs": ["text", "image"], "outputs": {"dense": output}}
    made.fields["loadtime"] = {"normalize": True}
    made.told.append(Told("normalization", "yes", "the default of the family"))
    _length(files, made, config)


def _pages(files: ModelFiles, stated: Mapping[str, Any], made: Description) -> None:
    width = number_of(files.object("config.json"), "embedding_dim")
    output: Fields = {"similarity": "maxsim"} | ({"dims": width} if width else {})
    made.fields |= {"inputs": ["text", "image"], "outputs": {"multivector": output, "score": {}}}


def _scorer(files: ModelFiles, stated: Mapping[str, Any], made: Description) -> None:
    made.fields |= {"inputs": ["text"], "outputs": {"score": {}}}
    stored = files.object(PROMPTS_FILE)
    if prompt := _guarded(lambda: default_prompt(stored)):
        made.told.append(Told("prompt", f"query {shown(prompt)!r}", PROMPTS_FILE))
    _length(files, made, files.object("config.json"))


def _extractor(files: ModelFiles, stated: Mapping[str, Any], made: Description) -> None:
    config = files.object("config.json")
    made.fields |= {"inputs": ["text"], "outputs": {"json": {}}}
    if made.fields["adapter"] in ("ner", "text_classification"):
        made.told.append(Told("labels", shown(", ".join(labels_of(config))), "config.json"))
    _length(files, made, config)


def _gliner(files: ModelFiles, stated: Mapping[str, Any], made: Description) -> None:
    config = files.object("gliner_config.json")
    made.fields |= {"inputs": ["text"], "outputs": {"json": {}}}
    longest = number_of(config, "max_len")
    if longest:
        made.fields["max_sequence_length"] = longest
        made.told.append(Told("length", f"{longest} words", "gliner_config.json: max_len"))
    borrowed = text_of(config, "labels_encoder", "gliner_config.json")
    if not borrowed and not ("tokenizer.json" in files.names and config.get("encoder_config")):
        borrowed = text_of(config, "model_name", "gliner_config.json")
    if borrowed:
        made.source["tokenizer_repo"] = borrowed
        made.told.append(Told("tokenizer", f"of {shown(borrowed)}", "gliner_config.json"))


def _gliner2(files: ModelFiles, stated: Mapping[str, Any], made: Description) -> None:
    made.fields |= {"inputs": ["text"], "outputs": {"json": {}}}
    if _ENCODER_CONFIG in files.names:
        made.source["files"] = [_ENCODER_CONFIG]
    made.told.append(Told("length", "found by the load", "no file states a length"))


def _picture_reader(files: ModelFiles, stated: Mapping[str, Any], made: Description) -> None:
    made.fields |= {"inputs": ["image"], "outputs": {"json": {}}}


def _vision_language(files: ModelFiles, stated: Mapping[str, Any], made: Description) -> None:
    config = files.object("config.json")
    ranks = made.fields["adapter"] == "qwen3_vl_reranker"
    width = _width_of(config)
    output: Fields = {"similarity": "cosine"} | ({"dims": width} if width else {})
    made.fields |= {"inputs": ["text", "image"], "outputs": {"score": {}} if ranks else {"dense": output}}
    _length(files, made, config)


def _causal(files: ModelFiles, stated: Mapping[str, Any], made: Description) -> None:
    made.fields |= {"inputs": ["text"], "outputs": {"chat": {}}}
    stored = files.object("tokenizer_config.json").get("chat_template")
    where = "chat_template.jinja" if "chat_template.jinja" in files.names else "tokenizer_config.json"
    if stored or "chat_template.jinja" in files.names:
        made.told.append(Told("chat template", "stored", where))
    else:
        made.told.append(Told("chat template", "none: completions only", "none is stored"))
    _length(files, made, files.object("config.json"))


_READERS: dict[str, Callable[[ModelFiles, Mapping[str, Any], Description], None]] = {
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
