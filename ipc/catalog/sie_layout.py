"""A catalog file in SIE's own layout, put into ours.

    sie_id, hf_id | weights_path | package_backed, hf_revision
    inputs:   {text, image, audio, video, document}
    tasks:    {encode: {dense | sparse | multivector: {dim}}, score: {}, extract: {}}
    max_sequence_length
    profiles: {name: {extends, adapter_path, max_batch_tokens, compute_precision,
                      adapter_options: {loadtime, runtime}, adaptive_batching}}

1. The file is read strictly: an unknown key is refused by its path.
2. Every profile is written out in full, since a profile that extends another takes over the missing fields.
3. Adapters of SIE become the family here that runs the same models, and options get the names they have here.
   An adapter that no family stands for keeps its path; only its own models cannot be loaded then.

`adaptive_batching` tunes a timer that does not exist here; it is read and has no effect.
"""

from __future__ import annotations

from typing import Any

import msgspec

KEY = "sie_id"
"""What tells this layout from ours."""
DEFAULT = "default"
FAMILIES = {
    "dense": "bert_flash xlm_roberta_flash rope_flash nomic_flash modernbert_flash qwen2_flash pytorch_embedding"
    " sentence_transformer sglang",
    "bge_m3": "bge_m3_flash bge_m3_flag bge_m3",
    "splade": "splade_flash gte_sparse_flash",
    "colbert": "colbert colbert_modernbert_flash colbert_rotary_flash",
    "colpali": "colpali",
    "colqwen2": "colqwen2",
    "clip": "clip",
    "siglip": "siglip",
    "cross_encoder": "bert_flash_cross_encoder modernbert_flash_cross_encoder jina_flash_cross_encoder cross_encoder",
    "qwen3_reranker": "qwen2_flash_cross_encoder",
    "qwen3_vl_embedding": "qwen3_vl_embedding",
    "qwen3_vl_reranker": "qwen3_vl_reranker",
    "gliner": "gliner gliner_bi",
    "gliner2": "gliner2",
    "gliclass": "gliclass",
    "nli_zero_shot": "nli_classification nli_classification_flash",
    "grounding_dino": "grounding_dino",
    "owlv2": "owlv2",
    "florence2": "florence2",
    "donut": "donut",
    "lighton_ocr": "lighton_ocr",
    "glm_ocr": "glm_ocr",
    "paddleocr_vl": "paddleocr_vl",
}
"""Families here, and the adapter modules of SIE whose models they run."""
REFUSED = {
    "docling": "no family reads files of documents; convert them to text or pictures first",
    "glirel": "its package takes the base model from the hub at each load; GLiNER models with a relations layer find"
    " relations",
    "nemo_colembed": "its architecture is code of its repository, which transformers does not have",
    "stablebridge_pruner": "its pruning head is in no package",
}
"""Adapter modules of SIE that no family stands for, and why."""
_FAMILY_OF = {module: family for family, modules in FAMILIES.items() for module in modules.split()}
_PACKAGE = "sie_server.adapters."
_OPTION_NAMES = {
    "doc_template": "document_template",
    "doc_prefix": "document_prefix",
    "doc_punctuation_skiplist": "skip_punctuation",
    "query_max_length": "query_length",
    "doc_max_length": "document_length",
    "yes_token": "positive_token",
    "no_token": "negative_token",
}
_OPTION_NAMES_OF = {"colbert": {"max_seq_length": "document_length"}}


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Unknown keys are refused."""


class Inputs(_Strict, frozen=True):
    """Which kinds of input a model takes."""

    text: bool = True
    image: bool = False
    audio: bool = False
    video: bool = False
    document: bool = False


class Width(_Strict, frozen=True):
    """Width of an output."""

    dim: int


class Encode(_Strict, frozen=True):
    """Outputs of encode."""

    dense: Width | None = None
    sparse: Width | None = None
    multivector: Width | None = None


class Empty(_Strict, frozen=True):
    """A task without settings."""


class Tasks(_Strict, frozen=True):
    """What a model does; null is the same as absent."""

    encode: Encode | None = None
    score: Empty | None = None
    extract: Empty | None = None


class AdapterOptions(_Strict, frozen=True):
    """Options of the load, and options that requests may change."""

    loadtime: dict[str, Any] = {}
    runtime: dict[str, Any] = {}


class SieProfile(_Strict, frozen=True):
    """One profile in the words of the file."""

    extends: str | None = None
    adapter_path: str | None = None
    max_batch_tokens: int | None = None
    compute_precision: str | None = None
    adapter_options: AdapterOptions = AdapterOptions()
    adaptive_batching: dict[str, Any] | None = None

    def over(self, parent: SieProfile) -> SieProfile:
        """This profile with its missing fields taken from `parent`; a map that is not empty replaces the whole one."""
        own, theirs = self.adapter_options, parent.adapter_options
        return SieProfile(
            self.extends,
            self.adapter_path or parent.adapter_path,
            self.max_batch_tokens or parent.max_batch_tokens,
            self.compute_precision or parent.compute_precision,
            AdapterOptions(own.loadtime or theirs.loadtime, own.runtime or theirs.runtime),
        )


class SieModel(_Strict, frozen=True):
    """One model in the words of the file."""

    sie_id: str
    profiles: dict[str, SieProfile]
    hf_id: str | None = None
    hf_revision: str | None = None
    weights_path: str | None = None
    package_backed: bool = False
    inputs: Inputs = Inputs()
    tasks: Tasks = Tasks()
    max_sequence_length: int | None = None


def translate(raw: dict[str, Any]) -> dict[str, Any]:
    """The same model in our layout, as a plain map. Raises `ValueError` that names the field."""
    model = msgspec.convert(raw, SieModel)
    if DEFAULT not in model.profiles:
        raise ValueError("profiles: there is no profile named default")
    whole = {name: _whole(model, name) for name in model.profiles}
    profiles = {name: _profile(profile) for name, profile in whole.items()}
    return {
        "id": model.sie_id,
        "source": _source(model),
        "adapter": profiles[DEFAULT]["adapter"],
        "inputs": [name for name in Inputs.__struct_fields__ if getattr(model.inputs, name)],
        "outputs": _outputs(model.tasks),
        "max_sequence_length": model.max_sequence_length,
        "profiles": profiles,
        "loras": {name: source for profile in whole.values() for name, source in _loras(profile).items()},
        "preload": False,
    }


def _whole(model: SieModel, name: str) -> SieProfile:
    profile = model.profiles[name]
    if profile.extends is not None:
        parent = model.profiles.get(profile.extends)
        if parent is None or parent.extends is not None:
            raise ValueError(f"profile {name!r} must extend one existing profile that extends none")
        profile = profile.over(parent)
    if not profile.adapter_path:
        raise ValueError(f"profiles.{name}.adapter_path: missing")
    return profile


def _source(model: SieModel) -> dict[str, Any]:
    given = [name for name in ("weights_path", "hf_id") if getattr(model, name)]
    if bool(given) == model.package_backed:
        named = " and ".join([*given, *["package_backed"] * model.package_backed]) or "none"
        raise ValueError(f"expected weights_path, hf_id or package_backed, got {named}")
    if model.weights_path:
        return {"kind": "directory", "path": model.weights_path}
    if model.hf_id:
        return {"kind": "hub", "repo": model.hf_id, "revision": model.hf_revision}
    return {"kind": "adapter", "path": "."}


def _outputs(tasks: Tasks) -> dict[str, dict[str, int]]:
    encode = tasks.encode or Encode()
    widths = {name: getattr(encode, name) for name in Encode.__struct_fields__}
    outputs = {name: {"dims": width.dim} for name, width in widths.items() if width is not None}
    if tasks.score is not None:
        outputs["score"] = {}
    if tasks.extract is not None:
        outputs["json"] = {}
    if not outputs:
        raise ValueError("tasks: names none of encode, score, extract")
    return outputs


def _profile(profile: SieProfile) -> dict[str, Any]:
    adapter = _adapter(profile.adapter_path or "")
    options = profile.adapter_options
    loadtime, runtime = _named(options.loadtime, adapter), _named(options.runtime, adapter)
    loadtime.pop("lora_paths", None)
    muvera = loadtime.pop("muvera_config", None)
    if isinstance(runtime.get("muvera"), dict) and isinstance(muvera, dict):
        runtime["muvera"] = {**muvera, **runtime["muvera"]}
    return {
        "extends": profile.extends,
        "adapter": adapter,
        "output_types": runtime.pop("output_types", None) or [],
        "similarity": runtime.pop("output_similarity", None) or {},
        "max_batch_tokens": profile.max_batch_tokens,
        "precision": profile.compute_precision,
        "loadtime": loadtime,
        "runtime": runtime,
    }


def _adapter(path: str) -> str:
    """The family that stands for an adapter of SIE; any other path unchanged."""
    return _FAMILY_OF.get(_module(path), path)


def refusal(path: str) -> str | None:
    """Why no family stands for an adapter of SIE, by its path or its module's name; None for any other name."""
    return REFUSED.get(_module(path) or path)


