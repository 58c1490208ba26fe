"""The generation engine on CUDA: tokens of generate() in fp32, and the proof of packed steps in half precision."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch

from ipc.wire.messages import Sampling
from tests.fakes.generating import Answers, engine_of, request_of
from tests.tiny import causal
from workers.generation.attention import PagedAttention
from workers.generation.paged_kernel import PagedKernel, select_kernel
from workers.generation.proof import packs
from workers.generation.sampling import BatchedSampler

pytestmark = pytest.mark.gpu
TOKENS = 9
LENGTHS = (1, 24, 40, 100)
HALF = [torch.float16, torch.bfloat16]
PLAIN = ("llama", "qwen3", "qwen3_moe", "mistral", "gemma3_text")
"""Types of models whose layers are all of the plain formula, with heads of 16. The kernel takes multiples of 8 only."""


@pytest.fixture(params=causal.FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    """A tiny model on the GPU."""
    return causal.make(request.param).to("cuda")


def prompt_of(length: int) -> list[int]:
    """Token ids of a prompt."""
    return random.Random(length).choices(range(5, causal.VOCABULARY), k=length)


@torch.inference_mode()
def generated(model: Any, prompt: list[int]) -> list[int]:
    """Tokens of generate()."""
    ids = torch.tensor([prompt], device="cuda")
    mask = torch.ones_like(ids)
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
    )[0]
    return list(found[len(prompt) :].tolist())


def test_tokens_are_those_of_generate_in_a_crowd_and_after_preemption(model: Any) -> None:
    model.set_attn_implementation("eager")
    wanted = {length: generated(model, prompt_of(length)) for length in LENGTHS}
    engine, answers = engine_of(model, blocks=18, prefill_tokens=32), Answers()
    for length in LENGTHS:
        engine.add(request_of(length, prompt_of(length), TOKENS, n=2))
    answers.run(engine)
    assert answers.tokens == {(length, choice): wanted[length] for length in LENGTHS for choice in (0, 1)}
    assert engine.pool.used == 0


AHEAD = {
    "greedy": Sampling(),
    "drawn": Sampling(temperature=0.9, seed=1),
    "filtered": Sampling(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01, seed=2),
    "flat": Sampling(temperature=30.0, top_p=0.99, seed=3),
    "penalised": Sampling(temperature=0.8, repetition_penalty=1.2, seed=4),
    "logprobs": Sampling(logprobs=2),
}


def sampled(model: Any, ahead: bool) -> Answers:
    """Texts of all kinds of sampling, beside each other, in float32."""
    sampler = BatchedSampler(lambda token: b"", lambda text: [])
    engine = engine_of(model, prefill_tokens=32, sampler=sampler, ahead=ahead)
    for number, (name, sampling) in enumerate(AHEAD.items()):
        engine.add(request_of(name, prompt_of(LENGTHS[number % 4]), 40, n=2, sampling=sampling))
    return Answers().run(engine)


def test_steps_that_run_ahead_have_the_tokens_of_steps_in_turn(model: Any) -> None:
    assert sampled(model, ahead=True).tokens == sampled(model, ahead=False).tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_proof_passes(model: Any, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert packs(model.to(dtype), PagedAttention(8))


@pytest.mark.parametrize("block_tokens", [16, 256])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kv_heads", [12, 4])
def test_a_kernel_reads_the_cache(dtype: torch.dtype, kv_heads: int, block_tokens: int) -> None:
    assert select_kernel(torch.device("cuda", 0), dtype, 12, kv_heads, 64, block_tokens) is not None


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("block_tokens", [8, 256])
def test_the_proof_passes_with_and_without_the_kernel(
    model: Any, dtype: torch.dtype, block_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = model.config._attn_implementation
    assert packs(model.to(dtype), PagedAttention(block_tokens, lambda *shape: None))
    model.set_attn_implementation(before)
    calls: list[int] = []
    whole = PagedKernel.__call__

    def counted(self: PagedKernel, *states: Any) -> torch.Tensor:
        calls.append(1)
        return whole(self, *states)

    attention = PagedAttention(block_tokens)
    assert packs(model, attention)
    # The kernels are known now, so that calls after this belong to the model.
    monkeypatch.setattr(PagedKernel, "__call__", counted)
    model.set_attn_implementation(before)
    assert packs(model, attention)
    if model.config.model_type in PLAIN:
        assert calls
    elif model.config.model_type in ("gemma2", "gpt_oss"):
        assert not calls


@pytest.mark.parametrize("dtype", HALF)
def test_the_kernel_gives_the_log_probabilities_of_the_grouped_path(dtype: torch.dtype) -> None:
    """Of the first tokens: later ones follow from the tokens before, which may differ at near ties."""
    model = causal.make("llama").to("cuda", dtype)
    found = []
    for attention in (PagedAttention(16), PagedAttention(16, lambda *shape: None)):
        engine, answers = engine_of(model, prefill_tokens=32, attention=attention), Answers()
        for length in LENGTHS:
            engine.add(request_of(length, prompt_of(length), 1))
        answers.run(engine)
        found.append([answers.logprobs[length, 0][0] for length in LENGTHS])
    assert found[0] == pytest.approx(found[1], abs=0.1)
