"""Files of models are read, never mapped; a load reads one version of all files, or fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import transformers

from ipc.catalog.entries import DirectorySource, ModelEntry
from ipc.settings import Settings
from tests.tiny import onnx_files
from tests.tiny.models import build
from workers.adapters.base import Adapter, LoadContext
from workers.adapters.dense import DenseAdapter
from workers.device.devices import Device
from workers.lifecycle.instance import Instance, LoadAbandoned
from workers.lifecycle.loading import Loader
from workers.loading import failure, reading
from workers.loading.program_files import external_files, nbytes_of
from workers.loading.reading import FilesChanged, files_of, mapped_files, unchanged


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a small encoder."""
    return build("dense_mean", tmp_path_factory.mktemp("stored") / "model")


@pytest.fixture
def model(stored: Path, tmp_path: Path) -> Path:
    """A copy of the encoder, to be damaged."""
    return Path(shutil.copytree(stored, tmp_path / "model"))


def pickle(directory: Path) -> Path:
    """Store the weights as torch does."""
    weights = directory / "model.safetensors"
    torch.save(reading.load_file(weights), directory / "pytorch_model.bin")
    weights.unlink()
    return directory


@pytest.mark.parametrize("form", ["safetensors", "pickled"])
def test_transformers_maps_no_file_and_keeps_its_values_when_the_file_is_cut(model: Path, form: str) -> None:
    right = {name: tensor.clone() for name, tensor in reading.load_file(model / "model.safetensors").items()}
    if form == "pickled":
        pickle(model)
    loaded = transformers.AutoModel.from_pretrained(str(model), dtype=torch.float32)
    assert mapped_files(model) == []
    for path in files_of(model):
        os.truncate(path, 0)
    state = loaded.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in right.items())


def test_both_libraries_read_although_their_callers_want_a_mapping(model: Path) -> None:
    weights = model / "model.safetensors"
    with safetensors.safe_open(weights, "pt", backend="mmap") as file:
        names = file.keys()
        whole, part = file.get_slice(names[0])[...], file.get_slice(names[0])[:1]
        assert file.metadata() == {"format": "pt"} and list(file.get_slice(names[0]).get_shape()) == list(
            whole.shape
        )
    tensors = safetensors.torch.load_file(weights)
    assert torch.equal(whole, tensors[names[0]]) and torch.equal(part, whole[:1])
    pickled = torch.load(pickle(model) / "pytorch_model.bin", mmap=True)
    assert mapped_files(model) == []
    assert all(torch.equal(pickled[name], tensor) for name, tensor in tensors.items())


def test_tied_weights_stay_one_tensor(tmp_path: Path) -> None:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(str(build("rr_qwen3", tmp_path / "model")))
    assert loaded.lm_head.weight.data_ptr() == loaded.get_input_embeddings().weight.data_ptr()


def test_a_file_that_is_cut_while_it_is_open_is_an_error_and_no_end_of_the_process(model: Path) -> None:
    with reading.safe_open(model / "model.safetensors", "pt") as file:
        name = file.keys()[-1]
        os.truncate(model / "model.safetensors", 4096)
        with pytest.raises(safetensors.SafetensorError):
            file.get_slice(name)[...]


def test_a_mapped_file_is_found(model: Path) -> None:
    link = model / "linked.bin"
    link.symlink_to(model / "tokenizer.json")
    held = torch.UntypedStorage.from_file(str(model / "tokenizer.json"), False, 64)
    assert mapped_files(model) == [link, model / "tokenizer.json"]
    del held
    assert mapped_files(model) == []


CHANGES: dict[str, Callable[[Path], object]] = {
    "overwritten": lambda model: (model / "model.safetensors").write_bytes(b"x" * 100),
    "replaced by a copy of the same size and time": lambda model: _replace(model / "config.json"),
    "deleted": lambda model: (model / "config.json").unlink(),
    "added": lambda model: (model / "adapter_config.json").write_text("{}"),
}


