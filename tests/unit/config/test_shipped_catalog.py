"""Every shipped model: it can be read, says what its family needs, and uses options that the family knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ipc.catalog.entries import ENCODE_OUTPUTS, Catalog, HubSource, ModelEntry
from ipc.catalog.reading import read_catalog, read_entries, read_entry
from ipc.processes.paths import asset
from penstock.families import FAMILIES
from workers.adapters import registry
from workers.generation.formats.table import NAMES, REASONING
from workers.repository.layout import PROGRAMS

FILES = sorted(asset("config/models").rglob("*.yaml"))
ENTRIES = {path: read_entry(path) for path in FILES}
VARIANTS = Catalog(ENTRIES.values())
NEED_IMAGES = {
    "clip", "siglip", "colpali", "colqwen2", "detection", "owlv2", "grounding_dino", "florence2", "donut",
    "document_qa", "qwen3_vl_embedding", "qwen3_vl_reranker", "lighton_ocr", "glm_ocr", "paddleocr_vl",
}  # fmt: skip
COMMON_OPTIONS = {"instruction", "overflow_policy", "muvera"}


def options_of(entry: ModelEntry) -> dict[str, Any]:
    """All options of an entry or variant."""
    return {**entry.runtime, **entry.loadtime}


def test_there_are_models_enough_and_all_are_their_own() -> None:
    entries = read_entries([]).entries
    assert len(entries) == len(FILES) >= 60
    repositories = [entry.source.repo for entry in entries.values() if isinstance(entry.source, HubSource)]
    renamed = [name for name in entries if name.startswith("microsoft/Florence-2-")]
    assert len(set(repositories)) == len(repositories) - len(renamed)


@pytest.mark.parametrize("size", ["base", "base-ft", "large", "large-ft"])
def test_florence_has_the_name_that_clients_know_and_that_of_its_converted_weights(size: str) -> None:
    entries = read_entries([]).entries
    known, converted = (
        entries[f"{owner}/Florence-2-{size}"] for owner in ("microsoft", "florence-community")
    )
    assert known.source == converted.source and known.runtime == converted.runtime
    assert known.profiles == converted.profiles


def test_only_the_demo_model_is_served_unless_the_operator_says_more() -> None:
    assert list(read_catalog([])) == ["sentence-transformers/all-MiniLM-L6-v2"]
    assert list(read_catalog([], ["BAAI/bge-m3"])) == [
        "BAAI/bge-m3", "BAAI/bge-m3:sparse", "BAAI/bge-m3:multivector", "BAAI/bge-m3:all",
    ]  # fmt: skip
    everything = read_catalog([], ["BAAI/bge-m3"], serve_all=True)
    assert set(everything) == set(VARIANTS)


def test_every_family_is_described_and_used() -> None:
    assert {entry.adapter for entry in ENTRIES.values()} == set(FAMILIES) - set(PROGRAMS)
    assert set(registry.BUILT_IN) <= set(FAMILIES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_model_says_what_its_family_needs(path: Path) -> None:
    entry = ENTRIES[path]
    assert path.stem == entry.id.rpartition("/")[2]
    assert entry.description.endswith(".") and "\n" not in entry.description
    assert set(entry.inputs) <= {"text", "image"} and entry.inputs
    assert ("image" in entry.inputs) == (entry.adapter in NEED_IMAGES)
    assert set(entry.outputs) <= {*ENCODE_OUTPUTS, "score", "json", "chat"} and entry.outputs
    for name, output in entry.outputs.items():
        assert (output.dims is not None) == (name in ENCODE_OUTPUTS), name
        assert (output.similarity is not None) == (name in ENCODE_OUTPUTS), name
    assert all(0 < width <= (entry.outputs["dense"].dims or 0) for width in entry.dimensions)


@pytest.mark.parametrize("name", VARIANTS)
def test_templates_have_a_place_for_what_is_put_in(name: str) -> None:
    options = options_of(VARIANTS[name])
    for option in ("query_template", "document_template"):
        template = options.get(option, "{text}")
        assert template.count("{text}") == 1
        assert ("default_instruction" in options) or "{instruction}" not in template
    assert options.get("hypothesis_template", "{}").count("{}") == 1
    pair = options.get("pair_template", "{query}{text}")
    assert pair.count("{query}") == pair.count("{text}") == 1


@pytest.mark.parametrize("family", sorted(registry.BUILT_IN))
def test_a_family_knows_every_option_of_its_models(family: str) -> None:
    known = {*registry.resolve(family).spec.options, *COMMON_OPTIONS}
    unknown = {
        name: sorted(set(options_of(entry)) - known)
        for name, entry in VARIANTS.items()
        if entry.adapter == family and set(options_of(entry)) - known
    }
    assert unknown == {}


@pytest.mark.parametrize("family", sorted(registry.BUILT_IN))
def test_a_family_gives_what_its_models_promise(family: str) -> None:
    spec = registry.resolve(family).spec
    for name, entry in VARIANTS.items():
        if entry.adapter == family:
            assert set(entry.encode_outputs) <= set(spec.outputs), name
            assert set(entry.inputs) <= set(spec.inputs), name
            assert ("score" not in entry.outputs) or "score" in spec.operations, name
            assert ("json" not in entry.outputs) or "extract" in spec.operations, name
            assert ("chat" not in entry.outputs) or "generate" in spec.operations, name


def test_a_chat_model_names_formats_that_exist() -> None:
    chat = [entry for entry in ENTRIES.values() if entry.adapter == "causal"]
    assert len(chat) >= 30
    for entry in chat:
        options = options_of(entry)
        assert entry.max_sequence_length and set(entry.outputs) == {"chat"}, entry.id
        assert options.get("tool_format", NAMES[0]) in NAMES, entry.id
        assert options.get("reasoning", "none") in (*REASONING, "none"), entry.id
