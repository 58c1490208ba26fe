"""Catalog files in SIE's own layout: what they become, what is refused, and which profile gets what."""

from __future__ import annotations

from pathlib import Path

import pytest

from frontend.protocols.sie.models import ProfileInfo, model_info
from ipc.catalog.entries import AdapterSource, Catalog, DirectorySource, HubSource
from ipc.catalog.reading import preloaded_names, read_catalog, read_entry
from ipc.catalog.sie_layout import FAMILIES
from ipc.errors import ConfigError
from ipc.wire.messages import ModelStatus
from workers.adapters import registry
from workers.scheduling.bound import ModelBudgets

M3 = """
sie_id: org/m3
hf_id: upstream/m3
hf_revision: 0123abc
inputs: {text: true, image: false}
tasks:
  encode: {dense: {dim: 1024}, sparse: {dim: 250002}, multivector: null}
  score: {}
  extract: null
max_sequence_length: 8192
profiles:
  default:
    max_batch_tokens: 16384
    compute_precision: bfloat16
    adapter_path: sie_server.adapters.bge_m3_flash:BGEM3FlashAdapter
    adapter_options:
      loadtime: {}
      runtime: {pooling: cls, normalize: true}
    adaptive_batching: {target_p50_ms: 20}
  sparse:
    extends: default
    adapter_options: {runtime: {pooling: cls, output_types: [sparse]}}
  banking:
    extends: default
    max_batch_tokens: 512
    adapter_options: {runtime: {lora_id: someone/banking-lora, instruction: Classify}}
  plain:
    extends: default
  alone:
    adapter_path: sie_server.adapters.colbert:ColBERTAdapter
    compute_precision: null
    adapter_options: {loadtime: {query_max_length: 32, doc_prefix: "[unused1]", max_seq_length: 300}}
"""
LATE = """
sie_id: org/late
weights_path: weights
tasks: {encode: {multivector: {dim: 128}}, score: {}}
profiles:
  default:
    adapter_path: sie_server.adapters.colbert:ColBERTAdapter
    adapter_options:
      loadtime: {muvera_config: {num_repetitions: 4, final_projection_dim: null}}
      runtime: {muvera: null}
  muvera:
    extends: default
    adapter_options: {runtime: {muvera: {seed: 7}, output_types: [dense], output_similarity: {dense: cosine}}}
"""
OWN = """
sie_id: org/own
package_backed: true
inputs: {text: false, document: true}
tasks: {extract: {}}
profiles:
  default: {adapter_path: "adapter.py:Mine", max_batch_tokens: 1}
"""


def catalog_of(root: Path, text: str, name: str = "whatever.yaml") -> Catalog:
    """The catalog of one file, which has no mistake."""
    (root / name).write_text(text)
    read_entry(root / name)
    return read_catalog([str(root)])


def test_a_model_with_profiles_is_read(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, M3)
    base = catalog["org/m3"]
    assert list(catalog) == [
        "org/m3",
        *(f"org/m3:{name}" for name in ("sparse", "banking", "plain", "alone")),
    ]
    assert base.source == HubSource("upstream/m3", "0123abc")
    assert (base.adapter, base.precision, base.max_sequence_length) == ("bge_m3", "bfloat16", 8192)
    assert {name: spec.dims for name, spec in base.outputs.items()} == {
        "dense": 1024,
        "sparse": 250002,
        "score": None,
    }
    assert (base.inputs, base.runtime) == (("text",), {"pooling": "cls", "normalize": True})
    assert base.default_outputs == ("dense",)


def test_weights_path_wins_over_hf_id(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, M3.replace("hf_id: upstream/m3", "hf_id: upstream/m3\nweights_path: here"))
    assert catalog["org/m3"].source == DirectorySource(str(tmp_path / "here"))


def test_options_that_only_adapters_of_sie_have_are_passed_over(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, M3.replace("loadtime: {}", "loadtime: {attn_implementation: sdpa}"))
    assert catalog["org/m3"].loadtime == {"attn_implementation": "sdpa"}


def test_profiles_take_over_what_they_leave_out_and_nothing_else(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, M3)
    sparse, banking, plain, alone = (
        catalog[f"org/m3:{name}"] for name in ("sparse", "banking", "plain", "alone")
    )
    assert sparse.runtime == {"pooling": "cls"}, "a map that is not empty replaces the whole one"
    assert sparse.default_outputs == ("sparse",) and sparse.adapter == "bge_m3"
    assert plain.runtime == {"pooling": "cls", "normalize": True}
    assert (plain.max_batch_tokens, banking.max_batch_tokens, alone.max_batch_tokens) == (16384, 512, None)
    assert banking.loras == {"someone/banking-lora": HubSource("someone/banking-lora")}
    assert (alone.adapter, alone.precision, alone.runtime) == ("colbert", None, {})
    assert alone.loadtime == {"query_length": 32, "document_prefix": "[unused1]", "document_length": 300}


def test_an_own_similarity_and_muvera_are_shown(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, LATE)
    base, muvera = catalog["org/late"], catalog["org/late:muvera"]
    assert base.source == DirectorySource(str(tmp_path / "weights"))
    assert "muvera" not in base.runtime
    assert muvera.runtime["muvera"] == {"num_repetitions": 4, "final_projection_dim": None, "seed": 7}
    shown = model_info(base, ModelStatus("org/late", "available")).profiles
    assert shown["default"].output_similarity == {"multivector": "maxsim"}
    assert shown["muvera"] == ProfileInfo(False, ["dense"], {"dense": "cosine"})
    variant = model_info(muvera, ModelStatus("org/late:muvera", "available")).profiles
    assert variant["default"].output_similarity == {"dense": "cosine"}


