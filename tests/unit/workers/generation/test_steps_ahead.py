"""Steps that begin before the one before has landed: the tokens of steps in turn, and nothing of what is thrown."""

from __future__ import annotations

import random
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch

from ipc.errors import InferenceFailed
from ipc.settings import Generation
from ipc.wire.messages import Sampling
from tests.fakes.generating import (
    BLOCK_TOKENS,
    Answers,
    Greedy,
    KeptOutput,
    NotedMasks,
    engine_of,
    request_of,
)
from tests.fakes.replaying import ReplayedSteps, attention
from tests.tiny import causal
from workers.generation.building import runs_ahead
from workers.generation.device_token_draw import DeviceDrawer
from workers.generation.engine import Engine
from workers.generation.flights import Reading
from workers.generation.sampling import BatchedSampler, NoNextToken, Uniforms
from workers.generation.scheduler import Sequence as Choice

TOKENS = 20
SAMPLINGS = {
    "greedy": Sampling(),
    "drawn": Sampling(temperature=0.9, seed=1),
    "hot": Sampling(temperature=30.0, seed=2),
    "top-k": Sampling(temperature=1.0, top_k=12, seed=3),
    "top-p": Sampling(temperature=0.8, top_p=0.9, seed=4),
    "min-p": Sampling(temperature=1.2, min_p=0.02, seed=5),
    "all filters": Sampling(temperature=1.1, top_k=40, top_p=0.8, min_p=0.001, seed=6),
    "one token": Sampling(temperature=1.0, top_k=1, seed=7),
    "wide top-k": Sampling(temperature=5.0, top_k=700, seed=8),
    "flat top-p": Sampling(temperature=50.0, top_p=0.99, seed=9),
}


def sampler() -> BatchedSampler:
    return BatchedSampler(lambda token: b"", lambda text: [])


def choices(samplings: Sequence[Sampling]) -> list[Choice]:
    """A sequence for each sampling."""
    requests = [request_of(at, [5, 6], sampling=one) for at, one in enumerate(samplings)]
    return [Choice(request, 0, at, KeptOutput(request, 0)) for at, request in enumerate(requests)]


def advance(sequences: Sequence[Choice], tokens: Sequence[int]) -> None:
    for sequence, token in zip(sequences, tokens, strict=True):
        sequence.tokens.append(token)


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [50, 320, 5000])
@pytest.mark.parametrize("spread", [0.02, 3.0])
def test_the_device_draws_what_the_host_draws(dtype: torch.dtype, columns: int, spread: float) -> None:
    host, drawer = sampler(), DeviceDrawer(sampler())
    first, second = choices(list(SAMPLINGS.values())), choices(list(SAMPLINGS.values()))
    generator, missed = torch.Generator().manual_seed(0), set[int]()
    for _ in range(30):
        logits = (torch.randn(len(first), columns, generator=generator) * spread).to(dtype)
        wanted = host.sample(logits.clone(), first)
        drawn = drawer.draw(logits, second)
        found = drawn.read(second)
        assert [found.chosen[one] for one in second] == wanted
        sure = [at for at, one in enumerate(second) if one not in found.missed]
        assert drawn.tokens[sure].tolist() == [wanted[at][0] for at in sure]
        missed |= {at for at, one in enumerate(second) if one in found.missed}
        assert all(drawer.waits(one) for one in found.missed)
        advance(first, [token for token, _ in wanted])
        advance(second, [token for token, _ in wanted])
    assert not missed or columns > 128
    assert missed or columns < 5000, "rows that keep many tokens are missed"
    assert list(SAMPLINGS).index("one token") not in missed or dtype == torch.bfloat16


