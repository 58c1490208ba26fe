"""Which family runs a model, by the files that describe the model.

The first of these that says something decides:

1. `gliner_config.json`, or what `config.json` says in GLiNER2 and model2vec.
2. `modules.json`: the kinds of its modules, the last words of their types.
3. `architectures` of `config.json`: the class under which transformers has stored the model.

What could be several families is refused with the fields of a catalog entry that would decide.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from penstock.own_models.files import CannotTell, ModelFiles, number_of, shown, undecided

POOLING_FILE = "1_Pooling/config.json"
_ARCHITECTURES = {
    "HF_ColBERT": "colbert",
    "CLIPModel": "clip",
    "SiglipModel": "siglip",
    "ColPaliForRetrieval": "colpali",
    "ColQwen2ForRetrieval": "colqwen2",
    "Owlv2ForObjectDetection": "owlv2",
    "GroundingDinoForObjectDetection": "grounding_dino",
    "Florence2ForConditionalGeneration": "florence2",
    "GLiClassModel": "gliclass",
    "LightOnOcrForConditionalGeneration": "lighton_ocr",
    "LightOnOCRForConditionalGeneration": "lighton_ocr",
    "GlmOcrForConditionalGeneration": "glm_ocr",
    "PaddleOCRVLForConditionalGeneration": "paddleocr_vl",
    "LayoutLMForQuestionAnswering": "document_qa",
    "LayoutLMv2ForQuestionAnswering": "document_qa",
    "LayoutLMv3ForQuestionAnswering": "document_qa",
}
"""Families of single classes of transformers."""
_ENDINGS = {
    "ForTokenClassification": "ner",
    "ForCausalLM": "causal",
    "ForObjectDetection": "detection",
}
"""Families of classes by the end of their names."""
_UNSERVED = {
    "Whisper": "a model of speech, which no family here runs. Exported to ONNX, encoder and decoder are served as "
    "programs of named tensors (docs/repository.md)",
    "T5": "a model that turns a text into a text, which no family here runs. Exported to ONNX, encoder and decoder are "
    "served as programs of named tensors (docs/repository.md); an encoder alone (T5EncoderModel) gives vectors",
}
_UNSERVED |= {
    "MT5": _UNSERVED["T5"],
    "UMT5": _UNSERVED["T5"],
    "Bart": _UNSERVED["T5"],
    "MBart": _UNSERVED["T5"],
}
_UNSERVED |= {"Marian": _UNSERVED["T5"], "Pegasus": _UNSERVED["T5"], "M2M100": _UNSERVED["T5"]}
"""What to tell of classes `...ForConditionalGeneration`, and of Marian's, by the begin of their names."""
_MOST_LABELS = 100_000
_GLINER2_TYPE = "extractor"
_MODEL2VEC_FIELD = "embedding_dtype"


class Choice(NamedTuple):
    """A family, and where the files say so."""

    family: str
    where: str


def choose(files: ModelFiles) -> Choice:
    """The family of a model. Raises `CannotTell`."""
    if "gliner_config.json" in files.names:
        return Choice("gliner", "gliner_config.json")
    if _model_type(files.object("config.json")) == _GLINER2_TYPE:
        return _gliner2(files.object("config.json"))
    _refuse_vision_language(files)
    choice = _by_modules(files) or _model2vec(files.object("config.json")) or _by_architecture(files)
    if choice is not None:
        return choice
    if "model.bin" in files.names and any("vocabulary." in name for name in files.names):
        raise CannotTell(
            "model.bin and vocabulary: a model in the form of CTranslate2, which is not read. Name the model in "
            "safetensors from which the model was converted"
        )
    if "adapter_config.json" in files.names:
        base = shown(files.object("adapter_config.json").get("base_model_name_or_path") or "another model")
        raise CannotTell(
            f"this is a LoRA adapter of {base}, no model: serve it beside that model (docs/lora.md)"
        )
    raise CannotTell(
        "there is no config.json with `architectures`, so nothing says which family the model is of"
    )


def _gliner2(config: dict[str, Any]) -> Choice:
    """GLiNER2 over spans. Raises `CannotTell` for its other architectures, which no family here runs."""
    architecture = config.get("architecture", "span")
    if architecture != "span":
        raise CannotTell(
            f"config.json: a GLiNER2 of the architecture {shown(architecture)!r}; only span is served"
        )
    return Choice("gliner2", f"config.json: model_type {_GLINER2_TYPE}")


def _model2vec(config: dict[str, Any]) -> Choice | None:
    """A table of vectors without modules.json, by what model2vec has written into the configuration."""
    if _model_type(config) == "model2vec" or _MODEL2VEC_FIELD in config:
        return Choice("static_embedding", "config.json: a table of model2vec")
    return None