def test_muvera_without_a_stated_similarity_is_compared_by_dot(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, LATE.replace(", output_similarity: {dense: cosine}", ""))
    shown = model_info(catalog["org/late"], ModelStatus("org/late", "available")).profiles
    assert shown["muvera"].output_similarity == {"dense": "dot"}


def test_an_adapter_in_a_file_is_found_beside_the_entry(tmp_path: Path) -> None:
    (tmp_path / "adapter.py").write_text("class Mine: pass\n")
    first = catalog_of(tmp_path, OWN)["org/own"]
    assert first.adapter == f"{tmp_path}/adapter.py:Mine"
    assert first.source == AdapterSource(str(tmp_path))
    assert first.inputs == ("document",)
    (tmp_path / "adapter.py").write_text("class Mine: changed = True\n")
    second = read_catalog([str(tmp_path)])["org/own"]
    assert first.code != second.code, "a changed adapter is a changed model"


def test_a_cap_of_tokens_holds_for_its_own_model(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, M3)
    budgets = ModelBudgets(2048)
    budgets.limits["org/m3:banking"] = catalog["org/m3:banking"].max_batch_tokens or 0
    assert [budgets.tokens_of(name) for name in ("org/m3", "org/m3:banking", "org/m3:alone")] == [
        2048,
        512,
        2048,
    ]
    budgets.shrink("org/m3:banking", 512)
    assert budgets.tokens_of("org/m3:banking") == 256


def test_models_of_this_layout_wait_for_their_first_request(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, M3)
    assert preloaded_names(catalog, ("auto",), (), serve_all=False) == []
    assert preloaded_names(catalog, ("org/m3",), (), serve_all=False)[0] == "org/m3"


def test_every_adapter_of_the_table_is_a_family_here() -> None:
    assert set(FAMILIES) <= set(registry.BUILT_IN)
    modules = [module for names in FAMILIES.values() for module in names.split()]
    assert len(modules) == len(set(modules))


def test_an_adapter_that_no_family_stands_for_keeps_its_path(tmp_path: Path) -> None:
    text = M3.replace("bge_m3_flash:BGEM3FlashAdapter", "docling:Adapter")
    adapter = catalog_of(tmp_path, text)["org/m3"].adapter
    assert adapter == "sie_server.adapters.docling:Adapter"
    with pytest.raises(
        registry.UnknownAdapterError, match=r"docling:Adapter.*no family reads files of documents"
    ):
        registry.resolve(adapter)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("hf_id: upstream/m3\n", ""), "weights_path, hf_id or package_backed, got none"),
        (("hf_id: upstream/m3\n", "hf_id: a\npackage_backed: true\n"), "got hf_id and package_backed"),
        (
            ("{pooling: cls, normalize", "{poling: cls, default_instructio: x, normalize"),
            "default_instructio: unknown option",
        ),
        (("hf_revision", "hf_revison"), "hf_revison"),
        (("image: false", "imag: false"), "imag"),
        (("  default:\n", "  standard:\n"), "no profile named default"),
        (
            ("extends: default\n    max", "extends: sparse\n    max"),
            "'banking' must extend one existing profile",
        ),
        (("{dim: 1024}", "{dim: wide}"), "tasks.encode.dense.dim"),
        (("{dim: 1024}", "{dim: 0}"), "outputs"),
        (("compute_precision: bfloat16", "compute_precision: int3"), "int3"),
        (("someone/banking-lora", "../../etc"), "loras"),
        (
            ("    adapter_path: sie_server.adapters.colbert:ColBERTAdapter\n", ""),
            "profiles.alone.adapter_path",
        ),
        (("  score: {}\n", "  score: {x: 1}\n"), "tasks.score"),
        (("output_types: [sparse]", "output_types: [multivector]"), "multivector"),
    ],
)
def test_mistakes_are_refused_by_name(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    assert change[0] in M3
    with pytest.raises(ConfigError, match=r"whatever\.yaml") as refused:
        catalog_of(tmp_path, M3.replace(*change))
    assert said in refused.value.message


def test_a_missing_adapter_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter\.py does not exist"):
        catalog_of(tmp_path, OWN)


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        ("[a/one, b/two]", {"a/one": HubSource("a/one"), "b/two": HubSource("b/two")}),
        ("{legal: {id: a/one, revision: abc}}", {"legal": HubSource("a/one", "abc")}),
        ("{legal: a/one}", {"legal": HubSource("a/one")}),
    ],
)
def test_lora_adapters_of_the_load_are_known(tmp_path: Path, paths: str, found: dict[str, HubSource]) -> None:
    text = M3.replace("loadtime: {}", f"loadtime: {{lora_paths: {paths}}}")
    entry = catalog_of(tmp_path, text)["org/m3"]
    assert {name: entry.loras[name] for name in found} == found
    assert "lora_paths" not in entry.loadtime


@pytest.mark.parametrize("paths", ["5", "[{}]", "{legal: {id: a, branch: b}}", "{legal: 5}"])
def test_bad_lora_adapters_are_refused(tmp_path: Path, paths: str) -> None:
    with pytest.raises(ConfigError, match="lora"):
        catalog_of(tmp_path, M3.replace("loadtime: {}", f"loadtime: {{lora_paths: {paths}}}"))
