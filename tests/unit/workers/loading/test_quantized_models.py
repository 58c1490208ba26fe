"""Models out of quantised weights: every weight is that of the format, every answer that of transformers on these."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ipc.wire.messages import Ending, GenerateCall, Sampling
from penstock.own_models.files import CannotTell
from penstock.own_models.places import find
from tests.tiny import chat_tokenizers, quantized_models
from tests.tiny.quantized_models import LAYOUTS
from tests.unit.workers.adapters import test_causal_adapter
from tests.unit.workers.loading.test_gguf_models import TEXTS, generated
from workers.adapters.causal import CausalAdapter
from workers.adapters.shared import checkpoint, quantized_weights
from workers.lifecycle.memory_budget import estimate
from workers.loading.quantized_files import read_plan
from workers.loading.quantized_parts import Part, QuantizedRefused

BASE = "model.layers.0.mlp.up_proj"
HUGE = (1 << 31) - 1


def model_of(root: Path, dtype: torch.dtype = torch.float32) -> Any:
    context = dataclasses.replace(test_causal_adapter.context(root), dtype=dtype)
    plan = read_plan(root)
    assert plan is not None
    return quantized_weights.build(context, plan, checkpoint.read_config(context), sees=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_gives_the_weights_of_its_format(layout: str, tmp_path: Path) -> None:
    wanted = quantized_models.write(tmp_path, LAYOUTS[layout]).state_dict()
    assert find(str(tmp_path)).entry["adapter"] == "causal"
    found = model_of(tmp_path).state_dict()
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    halves = model_of(tmp_path, torch.bfloat16).state_dict()
    assert [name for name in wanted if not torch.equal(halves[name], wanted[name].bfloat16())] == []


@pytest.mark.parametrize("layout", ["gptq in order of activations", "awq", "fp8 in blocks"])
def test_answers_are_those_of_transformers_with_the_numbers_of_the_file(layout: str, tmp_path: Path) -> None:
    wanted = quantized_models.write(tmp_path, LAYOUTS[layout])
    # The end token is a token like any other, as with `ignore_eos`.
    wanted.generation_config.eos_token_id = None
    context = dataclasses.replace(test_causal_adapter.context(tmp_path), max_sequence_length=None)
    adapter = CausalAdapter.load(context)
    calls, texts, tokenizer = [], [], chat_tokenizers.build("chatml")
    for text in TEXTS[:3]:
        messages = [{"role": "user", "content": text}]
        calls.append(
            GenerateCall(
                messages=messages,
                ending=Ending(max_tokens=24, ignore_eos=True),
                sampling=Sampling(temperature=0.0),
            )
        )
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        with torch.inference_mode():
            prompt = torch.tensor([ids])
            answer = wanted.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False
            )
        # A text of the wire has no NUL.
        text = tokenizer.decode(answer[0, len(ids) :], skip_special_tokens=True)
        texts.append(text.replace("\0", "\N{REPLACEMENT CHARACTER}"))
    assert generated(adapter, calls) == texts


def test_settings_of_generation_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    quantized_models.write(tmp_path, LAYOUTS["gptq"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert model_of(tmp_path).generation_config.eos_token_id == [2, 7]


def test_memory_is_that_of_the_numbers(tmp_path: Path) -> None:
    model = quantized_models.write(tmp_path, LAYOUTS["gptq"])
    values = sum(weight.numel() for weight in model.parameters())
    assert estimate(tmp_path, dtype=torch.float32) == 4 * values
    assert estimate(tmp_path, dtype=torch.bfloat16) == 2 * values


@pytest.mark.parametrize(
    ("layout", "end", "tensor", "why"),
    [
        ("gptq", "qzeros", None, "gptq: the tensor {}.qzeros is missing"),
        ("gptq", "qweight", None, "gptq: the tensor {}.qweight is missing"),
        ("gptq in order of activations", "g_idx", None, "gptq: the tensor {}.g_idx is missing"),
        ("gptq", "scales", torch.ones(3, 160), "gptq: {}.scales is [3, 160]; expected [4, 160]"),
        ("gptq", "qzeros", torch.ones(4, 19).int(), "gptq: {}.qzeros is [4, 19]; expected [4, 20]"),
        ("gptq", "qweight", torch.ones(16, 160), "gptq: {}.qweight is of F32; expected I32"),
        ("gptq", "qweight", torch.ones(16, 159).int(), "159 outputs are no multiple of the 8 zero points of 4 bits"),
        ("gptq", "g_idx", torch.zeros(127).int(), "gptq: {}.g_idx is [127]; expected [128]"),
        ("gptq", "weight", torch.ones(160, 128), "gptq: {}.weight stands beside its quantised form"),
        ("awq", "scales", None, "awq: the tensor {}.scales is missing"),
        ("awq", "qweight", torch.ones(128).int(), "awq: {}.qweight is [128]; expected 2 sizes from 1 on"),
        ("fp8 in blocks", "weight_scale_inv", None, "fp8: the tensor {}.weight_scale_inv is missing"),
        ("fp8 in blocks", "weight_scale_inv", torch.ones(1, 1), "fp8: {}.weight_scale_inv is [1, 1]; expected [2, 1]"),
        ("fp8, weight_scale", "weight_scale", None, "fp8: the tensor {}.weight_scale is missing"),
        ("fp8, weight_scale", "weight_scale", torch.ones(160, 1), "fp8: {}.weight_scale is [160, 1]; expected [] or"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_the_format_are_refused_before_the_start_and_by_the_load(
    layout: str, end: str, tensor: torch.Tensor | None, why: str, tmp_path: Path
) -> None:
    quantized_models.write(tmp_path, LAYOUTS[layout], {f"{BASE}.{end}": tensor})
    with pytest.raises(CannotTell) as told:
        find(str(tmp_path))
    assert why.replace("{}", BASE) in str(told.value)
    with pytest.raises(QuantizedRefused) as refused:
        model_of(tmp_path)
    assert why.replace("{}", BASE) in str(refused.value)


@pytest.mark.parametrize("group", [-1, 4])
def test_a_group_that_does_not_exist_is_refused_by_the_load(group: int, tmp_path: Path) -> None:
    order = torch.zeros(128).int()
    order[5] = group
    quantized_models.write(tmp_path, LAYOUTS["gptq"], {f"{BASE}.g_idx": order})
    why = rf"{BASE}\.g_idx has groups from .* {max(0, group)}, .* are 4 groups"
    with pytest.raises(CannotTell, match=why):
        find(str(tmp_path))
    with pytest.raises(QuantizedRefused, match=why):
        model_of(tmp_path)


@pytest.mark.sample(6)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("layout", "end", "shape"),
    [
        ("gptq", "scales", (4, 160)),
        ("awq", "scales", (4, 160)),
        ("fp8 in blocks", "weight_scale_inv", (2, 1)),
        ("fp8, weight_scale", "weight_scale", (1,)),
    ],
)
def test_scales_that_are_not_finite_are_refused_before_the_start_and_by_the_load(
    layout: str, end: str, shape: tuple[int, ...], dtype: torch.dtype, wrong: float, tmp_path: Path
) -> None:
    scales = torch.ones(shape, dtype=dtype)
    scales.view(-1)[-1] = wrong
    quantized_models.write(tmp_path, LAYOUTS[layout], {f"{BASE}.{end}": scales})
    method, last = layout.partition(" ")[0].rstrip(","), ", ".join(str(size - 1) for size in shape)
    why = f"{method}: {BASE}.{end} has 1 of {scales.numel()} numbers that are not finite, first [{last}]"
    with pytest.raises(CannotTell) as told:
        find(str(tmp_path))
    assert why in str(told.value)
    with pytest.raises(QuantizedRefused) as refused:
        model_of(tmp_path)
    assert str(refused.value) == why


@pytest.mark.parametrize("layout", ["fp8 in blocks", "fp8, weight_scale"])
def test_float8_that_is_no_number_is_refused_by_the_load(layout: str, tmp_path: Path) -> None:
    quantized_models.write(tmp_path, LAYOUTS[layout])
    stored = load_file(tmp_path / "model.safetensors")
    stored[f"{BASE}.weight"].view(torch.uint8)[3, 5] = 0xFF
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(QuantizedRefused, match=rf"{BASE}\.weight has 1 of 20480 values that are no numbers"):
        model_of(tmp_path)


@pytest.mark.parametrize("layout", ["gptq", "awq", "fp8 in blocks"])
def test_a_file_that_is_cut_off_is_refused_before_the_start(layout: str, tmp_path: Path) -> None:
    quantized_models.write(tmp_path, LAYOUTS[layout])
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(CannotTell, match=r"model\.safetensors (is cut off|is damaged)"):
        find(str(tmp_path))


@pytest.mark.parametrize("begin", [0, 1 << 62])
def test_a_tensor_that_is_larger_than_its_file_is_refused_unread(begin: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(64))
    part = Part("scales", file, [1 << 40, 1 << 20], "F16", begin)
    with pytest.raises(
        QuantizedRefused, match=rf"is cut off: scales has {64 if not begin else 0} of {1 << 61} "
    ):
        part.data()


@pytest.mark.parametrize("layout", ["gptq", "gptq of 8 bits", "awq", "fp8 in blocks"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_mixtures_of_experts_have_the_weights_of_their_format(
    family: str, layout: str, tmp_path: Path
) -> None:
    wanted = quantized_models.write(tmp_path, LAYOUTS[layout], family=family)
    assert find(str(tmp_path)).entry["adapter"] == "causal"
    found, known = model_of(tmp_path).state_dict(), wanted.state_dict()
    assert found.keys() == known.keys()
    assert [name for name in known if not torch.equal(found[name], known[name])] == []


def test_a_weight_of_another_size_than_the_model_s_is_refused_by_the_load(tmp_path: Path) -> None:
    parts = {
        "qweight": torch.ones(16, 80).int(),
        "qzeros": torch.ones(4, 10).int(),
        "scales": torch.ones(4, 80),
    }
    quantized_models.write(tmp_path, LAYOUTS["gptq"], {f"{BASE}.{end}": part for end, part in parts.items()})
    with pytest.raises(
        ValueError, match=r"up_proj\.weight is \[80, 128\] in the weights and \[160, 128\] by"
    ):
        model_of(tmp_path)


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        ({"bits": 3}, "gptq: quantization_config.bits 3 is not read; read are 4, 8"),
        ({"bits": True}, "gptq: quantization_config.bits True is not read"),
        ({"group_size": 0}, "gptq: quantization_config.group_size: expected -1 or a number from 1 on, got 0"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format marlin is not read; read are gptq, gptq_v2"),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic: layers with bits of their own are not read"),
        ({"dynamic": 5}, "gptq: quantization_config.dynamic: expected an object of layers, got 5"),
        ({"dynamic": ["-:.*down.*"]}, "gptq: quantization_config.dynamic: expected an object of layers, got ['-:"),
        ({"quant_method": "awq", "version": "gemv"}, "awq: quantization_config.version gemv is not read"),
        ({"quant_method": "awq", "bits": 8}, "awq: quantization_config.bits 8 is not read; read are 4"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "fp8: quantization_config.weight_block_size: expected"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8: quantization_config.fmt e5m2 is not read"),
        ({"quant_method": "bitsandbytes"}, "quant_method bitsandbytes is not read"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors: quantization_config.format None is not read"),
        ({"quant_method": "hqq"}, "quant_method hqq is not read; read are gptq, awq (version gemm), fp8, compressed"),
        ({"quant_method": ["gptq"]}, "quant_method ['gptq'] is not read"),
        ({"quant_method": "eetq"}, "quant_method eetq is not read"),
        ({"quant_method": "awq", "zero_point": False}, "awq: quantization_config.zero_point False is not read"),
        ({"desc_act": "yes"}, "gptq: quantization_config.desc_act yes is not read; read are False, True"),
        ({"quant_method": "fp8"}, "fp8: none of the"),
    ],
)  # fmt: skip
def test_a_scheme_that_is_not_read_is_refused_before_the_start(
    stated: dict[str, Any], why: str, tmp_path: Path
) -> None:
    quantized_models.write(tmp_path, LAYOUTS["gptq"])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= stated
    path.write_text(json.dumps(config))
    with pytest.raises(CannotTell) as told:
        find(str(tmp_path))
    assert why in str(told.value)
    with pytest.raises(QuantizedRefused):
        read_plan(tmp_path)


@pytest.mark.parametrize(
    ("layout", "field", "size", "scale", "bounded"),
    [
        ("fp8 in blocks", "weight_block_size", [HUGE, HUGE], "weight_scale_inv", (0, (160, 128))),
        ("gptq, one group", "group_size", HUGE, "", (128, ())),
        ("awq, one group", "group_size", HUGE, "", (128, ())),
    ],
)
def test_groups_and_blocks_larger_than_a_weight_take_the_memory_of_the_weight(
    layout: str, field: str, size: Any, scale: str, bounded: tuple[Any, ...], tmp_path: Path
) -> None:
    quantized_models.write(tmp_path, LAYOUTS[layout])
    path, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    config = json.loads(path.read_text())
    config["quantization_config"][field] = size
    path.write_text(json.dumps(config))
    tensors = load_file(file)
    ones = {name: torch.ones(1, 1) for name in tensors if scale and name.endswith(scale)}
    save_file(tensors | ones, file)
    plan = read_plan(tmp_path)
    assert plan is not None
    scheme = plan.quantized[f"{BASE}.weight"].scheme
    assert (scheme.group, scheme.block) == bounded
    assert model_of(tmp_path).get_submodule(BASE).weight.isfinite().all()


def test_the_memory_of_a_model_is_foreseen_whatever_stands_in_its_configuration(tmp_path: Path) -> None:
    config, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    save_file({"a.weight": torch.ones(100, 100)}, file)

    def foreseen() -> int:
        return estimate(tmp_path, dtype=torch.float32, quantization="int8")

    assert foreseen() == 10_100
    for content in ("{}", "[]", '"quantization_config"', '{"quantization_config": null, "model_type": []}'):
        config.write_text(content)
        assert foreseen() == 10_100
    for content in ("{", '{"quantization_config": 5}'):
        config.write_text(content)
        assert foreseen() == file.stat().st_size
