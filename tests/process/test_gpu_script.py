"""The script of a card's figures in its short form on a CPU: a part that fails or takes too long stops no other."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import gpu, report
from benchmarks.gpu import Part
from tests.fakes.forking import Forking
from tests.harness import lives

ENDLESS = Part("endless", ("-c", "import signal; signal.pause()"), 0.5)
BROKEN = Part("broken", ("-c", "raise SystemExit(3)"), 60)


@pytest.fixture(autouse=True)
def _forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts and their servers are forked, with one torch thread; the report goes to the test's directory."""
    lives.share()
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "subprocess", Forking)
    monkeypatch.setenv("PENSTOCK_WORKER__TORCH_THREADS", "1")


def test_parts_that_fail_or_take_too_long_are_saved_as_such(tmp_path: Path) -> None:
    fine = Part("fine", ("-c", "pass"), 60)
    assert not gpu.run([ENDLESS, BROKEN, fine], "cpu")
    saved = json.loads((tmp_path / "gpu.json").read_text())
    codes = {one["part"]: one["code"] for one in saved["data"]}
    assert codes == {"endless": None, "broken": 3, "fine": 0}
    tables = {table["title"]: table["rows"] for table in saved["tables"]}
    assert [row[1] for row in tables["Parts"]] == ["out of time", "failed with 3", "done"]


@pytest.mark.parametrize("least", [True, pytest.param(False, marks=pytest.mark.long)])
def test_all_parts_run_and_are_saved(least: bool, tmp_path: Path) -> None:
    assert gpu.run(gpu.parts_of("cpu", least), "cpu"), (tmp_path / "gpu.json").read_text()
    scale = gpu.SCALES["least" if least else "cpu"]
    saved = json.loads((tmp_path / "gpu.json").read_text())
    tables = {table["title"]: table["rows"] for table in saved["tables"]}
    assert [row[0] for row in tables["steps: Steps"]] == [str(count) for count in scale.streams]
    assert [row[:3] for row in tables["steps: Prompts"]] == [[mode, *scale.prompts] for mode in gpu.MODES]
    assert [row[0] for row in tables["large: Large"]] == ["1"]
    assert [row[0] for row in tables["encoder: Encoder"]] == ["adapter", "direct"]
    prompts = [row[1:] for row in tables["steps: Prompts"]]
    figures = [*tables["steps: Steps"], *prompts, *tables["large: Large"]]
    # A time of a step is a difference of two times, which can be below zero where a step costs nothing.
    assert all(math.isfinite(figure) for row in figures for figure in row[1:])
    cycles = {row[0]: row[1] for row in tables["cycles: Memory after each unload"]}
    assert cycles == {"bench/sound, resident": scale.cycles, "bench/leaky, resident": scale.control}
    assert [row[:2] for row in tables["Parts"]] == [
        [name, "done"] for name in ("steps", "large", "encoder", "cycles")
    ]
