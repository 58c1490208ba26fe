"""config/server.yaml lists every setting exactly once, explained, with its default."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import yaml

from ipc import setting_sources, settings
from tools.source_tree import ROOT

FILE = ROOT / "config" / "server.yaml"
SECTIONS = {field.name: field.type for field in msgspec.structs.fields(settings.Settings)}
DEFAULTS: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings.Settings()))
FIELDS = [
    (section, field.name) for section, kind in SECTIONS.items() for field in msgspec.structs.fields(kind)
]


def listed() -> list[tuple[str, str]]:
    """(section, field) of every entry in the file's order; PyYAML's plain loaders would hide repeated keys."""
    root = yaml.compose(FILE.read_text(encoding="utf-8"))
    return [(section.value, field.value) for section, fields in root.value for field, _ in fields.value]


def test_the_file_lists_every_field_of_every_section_exactly_once_and_in_order() -> None:
    found = listed()
    assert [entry for entry, times in Counter(found).items() if times > 1] == []
    assert found == FIELDS


@cache
def written_values() -> dict[str, dict[str, Any]]:
    """The values of the file, read once for all fields."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize(("section", "field"), FIELDS)
def test_the_value_in_the_file_is_the_default(section: str, field: str) -> None:
    written = written_values()[section][field]
    default = DEFAULTS[section][field]
    if setting_sources.is_size(field):
        assert str(written) == setting_sources.shown_size(default)
        return
    assert written == default
    assert type(written) is type(default)


def test_the_file_is_valid_and_changes_nothing() -> None:
    assert settings.load(FILE, environ={}) == settings.Settings()


def test_every_field_has_one_line_of_explanation_above_it() -> None:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    unexplained = [
        line
        for above, line in pairwise(lines)
        if line.startswith("  ") and not line.startswith("  #") and not above.startswith("  # ")
    ]
    assert unexplained == []
