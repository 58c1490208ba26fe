"""Titles, descriptions and extras of the built-in model families, for the command line and the model reference."""

from __future__ import annotations

from importlib.util import find_spec

import msgspec


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One model family.

    title       heading in the model reference
    about       one sentence about the results
    extra       extra of Penstock with the packages that the family needs, empty for none
    """

    title: str
    about: str
    extra: str = ""


PACKAGES = {
    "gliclass": ("gliclass",),
    "gliner": ("gliner", "sentencepiece"),
    "gliner2": ("gliner2",),
    "onnx": ("onnxruntime",),
    "siglip": ("PIL", "sentencepiece"),
    "vision": ("PIL", "scipy"),
}
"""Packages of each extra, by import name."""


def installed(extra: str) -> bool:
    """Whether the packages of an extra are installed."""
    return all(find_spec(package) is not None for package in PACKAGES[extra])


FAMILIES: dict[str, Family] = {
    "dense": Family(title="Dense embeddings", about="One vector per text."),
    "static_embedding": Family(
        title="Static embeddings", about="One vector per text, the mean of rows of a table; for a CPU."
    ),
    "bge_m3": Family(
        title="BGE-M3", about="Dense, sparse and multi-vector embeddings from one pass, and scores."
    ),
    "splade": Family(title="Sparse embeddings", about="Weights over the words of the vocabulary."),
    "colbert": Family(title="Late interaction", about="One vector per token, and scores by MaxSim."),
    "clip": Family(title="CLIP", about="Texts and images in one space.", extra="vision"),
    "siglip": Family(title="SigLIP", about="Texts and images in one space.", extra="siglip"),
    "colpali": Family(title="ColPali", about="Vectors for the patches of a page's picture.", extra="vision"),
    "colqwen2": Family(
        title="ColQwen2", about="Vectors for the patches of a page's picture.", extra="vision"
    ),
    "cross_encoder": Family(title="Cross-encoders", about="Scores of a query and each item."),
    "qwen3_reranker": Family(
        title="Yes or no rerankers", about="Scores of a language model that answers yes or no."
    ),
    "qwen3_vl_embedding": Family(
        title="Qwen3-VL embeddings", about="Vectors of texts, images, or both.", extra="vision"
    ),
    "qwen3_vl_reranker": Family(
        title="Qwen3-VL rerankers", about="Scores of texts and images, by yes or no.", extra="vision"
    ),
    "causal": Family(
        title="Chat",
        about="Text that continues a conversation; the length is of prompt and answer together.",
    ),
    "ner": Family(title="Named entities", about="Entities of the types that the model was trained on."),
    "gliner": Family(title="GLiNER", about="Entities of the types that the request names.", extra="gliner"),
    "gliner2": Family(
        title="GLiNER2", about="Entities of the types that the request names.", extra="gliner2"
    ),
    "gliclass": Family(
        title="GLiClass", about="Scores of the classes that the request names.", extra="gliclass"
    ),
    "nli_zero_shot": Family(
        title="Zero-shot classification", about="Scores of the classes that the request names."
    ),
    "text_classification": Family(
        title="Text classification", about="Scores of the classes that the model was trained on."
    ),
    "detection": Family(
        title="Object detection", about="Objects of the classes of the model.", extra="vision"
    ),
    "owlv2": Family(title="OWLv2", about="Objects that the labels name.", extra="vision"),
    "grounding_dino": Family(title="Grounding DINO", about="Objects that the labels name.", extra="vision"),
    "florence2": Family(title="Florence-2", about="Texts, captions and objects of an image.", extra="vision"),
    "donut": Family(title="Donut", about="Fields of a document's picture.", extra="vision"),
    "lighton_ocr": Family(title="LightOnOCR", about="The text of a page's picture.", extra="vision"),
    "glm_ocr": Family(
        title="GLM-OCR", about="Texts, tables and formulas of a page's picture.", extra="vision"
    ),
    "paddleocr_vl": Family(
        title="PaddleOCR-VL", about="Texts, tables, formulas and charts of a page's picture.", extra="vision"
    ),
    "document_qa": Family(
        title="Document questions", about="Answers from a page and its words.", extra="vision"
    ),
    "torch_export": Family(title="torch.export", about="Programs of a model repository, `model.pt2`."),
    "torchscript": Family(title="TorchScript", about="Programs of a model repository, `model.pt`."),
    "onnx": Family(title="ONNX", about="Programs of a model repository, `model.onnx`.", extra="onnx"),
    "python_model": Family(title="Python models", about="Programs of a model repository, `model.py`."),
}
