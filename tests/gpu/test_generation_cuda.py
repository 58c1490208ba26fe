"""The generation engine on CUDA: tokens of generate() in fp32, and the proof of packed steps in half precision."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.fakes.generating import Answers, engine_of, request_of
from tests.tiny import causal
from workers.generation.attention import PagedAttention
from workers.generation.building import packs

pytestmark = pytest.mark.gpu
TOKENS = 9
LENGTHS = (1, 24, 40, 100)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_proof_passes(model: Any, dtype: torch.dtype) -> None:
    assert packs(model.to(dtype), PagedAttention(8))
