"""Catalog files: what is read, what is derived, and how mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from ipc.catalog.entries import MOST_COMPARED, Catalog, DirectorySource, HubSource, ModelEntry
from ipc.catalog.reading import check_lists, preloaded_names, read_catalog, read_entry
from ipc.errors import ConfigError, ModelNotFound

MODEL = """
id: org/model
source: {kind: hub, repo: org/model, revision: abc}
outputs:
  dense: {dims: 8}
  sparse: {}
max_sequence_length: 128
runtime: {instruction: none}
loadtime: {pooling: mean}
profiles:
  default: {output_types: [dense, sparse]}
  query: {runtime: {instruction: ask}}
  fast: {extends: query, precision: bfloat16, loadtime: {pooling: cls}}
"""


def write(directory: Path, text: str, name: str = "model.yaml") -> Path:
    """A catalog file."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_model_and_its_profiles_are_served_by_name(tmp_path: Path) -> None:
    write(tmp_path, MODEL)
    catalog = read_catalog([str(tmp_path)])
    assert list(catalog) == ["org/model", "org/model:query", "org/model:fast"]
    base, query, fast = catalog.values()
    assert base.source == HubSource("org/model", "abc")
    assert base.default_outputs == ("dense", "sparse")
    assert (base.runtime, query.runtime, fast.runtime) == (
        {"instruction": "none"},
        {"instruction": "ask"},
        {"instruction": "ask"},
    )
    assert (query.loadtime, fast.loadtime) == ({"pooling": "mean"}, {"pooling": "cls"})
    assert (base.precision, fast.precision) == (None, "bfloat16")


def test_directories_are_searched_deeply_and_relative_sources_start_at_their_file(tmp_path: Path) -> None:
    write(tmp_path, "id: a\nsource: {kind: directory, path: ../weights}\n", "deep/er/a.yaml")
    write(tmp_path, "id: b\nsource: {kind: directory, path: /weights}\n", "b.yaml")
    catalog = read_catalog([str(tmp_path)])
    assert catalog["a"].source == DirectorySource(str(tmp_path / "deep" / "weights"))
    assert catalog["b"].source == DirectorySource("/weights")


def test_a_filter_chooses_models_and_their_order_also_unserved_ones(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write(
            tmp_path,
            f"id: {name}\nsource: {{kind: hub, repo: x}}\nserved: {str(name != 'c').lower()}\n",
            f"{name}.yaml",
        )
    assert list(read_catalog([str(tmp_path)])) == ["a", "b"]
    assert list(read_catalog([str(tmp_path)], ["c", "a"])) == ["c", "a"]


def test_an_unknown_model_is_answered_with_the_nearest_name(tmp_path: Path) -> None:
    write(tmp_path, MODEL)
    catalog = read_catalog([str(tmp_path)])
    with pytest.raises(ModelNotFound, match=r"'org/modle' not found; did you mean 'org/model'\?"):
        catalog.find("org/modle")
    with pytest.raises(ModelNotFound, match=r"did you mean 'org/model'\?$"):
        catalog.find("model:quary")
    with pytest.raises(ModelNotFound) as refused:
        catalog.find("x\n" * 5000)
    assert len(refused.value.message) < 2000 and "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("id: a\nsource: {kind: hub, repo: x}\noutptus: {}\n", ":3: Object contains unknown field `outptus`"),
        ("id: a\nsource: {kind: hub, repo: x}\nerror: mine\n", ":3: error: unknown field"),
        ("id: a\nsource: {kind: hub, repo: x}\ncode: mine\n", ":3: code: unknown field"),
        (
            "id: a\nsource: {kind: hub, repo: x}\nloadtime:\n  poling: cls\n",
            ":4: loadtime.poling: unknown option; did you mean 'pooling'?",
        ),
        (
            "id: a\nsource: {kind: hub, repo: x}\nprofiles:\n  p:\n    runtime: {instructoin: x}\n",
            ":5: profiles.p.runtime.instructoin: unknown option; did you mean 'instruction'?",
        ),
        (
            "id: a\nsource: {kind: hub, repo: x}\nadapter: ner\nruntime: {zzz: 1}\n",
            ":4: runtime.zzz: unknown option; known are aggregation_strategy, ",
        ),
        ("id: a\nsource: {kind: hub}\n", ":2: Object missing required field `repo`"),
        ("id: a\nsource: {kind: web, url: x}\n", "web"),
        ("source: {kind: hub, repo: x}\n", "id"),
        ("id: ../../etc\nsource: {kind: hub, repo: x}\n", "id"),
        ("id: a\nsource: {kind: hub, repo: x}\nmax_sequence_length: 0\n", "max_sequence_length"),
        *(
            (f"id: a\nsource: {{kind: hub, repo: x}}\n{field}\n", ":3: Expected `int` <= 9223372036854775807")
            for field in (
                f"max_sequence_length: {10**20}",
                f"max_batch_tokens: {10**20}",
                f"replicas: {10**20}",
                f"dimensions: [{10**20}]",
                f"outputs: {{dense: {{dims: {10**20}}}}}",
            )
        ),
        ("id: a\nsource: {kind: hub, repo: x}\nprecision: int3\n", "precision"),
        ("id: a\nsource: {kind: hub, repo: x}\nprofiles: {p: {extends: q}}\n", "'p' must extend"),
        ("id: a\nsource: {kind: hub, repo: x}\nprofiles: {p: {extends: p}}\n", "'p' must extend"),
        ("id: a\nsource: {kind: hub, repo: x}\nprofiles: {p: {output_types: [sparse]}}\n", "sparse"),
        (
            "id: a\nsource: {kind: hub, repo: x}\noutputs:\n  dense: {dims: 3}\n  multivector: {dims: -1}\n",
            "model.yaml:3: ",
        ),
        ("id: [", "model.yaml"),
        ("id: a\nsource: {kind: hub, repo: x}\nid: b\n", ":3: 'id' stands twice"),
        ("id: a\nsource: {kind: hub,\nadapter: dense\n", "model.yaml:4: while parsing"),
    ],
)
def test_a_mistake_is_refused_with_file_and_field(tmp_path: Path, text: str, named: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        read_entry(path)
    assert str(path) in refused.value.message
    assert named in refused.value.message


def test_chained_profiles_are_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "id: a\nsource: {kind: hub, repo: x}\nprofiles: {p: {}, q: {extends: p}, r: {extends: q}}\n",
    )
    with pytest.raises(ConfigError, match="'r' must extend one existing profile that extends none"):
        read_entry(path)


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_catalog([str(tmp_path / "nowhere")])
    with pytest.raises(ConfigError, match="serves no model"):
        read_catalog([str(tmp_path)])
    write(tmp_path, MODEL)
    with pytest.raises(ConfigError, match=r"unknown model 'org/modl'; did you mean 'org/model'\?"):
        read_catalog([str(tmp_path)], ["org/modl"])