def _refuse_vision_language(files: ModelFiles) -> None:
    """Raise `CannotTell` for a class that embeds or ranks, whose modules.json suits no family."""
    stated = files.object("config.json").get("architectures")
    if isinstance(stated, list) and stated and str(stated[0]).startswith("Qwen3VL"):
        raise undecided(
            f"config.json: architectures {shown(stated[0])}: the class embeds or ranks",
            "adapter: qwen3_vl_embedding, or adapter: qwen3_vl_reranker",
        )


def kinds_of(files: ModelFiles) -> list[str]:
    """Kinds of the modules in modules.json, in their order; empty without the file."""
    return [str(module.get("type", "")).rpartition(".")[2] for module in files.list("modules.json")]


def _by_modules(files: ModelFiles) -> Choice | None:
    kinds = kinds_of(files)
    where = "modules.json: " + shown(" > ".join(kinds))
    if kinds[:1] == ["StaticEmbedding"]:
        return Choice("static_embedding", where)
    if "SpladePooling" in kinds or "document_1_SpladePooling/config.json" in files.names:
        return Choice("splade", where)
    if "Pooling" in kinds:
        heads = {"sparse_linear.pt", "colbert_linear.pt"}
        if heads <= files.names:
            return Choice("bge_m3", " and ".join(sorted(heads)))
        return Choice("dense", where)
    if {"Dense", "MultiVectorMask"} & set(kinds):
        return Choice("colbert", where)
    if "LogitScore" in kinds:
        raise undecided(
            f"{where}: nothing says which words answer, and how a pair is written",
            "adapter: qwen3_reranker with loadtime.positive_token, loadtime.negative_token and loadtime.pair_template",
        )
    if kinds and set(kinds) != {"Transformer"}:
        raise CannotTell(f"{where}: no family here runs these modules")
    return None


def _by_architecture(files: ModelFiles) -> Choice | None:
    config = files.object("config.json")
    stated = config.get("architectures")
    if not isinstance(stated, list) or not stated or not isinstance(stated[0], str):
        return None
    name = stated[0]
    where = f"config.json: architectures {shown(name)}"
    base = re.match(r"([A-Za-z0-9]+?)(ForConditionalGeneration|MTModel)$", name)
    if base is not None and base[1] in _UNSERVED:
        raise CannotTell(f"{where}: {_UNSERVED[base[1]]}")
    family = _ARCHITECTURES.get(name)
    family = family or next((f for ending, f in _ENDINGS.items() if name.endswith(ending)), None)
    if family is None and name.endswith("ForSequenceClassification"):
        return _classifier(config, where)
    if family is None and _model_type(config.get("encoder")) == "donut-swin":
        family = "donut"
    if family is not None:
        return Choice(family, where)
    if name.endswith("ForMaskedLM"):
        raise undecided(
            f"{where}: a masked language model gives sparse vectors (SPLADE) or, with a pooling, dense ones, and no "
            "modules.json says which",
            "adapter: splade, or adapter: dense with loadtime.pooling",
        )
    if name.endswith("Model"):
        if POOLING_FILE in files.names:
            return Choice("dense", f"{POOLING_FILE} and {where}")
        raise undecided(
            f"{where}: the model gives a vector for each token, and neither modules.json nor {POOLING_FILE} says how "
            "one vector is made of them",
            "adapter: dense with loadtime.pooling (cls, mean, lasttoken, max, weightedmean) and loadtime.normalize",
        )
    raise CannotTell(f"{where}: no family here runs this class. State the adapter if one does all the same")


def _model_type(config: Any) -> Any:
    return config.get("model_type") if isinstance(config, dict) else None


def labels_of(config: dict[str, Any]) -> list[str]:
    """Labels of a classifier by transformers' rule: `id2label`, else as many as `num_labels`, else two."""
    named = config.get("id2label")
    if isinstance(named, dict) and named:
        return [str(label) for label in named.values()]
    return [f"LABEL_{at}" for at in range(min(number_of(config, "num_labels") or 2, _MOST_LABELS))]


def _classifier(config: dict[str, Any], where: str) -> Choice:
    """One label scores pairs, a label of entailment makes a zero-shot classifier, all others are classes."""
    labels = labels_of(config)
    if len(labels) == 1:
        return Choice("cross_encoder", f"{where}, one label")
    if any(label.lower().startswith("entail") for label in labels):
        return Choice("nli_zero_shot", f"{where}, labels {shown(', '.join(labels))}")
    return Choice("text_classification", f"{where}, {len(labels)} labels")
