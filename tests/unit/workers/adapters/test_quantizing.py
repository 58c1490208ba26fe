"""Models whose linear layers stay quantised: each format's own numbers, memory of a load, heads, adapters, refusals."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipc.catalog.entries import BadFile
from ipc.catalog.reading import read_entry
from ipc.wire.messages import Ending, GenerateCall, Sampling
from tests.harness.processor import needs_integers
from tests.tiny import causal, chat_tokenizers, gguf_models, loras, quantized_models
from tests.tiny.quantized_models import LAYOUTS
from tests.unit.workers.adapters import test_causal_adapter
from tests.unit.workers.adapters.test_quantized_linears import without_integers
from tests.unit.workers.loading.test_gguf_models import TEXTS, generated
from workers.adapters.causal import CausalAdapter
from workers.adapters.shared.gguf_blocks import AS_STORED, read_blocks, read_tensor
from workers.adapters.shared.quantized_linears import (
    FP8,
    INT4,
    INT8,
    Int4Linear,
    Int8Linear,
    MadeLinear,
    QuantizedLinear,
    quantize,
)
from workers.adapters.shared.quantizing import QuantizedTable, Quantizer
from workers.generation import proof
from workers.generation.joined import Part
from workers.generation.plain import PlainEngine
from workers.lifecycle.memory_budget import estimate
from workers.loading.gguf_file import GgufRefused, StoredTensor, read_model

NEAR = {Int8Linear: 1e-3, MadeLinear: 1e-4, Int4Linear: 3e-2}
"""Mean difference of logits, as a part of their mean size: rounding of rows to 16 bits, to float32, to bfloat16."""


def load(root: Path, kind: str, gguf: str = "", **changes: Any) -> CausalAdapter:
    context = test_causal_adapter.context(root)
    changes = {"max_sequence_length": None, "quantization": kind, "gguf": gguf, **changes}
    return CausalAdapter.load(dataclasses.replace(context, **changes))


def layers_of(adapter: CausalAdapter) -> dict[str, QuantizedLinear]:
    """Quantised layers by the paths of the model; layers that are joined have the layer that joins them."""
    found = {}
    for name, layer in adapter.engine.model.named_modules():
        if isinstance(layer, Part):
            assert isinstance(layer.product.whole, QuantizedLinear)
            found[name] = layer.product.whole
        elif isinstance(layer, QuantizedLinear) and ".product." not in name:
            found[name] = layer
    return found


@torch.inference_mode()
def is_near(adapter: CausalAdapter, wanted: Any) -> float:
    """Mean difference of logits of a text, as a part of their mean size."""
    model = adapter.engine.model
    ids = torch.arange(40)[None] * 7 % model.config.vocab_size
    model.set_attn_implementation("sdpa")
    found, wanted = (each(input_ids=ids, use_cache=False).logits.float() for each in (model, wanted))
    return float((found - wanted).abs().mean() / wanted.abs().mean())


def rounded(model: Any, kind: str) -> Any:
    """`model` with the numbers that its projections have as `kind`."""
    for name, weight in model.named_parameters():
        if "_proj." in name:
            weight.copy_(quantize(weight, kind).numbers())
    return model


def is_written(adapter: CausalAdapter) -> bool:
    """Whether an answer in company is that of the request alone."""
    calls = [
        GenerateCall(
            messages=[{"role": "user", "content": text}],
            ending=Ending(max_tokens=8, ignore_eos=True),
            sampling=Sampling(temperature=0.0),
        )
        for text in TEXTS[:2]
    ]
    return generated(adapter, calls) == [generated(adapter, [call])[0] for call in calls]


def stays(root: Path, wanted: Any, kind: str, form: type[QuantizedLinear]) -> None:
    """Assert that the layers of a model in `root` are of a form, with the logits of `wanted`, and answer alike."""
    adapter = load(root, kind)
    layers = layers_of(adapter)
    assert len(layers) == 2 * 7, "the head is a table of numbers in the file"
    assert {type(layer) for layer in layers.values()} == {form}
    assert is_near(adapter, wanted) < NEAR[form]
    assert is_written(load(root, kind))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("layout", "kind", "form"),
    [
        ("gptq", INT4, Int4Linear),
        ("gptq in order of activations", INT4, Int4Linear),
        ("gptq, symmetric", INT4, Int4Linear),
        ("awq", INT4, Int4Linear),
    ],
)
def test_weights_of_a_checkpoint_stay_as_they_are_where_their_kind_is_asked_for(
    layout: str, kind: str, form: type[QuantizedLinear], tmp_path: Path
) -> None:
    stays(tmp_path, quantized_models.write(tmp_path, LAYOUTS[layout]), kind, form)


@needs_integers
@pytest.mark.sample(2)
@pytest.mark.parametrize("has_integers", [True, False])
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("gptq of 8 bits", INT8),
        ("gptq of 8 bits in order of activations, symmetric", INT8),
        ("fp8 in blocks", FP8),
        ("fp8, weight_scale", FP8),
    ],
)
def test_weights_of_8_bits_become_int8_by_outputs_where_the_processor_has_such_products_else_stay(
    layout: str, kind: str, has_integers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = quantized_models.write(tmp_path, LAYOUTS[layout])
    if has_integers:
        stays(tmp_path, rounded(wanted, INT8), kind, Int8Linear)
    else:
        without_integers(monkeypatch)
        stays(tmp_path, wanted, kind, MadeLinear)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("layout", "kind"), [("gptq", INT8), ("gptq of 8 bits", INT4), ("awq", FP8), ("fp8 in blocks", INT8)]
)
def test_weights_of_another_kind_are_quantised_anew(layout: str, kind: str, tmp_path: Path) -> None:
    made = INT8 if kind == FP8 else kind
    wanted = rounded(quantized_models.write(tmp_path, LAYOUTS[layout]), made)
    adapter = load(tmp_path, kind)
    assert {layer.kind for layer in layers_of(adapter).values()} == {made}
    assert is_near(adapter, wanted) < 3e-2


@needs_integers
@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("stored", "kind", "kept"),
    [
        ("Q4_0", INT4, INT4),
        ("Q4_1", INT4, INT4),
        ("Q4_K", INT4, INT4),
        ("Q8_0", INT8, INT8),
        ("Q5_0", INT4, INT8),
        ("Q6_K", INT8, INT8),
    ],
)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_blocks_of_a_gguf_file_stay_or_become_int8_which_the_log_says(
    family: str, stored: str, kind: str, kept: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = gguf_models.write(tmp_path / "model.gguf", family, stored)
    with caplog.at_level(logging.INFO):
        adapter = load(tmp_path, kind, "model.gguf")
    layers = {name: layer for name, layer in layers_of(adapter).items() if name != "lm_head"}
    assert {layer.kind for layer in layers.values()} == {kept}
    is_kept = stored in AS_STORED[kind]
    assert {type(layer) for layer in layers.values()} == {Int4Linear if kept == INT4 else Int8Linear}
    assert (f"weights of {stored} have become {kept}" in caplog.text) == (not is_kept)
    assert (f"weights of {stored} are read as they are" in caplog.text) == is_kept
    told = {"Q8_0": "int8 in groups of 32 are multiplied as int8 with a scale for each output"}
    assert f"precision {kind} on cpu: " in caplog.text and told.get(stored, "") in caplog.text
    assert is_near(adapter, wanted) < 4e-2


@pytest.mark.parametrize(
    ("stored", "kind", "wrong", "whole"),
    [("Q8_0", INT8, 1, 2048), ("Q8_0", "", 32, 65536), ("Q8_0", INT4, 32, 65536), ("Q4_1", INT4, 1, 2048)],
)
def test_a_scale_of_a_block_that_is_not_finite_is_refused_by_file_tensor_and_numbers(
    stored: str, kind: str, wrong: int, whole: int, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    gguf_models.write(path, "llama", stored)
    tensor = read_model(path).tensors["blk.1.ffn_down.weight"]
    data = bytearray(path.read_bytes())
    data[tensor.start : tensor.start + 2] = np.float16("inf").tobytes()
    path.write_bytes(data)
    with pytest.raises(GgufRefused) as refused:
        load(tmp_path, kind, path.name)
    told = f"model.gguf: blk.1.ffn_down.weight has {wrong} of {whole} numbers that are not finite"
    assert str(refused.value) == told


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_the_log_tells_that_experts_stay_floats_and_how_many_bytes_they_have(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = causal.make(family)
    experts = sum(weight.nbytes for name, weight in model.named_parameters() if ".experts." in name)
    Quantizer(INT8, torch.float32, torch.device("cpu")).finish(model)
    told = f"precision int8 leaves the experts as float32: {experts} of "
    assert (told in caplog.text) == bool(experts) == (family == "qwen3_moe")


@pytest.mark.parametrize(
    ("kind", "block"), [(kind, block) for kind in AS_STORED for block in AS_STORED[kind]]
)
def test_blocks_that_stay_are_the_numbers_of_the_file(kind: str, block: str, tmp_path: Path) -> None:
    values, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block]]
    data = np.random.default_rng(1).integers(0, 256, (6, nbytes), dtype=np.uint8)
    halves = np.array([[0.5, -1.5], [0.25, 3.0], [0, -0.75], [0, 0], [2, 0], [0.125, 8]], dtype=np.float16)
    data[:, :4] = halves.view(np.uint8)
    path = tmp_path / "blocks"
    path.write_bytes(data.tobytes())
    tensor = StoredTensor((3, 2 * values), block, path, 0, data.nbytes)
    turned = read_blocks(tensor, kind, lambda rows: rows.flip(0)).numbers().flip(0)
    torch.testing.assert_close(turned, read_tensor(tensor, torch.float32), rtol=1e-5, atol=1e-5)


@needs_integers
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [INT8, INT4, FP8])
def test_a_load_holds_no_linear_layer_as_numbers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = gguf_models.write(tmp_path / "model.gguf", "llama", "F32")
    wanted.save_pretrained(tmp_path / "plain")
    chat_tokenizers.build("chatml").save_pretrained(tmp_path / "plain")
    held: list[int] = []
    finish = Quantizer.finish

    def watched(self: Quantizer, model: Any, **options: bool) -> None:
        held.append(sum(weight.untyped_storage().nbytes() for weight in model.parameters()))
        finish(self, model, **options)

    monkeypatch.setattr(Quantizer, "finish", watched)
    tables = sum(
        weight.nbytes for name, weight in wanted.named_parameters() if weight.ndim == 1 or "embed" in name
    )
    for adapter in (load(tmp_path / "plain", kind), load(tmp_path, kind, "model.gguf")):
        assert held.pop() < tables + 200
        assert MadeLinear not in {type(layer) for layer in layers_of(adapter).values()}
        made = INT8 if kind == FP8 else kind
        numbers = rounded(gguf_models.write(tmp_path / "again.gguf", "llama", "F32"), made)
        assert is_near(adapter, numbers) < 4e-2
    whole = estimate(tmp_path / "plain", dtype=torch.float32, quantization=kind)
    assert math.isclose(whole, adapter.memory_bytes - adapter.engine.cache_nbytes, rel_tol=0.1)


@needs_integers
@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "tolerance"), [(INT8, 0.02), (INT4, 0.1), (FP8, 1e-4)])
def test_packed_steps_may_differ_by_what_the_layers_round(
    kind: str, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == FP8:
        without_integers(monkeypatch)
    gguf_models.write(tmp_path / "model.gguf", "llama", "F32")
    model = load(tmp_path, kind, "model.gguf").engine.model
    wanted = torch.randn(3, 320, generator=torch.Generator().manual_seed(0))
    assert proof._are_near(model, [wanted * (1 + 0.9 * tolerance)], [wanted])
    assert not proof._are_near(model, [wanted * (1 + 1.1 * tolerance)], [wanted])
    packed_pass = proof.packed_pass

    def shifted(*args: Any, **options: Any) -> torch.Tensor:
        logits = packed_pass(*args, **options)
        return logits + 1.5 * tolerance * logits.abs().mean()

    monkeypatch.setattr(proof, "packed_pass", shifted)
    assert isinstance(load(tmp_path, kind, "model.gguf").engine, PlainEngine)


@needs_integers
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [INT8, INT4, FP8])
def test_a_table_of_embeddings_that_is_the_head_too_has_int8(kind: str, tmp_path: Path) -> None:
    wanted = gguf_models.write(tmp_path / "tied.gguf", "qwen3", "F32")
    adapter = load(tmp_path, kind, "tied.gguf")
    model, numbers = adapter.engine.model, rounded(wanted, INT8 if kind == FP8 else kind)
    table = model.get_input_embeddings()
    assert type(model.lm_head) is Int8Linear and type(table) is QuantizedTable
    assert table.weight.shape == wanted.model.embed_tokens.weight.shape
    stored = quantize(numbers.model.embed_tokens.weight, INT8).numbers()
    numbers.model.embed_tokens.weight.copy_(stored)
    ids = torch.tensor([[3, 1], [0, 9]])
    torch.testing.assert_close(table(ids), stored[ids])
    assert is_near(adapter, numbers) < 4e-2
    assert is_written(adapter)


def test_a_head_of_its_own_has_int8_and_its_table_stays(tmp_path: Path) -> None:
    gguf_models.write(tmp_path / "own.gguf", "llama", "F32")
    own = load(tmp_path, INT4, "own.gguf")
    assert type(own.engine.model.get_input_embeddings()) is nn.Embedding
    assert layers_of(own)["lm_head"].kind == INT8
    assert layers_of(own)["model.layers.0.mlp.up_proj"].kind == INT4


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [INT8, INT4, FP8])
def test_a_lora_adapter_adds_to_a_quantised_layer(kind: str, tmp_path: Path) -> None:
    quantized_models.write(tmp_path / "model", LAYOUTS["gptq"])
    adapter = load(tmp_path / "model", kind)
    shapes = {f"model.layers.{at}.mlp.up_proj": (160, 128) for at in range(2)}
    fitted = adapter.loras.fit(loras.write_layers(tmp_path / "lora", shapes, ("up_proj",)))
    layer = adapter.engine.model.get_submodule("model.layers.1.mlp.up_proj")
    rows = torch.randn(3, 128)
    delta = fitted.deltas["model.layers.1.mlp.up_proj"]
    with torch.inference_mode():
        plain = layer(rows)
        adapter.loras.install("a", fitted)
        call = GenerateCall(text="hi", ending=Ending(max_tokens=2, ignore_eos=True), lora="a")
        with adapter.loras.traced("a"):
            assert generated(adapter, [call])
        torch.testing.assert_close(
            plain + F.linear(F.linear(rows, delta.down), delta.up),
            layer(rows) + rows @ delta.down.T @ delta.up.T,
        )


@pytest.mark.parametrize("place", ["precision: int8", "profiles: {small: {precision: int4}}"])
def test_a_model_that_writes_no_text_refuses_quantised_weights_before_the_start(
    place: str, tmp_path: Path
) -> None:
    path = tmp_path / "entry.yaml"
    path.write_text(f"id: a/b\nsource: {{kind: hub, repo: a/b}}\nadapter: dense\n{place}\n")
    with pytest.raises(
        BadFile, match=r"precision: int. is for models that generate text .* dense takes float32"
    ):
        read_entry(path)
    path.write_text(f"id: a/b\nsource: {{kind: hub, repo: a/b}}\nadapter: causal\n{place}\n")
    read_entry(path)


def test_a_model_without_linear_layers_is_refused() -> None:
    class Nothing(nn.Module):
        base_model_prefix = "model"
        config: Any = None

        def get_output_embeddings(self) -> None:
            return None

        def get_input_embeddings(self) -> None:
            return None

    model = Nothing()
    model.config = type("Config", (), {"get_text_config": lambda self: self})()
    with pytest.raises(
        ValueError, match="precision: int8: Nothing has no linear layers that can be quantised"
    ):
        Quantizer(INT8, torch.float32, torch.device("cpu")).finish(model)