def _module(path: str) -> str:
    """The module of an adapter of SIE; "" for any other path."""
    if not path.startswith(_PACKAGE):
        return ""
    return path.removeprefix(_PACKAGE).partition(":")[0].partition(".")[0]


def _named(options: dict[str, Any], family: str) -> dict[str, Any]:
    """Options under the names that they have here."""
    names = {**_OPTION_NAMES, **_OPTION_NAMES_OF.get(family, {})}
    return {names.get(name, name): value for name, value in options.items() if value is not None}


def _loras(profile: SieProfile) -> dict[str, dict[str, Any]]:
    """LoRA adapters that a profile names: the adapter of its requests, and the adapters of its load."""
    options = profile.adapter_options
    named = options.loadtime.get("lora_paths") or {}
    if isinstance(named, list):
        named = {str(name): name for name in named}
    if not isinstance(named, dict):
        raise ValueError(f"lora_paths: expected a list or a map, got {type(named).__name__}")
    own = options.runtime.get("lora_id") or options.runtime.get("lora")
    loras = {str(own): own} if own else {}
    return {str(name): _lora(name, where) for name, where in {**loras, **named}.items()}


def _lora(name: Any, where: Any) -> dict[str, Any]:
    if isinstance(where, str):
        return {"kind": "hub", "repo": where}
    if isinstance(where, dict) and set(where) <= {"id", "revision"} and isinstance(where.get("id"), str):
        return {"kind": "hub", "repo": where["id"], "revision": where.get("revision")}
    raise ValueError(f"lora_paths.{name}: expected the id of a repository, or a map of id and revision")