def _replace(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_change_while_they_are_read_are_an_error_in_place_of_any_other(
    model: Path, change: str
) -> None:
    with pytest.raises(FilesChanged, match="changed while the model was read"), unchanged(model):
        CHANGES[change](model)
    with pytest.raises(FilesChanged) as found, unchanged(model):
        (model / "vocab.txt").write_text(change)
        raise ValueError("half a file")
    assert isinstance(found.value.__cause__, ValueError)
    told = failure.classify(found.value)
    assert (told.error_class, told.permanent, told.retry_after_s) == ("CHANGED", False, 2.0)


def test_of_an_adapter_only_its_own_files_count(model: Path) -> None:
    with unchanged(model, only=("config.json", "none.json")):
        (model / "vocab.txt").write_text("of another tool")
    with pytest.raises(FilesChanged), unchanged(model, only=("config.json", "none.json")):
        (model / "none.json").write_text("{}")


def test_other_errors_and_loads_that_nobody_wants_stay_what_they_are(model: Path) -> None:
    with unchanged(model):
        (model / ".lock").touch()
    with pytest.raises(ValueError, match="damaged"), unchanged(model):
        raise ValueError("damaged")
    with pytest.raises(LoadAbandoned), unchanged(model, (LoadAbandoned,)):
        (model / "config.json").unlink()
        raise LoadAbandoned


def test_a_load_during_which_files_change_fails_and_the_next_one_has_the_new_files(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = ModelEntry("m", DirectorySource(str(model)), adapter="dense", outputs={})
    settings = Settings()
    run = msgspec.structs.replace(settings.run, state_dir=str(tmp_path / "state"))
    loader = Loader(
        msgspec.structs.replace(settings, run=run),
        Device(torch.device("cpu"), "cpu", "", 1),
        lambda work: work(),
    )
    load, weights = DenseAdapter.load, model / "model.safetensors"

    def interrupted(context: LoadContext) -> Adapter:
        adapter = load(context)
        safetensors.torch.save_file(
            {name: -tensor for name, tensor in reading.load_file(weights).items()}, weights, {"format": "pt"}
        )
        return adapter

    with monkeypatch.context() as patched:
        patched.setattr(DenseAdapter, "load", interrupted)
        with pytest.raises(FilesChanged, match=r"model\.safetensors"):
            loader.load(Instance([entry]), lambda *_: None, lambda: None)
    loader.load(Instance([entry]), lambda *_: None, lambda: None)
    assert len(list((tmp_path / "state" / "fingerprints").iterdir())) == 1, "of the new files"


def test_files_beside_an_onnx_program_are_found_as_the_program_names_them(tmp_path: Path) -> None:
    home = tmp_path / "1"
    (home / "sub").mkdir(parents=True)
    (tmp_path / "outside").write_bytes(b"1234")
    (home / "link").symlink_to(tmp_path / "outside")
    program = home / "model.onnx"
    for name, inside in {
        "a": True,
        "./a": True,
        "sub/b": True,
        "../outside": False,
        "link": False,
        "none": False,
    }.items():
        (home / "a").write_bytes(b"12")
        (home / "sub" / "b").write_bytes(b"123")
        program.write_bytes(onnx_files.table(name, 1, 1))
        found = external_files(program)
        assert found == ({name: (home / name).resolve()} if inside else {})
        assert nbytes_of(program, found) == program.stat().st_size + sum(
            p.stat().st_size for p in found.values()
        )
    whole = onnx_files.table("a", 1, 1)
    for length in range(len(whole)):
        program.write_bytes(whole[:length])
        assert external_files(program) in ({}, {"a": home / "a"})


def test_onnxruntime_maps_no_data(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    from workers.adapters.onnx import open_session

    table = np.random.default_rng(0).random((64, 32), np.float32)
    (tmp_path / "model.onnx").write_bytes(onnx_files.table("data", 64, 32))
    (tmp_path / "data").write_bytes(table.tobytes())
    program = tmp_path / "model.onnx"
    outside, options = external_files(program), runtime.SessionOptions()
    session = open_session(runtime, program, outside, options, ["CPUExecutionProvider"])
    assert mapped_files(tmp_path) == []
    os.truncate(tmp_path / "data", 0)
    [rows] = session.run(None, {"INPUT": np.array([[5], [63]])})
    assert np.array_equal(rows[:, 0], table[[5, 63]])
