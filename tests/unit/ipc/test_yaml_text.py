"""YAML of the operator: documents that would overflow the C stack of the parser are refused instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from ipc import settings, yaml_text
from ipc.catalog import reading as catalog
from ipc.errors import ConfigError

DEEP = [b"[" * 900_000, b"{a: " * 500_000, b"- " * 100_000 + b"x", b"a: " + b"[" * 5000 + b"]" * 5000]


@pytest.mark.parametrize("data", DEEP, ids=["brackets", "braces", "dashes", "closed"])
def test_deep_documents_are_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        yaml_text.decode(data)
    path = tmp_path / "file.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="nested too deeply"):
        catalog.read_entry(path)
    with pytest.raises(ConfigError, match="nested too deeply"):
        settings.load(path, environ={})


def test_ordinary_documents_are_read() -> None:
    assert yaml_text.decode(b"a: [1, {b: c}]\nd:\n  - e\n") == {"a": [1, {"b": "c"}], "d": ["e"]}


def test_the_line_of_a_field_is_found_below_aliases_and_in_cycles() -> None:
    laughs = b"a: &a [x, x]\n" + b"".join(
        b"%c: &%c [*%c, *%c]\n" % (n, n, n - 1, n - 1) for n in range(98, 122)
    )
    assert yaml_text.line_of(laughs + b"deep: {name: 1}\n", ["name"]) == 26
    assert yaml_text.line_of(b"a: &a {b: *a}\nc:\n  d: 1\n", ["c", "d"]) == 3
    assert yaml_text.line_of(b"a: 1\nb: [{c: 1},\n {d: 2}]", ["b", "d", "nothing"]) == 3
    assert [yaml_text.line_of(data, ["a"]) for data in (*DEEP, b"{", b"")] == [1] * 6
