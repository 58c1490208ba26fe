"""Fingerprints of loaded models: recorded once, compared from then on, found by what they depend on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from ipc.catalog.entries import DirectorySource, ModelEntry, OutputSpec
from ipc.errors import InferenceFailed, InvalidInput
from ipc.wire.messages import Call, InputItem
from tests.fakes.weighing import WeighingAdapter
from workers.adapters.base import ItemFailure, Prepared
from workers.device import findings
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
    fingerprint.check(entry, {"encode.dense": found}, dtype, path)


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


def test_the_fingerprint_of_many_outputs_and_runs_is_compared_too(tmp_path: Path) -> None:
    path = tmp_path / "state" / "f.json"
    values = {f"infer.{number}.OUTPUT": [number + 0.123456789] * 8 for number in range(1000)}
    fingerprint.check(ENTRY, values, torch.float32, path)
    values["infer.999.OUTPUT"] = [0.0] * 8
    with pytest.raises(FingerprintMismatch):
        fingerprint.check(ENTRY, values, torch.float32, path)


def test_only_the_fingerprints_that_were_used_last_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "MOST_FILES", 2)
    paths = [tmp_path / "state" / f"{number}.json" for number in range(3)]
    for at, path in enumerate(paths[:2]):
        check(VALUES, path)
        os.utime(path, (at, at))
    check(VALUES, paths[0])
    check(VALUES, paths[2])
    assert [path.exists() for path in paths] == [True, False, True], (
        "the one that was compared counts as used"
    )


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


def test_a_record_belongs_to_every_file_that_values_may_come_from_and_to_what_the_entry_offers(
    tmp_path: Path,
) -> None:
    def path(entry: ModelEntry = ENTRY) -> Path:
        return fingerprint.path_of(tmp_path, entry, tmp_path, torch.float32, CPU)

    seen = [path()]
    for name in ("config.json", "modules.json", "1_Pooling/config.json", "tokenizer.model", "head.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
        seen.append(path())
    seen.append(path(replace(ENTRY, outputs={"dense": OutputSpec(), "score": OutputSpec()})))
    seen.append(path(replace(ENTRY, inputs=("text", "image"))))
    assert len(set(seen)) == len(seen)
    now = path()
    (tmp_path / "README.md").write_text("x")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "lock").write_text("x")
    assert path() == now


def test_an_identity_changes_with_a_file_although_a_tool_keeps_its_size_and_time(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    os.utime(weights, (1, 1))

    def identity(entry: ModelEntry = ENTRY, adapter: type = WeighingAdapter) -> str:
        return fingerprint.identity_of(entry, tmp_path, adapter, torch.float32, CPU)

    first = identity()
    assert identity() == first
    assert len({first, identity(replace(ENTRY, loadtime={"a": 1})), identity(adapter=ModelEntry)}) == 3
    other = tmp_path / "new"
    other.write_bytes(b"two")
    os.utime(other, (1, 1))
    assert other.stat().st_mtime_ns == weights.stat().st_mtime_ns
    other.replace(weights)
    assert identity() != first


def test_findings_may_be_more_or_fewer_while_the_values_of_tensors_may_not(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    found = {"encode.sparse.values": [2.0, 1.0], "extract.extraction": [0.9, 0.5], "score.score": [0.25]}
    fingerprint.check(ENTRY, {**found, "encode.sparse.values": [2.0, 1.0, 0.0]}, torch.float32, path)
    fingerprint.check(ENTRY, found, torch.float32, path)
    fingerprint.check(ENTRY, {**found, "extract.extraction": [0.9]}, torch.float32, path)
    fingerprint.check(ENTRY, {**found, "extract.extraction": []}, torch.float32, path)
    fingerprint.check(ENTRY, {**found, "extract.extraction": [0.9, 0.5, 0.4]}, torch.float32, path)
    for wrong in ({"extract.extraction": [0.5, 0.9]}, {"score.score": [0.5]}, {"score.score": [0.25, 0.1]}):
        with pytest.raises(FingerprintMismatch):
            fingerprint.check(ENTRY, {**found, **wrong}, torch.float32, path)


def test_the_canned_inference_gives_the_first_values_and_refuses_what_is_not_finite() -> None:
    adapter = WeighingAdapter({"dims": 16}, 512)
    values = prove(adapter, ENTRY)
    assert len(values["encode.dense"]) == 8 and prove(adapter, ENTRY) == values
    assert prove(adapter, replace(ENTRY, proof="something else")) != values
    with pytest.raises(Exception, match="finite"):
        prove(adapter, replace(ENTRY, proof="#nan"))


class Answering(WeighingAdapter):
    """Gives `answer` for every item, or raises it."""

    answer: ItemFailure | Exception

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """The answer."""
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer] * len(items)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (ValueError("broken tokenizer"), ValueError),
        (KeyError("head"), KeyError),
        (ItemFailure("INFERENCE_ERROR", "broken"), InferenceFailed),
        (InvalidInput("wants a picture"), InferenceFailed),
        (ItemFailure("INVALID_INPUT", "wants a picture"), InferenceFailed),
    ],
)
def test_a_model_that_breaks_on_its_canned_input_or_takes_none_is_not_proven(
    answer: ItemFailure | Exception, error: type[Exception]
) -> None:
    adapter = Answering({}, 512)
    adapter.answer = answer
    with pytest.raises(error):
        prove(adapter, ENTRY)


def test_a_family_may_say_that_no_canned_input_suits_it() -> None:
    adapter = Answering({}, 512)
    adapter.answer = InvalidInput("wants a recording")
    adapter.spec = replace(adapter.spec, needs_proof=False)  # type: ignore[misc]
    assert prove(adapter, ENTRY) == {}
