"""Options of the extract families, what the reader refuses, and what a missing library looks like."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ipc.catalog.option_names import EXTRACT_OPTIONS
from ipc.errors import InvalidInput
from ipc.wire.extraction import Entity
from ipc.wire.messages import ExtractCall
from workers.adapters import registry
from workers.adapters.base import LoadContext
from workers.adapters.gliner import fields_of, filled
from workers.adapters.shared.options import OptionReader
from workers.loading.failure import classify

FAMILIES = ("ner", "text_classification", "nli_zero_shot", "gliner", "gliclass")


def reader(**options: Any) -> OptionReader:
    """A reader over these options."""
    return OptionReader(ExtractCall([], options=options))


def test_absent_and_null_options_take_their_default() -> None:
    for options in ({}, {"a": None}):
        read = reader(**options)
        assert read.threshold("a", 0.5) == 0.5 and read.whole("a", 3, 1, 9) == 3 and read.flag("a", True)
        assert (
            read.text("a", "x") == "x"
            and read.choice("a", "x", ("x",)) == "x"
            and read.texts("a", 3, 9) == []
        )


def test_values_within_their_bounds_are_taken() -> None:
    read = reader(whole=1, edge=1.0, low=0, flag=False, name="é", many=["b", "a"])
    assert (
        read.threshold("whole", 0.5) == 1.0
        and read.threshold("edge", 0.5) == 1.0
        and read.threshold("low", 0.5) == 0.0
    )
    assert read.whole("whole", 5, 1, 1) == 1 and read.flag("flag", True) is False
    assert read.text("name", "") == "é" and read.texts("many", 2, 1) == ["b", "a"]


REFUSALS: dict[str, tuple[Any, Callable[[OptionReader], Any], tuple[str, ...]]] = {
    "number that is none": (float("nan"), lambda read: read.threshold("a", 0), ("nan", "no number")),
    "bool as number": (True, lambda read: read.threshold("a", 0), ("number", "bool")),
    "fraction as whole": (1.0, lambda read: read.whole("a", 1, 0, 9), ("int", "float")),
    "bool as whole": (False, lambda read: read.whole("a", 1, 0, 9), ("int", "bool")),
    "whole below": (-1, lambda read: read.whole("a", 1, 0, 9), ("-1", "0..9")),
    "number as flag": (1, lambda read: read.flag("a", False), ("bool", "int")),
    "another choice": ("z" * 500, lambda read: read.choice("a", "x", ("x", "y")), ("zzz", "x, y")),
    "a long text": ("z" * 11, lambda read: read.text("a", "", 10), ("11", "10")),
    "text for texts": ("z", lambda read: read.texts("a", 3, 9), ("array", "str")),
    "too many texts": (["a", "b"], lambda read: read.texts("a", 1, 9), ("2", "1")),
    "whole below one": (0, lambda read: read.whole("a", 1, 1), ("0", "below 1")),
    "a blank among texts": (["b", " "], lambda read: read.texts("a", 3, 9), ("a[1]",)),
    "a number among texts": ([1], lambda read: read.texts("a", 3, 9), ("a[0]", "str", "int")),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_value_that_does_not_fit_is_refused_with_field_and_limit(name: str) -> None:
    value, read, mentions = REFUSALS[name]
    with pytest.raises(InvalidInput) as refused:
        read(reader(a=value))
    assert refused.value.message.startswith("params.options.a") and len(refused.value.message) < 300
    for text in mentions:
        assert text in refused.value.message


def test_what_cannot_change_a_result_is_taken() -> None:
    read = reader(above=2, below=-1e300, never=float("inf"), many=["b", "a", "b"], large=2**62)
    assert [read.threshold(name, 0.5) for name in ("above", "below", "never")] == [2, -1e300, float("inf")]
    assert read.texts("many", 3, 9) == ["b", "a"] and read.whole("large", 1, 1) == 2**62


@pytest.mark.parametrize("family", FAMILIES)
def test_every_option_of_a_family_is_known_to_the_protocols(family: str) -> None:
    assert set(registry.resolve(family).spec.options) <= EXTRACT_OPTIONS


@pytest.mark.parametrize("family", ["gliner", "gliclass"])
def test_a_missing_library_is_a_dependency_failure_that_names_the_extra(
    family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, family, None)
    device = torch.device("cpu")
    context = LoadContext(tmp_path, "some/model", device, torch.float32, None, {}, lambda phase, part: None)
    with pytest.raises(ImportError) as missing:
        registry.resolve(family).load(context)
    failure = classify(missing.value)
    assert failure.error_class == "DEPENDENCY" and failure.permanent
    assert f"the extra {family} (pip install" in failure.message


def test_a_schema_names_the_labels_and_takes_the_texts_found() -> None:
    schema = {"properties": {"who": {"type": "array", "items": {"type": "string"}}, "where": {}, "when": {}}}
    fields = fields_of(ExtractCall([], output_schema=schema))
    assert list(fields.items()) == [("who", True), ("where", False), ("when", False)]
    entities = [
        Entity("Ada", "who", 0.7),
        Entity("Rome", "where", 0.6),
        Entity("Oslo", "where", 0.9),
        Entity("Bob", "who", 0.9),
        Entity("x", "other", 1.0),
    ]
    assert filled(fields, entities) == {"who": ["Ada", "Bob"], "where": "Oslo", "when": None}
