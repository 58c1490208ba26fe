"""Captured steps: tokens of plain steps for every form of attention, rows that are left over, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.fakes.generating import BLOCK_TOKENS, Answers, engine_of, request_of
from tests.fakes.replaying import Replay, ReplayedSteps, attention, decode
from tests.tiny import causal
from workers.generation.attention import PagedAttention
from workers.generation.captured import CapturedSteps, Graph, Inputs, row_counts
from workers.generation.heads import Heads
from workers.generation.paged_decode import DecodeLayout

pytestmark = pytest.mark.usefixtures("both_modes_at_length")

LENGTHS = (1, 7, 30, 60)
TOKENS = 14
LAYERS_WITH_RULES = ("llama4",)
"""Families some of whose layers see chunks, which the programs for single tokens do not know."""


def answers_of(
    model: Any, within: PagedAttention | None = None, captures: type[CapturedSteps] | None = None
) -> tuple[Answers, CapturedSteps | None]:
    """Three choices for each prompt. Prompts end at different steps, so the number of sequences falls."""
    engine = engine_of(model, prefill_tokens=32, attention=within, captures=captures)
    for number, length in enumerate(LENGTHS):
        prompt = random.Random(length).choices(range(5, causal.VOCABULARY), k=length)
        engine.add(request_of(length, prompt, TOKENS - 3 * number, n=3))
    return Answers().run(engine), engine._captured


@pytest.mark.sample(5)
@pytest.mark.parametrize("family", [name for name in causal.FAMILIES if name not in LAYERS_WITH_RULES])
def test_replayed_steps_choose_the_tokens_of_plain_steps(family: str) -> None:
    model = causal.make(family)
    plain, _ = answers_of(model)
    replayed, captured = answers_of(model, attention(BLOCK_TOKENS), ReplayedSteps)
    assert replayed.tokens == plain.tokens
    assert captured is not None and {4, 8, 16} <= captured.steps.keys()
    replays = [step.graph.count for step in captured.steps.values() if isinstance(step.graph, Replay)]
    assert sum(replays) > len(captured.steps), "each step was replayed at its capture only"


@pytest.mark.parametrize("family", LAYERS_WITH_RULES)
def test_layers_with_a_rule_are_not_captured(family: str) -> None:
    within = attention(BLOCK_TOKENS)
    engine_of(causal.make(family), attention=within)
    assert not within.prepare_decoding()


def test_attention_that_differs_is_refused_and_the_answers_are_those_of_plain_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def wrong(
        size: int,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layout: DecodeLayout,
        heads: Heads,
    ) -> torch.Tensor:
        return decode(size, q, keys, values.flip(0), layout, heads)

    model = causal.make("llama")
    plain, _ = answers_of(model)
    found, captured = answers_of(model, attention(BLOCK_TOKENS, wrong), ReplayedSteps)
    assert found.tokens == plain.tokens
    assert captured is not None and not captured.steps
    assert caplog.text.count("runs without captured steps: the logits differ") == 1


def test_a_model_that_cannot_be_captured_goes_on_in_plain_steps(caplog: pytest.LogCaptureFixture) -> None:
    class Refused(CapturedSteps):
        def _capture(self, inputs: Inputs) -> tuple[Graph, torch.Tensor]:
            raise RuntimeError("operation not permitted when stream is capturing")

    model = causal.make("qwen3")
    plain, _ = answers_of(model)
    found, captured = answers_of(model, attention(BLOCK_TOKENS), Refused)
    assert found.tokens == plain.tokens
    assert captured is not None and not captured.steps
    assert caplog.text.count("runs without captured steps: operation not permitted") == 1


@pytest.mark.parametrize(
    ("most", "counts"),
    [(1, [1]), (3, [1, 2, 3]), (32, [1, 2, 4, 8, 16, 24, 32]), (40, [1, 2, 4, 8, 16, 24, 32, 40])],
)
def test_steps_are_captured_for_some_numbers_of_sequences(most: int, counts: list[int]) -> None:
    assert row_counts(most) == counts


def test_no_step_is_captured_for_more_than_256_sequences() -> None:
    assert row_counts(4096)[-2:] == [240, 256]
