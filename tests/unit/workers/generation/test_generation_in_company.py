"""No neighbour changes a text: drawn prompts in one engine give what transformers' `generate()` gives for each alone.

The prompts have special, padding and last ids, share beginnings, and end on both sides of the border at which the
positions of some models change. Some texts grow past the border.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from ipc.wire.messages import Sampling
from tests.fakes.generating import Answers, Greedy, engine_of, request_of
from tests.fakes.replaying import ReplayedSteps, attention
from tests.tiny import causal
from workers.generation.engine import Engine
from workers.generation.sampling import BatchedSampler

pytestmark = pytest.mark.usefixtures("both_modes_at_length")

SOME = ("llama4", "gemma3", "gpt_oss")
FAMILIES = (*causal.BY_LENGTH, *SOME)
IDS = [0, 1, 4, causal.VOCABULARY - 1, *range(causal.VOCABULARY)]
"""Special and padding ids, the last id, and all ids."""
LONGEST = causal.BORDER + 16
MOST_TOKENS = 9


class Wish(NamedTuple):
    """A prompt, tokens to generate, and a seed for a second answer that is sampled."""

    prompt: list[int]
    tokens: int
    seed: int


def drawn(draw: random.Random) -> list[Wish]:
    """Prompts of uneven lengths; half of them go on from the beginning of another, often on the other side."""
    prompts: list[list[int]] = [[draw.choice(IDS) for _ in range(LONGEST)]]
    lengths = [draw.randint(1, LONGEST), causal.BORDER - draw.randint(1, 8), causal.BORDER]
    prompts += [draw.choices(IDS, k=length) for length in lengths]
    for _ in range(3):
        base = draw.choice(prompts)
        shared = base[: draw.randint(1, len(base))]
        prompts.append((shared + draw.choices(IDS, k=draw.randint(0, 16)))[:LONGEST])
    draw.shuffle(prompts)
    return [Wish(prompt, draw.randint(2, MOST_TOKENS), draw.randint(0, 99)) for prompt in prompts]


@torch.inference_mode()
def generated(family: str, wish: Wish) -> list[int]:
    """The likeliest tokens by transformers. A model by length is a fresh one, which knows of no other text."""
    model = causal.make(family) if family in causal.BY_LENGTH else causal.build(family)
    model.set_attn_implementation("eager")
    ids = torch.tensor([wish.prompt])
    found: list[int] = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=wish.tokens,
        do_sample=False,
        eos_token_id=None,
    )[0].tolist()
    return found[len(wish.prompt) :]


def company(model: Any, draw: random.Random, **more: Any) -> Engine:
    """An engine whose steps, cache and number of sequences are drawn; small caches preempt."""
    return engine_of(
        model,
        blocks=draw.choice([24, 40, 100]),
        prefill_tokens=draw.choice([16, 40, 512]),
        max_sequences=draw.choice([3, 8]),
        **more,
    )


def answers(engine: Engine, wishes: Sequence[Wish], draw: random.Random, *, sampled: bool) -> Answers:
    """The answers to all wishes; some arrive while others run."""
    found = Answers()
    for number, wish in enumerate(wishes):
        sampling = Sampling(temperature=1.0, seed=wish.seed, logprobs=0) if sampled else Sampling(logprobs=0)
        engine.add(request_of(number, wish.prompt, wish.tokens, sampling=sampling))
        for _ in range(draw.choice([0, 0, 1, 6])):
            found.take(engine.step())
    return found.run(engine)


def check(family: str, seed: int) -> None:
    draw = random.Random(f"{family} {seed}")
    wishes, model = drawn(draw), causal.build(family)
    likeliest = answers(company(model, draw), wishes, draw, sampled=False)
    wanted = {(number, 0): generated(family, wish) for number, wish in enumerate(wishes)}
    assert likeliest.tokens == wanted, (family, seed)

    def sampler() -> BatchedSampler:
        return BatchedSampler(lambda token: b"", lambda text: [])

    together = answers(company(model, draw, sampler=sampler()), wishes, draw, sampled=True)
    alone = engine_of(model, max_sequences=1, keeps_prefixes=False, sampler=sampler())
    assert answers(alone, wishes, draw, sampled=True).tokens == together.tokens, (family, seed)


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_in_company_are_those_of_generate_alone(family: str) -> None:
    check(family, 0)


@pytest.mark.long
@pytest.mark.parametrize("family", [*causal.BY_LENGTH, *causal.FAMILIES])
def test_many_more_draws(family: str) -> None:
    for seed in range(1, 25):
        check(family, seed)


@pytest.mark.parametrize("family", ["phi3_long", "llama_long"])
def test_captured_steps_tell_long_texts_from_short_ones(family: str) -> None:
    draw = random.Random(family)
    wishes, model = drawn(draw), causal.make(family)
    engine = engine_of(model, attention=attention(8), captures=ReplayedSteps, sampler=Greedy())
    found = answers(engine, wishes, draw, sampled=False)
    assert found.tokens == {(number, 0): generated(family, wish) for number, wish in enumerate(wishes)}
