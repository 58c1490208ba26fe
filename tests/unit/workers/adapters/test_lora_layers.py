"""LoRA adapters on loaded models, against the same model with W + scale * B A merged into its weights."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ipc.wire.messages import EncodeCall, InputItem
from tests.tiny import loras
from tests.tiny.models import build
from tests.tiny.texts import mixed_lengths
from workers.adapters import registry
from workers.adapters.base import Adapter, LoadContext
from workers.adapters.shared import linears
from workers.adapters.shared.lora import LoraLayers
from workers.loading.lora_files import UnsupportedLora

TEXTS = mixed_lengths()[:6]
LIMIT = 1e-5
FAMILIES = {
    "dense_mean": ("dense", loras.ATTENTION),
    "dense_modernbert": ("dense", ("attn.Wqkv", "mlp.Wo")),
    "dense_mpnet": ("dense", ("attention.attn.q", "output.dense")),
    "bge_m3": ("bge_m3", loras.ATTENTION),
    "splade": ("splade", ("attention.self.query", "predictions.transform.dense")),
    "colbert_pylate": ("colbert", ("attention.self.key", "intermediate.dense")),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Keep torch off cores that other tests use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(family: str, directory: Path, dtype: torch.dtype = torch.float32) -> Adapter:
    """The adapter of a directory on CPU."""
    found: Adapter = registry.resolve(family).load(
        LoadContext(
            directory=directory,
            model_id=directory.name,
            device=torch.device("cpu"),
            dtype=dtype,
            max_sequence_length=None,
            options={},
            progress=lambda phase, fraction: None,
        )
    )
    return found


def layers_of(adapter: Adapter) -> LoraLayers:
    """The LoRA adapters of a model."""
    assert adapter.loras is not None
    return adapter.loras


@torch.inference_mode()
def results(adapter: Adapter, lora: str = "") -> dict[str, np.ndarray]:
    """Every output for all texts as flat arrays; sparse ones filled up to the vocabulary."""
    outputs = frozenset(adapter.dims)
    call = EncodeCall([], sorted(outputs), lora=lora)
    prepared = adapter.prepare([InputItem(text) for text in TEXTS], call)
    with adapter.using(lora):
        found: Mapping[str, Any] = adapter.encode(adapter.collate(prepared), outputs)  # type: ignore[arg-type]
    dense = {name: value.numpy() for name, value in found.items() if name != "sparse"}
    if "sparse" in found:
        filled = np.zeros((len(TEXTS), adapter.dims["sparse"]), np.float32)
        for row, indices, values in zip(filled, found["sparse"].indices, found["sparse"].values, strict=True):
            row[indices] = values
        dense["sparse"] = filled
    return dense


def assert_equal(got: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    """Equal within the limit of fp32, output by output."""
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert float(np.abs(got[name] - value).max()) <= LIMIT * max(1.0, float(np.abs(value).max())), name


def differ(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> bool:
    """Whether any output is far from the other's."""
    return any(
        first[name].shape != second[name].shape or float(np.abs(first[name] - second[name]).max()) > 1e-3
        for name in first
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("model", FAMILIES)
def test_an_adapter_gives_what_the_merged_weights_give(tmp_path: Path, model: str) -> None:
    family, targets = FAMILIES[model]
    base = build(model, tmp_path / "base")
    lora = loras.write(tmp_path / "lora", base, targets)
    wanted = results(load(family, loras.merged(base, lora, tmp_path / "merged", 2.0)))
    adapter = load(family, base)
    plain = results(adapter)
    layers_of(adapter).install("some", layers_of(adapter).fit(lora))
    with layers_of(adapter).traced("some"):
        results(adapter, "some")
    assert_equal(results(adapter, "some"), wanted)
    assert_equal(results(adapter), plain)
    assert differ(plain, wanted), "an adapter that changes nothing would prove nothing"


def test_the_digest_of_an_adapter_is_that_of_its_content(tmp_path: Path) -> None:
    base = build("dense_mean", tmp_path / "base")
    layers = layers_of(load("dense", base))
    first = loras.write(tmp_path / "first", base)
    digest = layers.fit(first).digest
    assert digest and layers.fit(shutil.copytree(first, tmp_path / "copy")).digest == digest
    weights = load_file(first / "adapter_model.safetensors")
    name = next(iter(weights))
    weights[name] = weights[name] + 1
    save_file(weights, first / "adapter_model.safetensors")
    assert layers.fit(first).digest != digest


def test_layers_laid_out_for_onednn_take_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not linears.laid_out_dtypes():
        pytest.skip("this torch has no oneDNN linear operators")
    base = build("dense_mean", tmp_path / "base")
    lora = loras.write(tmp_path / "lora", base)
    wanted = results(load("dense", loras.merged(base, lora, tmp_path / "merged", 2.0)))
    monkeypatch.setattr(linears, "_is_better", lambda layers, rows: True)
    adapter = load("dense", base)
    layers_of(adapter).install("some", layers_of(adapter).fit(lora))
    assert_equal(results(adapter, "some"), wanted)


def test_patterns_and_the_square_root_scale_apply_to_the_layers_that_they_name(tmp_path: Path) -> None:
    base = build("dense_last", tmp_path / "base")
    lora = loras.write(
        tmp_path / "lora",
        base,
        ("q_proj", "v_proj", "mlp.down_proj"),
        ranks={"v_proj": 2},
        target_modules=r".*\.(self_attn\.[qv]_proj|mlp\.down_proj)",
        rank_pattern={"v_proj": 2},
        alpha_pattern={r".*self_attn\.q_proj": 6},
        use_rslora=True,
    )
    scales = {"q_proj": 6 / 2, "v_proj": 8 / math.sqrt(2), "down_proj": 8 / 2}
    wanted = results(load("dense", loras.merged(base, lora, tmp_path / "merged", scales)))
    adapter = load("dense", base)
    layers_of(adapter).install("some", layers_of(adapter).fit(lora))
    assert_equal(results(adapter, "some"), wanted)


def test_several_adapters_stay_apart_and_leave_no_trace(tmp_path: Path) -> None:
    base = build("dense_mean", tmp_path / "base")
    adapter = load("dense", base)
    layers, plain = layers_of(adapter), results(adapter)
    wanted = {}
    for seed, targets in enumerate((loras.ATTENTION, ("output.dense",))):
        name = f"lora-{seed}"
        lora = loras.write(tmp_path / name, base, targets, seed=seed)
        wanted[name] = results(load("dense", loras.merged(base, lora, tmp_path / f"{name}-merged", 2.0)))
        layers.install(name, layers.fit(lora))
    for _ in range(2):
        for name, expected in wanted.items():
            assert_equal(results(adapter, name), expected)
            assert_equal(results(adapter), plain)
    first = layers._installed["lora-0"]
    layers.install("lora-0", layers.fit(tmp_path / "lora-1"))
    layers.remove("lora-0", first)
    assert_equal(results(adapter, "lora-0"), wanted["lora-1"])
    for name in wanted:
        layers.remove(name, layers._installed[name])
    assert not layers._hooks
    assert_equal(results(adapter), plain)
    with pytest.raises(KeyError):
        results(adapter, "lora-0")


def test_the_proof_of_an_adapter_leaves_that_of_a_suspended_batch_active(tmp_path: Path) -> None:
    base = build("dense_mean", tmp_path / "base")
    adapter = load("dense", base)
    layers = layers_of(adapter)
    for seed, name in enumerate(("suspended", "new")):
        layers.install(name, layers.fit(loras.write(tmp_path / name, base, seed=seed)))
    wanted = results(adapter, "suspended")
    with adapter.using("suspended"):
        with layers.traced("new"):
            results(adapter, "new")
        assert_equal(results(adapter), wanted)


def test_paths_are_found_with_and_without_the_prefix_of_a_model_with_a_head(tmp_path: Path) -> None:
    whole, bare = build("plain_splade", tmp_path / "whole"), build("dense_mean", tmp_path / "bare")
    trained_whole, trained_bare = (
        loras.write(tmp_path / "with", whole),
        loras.write(tmp_path / "without", bare),
    )
    on_bare = layers_of(load("dense", bare)).fit(trained_whole)
    on_whole = layers_of(load("splade", whole)).fit(trained_bare)
    assert all(path.startswith("encoder.layer.") for path in on_bare.deltas)
    assert all(path.startswith("bert.encoder.layer.") for path in on_whole.deltas)


def test_half_precision_keeps_the_layers_dtype_and_counts_its_bytes(tmp_path: Path) -> None:
    base = build("dense_mean", tmp_path / "base")
    lora = loras.write(tmp_path / "lora", base)
    adapter = load("dense", base, torch.bfloat16)
    fitted = layers_of(adapter).fit(lora)
    assert {tensor.dtype for delta in fitted.deltas.values() for tensor in delta} == {torch.bfloat16}
    assert fitted.nbytes == 2 * 2 * (4 * 64 + 64 * 4) * 2, "two layers of two targets, rank 4, width 64"
    layers_of(adapter).install("some", fitted)
    assert np.isfinite(results(adapter, "some")["dense"]).all()


def test_a_layer_that_the_model_does_not_run_by_itself_is_told(tmp_path: Path) -> None:
    base = build("dense_mean", tmp_path / "base")
    adapter = load("dense", base)
    layers = layers_of(adapter)
    layers.install("some", layers.fit(loras.write(tmp_path / "lora", base)))
    with pytest.raises(UnsupportedLora, match="does not run this layer"), layers.traced("some"):
        pass


@pytest.mark.parametrize(
    ("targets", "change", "text"),
    [
        (("word_embeddings",), {}, "is a Embedding, only linear"),
        (loras.ATTENTION, {"rank_pattern": {"query": 3}}, "do not fit rank 3"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    tmp_path: Path, targets: tuple[str, ...], change: dict[str, Any], text: str
) -> None:
    base = build("dense_mean", tmp_path / "base")
    lora = loras.write(tmp_path / "lora", base, targets, **change)
    with pytest.raises(UnsupportedLora, match=text):
        layers_of(load("dense", base)).fit(lora)


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    other = loras.write(tmp_path / "lora", build("dense_last", tmp_path / "other"), ("q_proj",))
    with pytest.raises(UnsupportedLora, match="the model has no such layer"):
        layers_of(load("dense", build("dense_mean", tmp_path / "base"))).fit(other)
