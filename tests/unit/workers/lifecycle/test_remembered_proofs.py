"""A proof that an earlier load made is skipped only by loads whose canned inference gives the same values."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ipc.catalog.entries import DirectorySource, ModelEntry, OutputSpec
from ipc.errors import InferenceFailed
from ipc.settings import Run, Settings
from tests.tiny import chat_models
from workers.adapters.base import Adapter, LoadContext
from workers.adapters.causal import CausalAdapter
from workers.device.devices import Device
from workers.generation import proof
from workers.lifecycle import loading
from workers.lifecycle.fingerprint import FingerprintMismatch
from workers.lifecycle.instance import Instance
from workers.lifecycle.loading import Loader


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a small chat model."""
    return chat_models.save("llama3", tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Has an item for each comparison of a proof."""
    counted: list[int] = []
    near = proof._are_near
    monkeypatch.setattr(proof, "_are_near", lambda *args: counted.append(1) is None and near(*args))
    yield counted


def load(model: Path, home: Path, state: str = "state") -> None:
    """Load as a server does whose state lies in `state`; findings are those of the user."""
    run = Run(state_dir=str(home / state), cache_dir=str(home / "cache"))
    device = Device(torch.device("cpu"), "cpu", "", 1)
    entry = ModelEntry(
        "tiny/chat",
        DirectorySource(str(model)),
        adapter="causal",
        outputs={"chat": OutputSpec()},
    )
    loader = Loader(Settings(run=run), device, lambda work: work())
    loader.load(Instance([entry]), lambda *_: None, lambda: None)


def proofs(home: Path) -> list[Path]:
    return list((home / "cache" / "findings" / "packed").glob("*"))


def test_a_server_with_other_state_skips_the_proof_and_compares(
    model: Path, tmp_path: Path, compared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model, tmp_path)
    assert compared and len(proofs(tmp_path)) == 1
    compared.clear()
    load(model, tmp_path, "another port")
    assert not compared, "the proof was made before"
    prove = loading.prove

    def other(*load: Any, **how: Any) -> Mapping[str, list[float]]:
        return {name: [value * 1.1 for value in values] for name, values in prove(*load, **how).items()}

    monkeypatch.setattr(loading, "prove", other)
    with pytest.raises(FingerprintMismatch, match="whose proof is remembered"):
        load(model, tmp_path, "a third port")
    assert not (tmp_path / "a third port").exists(), "what is wrong is not recorded"


@pytest.mark.parametrize("fault", ["inference", "fingerprint", "files"])
def test_a_load_that_fails_behind_the_proof_leaves_no_proof(
    fault: str, model: Path, tmp_path: Path, compared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **how: object) -> None:
        raise InferenceFailed("broken")

    def touched(context: LoadContext) -> Adapter:
        adapter = built(context)
        path = model / "config.json"
        path.chmod(stat.S_IMODE(path.stat().st_mode))
        return adapter

    built = CausalAdapter.load
    with monkeypatch.context() as patched:
        if fault == "files":
            patched.setattr(CausalAdapter, "load", touched)
        else:
            place = (loading, "prove") if fault == "inference" else (loading.fingerprint, "check")
            patched.setattr(*place, broken)
        with pytest.raises((InferenceFailed, loading.reading.FilesChanged)):
            load(model, tmp_path)
    assert compared and not proofs(tmp_path)
    compared.clear()
    load(model, tmp_path)
    assert compared and len(proofs(tmp_path)) == 1


def test_state_and_findings_are_private_from_their_roots_on(model: Path, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        load(model, tmp_path)
    finally:
        os.umask(before)
    for place in ("state", "state/fingerprints", "cache/findings", "cache/findings/packed"):
        assert stat.S_IMODE((tmp_path / place).stat().st_mode) == 0o700, place


def test_what_a_load_took_is_the_estimate_of_the_first_load_of_a_later_process(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "REPORT_EVERY_S", 0.0)
    entry = ModelEntry("tiny/chat", DirectorySource(str(model)))
    assert 1.0 <= loading.expected_s(entry) < 2.0, "by the size of the weights"
    assert loading.expected_s(entry, 41.5) == 41.5
    load(model, tmp_path)
    [file] = (tmp_path / "cache" / "findings" / "loads").glob("*")
    seconds = float(file.read_text())
    assert 0 < seconds < 600
    expected: list[float] = []
    told = loading.expected_s
    monkeypatch.setattr(loading, "expected_s", lambda *args: expected.append(told(*args)) or expected[-1])
    file.write_text("37.5")
    load(model, tmp_path)
    assert expected == [37.5]
    file.write_text("[]")
    load(model, tmp_path)
    assert expected[1] == told(entry), "a damaged file is as good as none"
