"""Fingerprints of loaded models: recorded once, compared from then on, found by what they depend on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from ipc.catalog import DirectorySource, ModelEntry
from tests.fakes.weighing import WeighingAdapter
from workers.lifecycle import fingerprint
from workers.lifecycle.fingerprint import FingerprintMismatch
from workers.lifecycle.proof import prove
from workers.loading.failure import classify

ENTRY = ModelEntry("org/m", DirectorySource("/weights"))
VALUES = [0.5, -0.25, 0.125]
CPU = torch.device("cpu")


def check(
    found: list[float], path: Path, entry: ModelEntry = ENTRY, dtype: torch.dtype = torch.float32
) -> None:
    """Compare as a load does."""
    fingerprint.check(entry, found, dtype, path)


def test_the_first_load_records_and_later_ones_compare(tmp_path: Path) -> None:
    path = tmp_path / "state" / "f.json"
    check(VALUES, path)
    check([value * 1.0005 for value in VALUES], path)
    with pytest.raises(FingerprintMismatch, match="the same files gave before"):
        check([value * 1.01 for value in VALUES], path)
    with pytest.raises(FingerprintMismatch):
        check(VALUES[:2], path)
    with pytest.raises(FingerprintMismatch):
        check([float("nan"), *VALUES[1:]], path)


def test_half_precision_may_differ_more(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    check(VALUES, path, dtype=torch.bfloat16)
    check([value * 1.05 for value in VALUES], path, dtype=torch.bfloat16)
    with pytest.raises(FingerprintMismatch):
        check([-value for value in VALUES], path, dtype=torch.bfloat16)


def test_the_values_of_a_catalog_entry_count_at_the_first_load_already(tmp_path: Path) -> None:
    stated = replace(ENTRY, fingerprint=(0.5, -0.25))
    check(VALUES, tmp_path / "f.json", stated)
    with pytest.raises(FingerprintMismatch, match="catalog entry"):
        check([0.5, 0.25, 0.125], tmp_path / "other.json", stated)
    assert not (tmp_path / "other.json").exists(), "what is wrong is not recorded"


def test_a_mismatch_is_a_permanent_failure_of_its_own_class() -> None:
    found = classify(FingerprintMismatch("differs"))
    assert (found.error_class, found.permanent) == ("FINGERPRINT", True)


def test_a_damaged_record_is_written_anew_and_a_missing_disk_costs_the_record_only(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text("{")
    check(VALUES, path)
    with pytest.raises(FingerprintMismatch):
        check([1.0, 1.0, 1.0], path)
    (tmp_path / "file").write_text("")
    check(VALUES, tmp_path / "file" / "f.json")


def test_a_record_belongs_to_files_entry_precision_and_device(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")

    def path(entry: ModelEntry = ENTRY, dtype: torch.dtype = torch.float32) -> Path:
        return fingerprint.path_of(tmp_path, entry, tmp_path, dtype, CPU)

    first = path()
    assert path() == first
    others = {
        path(replace(ENTRY, loadtime={"a": 1})),
        path(replace(ENTRY, proof="hi")),
        path(dtype=torch.float16),
    }
    os.utime(weights, (1, 1))
    others.add(path())
    assert len(others | {first}) == 5


def test_the_canned_inference_gives_the_first_values_and_refuses_what_is_not_finite() -> None:
    adapter = WeighingAdapter({"dims": 16}, 512)
    values = prove(adapter, ENTRY)
    assert len(values) == 8 and prove(adapter, ENTRY) == values
    assert prove(adapter, replace(ENTRY, proof="something else")) != values
    with pytest.raises(Exception, match="finite"):
        prove(adapter, replace(ENTRY, proof="#nan"))