def test_the_shipped_catalog_is_valid() -> None:
    assert len(read_catalog([])) > 0


def test_a_model_that_the_catalog_has_and_nobody_serves_is_told_with_the_way_to_serve_it(
    tmp_path: Path,
) -> None:
    write(tmp_path, MODEL)
    write(tmp_path, GOOD.format("org/other-one") + "served: false\n", "other.yaml")
    catalog = read_catalog([str(tmp_path)])
    way = (
        "this server does not serve 'org/other-one': start it with --models org/other-one (catalog.models), "
    )
    way += "or all of them with catalog.serve_all"
    for name in ("org/other-one", "org/other-one:wide"):
        assert catalog.absence(name) == f"the catalog has the model, but {way}"
    for name in ("other-one", "org/other-eno"):
        assert catalog.absence(name) == f"did you mean 'org/other-one'? T{way[1:]}"
    assert catalog.absence("org/model:nothing") == catalog.absence("something") == ""


def test_an_unknown_name_is_compared_with_few_of_many_names(tmp_path: Path) -> None:
    compared: list[int] = []

    def compare(name: str, names: list[str], n: int) -> list[str]:
        compared.append(len(names))
        return []

    catalog = Catalog([ModelEntry(f"model_{n}", DirectorySource("/w")) for n in range(5000)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ipc.catalog.entries.difflib.get_close_matches", compare)
        assert catalog.absence("modle_17") == ""
    assert compared == [MOST_COMPARED]


def test_a_further_name_finds_the_model_and_its_profiles(tmp_path: Path) -> None:
    write(tmp_path, MODEL + "served_name: text-embedding-3-small\n")
    catalog = read_catalog([str(tmp_path)], ["org/model=short", "org/model=org/other"])
    assert list(catalog) == ["org/model", "org/model:query", "org/model:fast"]
    for name in ("text-embedding-3-small", "short", "org/other"):
        assert catalog.find(name) is catalog["org/model"] and name in catalog
        assert catalog.find(f"{name}:fast").id == "org/model:fast" == catalog.id_of(f"{name}:fast")
        assert f"{name}:default" not in catalog
    assert catalog.absence("text-embedding-3-smal") == "did you mean 'text-embedding-3-small'?"
    assert preloaded_names(catalog, ["auto"], ["org/model=short"], False) == list(catalog)
    with pytest.raises(ConfigError, match=r"catalog.pinned: unknown model 'short'"):
        check_lists(catalog, [], ["short"])
    catalog.replace(read_catalog([str(tmp_path)]))
    assert "short" not in catalog and "text-embedding-3-small" in catalog


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("b", "'b' is a name of the model 'org/b'"),
        ("org/b", "'org/b' is a name of the model 'org/b'"),
        ("taken", "'taken' is a name of the model 'org/b'"),
        ("default", "'default' stands for the model of generated text that the settings name"),
    ],
)
def test_a_further_name_that_another_model_has_is_refused(name: str, why: str, tmp_path: Path) -> None:
    write(tmp_path, GOOD.format("org/a"), "a.yaml")
    write(tmp_path, GOOD.format("org/b") + "served_name: [taken]\n", "b.yaml")
    with pytest.raises(ConfigError, match=f"^catalog.models: {why}$"):
        read_catalog([str(tmp_path)], [f"org/a={name}", "org/b"])
    if name != "taken":
        assert read_catalog([str(tmp_path)], ["org/a=a"])["a"].id == "org/a", "its own short name"
    write(tmp_path, GOOD.format("org/a") + f"served_name: {name}\n", "a.yaml")
    catalog = read_catalog([str(tmp_path)])
    assert catalog["org/a"].error == f"served_name: {why}"
    assert catalog.reading.bad[0].message == f"{tmp_path}/a.yaml:3: served_name: {why}"
    assert bool(catalog["org/b"].error) == (name == "taken"), "both are refused where both state the name"


