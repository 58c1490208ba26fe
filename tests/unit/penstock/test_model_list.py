"""`penstock models list`: what is searched, what the sizes are, and that lines fit a terminal of 80 columns."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from penstock.cli import main


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The models of a list by id."""
    assert main(["models", "list", *words, "--json"]) == 0
    return {row["id"]: row for row in json.loads(capsys.readouterr().out)}


def test_words_are_searched_in_ids_families_outputs_and_descriptions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = rows(capsys, "RERANK", "multilingual")
    assert "jinaai/jina-reranker-v2-base-multilingual" in found and "BAAI/bge-m3" not in found
    assert all("score" in row["outputs"] for row in found.values())
    assert rows(capsys, "no such words") == {}


def test_memory_follows_from_the_parameters_and_the_precision(capsys: pytest.CaptureFixture[str]) -> None:
    [whole] = rows(capsys, "bge-reranker-v2-m3", "--device", "cpu").values()
    [half] = rows(capsys, "bge-reranker-v2-m3", "--set", "worker.precision=bfloat16").values()
    assert whole["memory_bytes"] == 2 * half["memory_bytes"] == 568_000_000 * 4


def test_lines_fit_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["models", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 200 and max(map(len, lines)) <= 80
    assert any("..." in line.split()[0] for line in lines)
