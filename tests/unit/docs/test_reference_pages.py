"""The pages of docs/ that are made from code and configuration are what `make docs` would write now."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ipc import setting_sources, settings
from tools.docs import PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_page_is_up_to_date(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == PAGES[page](), "run `make docs`"


def test_every_setting_has_a_row_with_its_meaning() -> None:
    [page] = [render() for path, render in PAGES.items() if path.name == "settings.md"]
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    named = [row[0].strip("| `") for row in rows]
    assert named == [
        f"{section.name}.{field.name}"
        for section in msgspec.structs.fields(settings.Settings)
        for field in msgspec.structs.fields(section.type)
    ]
    assert [name for name, row in zip(named, rows, strict=True) if len(row) != 4 or len(row[3]) < 5] == []


def test_what_a_setting_takes_is_said_in_words() -> None:
    fields = msgspec.inspect.type_info(settings.Worker).fields
    found = {field.name: setting_sources.taken(field.name, field.type) for field in fields}
    assert found["prepare_threads"] == "whole number, above 0, at most 15"
    assert found["hang_timeout_s"] == "number, above 0"
    assert found["trust_remote_code"] == "true or false"
    assert "`bfloat16`" in found["precision"]
