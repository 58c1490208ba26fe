"""A decoder in place of transformers' modules, and linear layers of the same rows as one product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.tiny import causal
from workers.adapters.shared.building import parameter_bytes
from workers.device.findings import Findings, Proof
from workers.generation import decoder
from workers.generation.attention import PagedAttention
from workers.generation.decoder import Decoder
from workers.generation.heads import Heads
from workers.generation.joined import Joined, Part, bare, join, merged
from workers.generation.proof import Earlier, packs

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def joined(family: str) -> Any:
    """A model whose layers are joined."""
    model = causal.make(family)
    assert join(model.model.layers) == 2 * len(model.model.layers)
    return model


@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_like_llama_are_proven_with_a_decoder(family: str, is_joined: bool) -> None:
    model = joined(family) if is_joined else causal.make(family)
    attention = PagedAttention(8)
    assert packs(model, attention) and attention.decoder is not None


@pytest.mark.parametrize("family", ["gemma2", "phi3", "gpt_oss", "granite"])
def test_other_families_run_through_their_own_modules(family: str) -> None:
    model, attention = causal.make(family), PagedAttention(8)
    assert not Decoder.knows(model)
    assert packs(model, attention) and attention.decoder is None


def test_a_decoder_knows_float32_on_a_cpu_and_its_activation_only() -> None:
    model = causal.make("llama")
    assert Decoder.knows(model)
    assert not Decoder.knows(model.to(torch.bfloat16))
    model = causal.make("llama")
    model.config.hidden_act = "gelu"
    assert not Decoder.knows(model)


def test_a_decoder_that_computes_something_else_is_found_and_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoder, "_turned", lambda heads, turn: heads)
    model, attention = causal.make("llama"), PagedAttention(8)
    assert packs(model, attention) and attention.decoder is None and attention.passes_rules


def test_a_decoder_that_forgets_the_window_of_its_layers_is_found_and_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoder, "Heads", lambda *facts: Heads(*facts)._replace(window=0))
    attention = PagedAttention(8)
    assert packs(causal.make("mistral"), attention) and attention.decoder is None


@torch.inference_mode()
def test_a_bare_product_is_that_of_the_layer_without_its_hooks() -> None:
    layer, rows = nn.Linear(8, 4).eval().requires_grad_(False), torch.randn(3, 8)
    wanted = layer(rows)
    layer.register_forward_hook(lambda _, given, result: result + 1)
    assert torch.equal(bare(layer)(rows), wanted) and not torch.equal(layer(rows), wanted)
    other = nn.Sequential(layer)
    assert bare(other) is other, "a layer of an unknown form is called as a module"


def test_a_remembered_proof_brings_the_decoder_back(tmp_path: Path) -> None:
    for load in range(2):
        attention, found = PagedAttention(8), Proof(Findings(tmp_path))
        assert packs(causal.make("llama"), attention, Earlier(found, "the files"))
        assert attention.decoder is not None and (found.values is not None) == bool(load)
        found.keep({"generate.text": [1.0]})


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_joined_layers_give_the_logits_of_the_layers_in_the_same_memory(family: str) -> None:
    plain, model = causal.make(family), joined(family)
    ids = torch.arange(3, 40)[None]
    wanted, got = plain(input_ids=ids).logits, model(input_ids=ids).logits
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert parameter_bytes(model) == parameter_bytes(plain)


@torch.inference_mode()
def test_parts_of_a_product_are_right_in_any_order_and_keep_nothing() -> None:
    layers = [nn.Linear(8, width).eval().requires_grad_(False) for width in (6, 2, 2)]
    whole = merged(layers)
    assert whole is not None
    product = Joined(layers, whole)
    parts = [Part(product, number, layer) for number, layer in enumerate(layers)]
    calls: list[int] = []
    product.whole.register_forward_hook(lambda *_: calls.append(1))
    one, other = torch.randn(3, 8), torch.randn(5, 8)
    for rows, order in ((one, (0, 1, 2)), (other, (0, 1, 2)), (one, (2, 0, 1)), (other, (1, 2))):
        for at in order:
            torch.testing.assert_close(parts[at](rows), layers[at](rows))
    assert len(calls) == 5, "rows that all parts read in order are multiplied once"
    parts[0](one)
    parts[2](one)
    assert product._rows is None and not product._results
    for part, layer in zip(parts, layers, strict=True):
        assert torch.equal(part.weight, layer.weight)


def test_layers_of_different_kinds_are_not_joined() -> None:
    model = causal.make("llama")
    first = model.model.layers[0].self_attn
    first.k_proj = nn.Linear(first.k_proj.in_features, first.k_proj.out_features, bias=True)
    assert join(model.model.layers) == 2 * len(model.model.layers) - 1
    assert type(first.q_proj) is nn.Linear
