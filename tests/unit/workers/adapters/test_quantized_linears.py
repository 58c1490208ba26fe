"""Quantised linear layers: the product of their numbers, of each row in any company, and a model's perplexity."""

from __future__ import annotations

import copy
import math
import os
import platform
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.processor import needs_integers
from workers.adapters.shared import proven_linears
from workers.adapters.shared.building import parameter_bytes
from workers.adapters.shared.proven_linears import NEAR_NUMBERS, LayerNotProven, _forms, layer_of
from workers.adapters.shared.quantized_linears import (
    FP8,
    INT4,
    INT8,
    Int4Linear,
    Int8Linear,
    MadeLinear,
    PairedInt8Linear,
    QuantizedLinear,
    QuantizedWeight,
    quantize,
)
from workers.adapters.shared.quantizing import Quantizer, merged

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[4]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = 70
FORMS = {INT8: Int8Linear, INT4: Int4Linear, FP8: MadeLinear}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
BATCHES, STEPS, LENGTH, TESTED = 16, 200, 32, 8192


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def grouped(
    inner: int, size: int, *, zeros: bool = True, order: bool = True, seed: int = 3
) -> QuantizedWeight:
    """A weight of 48 outputs and 8 bits in groups."""
    draw = torch.Generator().manual_seed(seed)
    groups = -(-inner // size)
    return QuantizedWeight(
        INT8,
        torch.randint(-128, 128, (48, inner), dtype=torch.int8, generator=draw),
        torch.rand(48, groups, generator=draw) * 0.01 + 0.001,
        size,
        torch.randint(-128, 128, (48, groups), generator=draw).float() if zeros else None,
        torch.randperm(inner, generator=draw) if order else None,
    )


def with_two_large_inputs(stored: QuantizedWeight, times: float) -> QuantizedWeight:
    """All numbers but those of two inputs become less, or 0."""
    stored.scales[:, 1:] /= times
    stored.values[:, :30] = 0
    if stored.zeros is not None:
        stored.zeros[:, 0] = 0
    return stored


def without_integers(patch: pytest.MonkeyPatch) -> None:
    """From now on the processor has no products of int8."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("no such form")

    patch.setattr(Int8Linear, "__init__", refuse)


def in_groups(numbers: torch.Tensor, size: int, bits: int, *, zeros: bool = False) -> QuantizedWeight:
    """Numbers [outer, inner] as integers of 4 or 8 bits with a scale, and maybe a zero, for each `size` inputs."""
    inner, kind = numbers.shape[1], INT8 if bits == 8 else INT4
    parts = numbers.split(size, 1)
    most = torch.stack([part.amax(1) if zeros else part.abs().amax(1) for part in parts], 1)
    least = torch.stack([part.amin(1) for part in parts], 1) if zeros else -most
    steps, first = 2**bits - (1 if zeros else 2), -128 if bits == 8 else 0
    scales = (most - least) / steps
    places = first - least / scales if zeros else torch.full_like(scales, 0.0 if bits == 8 else 7.0)
    wide, offsets = (each.repeat_interleave(size, 1)[:, :inner] for each in (scales, places))
    values = (numbers / wide + offsets).round().clamp(first, first + 2**bits - 1).to(torch.int8)
    return QuantizedWeight(kind, values, scales, size, None if kind == INT8 and not zeros else places)


def agrees(
    layer: QuantizedLinear, stored: QuantizedWeight, bias: torch.Tensor | None, tolerance: float
) -> None:
    """The results of rows in company are the product of the numbers; those of each row alone are the same bits."""
    rows = drawn(ROWS, stored.shape[1], seed=1).to(layer.dtype)
    rows[3] = 0
    rows[4] *= 1e4
    with torch.inference_mode():
        found = layer(rows)
        wanted = F.linear(rows.double(), stored.numbers().double(), None if bias is None else bias.double())
        apart = (found.double() - wanted).abs().amax(1) / wanted.abs().amax(1).clamp(min=1e-9)
        assert float(apart.max()) < tolerance
        assert all(torch.equal(layer(rows[at]), found[at]) for at in range(ROWS))
        for first, last in ((0, 2), (5, 38), (31, 64), (1, ROWS)):
            assert torch.equal(layer(rows[first:last]), found[first:last])
        assert torch.equal(layer.bare(rows).to(layer.dtype), found)
    assert found.dtype == layer.dtype


@pytest.mark.sample
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("shape", [(96, 64), (160, 128), (64, 1600)])
def test_a_layer_gives_the_product_of_its_numbers_and_a_row_the_same_bits_in_any_company(
    shape: tuple[int, int], kind: str, dtype: torch.dtype
) -> None:
    stored, bias = quantize(drawn(*shape), kind), drawn(shape[0], seed=2).to(dtype).float()
    layer = layer_of("a", stored, bias, dtype, CPU)
    assert type(layer) is FORMS[kind]
    # NOTE: float16 has no place for 1e4 times these numbers of a wide layer; four bits compute in bfloat16.
    assert layer(drawn(2, 3, shape[1]).to(dtype)).shape == (2, 3, shape[0])
    if dtype != torch.float16:
        agrees(layer, stored, bias, TOLERANCE[torch.bfloat16 if kind == INT4 else dtype])


@pytest.mark.parametrize(
    "stored", [grouped(96, 32), grouped(100, 32), grouped(96, 96, order=False), grouped(96, 32, zeros=False)]
)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_groups_zero_points_and_the_order_of_inputs_are_kept(
    stored: QuantizedWeight, dtype: torch.dtype
) -> None:
    agrees(MadeLinear(stored, None, dtype, CPU), stored, None, TOLERANCE[dtype])


@needs_integers
@pytest.mark.parametrize(
    "stored", [grouped(96, 32), grouped(100, 32), grouped(96, 96, order=False), grouped(96, 32, zeros=False)]
)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_integers_that_no_product_takes_become_int8_by_outputs_near_their_numbers(
    stored: QuantizedWeight, dtype: torch.dtype
) -> None:
    layer = layer_of("a", stored, drawn(48), dtype, CPU)
    assert type(layer) is Int8Linear and layer.order is None
    agrees(layer, stored.by_outputs(), drawn(48).to(dtype).float(), TOLERANCE[dtype])
    agrees(layer, stored, drawn(48).to(dtype).float(), NEAR_NUMBERS)


@needs_integers
@pytest.mark.parametrize(("zeros", "order"), [(False, False), (True, True)])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_weight_whose_groups_differ_too_much_for_one_scale_has_two_and_the_log_says_why(
    dtype: torch.dtype, zeros: bool, order: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stored = with_two_large_inputs(grouped(96, 32, zeros=zeros, order=order), 200)
    bias = drawn(48, seed=2).to(dtype).float()
    with caplog.at_level("INFO"):
        layer = layer_of("layers.1.up", stored, bias, dtype, CPU)
    assert type(layer) is PairedInt8Linear
    agrees(layer, stored, bias, max(TOLERANCE[dtype], 5e-4))
    assert "layers.1.up: Int8Linear is not used for int8 in groups of 32: numbers differ by" in caplog.text
    assert layer.packed_nbytes == 2 * 48 * 96 and layer.weight.shape == (48, 96)


@needs_integers
@pytest.mark.parametrize("outer", [32, 100, 128])
def test_a_narrow_layer_asks_for_more_results_than_onednn_computes_by_reference_code(outer: int) -> None:
    stored, seen = quantize(drawn(outer, 64), INT8), []
    layer = Int8Linear(stored, None, torch.float32, CPU)
    run = layer._run

    def counted(parts: torch.Tensor, *more: Any) -> Any:
        seen.append(len(parts))
        return run(parts, *more)

    layer._run = counted
    agrees(layer, stored, None, TOLERANCE[torch.float32])
    assert min(seen) == 256 // outer + 1


def test_layers_with_two_scales_for_each_output_join_bit_for_bit() -> None:
    weights = [grouped(96, 32, seed=seed) for seed in (3, 4)]
    layers = [PairedInt8Linear(each.in_pairs(), None, torch.float32, CPU) for each in weights]
    whole, rows = merged(layers), drawn(5, 96, seed=1)
    assert type(whole) is PairedInt8Linear and whole.out_features == 96
    assert torch.equal(whole(rows), torch.cat([layer(rows) for layer in layers], -1))
    assert merged([layers[0], Int8Linear(weights[1].by_outputs(), None, torch.float32, CPU)]) is None


def test_a_weight_whose_groups_differ_too_much_for_two_scales_stays_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stored = with_two_large_inputs(grouped(32768, 32, zeros=False), 2e5)
    with caplog.at_level("INFO"):
        layer = layer_of("layers.1.up", stored, None, torch.float32, CPU)
    assert type(layer) is MadeLinear
    for form in ("Int8Linear", "PairedInt8Linear"):
        assert f"layers.1.up: {form} is not used for int8 in groups of 32: numbers differ by" in caplog.text


@needs_integers
@pytest.mark.parametrize("kind", [INT8, INT4])
def test_on_cards_no_weight_becomes_another(kind: str) -> None:
    stored = grouped(96, 32)
    if kind == INT4:
        stored = quantize(drawn(40, 96), INT4)
    assert [form for form, _ in _forms(stored, torch.device("cuda"))] == [MadeLinear]
    assert [form for form, _ in _forms(stored, CPU)] == [Int8Linear, PairedInt8Linear, MadeLinear]
    assert type(layer_of("a", stored, None, torch.float32, CPU)) is Int8Linear


@needs_integers
@pytest.mark.parametrize("kind", FORMS)
def test_rows_of_zeros_and_of_the_least_numbers_have_results_as_others(kind: str) -> None:
    stored = quantize(drawn(96, 64), kind)
    layer, rows = layer_of("a", stored, None, torch.float32, CPU), drawn(3, 64, seed=1)
    assert type(layer) is FORMS[kind]
    rows *= torch.tensor([[0.0], [1e-36], [1e-34]])
    with torch.inference_mode():
        found, wanted = layer(rows), F.linear(rows.double(), stored.numbers().double())
    assert not found[0].any()
    apart = (found.double() - wanted)[1:].abs().amax(1) / wanted[1:].abs().amax(1)
    assert apart.tolist() == pytest.approx([0, 0], abs=3e-2)
    assert layer(torch.full((1, 64), math.nan)).isnan().all()


@pytest.mark.parametrize("kind", FORMS)
def test_numbers_are_rounded_to_the_nearest_of_their_kind(kind: str) -> None:
    numbers = drawn(64, 96)
    numbers[5] = 0
    stored = quantize(numbers, kind)
    apart = (stored.numbers() - numbers).abs()
    step = stored.scales if kind == INT8 else stored.scales.repeat_interleave(32, 1) if kind == INT4 else None
    limit = (
        numbers.abs() / 16 + numbers.abs().amax(1, keepdim=True) / 448 / 512 if step is None else step * 0.501
    )
    # NOTE: scales and the middles of groups of 4 bits are rounded to bfloat16.
    assert bool((apart <= limit * (1.2 if kind == INT4 else 1) + 1e-9).all())
    assert not stored.numbers()[5].any()


@pytest.mark.parametrize("least", [-0.3, 0.01, -5.0, 0.0])
def test_numbers_of_sixteen_steps_keep_their_steps_in_four_bits(least: float) -> None:
    draw = torch.Generator().manual_seed(4)
    wanted = torch.randint(0, 16, (64, 3, 32), generator=draw)
    wanted[..., 0], wanted[..., 1] = 0, 15
    steps = torch.rand(64, 3, 1, generator=draw) * 0.05 + 0.05
    numbers = (wanted * steps + least).view(64, 96)
    stored = quantize(numbers, INT4)
    assert torch.equal(stored.values.long(), wanted.view(64, 96))
    apart = (stored.numbers() - numbers).abs().view(64, 3, 32).amax(2)
    assert bool((apart <= (15.5 * steps[..., 0] + abs(least)) / 256).all()), "but for bfloat16"


def test_four_bits_of_one_number_are_the_number() -> None:
    numbers = torch.tensor([0.0, 0.7, -30.0, 1e-20]).repeat_interleave(32).view(1, 128).repeat(16, 1)
    found = quantize(numbers, INT4).numbers()
    torch.testing.assert_close(found, numbers, rtol=2.0**-7, atol=0)


class Counted(TorchDispatchMode):
    """Counts the bytes of tensors that operations return, and keeps the most that live at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._seen = 0, list[weakref.ref[torch.Tensor]]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(each, torch.Tensor) and each.device.type == "cpu" and each.layout == torch.strided:
                self._seen.append(weakref.ref(each))
        self._seen = [each for each in self._seen if each() is not None]
        storages = [tensor.untyped_storage() for each in self._seen if (tensor := each()) is not None]
        self.most = max(self.most, sum({each.data_ptr(): each.nbytes() for each in storages}.values()))
        return result


@needs_integers
@pytest.mark.parametrize("kind", FORMS)
def test_a_layer_is_made_in_less_memory_than_its_numbers_have(kind: str) -> None:
    numbers = drawn(4096, 1024)
    with torch.inference_mode(), Counted() as counted:
        stored = quantize(numbers, kind)
        layer = layer_of("a", stored, None, torch.float32, CPU)
    assert type(layer) is FORMS[kind]
    # NOTE: the numbers are counted too, as the tiles are views of them.
    assert stored.values.nbytes < counted.most - numbers.nbytes < numbers.nbytes / 2


@needs_integers
def test_a_weight_in_groups_becomes_int8_by_outputs_in_less_memory_than_its_numbers_have() -> None:
    stored = in_groups(drawn(4096, 1024), 32, 8)
    with torch.inference_mode(), Counted() as counted:
        layer = layer_of("a", stored, None, torch.float32, CPU)
    assert type(layer) is Int8Linear
    assert stored.values.nbytes <= counted.most < 4 * stored.values.nbytes


def test_packing_in_tiles_is_packing_at_once() -> None:
    for outer, inner in ((1552, 576), (80, 4096)):
        stored = quantize(drawn(outer, inner), INT4)
        layer = layer_of("a", stored, None, torch.float32, CPU)
        whole = torch.ops.aten._convert_weight_to_int4pack_for_cpu(stored.values.int(), 1)
        assert torch.equal(layer.get_buffer("_packed"), whole)


def test_a_width_without_whole_groups_of_four_bits_becomes_int8() -> None:
    assert quantize(drawn(32, 100), INT4).kind == INT8


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_float8_is_its_number(dtype: torch.dtype) -> None:
    finite = [code for code in range(256) if code & 0x7F != 0x7F]
    values = torch.tensor([finite] * 32, dtype=torch.uint8).view(torch.float8_e4m3fn)
    layer = MadeLinear(QuantizedWeight(FP8, values, torch.ones(32, 1), len(finite)), None, dtype, CPU)
    assert torch.equal(layer._numbers(0, 32).float(), values.float())


def test_float8_that_is_no_number_is_refused_by_the_name_of_the_layer() -> None:
    stored = quantize(drawn(32, 64), FP8)
    stored.values.view(torch.uint8)[3, 4] = 0x7F
    with pytest.raises(LayerNotProven, match=r"^layers\.1\.up: the quantised layer \(fp8\) does not give"):
        layer_of("layers.1.up", stored, None, torch.float32, CPU)


@pytest.mark.parametrize("fault", ["other numbers", "rows that depend", "no such product"])
def test_a_product_that_fails_its_proof_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Int8Linear.product

    def product(self: Any, rows: torch.Tensor) -> torch.Tensor:
        if fault == "no such product":
            raise RuntimeError("not here")
        result = whole(self, rows)
        return result * 1.01 if fault == "other numbers" else result + 1e-6 * len(rows)

    monkeypatch.setattr(Int8Linear, "product", product)
    stored = quantize(drawn(32, 64), INT8)
    layer = layer_of("a", stored, None, torch.float32, CPU)
    assert type(layer) is MadeLinear
    agrees(layer, stored, None, 1e-5)


def test_a_layer_that_no_form_computes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proven_linears, "TOLERANCE", dict.fromkeys(DTYPES, -1.0))
    with pytest.raises(LayerNotProven, match=r"^a: the quantised layer \(int8\).*the limit is -1"):
        layer_of("a", quantize(drawn(32, 64), INT8), None, torch.float32, CPU)


