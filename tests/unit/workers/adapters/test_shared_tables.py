"""Tables of embeddings that are the head too, in int8: memory of a load, equal bits, estimates, what stays floats."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from ipc.wire.messages import Ending, GenerateCall, Sampling
from tests.harness.processor import needs_integers
from tests.tiny import chat_tokenizers, gguf_models, loras, seeing
from tests.unit.workers.adapters.test_quantized_linears import Counted, without_integers
from tests.unit.workers.adapters.test_quantizing import load
from workers.adapters.causal import CausalAdapter
from workers.adapters.shared import quantizing
from workers.adapters.shared.gguf_blocks import PIECE_VALUES, read_runs, read_tensor
from workers.adapters.shared.quantized_linears import (
    INT4,
    INT8,
    TILE_NBYTES,
    Int8Linear,
    QuantizedLinear,
    quantize,
    quantize_runs,
)
from workers.adapters.shared.quantizing import QuantizedTable, Quantizer
from workers.lifecycle.memory_budget import estimate
from workers.loading.gguf_file import read_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with such a table as GGUF file, and as a directory."""
    root = tmp_path_factory.mktemp("tied")
    model = gguf_models.write(root / "model.gguf", "qwen3", "F32")
    model.save_pretrained(root / "plain")
    chat_tokenizers.build("chatml").save_pretrained(root / "plain")
    return {"": root / "plain", "model.gguf": root}


def forms(adapter: CausalAdapter) -> tuple[type, type]:
    model = adapter.engine.model
    return type(model.get_output_embeddings()), type(model.get_input_embeddings())


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    model.set_attn_implementation("sdpa")
    found: torch.Tensor = model(input_ids=torch.arange(40)[None] * 7 % 300, use_cache=False).logits
    return found


def answered(adapter: CausalAdapter, **fields: Any) -> list[tuple[str, Any]]:
    """Texts of the steps of an answer, and their log probabilities."""
    call = GenerateCall(
        text="hello",
        ending=Ending(max_tokens=4, ignore_eos=True),
        sampling=Sampling(temperature=0.0, logprobs=2),
        **fields,
    )
    [prepared] = adapter.prepare(call.items, call)
    adapter.engine.add(prepared.payload)
    found = []
    while adapter.engine.has_work:
        found += [(emission.text, emission.logprobs) for emission in adapter.engine.step()]
    return found


@pytest.mark.parametrize("kind", [INT8, INT4, "fp8"])
def test_runs_of_rows_become_the_weight_that_the_whole_becomes(kind: str) -> None:
    numbers = torch.randn(1000, 320, generator=torch.Generator().manual_seed(0))
    whole = quantize(numbers, kind)
    runs = quantize_runs(numbers.split([1, 300, 698, 1]), (1000, 320), kind)
    assert torch.equal(runs.values.view(torch.int8), whole.values.view(torch.int8))
    assert torch.equal(runs.scales, whole.scales)
    assert (runs.zeros is None) == (whole.zeros is None)
    assert runs.zeros is None or (whole.zeros is not None and torch.equal(runs.zeros, whole.zeros))
    assert runs.group == whole.group
    with pytest.raises(ValueError, match="a weight of 1000 outputs has rows for 999"):
        quantize_runs([numbers[1:]], (1000, 320), kind)
    with pytest.raises(ValueError, match="a weight of 1000 outputs has rows for 0"):
        quantize_runs([], (1000, 320), kind)


def test_a_weight_is_quantised_in_its_own_memory_and_that_of_a_few_tiles() -> None:
    numbers = torch.randn(16384, 512)
    with torch.inference_mode(), Counted() as counted:
        stored = quantize(numbers, INT8)
    assert counted.most - numbers.nbytes <= stored.values.nbytes + stored.scales.nbytes + 6 * TILE_NBYTES


