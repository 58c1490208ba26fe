"""Find the class of a model family by name.

1. A built-in family name, imported when first asked for.
2. A name that an installed package registers in the entry-point group `penstock.adapters`.
3. A dotted path, "package.module:Class".
4. A file, "/directory/adapter.py:Class": code of the operator, run only with `worker.trust_remote_code`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import sys
from difflib import get_close_matches
from importlib.abc import SourceLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ipc.catalog.entries import ADAPTER_FILE
from ipc.catalog.sie_layout import refusal
from ipc.processes import starting as processes
from workers import libraries

if TYPE_CHECKING:
    from workers.adapters.base import Adapter

ENTRY_POINT_GROUP = "penstock.adapters"
BUILT_IN = {
    "dense": "workers.adapters.dense:DenseAdapter",
    "static_embedding": "workers.adapters.static_embedding:StaticEmbeddingAdapter",
    "bge_m3": "workers.adapters.bge_m3:BgeM3Adapter",
    "splade": "workers.adapters.splade:SpladeAdapter",
    "colbert": "workers.adapters.colbert:ColbertAdapter",
    "clip": "workers.adapters.two_towers:ClipAdapter",
    "siglip": "workers.adapters.two_towers:SiglipAdapter",
    "colpali": "workers.adapters.page_retrievers:ColPaliAdapter",
    "colqwen2": "workers.adapters.page_retrievers:ColQwen2Adapter",
    "cross_encoder": "workers.adapters.cross_encoder:CrossEncoderAdapter",
    "qwen3_reranker": "workers.adapters.qwen3_reranker:Qwen3RerankerAdapter",
    "qwen3_vl_embedding": "workers.adapters.qwen3_vl:Qwen3VlEmbeddingAdapter",
    "qwen3_vl_reranker": "workers.adapters.qwen3_vl:Qwen3VlRerankerAdapter",
    "causal": "workers.adapters.causal:CausalAdapter",
    "detection": "workers.adapters.detection:DetectionAdapter",
    "owlv2": "workers.adapters.owlv2:Owlv2Adapter",
    "grounding_dino": "workers.adapters.grounding_dino:GroundingDinoAdapter",
    "florence2": "workers.adapters.florence2:Florence2Adapter",
    "donut": "workers.adapters.donut:DonutAdapter",
    "lighton_ocr": "workers.adapters.ocr_models:LightOnOcrAdapter",
    "glm_ocr": "workers.adapters.ocr_models:GlmOcrAdapter",
    "paddleocr_vl": "workers.adapters.ocr_models:PaddleOcrVlAdapter",
    "document_qa": "workers.adapters.document_qa:DocumentQaAdapter",
    "ner": "workers.adapters.ner:NerAdapter",
    "text_classification": "workers.adapters.text_classification:TextClassificationAdapter",
    "nli_zero_shot": "workers.adapters.nli_zero_shot:NliZeroShotAdapter",
    "gliclass": "workers.adapters.gliclass:GliclassAdapter",
    "gliner": "workers.adapters.gliner:GlinerAdapter",
    "gliner2": "workers.adapters.gliner2:Gliner2Adapter",
    "torch_export": "workers.adapters.torch_export:TorchExportAdapter",
    "torchscript": "workers.adapters.torchscript:TorchScriptAdapter",
    "onnx": "workers.adapters.onnx:OnnxAdapter",
    "python_model": "workers.adapters.python_model:PythonModelAdapter",
}

PROGRAMS = ("torch_export", "torchscript", "onnx", "python_model")
"""Families that need no transformers."""


class UnknownAdapterError(ValueError):
    """The name is neither a family nor an importable class; the message lists the nearest names."""


class AdapterFileRefused(PermissionError):
    """The adapter is a file of the catalog, and `worker.trust_remote_code` is off."""


def names() -> tuple[str, ...]:
    """All family names this installation knows, built-in and registered, sorted."""
    return tuple(sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))}))


def refuse_unknown(name: str) -> None:
    """Raise UnknownAdapterError when `name` is no known family, or an adapter of SIE that none stands for.

    Any other dotted path passes, as nothing is imported here.
    """
    known = names()
    if (reason := refusal(name)) is not None and name not in known:
        raise UnknownAdapterError(f"there is no family for {name!r}: {reason}")
    if name in known or ":" in name:
        return
    nearest = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(nearest)}" if nearest else f"known families are {', '.join(known)}"
    raise UnknownAdapterError(f"unknown adapter {name!r}: {hint}")


def building(name: str) -> contextlib.AbstractContextManager[None]:
    """What the models of a family are built in: without torch's compiler, unless code may ask for the compiler."""
    if name in BUILT_IN and name not in PROGRAMS:
        return libraries.without_compiler()
    return contextlib.nullcontext()


