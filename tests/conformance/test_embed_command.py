"""`penstock embed` against a running server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from penstock.cli import main
from tests.fakes.adapter import vector_of
from tests.harness.server import Server


def test_a_file_of_texts_becomes_a_file_of_vectors(
    fakes: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
    texts = [f"text number {number}" for number in range(300)] + ["one that fails #nan"]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.npy"
    source.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    flags = ("--field", "body", "--batch", "16", "--url", fakes.url)
    assert main(["embed", str(source), str(target), "--model", "fake/echo", *flags]) == 1
    printed = capsys.readouterr()
    assert f"300 vectors of 16 values in {target}" in printed.out
    assert "line 301: " in printed.err and "1 lines have no vector" in printed.err
    found = np.load(target)
    np.testing.assert_allclose(found[:300], [vector_of(text, 16) for text in texts[:300]], atol=1e-6)
    assert np.isnan(found[300]).all()
    assert main(["embed", str(source), str(target), "--model", "fake/absent", "--force", *flags]) == 1
    assert "404: " in capsys.readouterr().err and np.load(target).shape == found.shape
