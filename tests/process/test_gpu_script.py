"""The script of a card's figures in its short form on a CPU: a part that fails or takes too long stops no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu, report
from benchmarks.gpu import Part
from tests.fakes.forking import Forking


def test_all_parts_run_and_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "subprocess", Forking)
    own = [part for part in gpu.parts_of("cpu") if part.name != "cycles"]
    endless = Part("endless", ("-c", "import signal; signal.pause()"), 0.5)
    broken = Part("broken", ("-c", "raise SystemExit(3)"), 60)
    assert not gpu.run([endless, broken, *own], "cpu")
    saved = json.loads((tmp_path / "gpu.json").read_text())
    codes = {one["part"]: one["code"] for one in saved["data"]}
    assert codes == {"endless": None, "broken": 3, "steps": 0, "large": 0, "encoder": 0}, saved["data"]
    tables = {table["title"]: table["rows"] for table in saved["tables"]}
    assert [row[0] for row in tables["steps: Steps"]] == ["1", "4"]
    assert [row[:2] for row in tables["steps: Prompts"]] == [[4, 96]]
    assert [row[0] for row in tables["large: Large"]] == ["1"]
    assert [row[0] for row in tables["encoder: Encoder"]] == ["adapter", "direct"]
    figures = [*tables["steps: Steps"], *tables["steps: Prompts"], *tables["large: Large"]]
    assert all(figure > 0 for row in figures for figure in row[1:])
    assert [row[1] for row in tables["Parts"]] == ["out of time", "failed with 3", "done", "done", "done"]
