"""Linear layers laid out for oneDNN: same numbers, memory still counted, shared weights left alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from workers.adapters.shared import linears
from workers.adapters.shared.building import parameter_bytes
from workers.device.findings import Findings

needs_onednn = pytest.mark.skipif(
    not linears.laid_out_dtypes(), reason="this torch has no oneDNN linear operators"
)


@needs_onednn
@pytest.mark.parametrize("dtype", sorted(linears.laid_out_dtypes(), key=str))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 64), (7, 64), (2, 5, 64)])
def test_laid_out_layer_gives_the_numbers_of_the_plain_one(
    dtype: torch.dtype, bias: bool, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(1)
    plain = nn.Linear(64, 96, bias=bias).to(dtype).eval()
    rows = torch.randn(shape).to(dtype)
    with torch.inference_mode():
        got, wanted = linears.LaidOutLinear(plain)(rows), plain(rows)
    assert got.shape == wanted.shape
    assert float((got - wanted).abs().max()) <= linears.TOLERANCE[dtype] * float(wanted.abs().max())


@needs_onednn
def test_layers_are_replaced_only_where_they_agree_and_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)).eval()
    monkeypatch.setattr(linears, "_is_better", lambda layers, rows: False)
    assert linears.lay_out_linears(model) == 0
    monkeypatch.setattr(linears, "_is_better", lambda layers, rows: True)
    before = parameter_bytes(model)
    rows = torch.randn(3, 32)
    with torch.inference_mode():
        wanted = model(rows)
        assert linears.lay_out_linears(model) == 2
        assert torch.allclose(model(rows), wanted, atol=1e-5)
    assert parameter_bytes(model) == before


@needs_onednn
def test_a_small_model_keeps_the_plain_form_for_single_rows_and_counts_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linears, "_is_better", lambda layers, rows: tuple(rows) != (1,))
    plain = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32)).eval()
    wanted, single = plain(torch.ones(3, 32)).detach(), plain(torch.ones(1, 1, 32)).detach()
    before = parameter_bytes(plain)
    weights = sum(layer.weight.nbytes for layer in plain)
    assert linears.lay_out_linears(plain, linears.GENERATED_ROWS) == 2
    assert parameter_bytes(plain) == before + weights
    with torch.inference_mode():
        assert torch.equal(plain(torch.ones(1, 1, 32)), single), "the same product as before"
        monkeypatch.setattr(linears.F, "linear", None)
        assert torch.allclose(plain(torch.ones(3, 32)), wanted, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize(("rows", "most"), [((), 1 << 30), (linears.GENERATED_ROWS, 1)])
def test_batches_of_texts_and_large_models_have_one_form(
    rows: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "KEPT_NBYTES", most)
    monkeypatch.setattr(linears, "_is_better", lambda layers, rows: tuple(rows) != (1,))
    model = nn.Sequential(nn.Linear(32, 48)).eval()
    before = parameter_bytes(model)
    assert linears.lay_out_linears(model, rows) == 1 and parameter_bytes(model) == before


@needs_onednn
def test_a_head_that_shares_the_table_of_embeddings_stays_and_progress_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []
    monkeypatch.setattr(
        linears, "_is_better", lambda layers, rows: tried.append(layers[0].out_features) is None
    )
    model = nn.ModuleDict({"words": nn.Embedding(96, 32), "up": nn.Linear(32, 48), "down": nn.Linear(48, 32)})
    model["head"] = nn.Linear(32, 96, bias=False)
    model["head"].weight = model["words"].weight  # type: ignore[assignment]
    told: list[float] = []
    assert linears.lay_out_linears(model.eval(), linears.GENERATED_ROWS, told.append) == 2
    assert 96 not in tried and type(model["head"]) is nn.Linear
    assert model["head"].weight is model["words"].weight
    assert told == [0.0, 0.5]


@needs_onednn
def test_a_layer_that_disagrees_is_not_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        linears.LaidOutLinear, "forward", lambda self, rows: rows.new_zeros(len(rows), self.out_features)
    )
    assert not linears._is_better([nn.Linear(32, 32).eval()], ())


@needs_onednn
def test_bfloat16_stays_as_it_is_on_a_processor_that_cannot_lay_it_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linears, "_is_better", lambda layers, rows: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32).bfloat16()).eval()
    assert linears.lay_out_linears(model) == 1
    assert type(model[0]) is linears.LaidOutLinear
    assert type(model[1]) is nn.Linear


@needs_onednn
def test_bfloat16_is_laid_out_exactly_where_the_operator_takes_it() -> None:
    weight = torch.zeros(32, 32, dtype=torch.bfloat16)
    if torch.bfloat16 in linears.laid_out_dtypes():
        torch.ops.mkldnn._reorder_linear_weight(weight, None)
    else:
        with pytest.raises(RuntimeError, match="bf16"):
            torch.ops.mkldnn._reorder_linear_weight(weight, None)


def test_weights_shared_with_an_embedding_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 8)
            self.decoder = nn.Linear(8, 16, bias=False)
            self.decoder.weight = self.embedding.weight

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = Tied()
            self.two = nn.Linear(8, 16, bias=False)
            self.two.weight = nn.Parameter(self.one.embedding.weight.detach())

    monkeypatch.setattr(linears, "_is_better", lambda layers, rows: True)
    model = Both().eval()
    linears.lay_out_linears(model)
    assert type(model.two) is nn.Linear


@needs_onednn
def test_choices_are_remembered_by_shapes_and_rows_and_checked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32)).eval()

    def decide(model: nn.Module, rows: tuple[int, ...] = linears.GENERATED_ROWS) -> list[str]:
        tried.clear()
        linears.lay_out_linears(model, rows, findings=Findings(tmp_path))
        return [type(layer).__name__ for layer in model]  # type: ignore[attr-defined]

    tried: list[int] = []

    def is_better(layers: Sequence[nn.Linear], rows: Sequence[int]) -> bool:
        tried.append(len(rows))
        return layers[0].out_features == 48 and tuple(rows) != (1,)

    monkeypatch.setattr(linears, "_is_better", is_better)
    assert decide(made()) == ["LaidOutLinear", "Linear"] and tried
    first = made()
    assert decide(first) == ["LaidOutLinear", "Linear"] and not tried, "what the first load has found"
    assert first[0]._plain is not None  # type: ignore[index]
    decide(made(), (1, 8))
    assert tried, "other rows are tried anew"
    decide(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(48, 32)).eval())
    assert tried, "another model is tried anew"
    monkeypatch.setattr(
        linears.LaidOutLinear, "forward", lambda self, rows: rows.new_zeros(len(rows), self.out_features)
    )
    assert decide(made()) == ["Linear", "Linear"], "a form with other numbers is never used"
