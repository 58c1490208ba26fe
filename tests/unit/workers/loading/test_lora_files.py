"""LoRA adapters as files: what PEFT's config may say, which weights are taken, and where names lead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ipc.catalog.entries import DirectorySource, HubSource, ModelEntry, is_lora_name
from ipc.catalog.reading import read_entry
from ipc.errors import ConfigError
from tests.tiny import loras
from workers.loading import lora_files
from workers.loading.lora_files import Lora, UnsupportedLora
from workers.loading.source import SourceError

PATH = "encoder.layer.0.attention.self.query"
ENTRY = ModelEntry("org/m", DirectorySource("/weights"), loras={"listed": DirectorySource("/loras/listed")})


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    """An adapter for one layer of 8 by 8."""
    (tmp_path / "model").mkdir()
    save_file({f"{PATH}.weight": torch.zeros(8, 8)}, tmp_path / "model" / "model.safetensors")
    return loras.write(tmp_path / "dir" / "lora", tmp_path / "model", ("query",))


def change(lora: Path, **fields: Any) -> None:
    """Change fields of an adapter's config."""
    config = json.loads((lora / loras.CONFIG).read_text())
    (lora / loras.CONFIG).write_text(json.dumps({**config, **fields}))


@pytest.mark.parametrize(
    "fields",
    [
        {"peft_type": "IA3"},
        {"use_dora": True},
        {"modules_to_save": ["classifier"]},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"fan_in_fan_out": True},
        {"layer_replication": [[0, 2]]},
        {"trainable_token_indices": [1]},
        {"target_parameters": ["experts.weight"]},
        {"init_lora_weights": "pissa"},
        {"target_modules": ["value"]},
        {"target_modules": ".*value"},
        {"target_modules": "("},
        {"r": 0},
        {"r": "4"},
        {"lora_alpha": [1]},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_what_cannot_be_applied_as_trained_is_refused_by_its_name(lora: Path, fields: dict[str, Any]) -> None:
    change(lora, **fields)
    with pytest.raises(UnsupportedLora) as caught:
        Lora(lora)
    assert next(iter(fields)) in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"init_lora_weights": "gaussian", "loftq_config": {}, "modules_to_save": []},
        {"target_modules": "all-linear"},
        {"target_modules": ["self.query"]},
        {"target_modules": r"encoder\..*\.query", "revision": None, "some_field_of_tomorrow": 3},
    ],
)
def test_what_does_not_change_the_result_is_taken(lora: Path, fields: dict[str, Any]) -> None:
    change(lora, **fields)
    [weights] = Lora(lora).read().values()
    assert weights.scale == 2.0 and weights.down.shape == (4, 8)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (f"base_model.model.{PATH}.bias", torch.zeros(8)),
        (f"base_model.model.{PATH}.lora_magnitude_vector", torch.zeros(8)),
        ("base_model.model.embeddings.lora_embedding_A", torch.zeros(4, 8)),
        ("base_model.model.other.query.lora_A.weight", torch.zeros(4, 8)),
        (f"base_model.model.{PATH}.lora_A.weight", torch.full((4, 8), torch.nan)),
        (f"base_model.model.{PATH}.lora_A.weight", torch.zeros((4, 8), dtype=torch.int8)),
    ],
)
def test_other_weights_and_values_are_refused(lora: Path, name: str, tensor: torch.Tensor) -> None:
    tensors = load_file(lora / loras.WEIGHTS)
    save_file({**tensors, name: tensor}, lora / loras.WEIGHTS)
    with pytest.raises(UnsupportedLora):
        Lora(lora).read()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip", b"\xff" * 64])
def test_files_that_are_no_safetensors_are_refused(lora: Path, content: bytes) -> None:
    (lora / loras.WEIGHTS).write_bytes(content)
    with pytest.raises(UnsupportedLora, match="safetensors"):
        Lora(lora)


def test_a_cut_off_file_and_a_config_that_is_no_map_are_refused(lora: Path) -> None:
    whole = (lora / loras.WEIGHTS).read_bytes()
    (lora / loras.WEIGHTS).write_bytes(whole[:-4])
    with pytest.raises(UnsupportedLora):
        Lora(lora)
    (lora / loras.WEIGHTS).write_bytes(whole)
    for content in (b"[]", b"{", b"null", b" " * (2 << 20), b'{"peft_type": "\xff"}'):
        (lora / loras.CONFIG).write_bytes(content)
        with pytest.raises(UnsupportedLora):
            Lora(lora)


@pytest.mark.parametrize(
    "name",
    [
        "..", ".", "../lora", "dir/..", "./lora", "/etc", "a/b/c", "lora/", "/lora", "", "lo ra", "lora\n", "lora\0",
        "l\u00f6ra", "a" * 65, "..%2flora", "dir\\lora", "...",
    ],
)  # fmt: skip
def test_names_that_are_no_plain_parts_lead_nowhere(lora: Path, name: str) -> None:
    assert not is_lora_name(name)
    assert lora_files.find(ENTRY, [str(lora.parent)], name) is None


def test_names_are_looked_up_in_the_entry_and_then_below_the_directories(lora: Path) -> None:
    dirs = [str(lora.parent / "missing"), str(lora.parent)]
    assert lora_files.find(ENTRY, dirs, "listed") == DirectorySource("/loras/listed")
    assert lora_files.find(ENTRY, dirs, "lora") == DirectorySource(str(lora))
    assert lora_files.find(ENTRY, [str(lora.parent.parent)], "dir/lora") == DirectorySource(str(lora))
    assert lora_files.find(ENTRY, dirs, "other") is None
    assert lora_files.find(ENTRY, [str(lora.parent.parent)], "dir") is None, "it holds no adapter itself"


def test_links_that_lead_out_of_the_directory_do_not_exist(lora: Path, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    (inside / "files").mkdir(parents=True)
    (inside / "way-out").symlink_to(lora)
    for name in (loras.CONFIG, loras.WEIGHTS):
        (inside / "files" / name).symlink_to(lora / name)
    (inside / "loop").symlink_to("loop")
    for name in ("way-out", "files", "loop"):
        assert lora_files.find(ENTRY, [str(inside)], name) is None, name
    (lora.parent / "alias").symlink_to("lora")
    assert lora_files.find(ENTRY, [str(lora.parent)], "alias") == DirectorySource(str(lora))


def test_a_change_of_the_files_is_seen_and_a_missing_file_is_named(lora: Path) -> None:
    source = DirectorySource(str(lora))
    before = lora_files.state_of(source)
    assert lora_files.fetch(source) == lora
    change(lora, r=16)
    assert lora_files.state_of(source) != before
    (lora / loras.WEIGHTS).rename(lora / "adapter_model.bin")
    with pytest.raises(SourceError, match=r"no adapter_model\.safetensors; weights in another format"):
        lora_files.fetch(source)
    assert lora_files.state_of(HubSource("org/lora")) == ()


def test_a_catalog_file_names_adapters_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    text = (
        "id: org/m\nsource: {kind: directory, path: weights}\nloras: {%s: {kind: directory, path: loras/a}}\n"
    )
    path.write_text(text % "team/a")
    assert read_entry(path).loras == {"team/a": DirectorySource(str(tmp_path / "loras" / "a"))}
    path.write_text(text % '"../a"')
    with pytest.raises(ConfigError, match="loras"):
        read_entry(path)