def test_equal_probabilities_are_drawn_in_the_order_of_their_ids() -> None:
    host, drawer = sampler(), DeviceDrawer(sampler())
    wishes = [Sampling(temperature=1.0, top_k=number, seed=number) for number in range(1, 60)]
    first, second = choices(wishes), choices(wishes)
    logits = torch.tensor([[float(-(column % 5)) for column in range(400)]] * len(wishes))
    for _ in range(5):
        wanted = host.sample(logits.clone(), first)
        found = drawer.draw(logits, second).read(second)
        assert [found.chosen[one] for one in second] == wanted
        advance(first, [token for token, _ in wanted])
        advance(second, [token for token, _ in wanted])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_row_without_a_finite_highest_logit_fails_when_its_step_lands(wrong: float) -> None:
    sequences = choices([SAMPLINGS["greedy"], SAMPLINGS["drawn"], SAMPLINGS["top-p"]])
    logits = torch.zeros(3, 320)
    logits[1, 7] = wrong
    drawn = DeviceDrawer(sampler()).draw(logits, sequences)
    with pytest.raises(NoNextToken) as failed:
        drawn.read(sequences)
    assert failed.value.sequences == [sequences[1]]
    assert drawn.read([sequences[0]]).chosen.keys() == {sequences[0]}
    assert isinstance(failed.value, InferenceFailed)


def test_the_numbers_of_steps_that_are_revoked_can_be_asked_for_again() -> None:
    one, other = Uniforms(3, 0), Uniforms(3, 0)
    numbers = [one.at(place) for place in range(10)]
    assert [other.at(place) for place in (0, 1, 2, 1, 2, 3, 2, 3, 4)] == [
        numbers[place] for place in (0, 1, 2, 1, 2, 3, 2, 3, 4)
    ]
    with pytest.raises(IndexError):
        one.at(2)


def prompt_of(seed: int) -> list[int]:
    return random.Random(seed).choices(range(5, causal.VOCABULARY), k=7 + 11 * (seed % 5))


