"""The proof at the load of a model that generates: right attention passes, and whatever a layer leaves out is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.tiny import causal
from workers.device.findings import Findings, Proof
from workers.generation import attention as attention_module
from workers.generation import proof
from workers.generation.attention import MaskRule, PagedAttention
from workers.generation.decoder import Decoder
from workers.generation.proof import packs

BLOCK_TOKENS = 8


@pytest.mark.sample(10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", causal.FAMILIES)
def test_every_form_of_attention_passes(family: str, dtype: torch.dtype) -> None:
    model, attention = causal.make(family).to(dtype), PagedAttention(BLOCK_TOKENS)
    assert packs(model, attention) and attention.passes_rules
    assert model.config._attn_implementation == attention.name


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Leave an argument out."""
    return lambda named: {**named, name: None}


LEFT_OUT: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "the soft cap": ("gemma2", without("softcap")),
    "the sinks": ("gpt_oss", without("s_aux")),
    "the window": ("mistral", without("sliding_window")),
    "one token of the window": (
        "phi3",
        lambda named: {**named, "sliding_window": named["sliding_window"] - 1},
    ),
    "the window of every second layer": ("gemma3", without("sliding_window")),
    "only the mask": ("mistral", dict),
    "the scale": ("granite", without("scaling")),
}


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_what_is_left_out_is_found_unless_it_is_told_twice(
    left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, change = LEFT_OUT[left_out]
    whole = PagedAttention.attend

    def changed(self: Any, module: Any, query: Any, key: Any, value: Any, mask: Any, **named: Any) -> Any:
        return whole(self, module, query, key, value, None, **change(named))

    monkeypatch.setattr(PagedAttention, "attend", changed)
    # NOTE: a decoder attends by what its layers say, not by arguments of transformers' modules.
    monkeypatch.setattr(Decoder, "knows", staticmethod(lambda model: False))
    model, attention = causal.make(family), PagedAttention(BLOCK_TOKENS)
    assert packs(model, attention) == (left_out == "only the mask")
    assert (model.config._attn_implementation == attention.name) == (left_out == "only the mask")


def test_chunks_that_only_the_mask_knows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MaskRule, "allows", lambda self, queries, keys: keys <= queries)
    assert not packs(causal.make("llama4"), PagedAttention(BLOCK_TOKENS))


@pytest.mark.parametrize("family", causal.BY_LENGTH)
def test_positions_by_length_pass(family: str) -> None:
    assert packs(causal.make(family), PagedAttention(BLOCK_TOKENS))


@pytest.mark.parametrize("family", [name for name in causal.BY_LENGTH if name != "llama_dynamic"])
def test_positions_of_the_longest_text_are_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "length_rope", lambda model: None)
    assert not packs(causal.make(family), PagedAttention(BLOCK_TOKENS))


@pytest.mark.parametrize("border", [100, 4096])
def test_positions_of_unknown_code_that_looks_at_the_longest_text_are_found(border: int) -> None:
    model = causal.make("llama")
    model.config.max_position_embeddings = 2 * border
    rotary = model.model.rotary_emb
    plain = rotary.forward

    def by_the_longest(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return plain(x, position_ids * (0.5 if position_ids.max() >= border else 1.0))

    rotary.forward = by_the_longest
    assert not packs(model, PagedAttention(BLOCK_TOKENS))


def test_ids_that_a_model_treats_in_its_own_way_are_part_of_the_proof() -> None:
    model = causal.make("llama")
    embed = model.model.embed_tokens
    pad = model.config.pad_token_id

    def shifted(ids: torch.Tensor) -> torch.Tensor:
        rows = torch.nn.functional.embedding(ids, embed.weight)
        return rows + (ids == pad).cumsum(-1)[..., None] * 0.3

    embed.forward = shifted
    assert not packs(model, PagedAttention(BLOCK_TOKENS))


def test_the_modules_beside_a_decoder_are_part_of_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    model, attention = causal.make("llama"), PagedAttention(BLOCK_TOKENS)
    assert packs(model, attention) and attention.decoder is not None
    logits = attention_module._logits
    monkeypatch.setattr(attention_module, "_logits", lambda *given: logits(*given) * 1.01)
    assert not packs(causal.make("llama"), PagedAttention(BLOCK_TOKENS))


@pytest.mark.parametrize("kind", ["Falcon", "Bloom"])
def test_a_model_that_never_calls_the_attention_function_is_refused(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, n_head=2
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    assert not packs(model, PagedAttention(BLOCK_TOKENS))


def test_a_proof_is_remembered_by_the_identity_of_a_load_and_the_engine_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def proven(identity: str, block_tokens: int = BLOCK_TOKENS) -> tuple[bool, int]:
        compared.clear()
        attention = PagedAttention(block_tokens)
        load = Proof(Findings(tmp_path))
        found = packs(causal.make("gpt_oss"), attention, proof.Earlier(load, identity, told.append))
        load.keep({"generate.logprobs": [0.5]})
        assert attention.token_nbytes() and attention.passes_rules
        return found, len(compared)

    compared: list[int] = []
    told: list[float] = []
    near = proof._are_near
    monkeypatch.setattr(proof, "_are_near", lambda *args: compared.append(1) is None and near(*args))
    assert proven("files of one model") == (True, 2)
    assert told == sorted(told) and len(told) > 2
    assert proven("files of one model") == (True, 0)
    assert proven("files of another") == (True, 2)
    assert proven("files of one model", 16) == (True, 2)
    assert proven("") == (True, 2), "files that changed meanwhile"
    monkeypatch.setattr(proof, "_CODE", [Path(__file__)])
    assert proven("files of one model") == (True, 2), "other code"


def test_a_proof_that_failed_and_a_model_with_code_of_its_own_are_proven_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OwnCode(transformers.LlamaForCausalLM):
        """A class that does not come from transformers."""

    load = Proof(Findings(tmp_path))
    earlier = proof.Earlier(load, "identity")
    model, attention = causal.make("llama"), PagedAttention(BLOCK_TOKENS)
    assert proof._facts(model, attention, None, None) is not None
    assert proof._facts(OwnCode(model.config), attention, None, None) is None
    earlier.succeed(None, True)
    monkeypatch.setattr(proof, "_are_near", lambda *_: False)
    assert not packs(causal.make("llama"), PagedAttention(BLOCK_TOKENS), earlier)
    load.keep({"generate.logprobs": [0.5]})
    assert not list(tmp_path.rglob("*.json"))