def resolve(name: str, *, files: bool = False) -> type[Adapter]:
    """The adapter class called `name`; `files` allows code beside the catalog's files.

    Raises UnknownAdapterError for a name without a class, TypeError for a class that is no Adapter, ImportError for a
    missing dependency of the family, and AdapterFileRefused.
    """
    if ADAPTER_FILE in name:
        if not files:
            raise AdapterFileRefused(
                f"the adapter {Path(name).name} is a file of the catalog; set worker.trust_remote_code to run its code"
            )
        return _checked(name, _from_file(name))
    if name in BUILT_IN:
        if name not in PROGRAMS:
            libraries.import_transformers()
        return _checked(name, _import_path(BUILT_IN[name]))
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            return _checked(name, point.load())
    refuse_unknown(name)
    return _checked(name, _import_path(name))


def _import_path(path: str) -> Any:
    """Import "package.module:Class"."""
    module_name, _, class_name = path.partition(":")
    try:
        with processes.importing():
            module = importlib.import_module(module_name)
        return getattr(module, class_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UnknownAdapterError(f"unknown adapter {path!r}: no module named {error.name}") from error
        raise
    except AttributeError as error:
        raise UnknownAdapterError(f"unknown adapter {path!r}: {module_name} has no {class_name}") from error


def _from_file(path: str) -> Any:
    """The class of "/directory/adapter.py:Class". A changed file is run again as a new module."""
    file, _, class_name = path.rpartition(":")
    place = hashlib.sha256(file.encode()).hexdigest()[:16]
    source = Path(file).read_bytes()
    content = hashlib.sha256(source).hexdigest()[:16]
    module = sys.modules.get(f"penstock_adapter_{place}")
    if module is None or module.__dict__.get("_content") != content:
        module = run_file(f"penstock_adapter_{place}", Path(file), source)
        module.__dict__["_content"] = content
    if not hasattr(module, class_name):
        raise UnknownAdapterError(f"unknown adapter {class_name!r}: {Path(file).name} has no such class")
    return getattr(module, class_name)


def run_file(name: str, path: Path, source: bytes) -> ModuleType:
    """A module called `name`, also in `sys.modules`, that has run `source`, the text of `path`.

    No compiled file is written or read, as the file could be of an older text with equal size and time. Raises
    `UnknownAdapterError` for a file with another suffix, and any error of the code.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or not isinstance(spec.loader, SourceLoader):
        raise UnknownAdapterError(f"unknown adapter: {path.name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    # NOTE: dataclasses and type hints look up their module by name while the module runs.
    sys.modules[name] = module
    try:
        exec(spec.loader.source_to_code(source, str(path)), vars(module))
    except BaseException:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise
    return module


def _checked(name: str, found: Any) -> type[Adapter]:
    """`found`. Raises TypeError unless `found` is an Adapter class."""
    from workers.adapters.base import Adapter

    if not (isinstance(found, type) and issubclass(found, Adapter)):
        raise TypeError(f"adapter {name!r} is not a subclass of workers.adapters.base.Adapter")
    return found
