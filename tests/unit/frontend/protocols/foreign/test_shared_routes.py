"""Which server's form a path has that several servers know, and which model a request without a model means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from frontend.engine import planning
from frontend.protocols.registry import chosen, protocols
from ipc.catalog.entries import Catalog, OutputSpec
from ipc.errors import ConfigError
from ipc.settings import load
from tests.fakes.tensors import entry

KNOWN = protocols()
OWNERS = KNOWN.owners


def root_of(*compatible: str) -> str:
    """The path that a POST to the root means."""
    return protocols(compatible).root


def test_a_server_is_chosen_for_all_of_its_paths_or_for_one() -> None:
    assert chosen((), OWNERS) == {}
    assert chosen(["tei"], OWNERS) == dict.fromkeys(("/invocations", "/rerank", "/tokenize"), "tei")
    assert chosen(["vllm:/classify"], OWNERS) == {"/classify": "vllm"}
    assert chosen(["tei", "vllm:/classify"], OWNERS)["/classify"] == "vllm"
    assert chosen(["vllm", "vllm"], OWNERS) == {
        path: "vllm" for path, owners in OWNERS.items() if "vllm" in owners
    }


def test_a_post_to_the_root_means_the_route_of_tei_also_where_nobody_chose_it() -> None:
    assert root_of("tei") == root_of("vllm:/rerank", "tei:/invocations") == "/invocations"
    assert root_of() == root_of("vllm") == root_of("tei:/rerank") == "/invocations"
    assert "/invocations" in OWNERS, "a path that nobody chose answers 501"


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (["tei", "vllm"], r"'tei' and 'vllm' both choose the form of /rerank.*vllm:/rerank"),
        (
            ["vllm:/classify", "infinity"],
            r"'vllm:/classify' and 'infinity' both choose the form of /classify",
        ),
        (["tei:/rerank", "tei"], "'tei:/rerank' and 'tei' both"),
        (["tei:/embed"], r"'tei:/embed': tei shares /invocations, /rerank, /tokenize"),
    ],
)
def test_two_choices_for_a_path_are_refused(entries: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        protocols(entries)


def test_all_routes_of_other_servers_need_the_scope_of_inference() -> None:
    servers = [row for row in KNOWN.routes if row.tag in ("tei", "vllm", "infinity")]
    assert len(servers) > 20 and {row.need for row in servers} == {"infer"}
    assert {KNOWN.need_of(row.path) for row in servers} == {"infer"}


def test_default_models_must_be_served() -> None:
    catalog = Catalog([entry("org/dense", served_name="short")])
    planning.check(catalog, load(None, {"server.default_models": "org/dense,short"}, {}))
    with pytest.raises(ConfigError, match=r"server\.default_models: no model 'org/typo' is served"):
        planning.check(catalog, load(None, {"server.default_models": "org/dense,org/typo"}, {}))
    extractors = [
        entry(name, adapter=adapter, outputs={"json": OutputSpec()})
        for name, adapter in (("org/places", "gliner"), ("org/moods", "text_classification"))
    ]
    both = load(None, {"server.default_models": "org/places,org/moods"}, {})
    known: Any = SimpleNamespace(catalog=Catalog(extractors))
    found = planning.default_model(known, both, ("json",), "text_classification")
    assert found == "org/moods"
    named = load(None, {"server.default_models": "short"}, {})
    known = SimpleNamespace(catalog=catalog)
    assert planning.default_model(known, named, ("dense",)) == "short"
