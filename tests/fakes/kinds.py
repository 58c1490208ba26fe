"""A catalog with a fake model for every operation, and models that cannot be loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.harness.server import FAKE_CATALOG

DENSE = {"dense": {"dims": 16}}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"outputs": DENSE},
    "ranker": {"adapter": "tests.fakes.scorer:FakeScorer", "outputs": {"score": {}}},
    "finder": {"adapter": "tests.fakes.extractor:FakeExtractor", "outputs": {"json": {}}},
    "small": {"outputs": DENSE, "loadtime": {"dims": 16, "memory_tokens": 64}},
    "broken": {"outputs": DENSE, "loadtime": {"dims": 16, "fail_load": "UNKNOWN"}},
    "lacking": {"outputs": DENSE, "source": {"kind": "package", "package": "a_package_that_nobody_has"}},
}


def write_kinds(directory: Path, also: Mapping[str, str] | None = None) -> list[str]:
    """Write one file per model, and under further ids the kinds that `also` names; returns the ids."""
    directory.mkdir()
    models = {name: name for name in KINDS} | dict(also or {})
    for number, (name, kind) in enumerate(models.items()):
        entry = {
            "id": name,
            "source": {"kind": "directory", "path": str(FAKE_CATALOG.parent / "weights")},
            "adapter": "tests.fakes.adapter:FakeAdapter",
            "max_sequence_length": 512,
            "loadtime": {"dims": 16},
            **KINDS[kind],
        }
        (directory / f"{number}.yaml").write_text(json.dumps(entry))  # JSON is YAML
    return list(models)