@pytest.mark.parametrize("name", ["", "x:y", "a@1", "-x", "x" * 201, "ä", "a=b"])
def test_what_is_no_further_name_is_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path, GOOD.format("org/a"), "a.yaml")
    with pytest.raises(ConfigError, match=r"^catalog.models: .* is no name for a model: letters"):
        read_catalog([str(tmp_path)], [f"org/a={name}"])
    for stated in (f"['{name}']", f"'{name}'"):
        path = write(tmp_path, GOOD.format("org/b") + f"served_name: {stated}\n", "b.yaml")
        with pytest.raises(ConfigError, match=r"b\.yaml:.*served_name"):
            read_entry(path)


GOOD = "id: {}\nsource: {{kind: directory, path: /w}}\n"


def test_a_bad_file_costs_its_own_model_only(tmp_path: Path) -> None:
    write(tmp_path, GOOD.format("good"), "good.yaml")
    write(tmp_path, GOOD.format("typo") + "loadtime: {poling: cls}\n", "typo.yaml")
    write(tmp_path, "sie_id: torn\nprofiles: {default: [\n", "torn.yaml")
    write(tmp_path, GOOD.format("two"), "two.yaml")
    write(tmp_path, GOOD.format("two"), "deeper/other.yaml")
    write(tmp_path, "nonsense", "nameless.yaml")
    catalog = read_catalog([str(tmp_path)])
    assert {name for name, entry in catalog.items() if not entry.error} == {"good"}
    assert catalog["typo"].error == "loadtime.poling: unknown option; did you mean 'pooling'?"
    assert "line 3" in catalog["torn"].error and str(tmp_path) not in catalog["torn"].error
    assert catalog["two"].error == "id: 'two' is defined in two files"
    assert {"score", "json", "dense"} <= set(catalog["torn"].outputs), "requests of all kinds meet the error"
    places = sorted(bad.message.partition(": ")[0] for bad in catalog.reading.bad)
    names = ("deeper/other.yaml:1", "nameless.yaml:1", "torn.yaml:3", "two.yaml:1", "typo.yaml:3")
    assert places == [f"{tmp_path}/{name}" for name in names]


def test_models_of_files_that_became_bad_go_on_as_they_were(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path, GOOD.format(name), f"{name}.yaml")
    before = read_catalog([str(tmp_path)])
    write(tmp_path, GOOD.format("a") + "runtime: {x: 1}\n", "a.yaml")
    write(tmp_path, GOOD.format("new") + "runtime: {x: 1}\n", "new.yaml")
    (tmp_path / "c.yaml").unlink()
    found = read_catalog([str(tmp_path)], vanished_ok=True).keeping(before.sources)
    assert {name: bool(entry.error) for name, entry in found.items()} == {"a": False, "b": False, "new": True}
    write(tmp_path, "", "b.yaml")
    found = read_catalog([str(tmp_path)], vanished_ok=True).keeping(found.sources)
    assert {"a", "b"} <= {name for name, entry in found.items() if not entry.error}, (
        "b.yaml names no model now"
    )
    write(tmp_path, GOOD.format("a"), "a.yaml")
    write(tmp_path, GOOD.format("b").replace("/w", "/v"), "b.yaml")
    (tmp_path / "new.yaml").unlink()
    found = read_catalog([str(tmp_path)], vanished_ok=True).keeping(found.sources)
    assert found["b"].source == DirectorySource("/v") and list(found) == ["a", "b"]


def test_a_model_that_is_to_be_served_and_whose_file_names_none_stops_nothing(tmp_path: Path) -> None:
    write(tmp_path, GOOD.format("a"), "a.yaml")
    write(tmp_path, "{", "b.yaml")
    assert list(read_catalog([str(tmp_path)], ["a", "b"])) == ["a"]
