"""References that are classes of sentence-transformers, and the choice of a family's reference.

A reference has those of the methods `encode`, `score` and `extract` that its family needs; they answer as those of
`penstock.verification.ours.Ours`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ipc import extras
from ipc.errors import DependencyConflict, Unsupported
from ipc.wire.messages import InputItem
from penstock.verification import formulas, pipelines
from penstock.verification.opening import Opening
from penstock.verification.pictures import opened

Array = np.ndarray[Any, Any]


def sentence_transformers() -> Any:
    """The package.  Raises `DependencyConflict` that names the extra when it is missing."""
    try:
        import sentence_transformers as package
    except ImportError as error:
        raise DependencyConflict(
            f"verify needs the package sentence-transformers: {extras.needed('verify')}"
        ) from error
    return package


class Encoder:
    """SentenceTransformer, SparseEncoder or MultiVectorEncoder on the model's directory."""

    def __init__(self, opening: Opening, kind: str) -> None:
        package = sentence_transformers()
        self._opening = opening
        self._model = getattr(package, kind)(opening.place, **opening.arguments)
        if kind != "MultiVectorEncoder":
            self._model.max_seq_length = opening.length
        self.name = f"sentence-transformers {package.__version__} {kind}"

    def encode(self, items: Sequence[InputItem], output: str, *, is_query: bool) -> list[Array]:
        """Per item: dense [dims], sparse [vocabulary], or multivector [tokens, dims], float32."""
        encode = self._model.encode_query if is_query else self._model.encode_document
        inputs: list[Any] = [item.text for item in items if item.text is not None]
        if not inputs:
            inputs = opened([item.images[0] for item in items])
        elif not self._stores_prompt(is_query):
            inputs = self._opening.prompted(inputs, is_query=is_query)
        found = encode(inputs, batch_size=8, show_progress_bar=False)
        return [_array(one.to_dense() if output == "sparse" else one) for one in found]

    def _stores_prompt(self, is_query: bool) -> bool:
        names = ("query",) if is_query else ("document", "passage", "corpus")
        return any(self._model.prompts.get(name) for name in names)


class Pairs:
    """CrossEncoder."""

    def __init__(self, opening: Opening) -> None:
        package = sentence_transformers()
        self._model = package.CrossEncoder(opening.place, max_length=opening.length, **opening.arguments)
        self.name = f"sentence-transformers {package.__version__} CrossEncoder"

    def score(self, query: str, texts: Sequence[str]) -> Array:
        """float32 [texts]."""
        found = self._model.predict([(query, text) for text in texts], batch_size=8, show_progress_bar=False)
        return _array(found)


def _array(values: Any) -> Array:
    host = values.float().cpu().numpy() if hasattr(values, "cpu") else values
    return np.asarray(host, dtype=np.float32)


def _encoder(kind: str) -> Callable[[Opening], Any]:
    return lambda opening: Encoder(opening, kind)


_SENTENCE_TRANSFORMERS: dict[str, Callable[[Opening], Any]] = {
    "dense": _encoder("SentenceTransformer"),
    "splade": _encoder("SparseEncoder"),
    "colbert": _encoder("MultiVectorEncoder"),
    "colpali": _encoder("MultiVectorEncoder"),
    "colqwen2": _encoder("MultiVectorEncoder"),
    "cross_encoder": Pairs,
}
_OTHERS: dict[str, Callable[[Opening], Any]] = {
    "bge_m3": formulas.BgeM3,
    "clip": formulas.TwoTowers,
    "siglip": formulas.TwoTowers,
    "qwen3_reranker": formulas.YesOrNo,
    "ner": pipelines.Entities,
    "text_classification": pipelines.Classes,
    "nli_zero_shot": pipelines.ZeroShotClasses,
}


def check(adapter: str) -> None:
    """Raise `Unsupported` for a family without a reference, `DependencyConflict` for a missing extra."""
    if adapter in _SENTENCE_TRANSFORMERS:
        sentence_transformers()
    elif adapter not in _OTHERS:
        known = ", ".join(sorted({*_SENTENCE_TRANSFORMERS, *_OTHERS}))
        raise Unsupported(f"verify has no reference for the family {adapter!r}; it has for {known}")


def open_reference(opening: Opening) -> Any:
    """The reference of the entry's family; raises as `check` does, and whatever the library raises."""
    check(opening.entry.adapter)
    return {**_SENTENCE_TRANSFORMERS, **_OTHERS}[opening.entry.adapter](opening)