def parts_of(
    kind: str, widths: tuple[int, ...] = (192, 64, 96), inner: int = 128, **more: Any
) -> list[QuantizedLinear]:
    """Layers of the same inputs, each with a bias, unless `more` says otherwise."""
    made = []
    for seed, width in enumerate(widths):
        bias = more.get("bias", drawn(width, seed=9))
        stored = quantize(drawn(width, inner, seed=seed), more.get("kinds", {}).get(seed, kind))
        stored.order = more.get("order")
        made.append(layer_of("a", stored, bias, more.get("dtype", torch.float32), CPU))
    return made


@needs_integers
@torch.inference_mode()
def test_layers_in_groups_become_one_with_the_bits_of_each() -> None:
    parts = [
        layer_of("a", in_groups(drawn(width, 128, seed=width), 32, 8), None, torch.float32, CPU)
        for width in (192, 64, 96)
    ]
    rows = drawn(5, 128, seed=4)
    whole = merged(parts)
    assert type(whole) is Int8Linear
    assert torch.equal(whole(rows), torch.cat([part(rows) for part in parts], -1))


@needs_integers
@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("kind", [INT8, INT4])
def test_layers_of_the_same_rows_become_one_with_the_same_bits_in_the_same_memory(
    kind: str, dtype: torch.dtype
) -> None:
    parts = parts_of(kind, dtype=dtype)
    rows = drawn(5, 128, seed=4).to(dtype)
    wanted, nbytes = torch.cat([part(rows) for part in parts], -1), parameter_bytes(*parts)
    whole = merged(parts)
    assert type(whole) is FORMS[kind] and whole.weight.shape == (352, 128)
    assert torch.equal(whole(rows), wanted) and torch.equal(whole(rows[2:3]), wanted[2:3])
    assert parameter_bytes(whole) == nbytes
    assert torch.equal(torch.cat([part(rows) for part in parts], -1), wanted), "the layers stay as they were"
    plain = merged(parts_of(kind, dtype=dtype, bias=None))
    assert plain is not None and plain.bias is None


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (INT8, {"order": torch.arange(128).flip(0)}),
        (INT8, {"kinds": {1: INT4}}),
        (INT4, {"kinds": {2: INT8}}),
        (INT4, {"widths": (80, 64)}),
        (FP8, {}),
    ],
)
def test_layers_that_differ_or_have_no_joined_form_stay_apart(kind: str, more: dict[str, Any]) -> None:
    assert merged(parts_of(kind, **more)) is None


