"""Tiny models of the text families that find something, served under the ids of the contract's examples."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conformance.required_tool import lacking
from tests.conformance.wire import Form
from tests.harness.server import FAKE_CATALOG, Server
from tests.tiny.models import build

GLINER, GLICLASS = "urchade/gliner_multi-v2.1", "knowledgator/gliclass-small-v1.0"
GLINER2 = "fastino/gliner2-base-v1"
GLINER_BI = "knowledgator/gliner-bi-base-v2.0"


@dataclass(frozen=True)
class Extractor:
    """A tiny model, the family that serves it, and the library it needs."""

    tiny: str
    adapter: str
    library: str = "transformers"
    runtime: Mapping[str, Any] | None = None
    loadtime: Mapping[str, Any] | None = None


EXTRACTORS = {
    "tiny/ner": Extractor("ner", "ner"),
    "tiny/ner-xlmr": Extractor("ner_xlmr", "ner", runtime={"aggregation_strategy": "first"}),
    "tiny/moods": Extractor("classifier", "text_classification"),
    "tiny/mood": Extractor("classifier_single", "text_classification"),
    "tiny/nli": Extractor("nli", "nli_zero_shot"),
    "tiny/nli-bart": Extractor("nli_bart", "nli_zero_shot"),
    GLINER: Extractor("gliner", "gliner", "gliner"),
    "tiny/relex": Extractor("gliner_relex", "gliner", "gliner"),
    GLINER2: Extractor("gliner2", "gliner2", "gliner2"),
    GLINER_BI: Extractor("gliner_bi", "gliner", "gliner"),
    GLICLASS: Extractor("gliclass", "gliclass", "gliclass"),
    "tiny/gliclass-single": Extractor(
        "gliclass", "gliclass", "gliclass", loadtime={"classification_type": "single-label"}
    ),
}

FAKES: dict[str, dict[str, Any]] = {
    "finder": {"adapter": "tests.fakes.extractor:FakeExtractor", "outputs": {"json": {}}},
    "dense": {"adapter": "tests.fakes.adapter:FakeAdapter", "outputs": {"dense": {"dims": 16}}},
}
"""A family that obeys commands in texts, and a model that finds nothing."""


def is_there(library: str) -> bool:
    """Whether a library can be imported."""
    return importlib.util.find_spec(library) is not None


def required_library(name: str) -> None:
    """End the test where a library is missing."""
    if not is_there(name):
        lacking(f"the package {name} is not installed here")


def write_models(place: Path) -> list[str]:
    """Build what can be built here below `place` and write `place / "catalog"`; returns the ids."""
    catalog = place / "catalog"
    catalog.mkdir(parents=True)
    names = []
    for number, (name, extractor) in enumerate(EXTRACTORS.items()):
        if not is_there(extractor.library):
            continue
        if not (place / extractor.tiny).exists():
            build(extractor.tiny, place / extractor.tiny)
        entry = {
            "id": name,
            "source": {"kind": "directory", "path": str(place / extractor.tiny)},
            "adapter": extractor.adapter,
            "inputs": ["text"],
            "outputs": {"json": {}},
            "runtime": dict(extractor.runtime or {}),
            "loadtime": dict(extractor.loadtime or {}),
        }
        (catalog / f"{number}.yaml").write_text(json.dumps(entry))  # JSON is YAML
        names.append(name)
    for name, fields in FAKES.items():
        source = {"kind": "directory", "path": str(FAKE_CATALOG.parent / "weights")}
        entry = {"id": name, "source": source, "max_sequence_length": 512, **fields}
        (catalog / f"{name}.yaml").write_text(json.dumps(entry))
        names.append(name)
    return names


def body_of(texts: Sequence[str], **params: Any) -> dict[str, Any]:
    """A request over texts."""
    return {"items": [{"text": text} for text in texts], "params": params}


def extract(server: Server, form: Form, model: str, texts: Sequence[str], **params: Any) -> list[Any]:
    """Items of a successful answer."""
    answer = form.post(server, f"/v1/extract/{model}", body_of(texts, **params))
    assert answer.status == 200, answer.body
    items: list[Any] = form.load(answer.body)["items"]
    return items


def extract_together(
    server: Server, form: Form, model: str, requests: Sequence[tuple[str, dict[str, Any]]]
) -> list[Any]:
    """One item per request, all sent at the same time, so that they meet in batches."""
    with ThreadPoolExecutor(len(requests)) as pool:
        tasks = [pool.submit(extract, server, form, model, [text], **params) for text, params in requests]
        return [task.result()[0] for task in tasks]
