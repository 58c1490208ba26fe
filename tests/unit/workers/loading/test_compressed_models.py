"""Models of compressed-tensors, in files of the package of that name, have the numbers that the package makes of them.

Whatever does not fit the format is refused before the start, by format, tensor and numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.own_models.files import CannotTell
from penstock.own_models.places import find
from tests.harness.processor import needs_integers
from tests.tiny import compressed_models
from tests.tiny.compressed_models import LAYOUTS, Layout, change
from tests.unit.workers.adapters.test_quantized_linears import without_integers
from tests.unit.workers.adapters.test_quantizing import NEAR, is_near, layers_of, load, rounded, stays
from tests.unit.workers.loading.test_quantized_models import model_of
from workers.adapters.shared.quantized_linears import (
    FP8,
    INT4,
    INT8,
    Int4Linear,
    Int8Linear,
    MadeLinear,
    QuantizedLinear,
)
from workers.loading.quantized_parts import QuantizedRefused

pytest.importorskip("compressed_tensors", reason="the package compressed-tensors writes the files")
UP = "model.layers.0.mlp.up_proj"


def differing(root: Path, wanted: Any, dtype: torch.dtype = torch.float32) -> list[str]:
    """Names of weights that differ from those of `wanted`."""
    found, known = model_of(root, dtype).state_dict(), wanted.state_dict()
    assert found.keys() == known.keys()
    return [name for name in known if not torch.equal(found[name], known[name])]


def refused(root: Path) -> str:
    """Why a model is refused, before the start and by the load in the same words."""
    with pytest.raises(CannotTell) as told:
        find(str(root))
    with pytest.raises(QuantizedRefused) as by_load:
        model_of(root)
    assert str(by_load.value) in str(told.value)
    return str(by_load.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_gives_the_weights_that_the_package_makes_of_the_files(
    layout: str, tmp_path: Path
) -> None:
    chosen = LAYOUTS[layout]
    wanted = compressed_models.write(tmp_path, chosen)
    assert find(str(tmp_path)).entry["adapter"] == "causal"
    assert differing(tmp_path, wanted, chosen.dtype) == []


def test_layers_of_two_groups_have_the_form_of_their_own_group(tmp_path: Path) -> None:
    wanted = compressed_models.write(
        tmp_path, LAYOUTS["4 bits in groups, asymmetric"], LAYOUTS["float8 by outputs"]
    )
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert differing(tmp_path, wanted) == []
    kinds = {name.rpartition(".")[2]: layer.kind for name, layer in layers_of(load(tmp_path, FP8)).items()}
    assert set(kinds.values()) == {INT8}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_groups_of_4_and_of_8_bits_in_bytes_are_read_whichever_comes_first(
    order: tuple[int, int], tmp_path: Path
) -> None:
    layouts = Layout("naive-quantized", 4), Layout("naive-quantized", 8)
    wanted = compressed_models.write(tmp_path, *(layouts[at] for at in order))
    assert differing(tmp_path, wanted) == []


@needs_integers
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("layout", "kind", "form"),
    [
        ("4 bits in groups", INT4, Int4Linear),
        ("4 bits in groups, asymmetric", INT4, Int4Linear),
        ("4 bits by outputs, asymmetric", INT4, Int4Linear),
        ("4 bits of one scale", INT4, Int4Linear),
        ("4 bits in bytes", INT4, Int4Linear),
        ("int8 by outputs", INT8, Int8Linear),
        ("int8 of one scale", INT8, Int8Linear),
    ],
)
def test_weights_stay_as_they_are_where_their_kind_is_asked_for(
    layout: str, kind: str, form: type[QuantizedLinear], tmp_path: Path
) -> None:
    stays(tmp_path, compressed_models.write(tmp_path, LAYOUTS[layout]), kind, form)


@needs_integers
@pytest.mark.sample(2)
@pytest.mark.parametrize("has_integers", [True, False])
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("int8 by outputs, asymmetric", INT8),
        ("8 bits packed in groups", INT8),
        ("float8 by outputs", FP8),
        ("float8 in blocks", FP8),
    ],
)
def test_weights_of_8_bits_become_int8_by_outputs_where_the_processor_has_such_products_else_stay(
    layout: str, kind: str, has_integers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = compressed_models.write(tmp_path, LAYOUTS[layout])
    if has_integers:
        stays(tmp_path, rounded(wanted, INT8), kind, Int8Linear)
    else:
        without_integers(monkeypatch)
        stays(tmp_path, wanted, kind, MadeLinear)


@pytest.mark.parametrize("kind", ["", INT4])
def test_inputs_in_the_order_of_activations_meet_their_own_groups(kind: str, tmp_path: Path) -> None:
    wanted = compressed_models.write(tmp_path, LAYOUTS["4 bits in groups"])
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1)) // 32
    numbers = compressed_models.reorder(tmp_path, UP, order)
    wanted.get_submodule(UP).weight.copy_(numbers)
    if not kind:
        assert differing(tmp_path, wanted) == []
        return
    adapter = load(tmp_path, kind)
    assert type(layers_of(adapter)[UP]) is Int4Linear
    assert is_near(adapter, wanted) < 1.2 * NEAR[Int4Linear]
    rows = torch.randn(3, 128, generator=torch.Generator().manual_seed(2))
    found, exact = layers_of(adapter)[UP](rows), torch.nn.functional.linear(rows, numbers)
    assert float((found - exact).abs().max()) < 2e-2 * float(exact.abs().max())
    compressed_models.reorder(tmp_path, UP, torch.tensor([0] * 40 + [1] * 24 + [2] * 32 + [3] * 32))
    uneven = layers_of(load(tmp_path, kind))[UP]
    assert uneven.kind == INT4, "groups of unequal size are quantised anew"


def test_an_order_of_minus_one_says_nothing(tmp_path: Path) -> None:
    wanted = compressed_models.write(tmp_path, LAYOUTS["4 bits in groups"])
    change(tmp_path, {f"{UP}.weight_g_idx": torch.full((128,), -1).int()})
    assert differing(tmp_path, wanted) == []


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("layout", "end", "tensor", "why"),
    [
        ("4 bits in groups", "weight_scale", None, "the tensor {}.weight_scale is missing"),
        ("4 bits in groups", "weight_packed", None, "the tensor {}.weight_packed is missing"),
        ("4 bits in groups", "weight_shape", None, "the tensor {}.weight_shape is missing"),
        ("4 bits in groups", "weight_shape", torch.tensor([160, 120]), "weight_shape [160, 120] wants [160, 15] of 4"),
        ("4 bits in groups", "weight_shape", torch.tensor([160, -1]), "weight_shape [160, -1] wants [160, 0] of 4"),
        ("4 bits in groups", "weight_packed", torch.ones(160, 16), "{}.weight_packed is of F32; expected I32"),
        ("4 bits in groups", "weight_scale", torch.ones(160, 3), "{}.weight_scale is [160, 3]; expected [160, 4]"),
        ("4 bits in groups", "weight_g_idx", torch.zeros(127).int(), "{}.weight_g_idx is [127]; expected [128]"),
        ("4 bits in groups", "weight_g_idx", torch.full((128,), 4), "groups from 4 to 4, and there are 4 groups"),
        ("4 bits in groups, asymmetric", "weight_zero_point", None, "the tensor {}.weight_zero_point is missing"),
        ("4 bits in groups, asymmetric", "weight_zero_point", torch.ones(19, 4).int(),
         "{}.weight_zero_point is [19, 4]; expected [20, 4]"),
        ("4 bits of one scale", "weight_zero_point", torch.ones(20, 1).int(),
         "{}.weight_zero_point is of I32; expected I8"),
        ("4 bits in groups", "weight", torch.ones(160, 128), "{}.weight stands beside its quantised form"),
        ("int8 by outputs", "weight", None, "the tensor {}.weight is missing"),
        ("int8 by outputs", "weight_scale", torch.ones(1, 160), "{}.weight_scale is [1, 160]; expected [160, 1] or [1"),
        ("int8 by outputs", "weight", torch.ones(160, 128), "{}.weight is of F32; expected I8"),
        ("float8 in blocks", "weight_scale", torch.ones(2, 2), "{}.weight_scale is [2, 2]; expected [2, 3]"),
        ("float8 by outputs", "weight_scale", torch.full((160, 1), float("nan")),
         "{}.weight_scale has 160 of 160 numbers that are not finite, first [0, 0]"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_before_the_start_and_by_the_load(
    layout: str, end: str, tensor: torch.Tensor | None, why: str, tmp_path: Path
) -> None:
    compressed_models.write(tmp_path, LAYOUTS[layout])
    change(tmp_path, {f"{UP}.{end}": tensor})
    told = refused(tmp_path)
    assert told.startswith("compressed-tensors: ") and why.replace("{}", UP) in told


def test_integers_outside_of_their_bits_are_refused_by_the_load(tmp_path: Path) -> None:
    compressed_models.write(tmp_path, LAYOUTS["4 bits in bytes"])
    change(tmp_path, {f"{UP}.weight": torch.full((160, 128), 8, dtype=torch.int8)})
    with pytest.raises(
        QuantizedRefused, match=rf"{UP}\.weight has integers from 8 to 8; of 4 bits are -8 to 7"
    ):
        model_of(tmp_path)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("change_of", "why"),
    [
        (lambda stated: stated.update(format="marlin-24"), "quantization_config.format marlin-24 is not read"),
        (lambda stated: stated.update(format="nvfp4-pack-quantized"), "format nvfp4-pack-quantized is not read"),
        (lambda stated: stated.update(quantization_status="frozen"), "quantization_status frozen is not read"),
        (lambda stated: stated.update(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config {"),
        (lambda stated: stated.update(transform_config={"config_groups": {"a": {}}}), "transform_config {"),
        (lambda stated: stated.update(config_groups={}), "config_groups: expected an object of groups, got {}"),
        (lambda stated: stated.update(config_groups={"W4A16": ["Linear"]}), "W4A16: expected an object, got ['L"),
        (lambda stated: stated.update(config_groups={"a": {"weights": None}}), "none of 1 has weights"),
        (lambda stated: weights(stated).update(num_bits=3), "weights.num_bits 3 is not read; read are 4, 8"),
        (lambda stated: weights(stated).update(num_bits=True), "weights.num_bits True is not read"),
        (lambda stated: weights(stated).update(type="float"), "weights of type float have no format pack-quantized"),
        (lambda stated: weights(stated).update(symmetric="no"), "weights.symmetric no is not read"),
        (lambda stated: weights(stated).update(strategy="tensor_group"), "weights.strategy tensor_group is not read"),
        (lambda stated: weights(stated).update(group_size=48), "160 inputs are no multiple of the group_size 48"),
        (lambda stated: weights(stated).update(group_size=0), "weights.group_size: expected a number from 1 on, got 0"),
        (lambda stated: weights(stated).update(dynamic=True), "weights.dynamic True is not read; read are False"),
        (lambda stated: weights(stated).update(strategy="block"), "weights.block_structure: expected two numbers"),
        (lambda stated: weights(stated).update(actorder="column"), "weights.actorder column is not read"),
    ],
)  # fmt: skip
def test_a_scheme_that_is_not_read_is_refused_before_the_start(
    change_of: Any, why: str, tmp_path: Path
) -> None:
    compressed_models.write(tmp_path, LAYOUTS["4 bits in groups"])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    change_of(config["quantization_config"])
    path.write_text(json.dumps(config))
    assert why in refused(tmp_path)


def weights(stated: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the weights in the only group of a `quantization_config`."""
    [group] = stated["config_groups"].values()
    found: dict[str, Any] = group["weights"]
    return found


def test_a_layer_of_no_group_is_refused(tmp_path: Path) -> None:
    compressed_models.write(tmp_path, LAYOUTS["4 bits in groups, asymmetric"], LAYOUTS["float8 by outputs"])
    change(tmp_path, {f"{UP}.weight_scale": torch.ones(5)})
    told = refused(tmp_path)
    assert f"{UP}.weight_scale is [5]; expected [160, 4]" in told
    assert told.endswith("and the layer is of no other of 2 groups")
