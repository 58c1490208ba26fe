"""Find the class of a model family by name.

1. A built-in family name, imported when first asked for.
2. A name that an installed package registers in the entry-point group `penstock.adapters`.
3. A dotted path, "package.module:Class".
"""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.adapters.base import Adapter

ENTRY_POINT_GROUP = "penstock.adapters"
BUILT_IN = {
    "dense": "workers.adapters.dense:DenseAdapter",
    "bge_m3": "workers.adapters.bge_m3:BgeM3Adapter",
    "splade": "workers.adapters.splade:SpladeAdapter",
    "colbert": "workers.adapters.colbert:ColbertAdapter",
    "clip": "workers.adapters.clip:ClipAdapter",
    "siglip": "workers.adapters.siglip:SiglipAdapter",
    "colpali": "workers.adapters.colpali:ColPaliAdapter",
    "colqwen2": "workers.adapters.colqwen2:ColQwen2Adapter",
    "cross_encoder": "workers.adapters.cross_encoder:CrossEncoderAdapter",
    "qwen3_reranker": "workers.adapters.qwen3_reranker:Qwen3RerankerAdapter",
    "detection": "workers.adapters.detection:DetectionAdapter",
    "owlv2": "workers.adapters.owlv2:Owlv2Adapter",
    "grounding_dino": "workers.adapters.grounding_dino:GroundingDinoAdapter",
    "florence2": "workers.adapters.florence2:Florence2Adapter",
    "donut": "workers.adapters.donut:DonutAdapter",
    "document_qa": "workers.adapters.document_qa:DocumentQaAdapter",
    "ner": "workers.adapters.ner:NerAdapter",
    "text_classification": "workers.adapters.text_classification:TextClassificationAdapter",
    "nli_zero_shot": "workers.adapters.nli_zero_shot:NliZeroShotAdapter",
    "gliclass": "workers.adapters.gliclass:GliclassAdapter",
    "gliner": "workers.adapters.gliner:GlinerAdapter",
}


class UnknownAdapterError(ValueError):
    """The name is no family and no importable class; the message lists the nearest names."""


def names() -> tuple[str, ...]:
    """All family names this installation knows, built-in and registered, sorted."""
    return tuple(sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))}))


def check(name: str) -> None:
    """Raise UnknownAdapterError when `name` is no known family; a dotted path passes, since nothing is imported."""
    known = names()
    if name in known or ":" in name:
        return
    nearest = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(nearest)}" if nearest else f"known families are {', '.join(known)}"
    raise UnknownAdapterError(f"unknown adapter {name!r}: {hint}")


def resolve(name: str) -> type[Adapter]:
    """The adapter class called `name`.

    Raises UnknownAdapterError when there is none, TypeError when what the name leads to is not an Adapter, and
    ImportError when a dependency of the family is missing.
    """
    if name in BUILT_IN:
        return _checked(name, _import_path(BUILT_IN[name]))
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            return _checked(name, point.load())
    check(name)
    return _checked(name, _import_path(name))


def _import_path(path: str) -> Any:
    """Import "package.module:Class"."""
    module_name, _, class_name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UnknownAdapterError(f"unknown adapter {path!r}: no module named {error.name}") from error
        raise
    except AttributeError as error:
        raise UnknownAdapterError(f"unknown adapter {path!r}: {module_name} has no {class_name}") from error


def _checked(name: str, found: Any) -> type[Adapter]:
    """`found`, if it is an Adapter class."""
    from workers.adapters.base import Adapter

    if not (isinstance(found, type) and issubclass(found, Adapter)):
        raise TypeError(f"adapter {name!r} is not a subclass of workers.adapters.base.Adapter")
    return found
