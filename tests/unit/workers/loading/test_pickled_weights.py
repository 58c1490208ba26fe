"""Pickled weights: plain tensors are loaded as safetensors are, anything that runs code is refused by name."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.tiny.models import build, write_json
from tests.tiny.texts import mixed_lengths
from tests.unit.workers.adapters.test_dense_reference import encode, load
from workers.adapters.shared.checkpoint import CheckpointError, build_transformer
from workers.loading.source import SourceError, from_directory

CPU = torch.device("cpu")


class Bomb:
    """An object whose unpickling would run a command."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch exploded",)


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    """A tiny model whose weights are pickled tensors."""
    directory = build("plain_bert", tmp_path / "model")
    _pickle(directory)
    return directory


def test_plain_tensors_are_loaded(pickled: Path) -> None:
    assert from_directory(pickled) == pickled
    model = build_transformer(pickled, device=CPU, dtype=torch.float32)
    stored = torch.load(pickled / "pytorch_model.bin", weights_only=True)
    name = next(name for name in stored if name.endswith("word_embeddings.weight"))
    assert torch.equal(model.get_input_embeddings().weight, stored[name])


@pytest.mark.parametrize("how", ["pickle", "torch", "cut off", "list"])
def test_anything_else_is_refused_and_never_run(
    pickled: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pickled)
    path = pickled / "pytorch_model.bin"
    if how == "pickle":
        path.write_bytes(pickle.dumps({"a": Bomb()}))
    elif how == "torch":
        torch.save({"a": torch.ones(2), "b": Bomb()}, path)
    elif how == "list":
        torch.save([torch.ones(2)], path)
    else:
        path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(SourceError, match=r"pytorch_model\.bin is damaged or holds more than tensors"):
        from_directory(pickled)
    with pytest.raises(CheckpointError):
        build_transformer(pickled, device=CPU, dtype=torch.float32)
    assert not (pickled / "exploded").exists()


def test_modules_with_pickled_tensors_give_the_same_vectors(tmp_path: Path) -> None:
    directory = build("dense_projected", tmp_path / "model")
    wanted = encode(load(directory), mixed_lengths())
    for place in (directory, directory / "2_Dense"):
        _pickle(place)
    assert np.array_equal(encode(load(from_directory(directory)), mixed_lengths()), wanted)
    torch.save({"linear.weight": Bomb()}, directory / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(SourceError, match=r"pytorch_model\.bin is damaged or holds more than tensors"):
        from_directory(directory)
    with pytest.raises(FileNotFoundError, match="module 2_Dense has no"):
        load(directory)


def test_a_transformer_in_a_directory_of_its_own_may_be_pickled(tmp_path: Path) -> None:
    directory = build("dense_mean", tmp_path / "model")
    wanted = encode(load(directory), mixed_lengths())
    _pickle(directory)
    (directory / "0_Transformer").mkdir()
    for path in [path for path in directory.iterdir() if path.is_file() and path.name != "modules.json"]:
        path.rename(directory / "0_Transformer" / path.name)
    modules = json.loads((directory / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    write_json(directory / "modules.json", modules)
    assert np.array_equal(encode(load(from_directory(directory)), mixed_lengths()), wanted)


def _pickle(directory: Path) -> None:
    """Store the weights of a directory as pickled tensors."""
    weights = directory / "model.safetensors"
    torch.save(load_file(weights), directory / "pytorch_model.bin")
    weights.unlink()