def test_layers_with_a_bias_and_without_and_layers_of_numbers_stay_apart() -> None:
    biased, plain = parts_of(INT8)[0], parts_of(INT8, bias=None)[0]
    assert merged([biased, plain]) is None
    assert merged([plain, torch.nn.Linear(128, 64, bias=False)]) is None
    assert merged([torch.nn.Linear(128, 64, bias=False), plain]) is None


@pytest.mark.parametrize("fault", ["other bits", "no such layout"])
def test_a_joined_product_that_fails_its_proof_is_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Int8Linear.take

    def take(self: Any, others: Any) -> None:
        if fault == "no such layout":
            raise RuntimeError("not here")
        whole(self, others)
        self._scales[-1] *= 1.0001

    monkeypatch.setattr(Int8Linear, "take", take)
    assert merged(parts_of(INT8)) is None


@needs_integers
@pytest.mark.parametrize("kind", FORMS)
def test_memory_of_a_layer_is_that_of_its_integers_and_scales(kind: str) -> None:
    outer, inner = 128, 256
    nbytes = parameter_bytes(layer_of("a", quantize(drawn(outer, inner), kind), None, torch.float32, CPU))
    each = {INT8: outer * (inner + 8), INT4: outer * (inner // 2 + inner // 32 * 4), FP8: outer * (inner + 4)}
    assert nbytes == each[kind]


@needs_integers
@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("shape", [(64, 64), (32, 1536), (256, 96)])
def test_products_of_int8_are_never_computed_by_reference_code(
    shape: tuple[int, int], rows: int, capfd: pytest.CaptureFixture[str]
) -> None:
    layer = Int8Linear(quantize(drawn(*shape), INT8), None, torch.float32, CPU)
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        layer(torch.randn(rows, shape[1]))
    products = [line for line in capfd.readouterr().out.splitlines() if ",exec,cpu,matmul," in line]
    assert len(products) == 1 and ",ref" not in products[0]


_LAYER = """
import torch
from workers.adapters.shared.proven_linears import layer_of
from workers.adapters.shared.quantized_linears import INT8, quantize
numbers = torch.randn(320, 512, generator=torch.Generator().manual_seed(0))
layer = layer_of("bell", quantize(numbers, INT8), None, torch.bfloat16, torch.device("cpu"))
print(type(layer).__name__)
"""


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="oneDNN takes the name of a processor on x86-64 alone"
)
@pytest.mark.parametrize("processor", ["AVX2", pytest.param("AVX512_CORE", marks=pytest.mark.long)])
def test_a_processor_whose_products_of_int8_saturate_makes_numbers(processor: str) -> None:
    """A layer of bell-shaped weights in bfloat16, where random rows lose less than the proof allows."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": processor}
    command = [sys.executable, "-c", _LAYER]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.stdout == "MadeLinear\n", ended.stderr


@needs_integers
def test_products_of_int8_are_exact_for_the_widest_rows_and_the_largest_numbers() -> None:
    inner = 53248
    weights = QuantizedWeight(INT8, torch.full((32, inner), 127, dtype=torch.int8), torch.ones(32, 1), inner)
    layer = Int8Linear(weights, None, torch.float32, CPU)
    rows = torch.full((3, inner), 127.0 * 254)
    assert torch.allclose(
        layer(rows).double(), rows.double() @ torch.full((inner, 32), 127.0).double(), rtol=1e-6
    )


@pytest.fixture(scope="module")
def learnt() -> tuple[Any, torch.Tensor, float]:
    """A model of bytes that has learnt from the pages of this repository, a text that is new to it, its perplexity."""
    pages = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = torch.frombuffer(
        bytearray(b"\n".join(page.read_bytes() for page in pages)), dtype=torch.uint8
    ).long()
    tested, known = text[:TESTED], text[TESTED:]
    config = transformers.LlamaConfig(
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        # With larger first weights and an early peak of the rate the model learns in half the time.
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, fused=True)
    pace = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, STEPS, pct_start=0.1)
    for _ in range(STEPS):
        batch = torch.stack(
            [known[at : at + LENGTH] for at in torch.randint(len(known) - LENGTH, (BATCHES,))]
        )
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pace.step()
    model.eval().requires_grad_(False)
    return model, tested, perplexity(model, tested)


@torch.inference_mode()
def perplexity(model: Any, text: torch.Tensor) -> float:
    parts = text.view(-1, 128).split(16)
    return math.exp(sum(float(model(input_ids=part, labels=part).loss) for part in parts) / len(parts))


@needs_integers
@pytest.mark.parametrize(("kind", "most"), [(INT8, 0.01), (INT4, 0.05), (FP8, 0.01)])
def test_perplexity_of_a_model_that_has_learnt_hardly_changes(
    kind: str, most: float, learnt: tuple[Any, torch.Tensor, float]
) -> None:
    model, text, before = learnt
    assert before < 20, "the model has learnt something: 256 bytes are equally likely without"
    quantized = copy.deepcopy(model)
    Quantizer(kind, torch.float32, CPU).finish(quantized)
    made = {type(layer) for layer in quantized.modules() if isinstance(layer, QuantizedLinear)}
    assert made == ({Int4Linear, Int8Linear} if kind == INT4 else {Int8Linear})
    assert not [layer for layer in quantized.modules() if type(layer) is torch.nn.Linear]
    assert abs(perplexity(quantized, text) / before - 1) < most


def test_float8_stays_within_its_bound_where_the_processor_has_no_products_of_integers(
    learnt: tuple[Any, torch.Tensor, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_integers(monkeypatch)
    model, text, before = learnt
    quantized = copy.deepcopy(model)
    Quantizer(FP8, torch.float32, CPU).finish(quantized)
    layers = [layer for layer in quantized.modules() if isinstance(layer, QuantizedLinear)]
    assert {(type(layer), layer.kind) for layer in layers} == {(MadeLinear, FP8)}
    assert abs(perplexity(quantized, text) / before - 1) < 0.01


@needs_integers
def test_float8_of_a_file_that_becomes_int8_stays_within_its_bound_of_the_dequantised_model(
    learnt: tuple[Any, torch.Tensor, float],
) -> None:
    model, text, _ = learnt
    numbers, quantized = copy.deepcopy(model), copy.deepcopy(model)
    quantizer = Quantizer(FP8, torch.float32, CPU)
    for name in quantizer.names(model):
        stored = quantize(quantized.get_parameter(name), FP8).numbers()
        numbers.get_parameter(name).copy_(stored)
        quantized.get_parameter(name).data = quantizer.hold(name, stored)
    quantizer.finish(quantized, held_only=True)
    layers = [layer for layer in quantized.modules() if isinstance(layer, QuantizedLinear)]
    assert len(layers) == 2 * 7 + 1 and {type(layer) for layer in layers} == {Int8Linear}
    assert abs(perplexity(quantized, text) / perplexity(numbers, text) - 1) < 0.01


@needs_integers
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("size", "bits", "zeros", "most"),
    [
        (32, 8, False, 0.01),
        (64, 8, True, 0.01),
        (96, 8, False, 0.01),
        (24, 4, False, 0.05),
        (24, 4, True, 0.05),
    ],
)
def test_groups_that_become_int8_by_outputs_stay_within_the_bound_of_the_dequantised_model(
    size: int, bits: int, zeros: bool, most: float, learnt: tuple[Any, torch.Tensor, float]
) -> None:
    model, text, _ = learnt
    numbers, quantized = copy.deepcopy(model), copy.deepcopy(model)
    quantizer = Quantizer(INT8 if bits == 8 else INT4, torch.float32, CPU)
    for name in quantizer.names(model):
        weight = quantized.get_parameter(name)
        stored = in_groups(weight, size, bits, zeros=zeros)
        numbers.get_parameter(name).copy_(stored.numbers())
        weight.data = quantizer.hold(name, stored)
    quantizer.finish(quantized, held_only=True)
    layers = [layer for layer in quantized.modules() if isinstance(layer, QuantizedLinear)]
    assert len(layers) == 2 * 7 + 1 and {type(layer) for layer in layers} == {Int8Linear}
    assert abs(perplexity(quantized, text) / perplexity(numbers, text) - 1) < most
