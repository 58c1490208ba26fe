"""Captured steps on CUDA in half precision: the log probabilities of plain steps, for every family without experts."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch

from tests.fakes.generating import Answers, Greedy, engine_of, request_of
from tests.tiny import causal, kernel_shapes
from workers.generation import building, proof
from workers.generation.attention import PagedAttention
from workers.generation.captured import Captured, CapturedPrompts, CapturedSteps, Step
from workers.generation.fused import fuse
from workers.generation.heads import Heads
from workers.generation.kernel_decoder import KernelDecoder, kernel_decoder
from workers.generation.paged_decode import DecodeLayout, select_decode
from workers.generation.scheduler import Sequence

pytestmark = pytest.mark.gpu
HALF = [torch.float16, torch.bfloat16]
EXPERTS = ("llama4", "qwen3_moe", "deepseek_v3", "gpt_oss")
CAPTURED = [name for name in causal.FAMILIES if name not in (*EXPERTS, "gemma3n")]
"""Gemma 3n makes numbers on the host in each pass, which CUDA does not capture."""
TOKENS = 24
LENGTHS = (1, 7, 30, 100)
NEAR = 0.15
DEVICE = torch.device("cuda", 0)


def prompt_of(length: int) -> list[int]:
    """Token ids of a prompt."""
    return random.Random(length).choices(range(5, causal.VOCABULARY), k=length)


def forced(sequence: Sequence) -> set[int]:
    """The next token of a sequence, whatever its model prefers: so all engines write the same text."""
    draw = random.Random(f"{sequence.request.key} {sequence.choice} {len(sequence.tokens)}")
    return {draw.randrange(5, causal.VOCABULARY)}


def answers_of(model: Any, captures: bool) -> tuple[Answers, CapturedSteps | None]:
    """Log probabilities of the same tokens, some of which end earlier than others."""
    engine = engine_of(
        model,
        prefill_tokens=32,
        sampler=Greedy(forced),
        attention=PagedAttention(16),
        captures=CapturedSteps if captures else None,
    )
    for number, length in enumerate(LENGTHS):
        engine.add(request_of(length, prompt_of(length), TOKENS - 5 * number, n=3))
    return Answers().run(engine), engine._captured


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("family", CAPTURED)
def test_captured_steps_give_the_log_probabilities_of_plain_steps(
    family: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = causal.make(family).to(DEVICE, dtype)
    plain, _ = answers_of(model, False)
    with caplog.at_level(logging.WARNING):
        replayed, captured = answers_of(model, True)
    assert captured is not None and {4, 8, 16} <= captured.steps.keys(), caplog.text
    assert replayed.tokens == plain.tokens
    for place, wanted in plain.logprobs.items():
        assert replayed.logprobs[place] == pytest.approx(wanted, abs=NEAR), place


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("family", CAPTURED)
def test_kernels_of_norms_and_gates_give_the_log_probabilities_of_the_modules(
    family: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = causal.make(family).to(DEVICE, dtype)
    plain, _ = answers_of(model, False)
    names = [type(module).__name__ for module in model.modules()]
    with caplog.at_level(logging.INFO):
        assert fuse(model) >= sum(name in ("LlamaRMSNorm", "LlamaMLP") for name in names), caplog.text
    found, captured = answers_of(model, True)
    assert captured is not None and captured.steps
    assert found.tokens == plain.tokens
    for place, wanted in plain.logprobs.items():
        assert found.logprobs[place] == pytest.approx(wanted, abs=NEAR), place


class KeptPrompts(CapturedPrompts):
    """Captured prompts, whatever time these take."""

    def _is_worth(self, captured: Captured, step: Step) -> bool:
        return True


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("family", CAPTURED)
def test_captured_prompts_give_the_log_probabilities_of_plain_steps(
    family: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = causal.make(family).to(DEVICE, dtype)
    plain, _ = answers_of(model, False)
    engine = engine_of(
        model,
        prefill_tokens=32,
        sampler=Greedy(forced),
        attention=PagedAttention(16),
        captures=CapturedSteps,
        prompts=KeptPrompts,
    )
    for number, length in enumerate(LENGTHS):
        engine.add(request_of(length, prompt_of(length), TOKENS - 5 * number, n=3))
    with caplog.at_level(logging.WARNING):
        found = Answers().run(engine)
    assert engine._prompts is not None and engine._prompts.steps, caplog.text
    assert found.tokens == plain.tokens
    for place, wanted in plain.logprobs.items():
        assert found.logprobs[place] == pytest.approx(wanted, abs=NEAR), place


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", kernel_shapes.SHAPES)
def test_layers_in_kernels_pass_the_proof(
    shape: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model, attention = kernel_shapes.make(shape).to(DEVICE, dtype), PagedAttention(16)
    with caplog.at_level(logging.INFO):
        assert proof.packs(model, attention, make_kernels=kernel_decoder), caplog.text
    assert isinstance(attention.decoder, KernelDecoder), caplog.text


@pytest.mark.parametrize("family", EXPERTS)
def test_models_with_experts_run_without_captured_steps(family: str) -> None:
    model = causal.make(family).to(DEVICE, torch.bfloat16)
    attention = PagedAttention(16)
    assert proof.packs(model, attention)
    assert building.captured_steps(model, attention, 32, 32) is None


def test_a_model_that_waits_for_the_device_goes_on_in_plain_steps(caplog: pytest.LogCaptureFixture) -> None:
    found, captured = answers_of(causal.make("gemma3n").to(DEVICE, torch.bfloat16), True)
    assert captured is not None and not captured.steps
    assert "runs without captured steps" in caplog.text
    assert len(found.finishes) == 3 * len(LENGTHS)
    # The device is sound afterwards: another engine captures its steps.
    _, captured = answers_of(causal.make("llama").to(DEVICE, torch.bfloat16), True)
    assert captured is not None and captured.steps


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("page_tokens", [4, 16, 256])
@pytest.mark.parametrize(
    ("heads", "key", "value"),
    [
        (32, (8, 64), (8, 64)),
        (32, (8, 128), (8, 128)),
        (24, (24, 192), (24, 128)),
        (8, (4, 256), (4, 256)),
        (14, (2, 80), (2, 80)),
    ],
)
def test_single_tokens_are_attended_to_in_their_blocks(
    dtype: torch.dtype, page_tokens: int, heads: int, key: tuple[int, int], value: tuple[int, int]
) -> None:
    shapes = torch.Size(key), torch.Size(value)
    assert select_decode(DEVICE, dtype, heads, *shapes, page_tokens) is not None


def test_a_long_sequence_beside_short_ones_is_read_to_its_end() -> None:
    shape, size, lengths = torch.Size((2, 64)), 16, [30_000, 1, 500]
    decode = select_decode(DEVICE, torch.bfloat16, 8, shape, shape, size)
    assert decode is not None
    pages = [-(-length // size) for length in lengths]
    generator = torch.Generator(DEVICE).manual_seed(1)
    keys, values = torch.randn((2, sum(pages) * size, *shape), generator=generator, device=DEVICE).bfloat16()
    q = torch.randn((3, 8, 64), generator=generator, device=DEVICE).bfloat16()
    starts = [0, pages[0], pages[0] + pages[1]]
    table = torch.zeros(3, max(pages), dtype=torch.int32, device=DEVICE)
    for row, (start, count) in enumerate(zip(starts, pages, strict=True)):
        table[row, :count] = torch.arange(start, start + count, device=DEVICE)
    heads = Heads(None, None, None, 0, None)
    found = decode(q, keys, values, DecodeLayout(table, torch.tensor(lengths, device=DEVICE)), heads)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        cells = slice(start * size, start * size + length)
        seen = torch.ones(1, length, dtype=torch.bool, device=DEVICE)
        wanted = heads.masked(q[row : row + 1].float(), keys[cells].float(), values[cells].float(), seen)[0]
        torch.testing.assert_close(found[row].float(), wanted, atol=1e-2, rtol=2e-2)
