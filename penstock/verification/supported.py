"""Families that have a reference, known without importing a model library."""

from __future__ import annotations

from importlib.util import find_spec

from ipc import extras
from ipc.errors import DependencyConflict, Unsupported

SENTENCE_TRANSFORMERS = {
    "dense": "SentenceTransformer",
    "static_embedding": "SentenceTransformer",
    "splade": "SparseEncoder",
    "colbert": "MultiVectorEncoder",
    "colpali": "MultiVectorEncoder",
    "colqwen2": "MultiVectorEncoder",
    "cross_encoder": "CrossEncoder",
}
"""Classes of sentence-transformers by family."""
OWN = {
    "bge_m3": "BgeM3",
    "clip": "TwoTowers",
    "siglip": "TwoTowers",
    "qwen3_reranker": "YesOrNo",
    "qwen3_vl_embedding": "Embedder",
    "qwen3_vl_reranker": "Reranker",
    "ner": "Entities",
    "text_classification": "Classes",
    "nli_zero_shot": "ZeroShotClasses",
}
"""Classes of `penstock.verification.references` by family."""


def refuse_unsupported(adapter: str) -> None:
    """Raise `Unsupported` for a family without a reference, `DependencyConflict` for a missing extra."""
    if adapter in SENTENCE_TRANSFORMERS:
        if find_spec("sentence_transformers") is None:
            needed = extras.needed("verify")
            raise DependencyConflict(f"verify needs the package sentence-transformers: {needed}")
    elif adapter not in OWN:
        known = ", ".join(sorted({*SENTENCE_TRANSFORMERS, *OWN}))
        raise Unsupported(f"verify has no reference for the family {adapter!r}; it has for {known}")