def test_a_table_in_runs_takes_less_than_half_the_memory_of_its_numbers() -> None:
    outer, inner = 16384, 1024

    def runs() -> Iterator[torch.Tensor]:
        for _ in range(16):
            yield torch.randn(outer // 16, inner)

    with torch.inference_mode(), Counted() as counted:
        Quantizer(INT4, torch.float32, CPU).hold_table((outer, inner), runs())
    assert outer * inner <= counted.most < 4 * outer * inner / 2


def test_runs_of_a_gguf_file_are_the_tensor(tmp_path: Path) -> None:
    gguf_models.write(tmp_path / "model.gguf", "qwen3", "Q8_0", options={"vocab_size": 5000})
    stored = read_model(tmp_path / "model.gguf").tensors["token_embd.weight"]
    runs = list(read_runs(stored))
    assert len(runs) > 1
    assert max(run.numel() for run in runs) <= PIECE_VALUES
    assert torch.equal(torch.cat(runs), read_tensor(stored, torch.float32))


@needs_integers
@pytest.mark.sample(2)
@pytest.mark.parametrize("file", ["", "model.gguf"])
@pytest.mark.parametrize("kind", [INT8, INT4])
def test_a_table_is_never_there_in_floats_and_gives_the_bits_of_one_that_was(
    file: str, kind: str, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    finish = Quantizer.finish

    def watched(self: Quantizer, model: Any, **options: bool) -> None:
        held.append(
            sum(weight.untyped_storage().nbytes() for weight in model.parameters() if weight.ndim == 2)
        )
        finish(self, model, **options)

    monkeypatch.setattr(Quantizer, "finish", watched)
    adapter = load(places[file], kind, file)
    assert forms(adapter) == (Int8Linear, QuantizedTable)
    assert held[0] < 200
    taken = adapter.memory_bytes - adapter.engine.cache_nbytes
    told = estimate(places[file], gguf=file, dtype=torch.float32, quantization=kind)
    assert math.isclose(told, taken, rel_tol=0.06)
    with monkeypatch.context() as patch:
        patch.setattr(Quantizer, "table_of", lambda *_: "")
        whole = load(places[file], kind, file)
    assert held[1] > 4 * 300 * 256
    assert forms(whole) == (Int8Linear, QuantizedTable)
    assert torch.equal(logits(adapter.engine.model), logits(whole.engine.model))
    assert answered(adapter) == answered(whole)


def test_numbers_of_a_whole_table_go_before_the_layer_is_made(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(places[""])
    made, sizes = quantizing.layer_of, list[int]()

    def watched(name: str, *arguments: Any) -> Any:
        if name == "lm_head":
            sizes.append(sum(each.weight.numel() for each in (model.lm_head, model.model.embed_tokens)))
        return made(name, *arguments)

    monkeypatch.setattr(quantizing, "layer_of", watched)
    Quantizer(INT8, torch.float32, CPU).finish(model)
    assert sizes == [0]


@pytest.mark.parametrize("file", ["", "model.gguf"])
def test_a_table_stays_where_the_processor_has_no_products_of_integers(
    file: str, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_integers(monkeypatch)
    adapter = load(places[file], INT8, file)
    head, table = forms(adapter)
    assert table is nn.Embedding
    assert not issubclass(head, QuantizedLinear)
    assert answered(adapter)


def test_a_head_that_is_stored_beside_its_table_and_differs_stays(
    places: dict[str, Path], tmp_path: Path
) -> None:
    for path in places[""].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = table.flip(0).contiguous()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    model = load(tmp_path, INT8).engine.model
    # A trial on the machine chooses the layer of the head, and one of them has its numbers in oneDNN's layout.
    with torch.inference_mode():
        assert torch.equal(model.get_output_embeddings()(torch.eye(table.shape[1])).t(), table.flip(0))
    assert torch.equal(model.get_input_embeddings().weight, table)


def test_lora_adapters_and_log_probabilities_of_a_model_with_such_a_table(
    places: dict[str, Path], tmp_path: Path
) -> None:
    adapter = load(places[""], INT8)
    plain = answered(adapter)
    assert sum(found is not None and bool(found) for _, found in plain) == 4
    shape = tuple(adapter.engine.model.model.layers[0].mlp.up_proj.weight.shape)
    shapes = {"model.layers.0.mlp.up_proj": shape}
    fitted = adapter.loras.fit(loras.write_layers(tmp_path / "lora", shapes, ("up_proj",), spread=1.0))
    adapter.loras.install("a", fitted)
    assert answered(adapter, lora="a") != plain
    assert answered(adapter) == plain
    for layer in ("lm_head", "model.embed_tokens"):
        head = loras.write_layers(tmp_path / layer, {layer: (300, 256)}, (layer.rpartition(".")[2],))
        with pytest.raises(ValueError, match=layer):
            adapter.loras.fit(head)


def test_rows_in_bfloat16_meet_such_a_table(places: dict[str, Path]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(places[""], dtype=torch.bfloat16)
    wanted = logits(model).float()
    Quantizer(INT8, torch.bfloat16, CPU).finish(model)
    found = logits(model)
    assert found.dtype == torch.bfloat16
    assert type(model.get_input_embeddings()) is QuantizedTable
    assert float((found.float() - wanted).abs().mean() / wanted.abs().mean()) < 5e-2


@needs_integers
@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
def test_a_model_that_sees_has_such_a_table(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"qwen3_vl": "Qwen3VLConfig", "smolvlm": "SmolVLMConfig"}[family]
    known = getattr(seeing.transformers, name)

    def tied(**options: Any) -> Any:
        options["text_config"]["tie_word_embeddings"] = True
        return known(**{**options, "tie_word_embeddings": True})

    with monkeypatch.context() as patch:
        patch.setattr(seeing.transformers, name, tied)
        seeing.save(family, tmp_path)
    adapter = load(tmp_path, INT8)
    assert forms(adapter) == (Int8Linear, QuantizedTable)
    wanted = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path).requires_grad_(False)
    for layer in wanted.get_decoder().modules():
        if type(layer) is nn.Linear:
            layer.weight.copy_(quantize(layer.weight, INT8).numbers())
    table = wanted.get_input_embeddings().weight
    table.copy_(quantize(table, INT8).numbers())
    apart = logits(adapter.engine.model) - logits(wanted)
    assert float(apart.abs().mean() / logits(wanted).abs().mean()) < 1e-2
    assert answered(adapter)