def answers_of(ahead: bool, samplings: Sequence[Sampling], **settings: Any) -> tuple[Engine, Answers]:
    """The answers to as many prompts, some of which are shared."""
    engine = engine_of(causal.build("llama"), ahead=ahead, sampler=sampler(), **settings)
    for at, sampling in enumerate(samplings):
        engine.add(request_of(at, prompt_of(at // 2), TOKENS, sampling=sampling, n=1 + at % 2))
    return engine, Answers().run(engine)


WAITING = [
    Sampling(temperature=0.7, repetition_penalty=1.2, seed=1),
    Sampling(frequency_penalty=0.5),
    Sampling(logit_bias={9: 4.0}),
    Sampling(logprobs=2),
    Sampling(temperature=1.0, logprobs=0, top_p=0.9, seed=2),
    Sampling(dry_multiplier=0.8),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("blocks", [400, 24])
def test_all_kinds_of_sampling_beside_each_other_have_the_texts_of_steps_in_turn(blocks: int) -> None:
    samplings = [*SAMPLINGS.values(), *WAITING]
    _, wanted = answers_of(False, samplings, blocks=blocks, prefill_tokens=32)
    engine, found = answers_of(True, samplings, blocks=blocks, prefill_tokens=32)
    plain, _ = answers_of(False, samplings, blocks=400)
    assert found.tokens == wanted.tokens
    assert (engine.statistics().preemptions > 0) is (blocks < 100)
    assert engine.statistics().output_tokens == plain.statistics().output_tokens
    assert engine.pool.used == 0 and not engine.has_work


def test_captured_steps_read_tokens_that_the_host_does_not_know() -> None:
    samplings = [*SAMPLINGS.values(), *WAITING]
    _, wanted = answers_of(False, samplings)
    model = causal.build("llama")
    engine = engine_of(
        model, ahead=True, sampler=sampler(), attention=attention(BLOCK_TOKENS), captures=ReplayedSteps
    )
    for at, sampling in enumerate(samplings):
        engine.add(request_of(at, prompt_of(at // 2), TOKENS, sampling=sampling, n=1 + at % 2))
    assert Answers().run(engine).tokens == wanted.tokens
    assert engine._captured is not None and engine._captured.steps


class Watched:
    """Notes when the model computes, and when a step's tokens are read."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        forward, drawer = engine._forward, engine._drawer
        assert drawer is not None
        draw = drawer.draw

        def computed(spans: Any) -> torch.Tensor:
            self.events.append("launch")
            return forward(spans)

        def drawn(logits: torch.Tensor, sequences: Sequence[Choice]) -> Any:
            tokens = draw(logits, sequences)
            read = tokens.read

            def noted(wanted: Any) -> Reading:
                self.events.append("read")
                return read(wanted)

            monkeypatch.setattr(tokens, "read", noted)
            return tokens

        monkeypatch.setattr(engine, "_forward", computed)
        monkeypatch.setattr(drawer, "draw", drawn)


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(causal.build("llama"), ahead=True)
    watched = Watched(engine, monkeypatch)
    engine.add(request_of("x", prompt_of(1), 5))
    Answers().run(engine)
    assert watched.events == [
        "launch",
        "launch",
        "read",
        "launch",
        "read",
        "launch",
        "read",
        "launch",
        "read",
        "read",
    ]


def test_only_the_sequences_that_need_the_host_wait() -> None:
    engine, answers = engine_of(causal.build("llama"), ahead=True, sampler=sampler()), Answers()
    for key, sampling in (("ahead", SAMPLINGS["greedy"]), ("waits", Sampling(frequency_penalty=0.5))):
        engine.add(request_of(key, prompt_of(3), 30, sampling=sampling))
    for _ in range(21):
        answers.take(engine.step())
    assert len(answers.tokens["ahead", 0]) == 20
    assert len(answers.tokens["waits", 0]) == 10
    engine.cancel("ahead")
    seen = len(answers.tokens["waits", 0])
    for _ in range(10):
        answers.take(engine.step())
    assert len(answers.tokens["waits", 0]) >= seen + 9, (
        "a sequence that waits alone gets a token in each step"
    )


def test_a_token_behind_the_end_is_thrown_away_and_its_block_is_found_by_nobody() -> None:
    # NOTE: engines in turns need models of their own, as a model has the attention of one engine.
    prompt, wanted = prompt_of(2)[: 2 * BLOCK_TOKENS - 3], engine_of(causal.make("llama"), ahead=False)
    wanted.add(request_of("x", prompt, 8))
    tokens = Answers().run(wanted).tokens["x", 0]
    # The end token is the last of its block. The step under way computes it, and a token behind it.
    end = next(at for at in range(2, 8) if (len(prompt) + at + 1) % BLOCK_TOKENS == 0)
    assert tokens.index(tokens[end]) == end
    engine, answers = engine_of(causal.make("llama"), ahead=True), Answers()
    engine.add(request_of("x", prompt, 8, stop_ids=frozenset({tokens[end]})))
    answers.run(engine)
    assert answers.tokens["x", 0] == tokens[: end + 1]
    whole = [*prompt, *tokens[:end]]
    contents = [content for _, content in engine.pool._found]
    assert contents == [
        tuple(whole[at : at + BLOCK_TOKENS]) for at in range(0, len(whole) - BLOCK_TOKENS + 1, BLOCK_TOKENS)
    ]
    assert engine.pool.used == 0
    following = [*whole, tokens[end], 7, 8, 9]
    engine.add(request_of("next", following, 6))
    wanted.add(request_of("next", following, 6))
    assert answers.run(engine).tokens["next", 0] == Answers().run(wanted).tokens["next", 0]
    assert answers.cached["next"] == len(contents) * BLOCK_TOKENS


class Breaks(Exception):
    """What reading may raise."""


def test_a_step_that_cannot_be_read_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    samplings = [SAMPLINGS["drawn"], SAMPLINGS["top-p"], SAMPLINGS["greedy"], WAITING[0]]
    _, wanted = answers_of(False, samplings)
    engine = engine_of(causal.build("llama"), ahead=True, sampler=sampler())
    for at, sampling in enumerate(samplings):
        engine.add(request_of(at, prompt_of(at // 2), TOKENS, sampling=sampling, n=1 + at % 2))
    reads, choose = 0, engine._choose

    def breaking(*step: Any) -> Any:
        nonlocal reads
        reads += 1
        found = choose(*step)
        if reads % 3 == 0:
            raise Breaks
        return found

    monkeypatch.setattr(engine, "_choose", breaking)
    answers = Answers()
    while engine.has_work:
        try:
            answers.take(engine.step())
        except Breaks:
            pass
    assert answers.tokens == wanted.tokens and reads > 10
    assert engine.pool.used == 0


def test_without_running_ahead_nothing_is_under_way_behind_a_step() -> None:
    engine, answers = engine_of(causal.build("llama"), ahead=True), Answers()
    engine.add(request_of("x", prompt_of(1), 8))
    answers.take(engine.step())
    assert ("x", 0) not in answers.tokens
    answers.take(engine.step(ahead=False))
    assert len(answers.tokens["x", 0]) == 2 and engine._flight is None
    answers.run(engine)
    greedy = engine_of(causal.build("llama"), ahead=False, sampler=Greedy())
    greedy.add(request_of("x", prompt_of(1), 8))
    assert answers.tokens == Answers().run(greedy).tokens


def test_a_paused_sequence_tells_nothing_of_the_step_under_way() -> None:
    engine, answers = engine_of(causal.build("llama"), ahead=True, sampler=sampler()), Answers()
    engine.add(request_of("x", prompt_of(1), TOKENS, sampling=SAMPLINGS["drawn"]))
    for _ in range(5):
        answers.take(engine.step())
    seen = len(answers.tokens["x", 0])
    engine.pause("x")
    assert not engine.has_work and engine.step() == []
    engine.resume("x")
    answers.run(engine)
    wanted = engine_of(causal.build("llama"), ahead=False, sampler=sampler())
    wanted.add(request_of("x", prompt_of(1), TOKENS, sampling=SAMPLINGS["drawn"]))
    assert seen == 4 and answers.tokens == Answers().run(wanted).tokens


@pytest.mark.parametrize(
    ("setting", "kind", "ahead"),
    [("auto", "cpu", False), ("auto", "cuda", True), ("always", "cpu", True), ("never", "cuda", False)],
)
def test_the_setting_and_the_device_say_whether_steps_run_ahead(
    setting: Literal["auto", "always", "never"], kind: str, ahead: bool
) -> None:
    assert runs_ahead(Generation(run_ahead=setting), kind) is ahead


class Free:
    """A grammar that allows every token."""

    def consume(self, token: int) -> bool:
        return True

    def forced(self) -> list[int]:
        return []


def held_by(engine: Engine) -> list[weakref.ref[torch.Tensor]]:
    """What the step under way holds on the device."""
    flight = engine._flight
    assert flight is not None and flight.unread is not None
    return [weakref.ref(flight.logits), weakref.ref(flight.unread.tokens)]


@pytest.mark.parametrize("ending", ["cancel", "pause"])
def test_a_step_that_nobody_wants_any_more_is_forgotten_once_its_masks_are_filled(ending: str) -> None:
    engine = engine_of(causal.build("llama"), ahead=True, sampler=sampler())
    engine.add(request_of("x", prompt_of(1), TOKENS, sampling=SAMPLINGS["greedy"]))
    engine.add(request_of("guided", prompt_of(2), TOKENS, make_matcher=Free))
    for _ in range(3):
        engine.step()
    held, masks = held_by(engine), engine._masks
    assert isinstance(masks, NotedMasks) and masks.filling
    for key in ("x", "guided"):
        assert engine._flight is not None, "the guided request wants the step"
        getattr(engine, ending)(key)
    assert engine._flight is None and not masks.filling and not engine.has_work
    assert [tensor() for tensor in held] == [None, None]


def test_the_step_behind_the_last_end_is_forgotten() -> None:
    engine = engine_of(causal.build("llama"), ahead=True, sampler=sampler())
    engine.add(request_of("first", prompt_of(1), 4, sampling=SAMPLINGS["greedy"]))
    stop = frozenset(Answers().run(engine).tokens["first", 0][3:])
    answers, held = Answers(), list[weakref.ref[torch.Tensor]]()
    engine.add(request_of("x", prompt_of(1), TOKENS, sampling=SAMPLINGS["greedy"], stop_ids=stop))
    while engine.has_work:
        answers.take(engine.step())
        held = held_by(engine) if engine._flight is not None else held
    assert held and answers.finishes["x", 0].reason == "stop" and engine._flight is None
    assert [tensor() for tensor in held] == [None, None]
