"""The generation engine on tiny models of every form of attention: the tokens of generate(), in any company."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from ipc.wire.messages import Sampling
from tests.fakes.generating import BLOCK_TOKENS, Answers, Greedy, Modes, engine_of, request_of
from tests.tiny import causal
from workers.generation.engine import Engine
from workers.generation.sampling import BatchedSampler
from workers.generation.scheduler import Sequence as Choice

FAMILIES = tuple(causal.FAMILIES)
TOKENS = 9
LENGTHS = (1, 24, 40, 63, 100)
LOGPROB_TOLERANCE = 1e-4


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids that no model here has as a special token."""
    return random.Random(1000 * seed + length).choices(range(5, causal.VOCABULARY), k=length)


PROMPTS = {length: prompt_of(length) for length in LENGTHS}


@torch.inference_mode()
def generated(model: Any, prompt: list[int], max_tokens: int = TOKENS) -> tuple[list[int], list[float]]:
    """Tokens of generate(), and their log probabilities from one pass over the whole text."""
    model.set_attn_implementation("eager")
    ids = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
    )[0]
    scores = torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1], dim=-1)
    answer = ids[len(prompt) :]
    return answer.tolist(), scores.gather(1, answer[:, None])[:, 0].tolist()


@cache
def expected(family: str) -> dict[int, tuple[list[int], list[float]]]:
    """The answers to `PROMPTS`, by length."""
    model = causal.build(family)
    return {length: generated(model, prompt) for length, prompt in PROMPTS.items()}


def alone(model: Any) -> tuple[Engine, Answers]:
    engine, answers = engine_of(model, keeps_prefixes=False), Answers()
    for length, prompt in PROMPTS.items():
        engine.add(request_of(length, prompt, TOKENS))
        answers.run(engine)
    return engine, answers


def together(model: Any) -> tuple[Engine, Answers]:
    engine = engine_of(model, max_sequences=4)
    for length, prompt in PROMPTS.items():
        engine.add(request_of(length, prompt, TOKENS))
    return engine, Answers().run(engine)


def in_chunks(model: Any) -> tuple[Engine, Answers]:
    engine = engine_of(model, prefill_tokens=20)
    for length, prompt in PROMPTS.items():
        engine.add(request_of(length, prompt, TOKENS))
    answers = Answers().run(engine)
    assert engine.statistics().prompt_tokens == sum(LENGTHS)
    return engine, answers


def with_known_beginnings(model: Any) -> tuple[Engine, Answers]:
    engine, first, answers = engine_of(model), Answers(), Answers()
    for length, prompt in PROMPTS.items():
        engine.add(request_of(length, [*prompt[:50], 5, 6], 2))
    first.run(engine)
    for length, prompt in PROMPTS.items():
        engine.add(request_of(length, prompt, TOKENS))
    answers.run(engine)
    known = {
        length: min((length - 1) // BLOCK_TOKENS, 50 // BLOCK_TOKENS) * BLOCK_TOKENS for length in LENGTHS
    }
    assert answers.cached == known
    return engine, answers


def preempted(model: Any) -> tuple[Engine, Answers]:
    engine, answers = engine_of(model, blocks=20, prefill_tokens=64), Answers()
    for length in sorted(PROMPTS, reverse=True):
        engine.add(request_of(length, PROMPTS[length], TOKENS))
    for length in (1, 24):
        engine.add(request_of(f"again {length}", PROMPTS[length], TOKENS))
    answers.run(engine)
    assert engine.statistics().preemptions > 0
    for length in (1, 24):
        assert answers.tokens[f"again {length}", 0] == answers.tokens[length, 0]
    return engine, answers


def three_choices(model: Any) -> tuple[Engine, Answers]:
    engine = engine_of(model)
    for length, prompt in PROMPTS.items():
        engine.add(request_of(length, prompt, TOKENS, n=3))
    answers = Answers().run(engine)
    assert engine.statistics().prompt_tokens < 3 * sum(LENGTHS)
    for length in PROMPTS:
        assert answers.tokens[length, 0] == answers.tokens[length, 1] == answers.tokens[length, 2]
    return engine, answers


WAYS = (alone, together, in_chunks, with_known_beginnings, preempted, three_choices)
LIKE_LLAMA = ("qwen2", "qwen3", "olmo2", "granite")
"""Families whose attention the engine cannot tell from llama's: two ways tell whether their layers are right."""
AHEAD = {("llama", together), ("llama", with_known_beginnings), ("gemma3", preempted), ("mistral", in_chunks)}
"""What is looked at in both modes each time."""


def is_long(family: str, way: Callable[[Any], tuple[Engine, Answers]], ahead: bool) -> bool:
    """Whether another case tells as much."""
    if ahead:
        return (family, way) not in AHEAD
    return family in LIKE_LLAMA and way not in (alone, together)


CASES = [
    pytest.param(
        family,
        way,
        ahead,
        id=f"{family}-{way.__name__}{'-ahead' if ahead else ''}",
        marks=[pytest.mark.long] if is_long(family, way, ahead) else [],
    )
    for family in FAMILIES
    for way in WAYS
    for ahead in (False, True)
]
both = pytest.mark.usefixtures("both_modes")


@pytest.mark.sample(14)
@pytest.mark.parametrize(("family", "way", "ahead"), CASES)
def test_tokens_and_log_probabilities_are_those_of_generate(
    family: str,
    way: Callable[[Any], tuple[Engine, Answers]],
    ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Modes, "ahead", ahead)
    wanted = expected(family)
    engine, answers = way(causal.build(family))
    for length in LENGTHS:
        tokens, logprobs = wanted[length]
        assert answers.tokens[length, 0] == tokens, length
        assert answers.logprobs[length, 0] == pytest.approx(logprobs, abs=LOGPROB_TOLERANCE), length
        assert answers.finishes[length, 0].reason == "length"
    assert engine.pool.used == 0 and not list(engine.keys)


def llama() -> Any:
    """The plainest model, for what does not depend on the form of attention."""
    return causal.build("llama")


def steps(engine: Engine, answers: Answers, count: int) -> None:
    """Run so many steps."""
    for _ in range(count):
        answers.take(engine.step())


@both
def test_a_request_that_is_cancelled_gives_its_blocks_back_and_says_no_more() -> None:
    engine, answers = engine_of(llama(), max_sequences=2, prefill_tokens=16, keeps_prefixes=False), Answers()
    for length in (63, 100, 24):
        engine.add(request_of(length, PROMPTS[length], TOKENS, n=2 if length == 24 else 1))
    steps(engine, answers, 3)
    held = engine.pool.used
    assert held > 0
    engine.cancel(100)
    engine.cancel(24)
    engine.cancel(24)
    engine.cancel("never seen")
    answers.run(engine)
    assert {key for key, _ in answers.finishes} == {63}
    assert answers.tokens == {(63, 0): expected("llama")[63][0]}
    assert engine.pool.used == 0 and not list(engine.keys)


@both
def test_what_a_cancelled_request_has_not_told_yet_is_not_told() -> None:
    engine, answers = engine_of(llama()), Answers()
    engine.add(request_of("gone", PROMPTS[24], TOKENS))
    engine.add(request_of("stays", PROMPTS[24], TOKENS))
    engine.step()
    engine.cancel("gone")
    assert {emission.key for emission in engine.step()} == {"stays"}
    answers.cached["stays"] = 0
    answers.run(engine)
    assert engine.pool.used == 0


@both
def test_a_paused_request_rests_and_goes_on_where_it_was() -> None:
    engine, answers = engine_of(llama()), Answers()
    engine.add(request_of(24, PROMPTS[24], TOKENS, n=2))
    steps(engine, answers, 4)
    engine.pause(24)
    engine.pause(24)
    before = {place: list(tokens) for place, tokens in answers.tokens.items()}
    assert not engine.has_work and engine.step() == []
    engine.add(request_of(40, PROMPTS[40], TOKENS))
    answers.run(engine)
    assert answers.finishes.keys() == {(40, 0)}
    assert {place: answers.tokens[place] for place in before} == before
    engine.resume(24)
    engine.resume(24)
    answers.run(engine)
    wanted = expected("llama")
    assert answers.tokens == {(24, 0): wanted[24][0], (24, 1): wanted[24][0], (40, 0): wanted[40][0]}
    assert engine.pool.used == 0


@both
def test_a_paused_request_loses_its_blocks_to_others_and_computes_them_again() -> None:
    engine, answers = engine_of(llama(), blocks=16, keeps_prefixes=False), Answers()
    engine.add(request_of(63, PROMPTS[63], TOKENS))
    steps(engine, answers, 3)
    engine.pause(63)
    engine.add(request_of(100, PROMPTS[100], TOKENS))
    answers.run(engine)
    assert answers.finishes.keys() == {(100, 0)} and engine.pool.used == 0
    engine.resume(63)
    answers.run(engine)
    assert {length: answers.tokens[length, 0] for length in (63, 100)} == {
        length: expected("llama")[length][0] for length in (63, 100)
    }
    assert engine.pool.used == 0


@both
def test_a_paused_request_can_be_cancelled() -> None:
    engine = engine_of(llama())
    engine.add(request_of(24, PROMPTS[24], TOKENS))
    engine.step()
    engine.pause(24)
    engine.cancel(24)
    assert engine.pool.used == 0 and not engine.has_work and not list(engine.keys)


@both
def test_more_requests_than_the_cache_holds_all_end_with_their_tokens() -> None:
    engine, answers = engine_of(llama(), blocks=14, max_sequences=8, prefill_tokens=32), Answers()
    requests = [(number, LENGTHS[number % len(LENGTHS)]) for number in range(16)]
    for number, length in requests:
        engine.add(request_of(number, PROMPTS[length], 3 * TOKENS))
    answers.run(engine)
    wanted = expected("llama")
    assert {number: answers.tokens[number, 0][:TOKENS] for number, _ in requests} == {
        number: wanted[length][0] for number, length in requests
    }
    found = engine.statistics()
    assert found.preemptions > 0 and found.blocks_used == 0
    assert (found.running, found.waiting) == (0, 0)


@both
def test_an_answer_ends_at_the_end_of_the_cache() -> None:
    engine, answers = engine_of(llama(), blocks=4), Answers()
    assert engine.capacity == 4 * BLOCK_TOKENS
    engine.add(request_of(24, PROMPTS[24], 1000))
    answers.run(engine)
    assert answers.tokens[24, 0] == generated(llama(), PROMPTS[24], 8)[0]
    assert answers.finishes[24, 0].reason == "length" and engine.pool.used == 0


@both
def test_an_end_token_ends_one_choice_and_leaves_the_others() -> None:
    engine, answers = engine_of(llama()), Answers()
    tokens = expected("llama")[40][0]
    end = tokens[4]
    engine.add(request_of("ends", PROMPTS[40], TOKENS, stop_ids=frozenset({end})))
    engine.add(request_of("goes on", PROMPTS[40], TOKENS))
    answers.run(engine)
    assert answers.tokens["ends", 0] == tokens[: tokens.index(end) + 1]
    assert answers.finishes["ends", 0].reason == "stop"
    assert answers.tokens["goes on", 0] == tokens


@pytest.mark.usefixtures("both_modes_at_length")
@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.long)])
def test_many_requests_that_end_in_all_ways_leave_every_block_free(count: int) -> None:
    chance = random.Random(7)
    engine, answers = engine_of(llama(), blocks=40, max_sequences=16, prefill_tokens=64), Answers()
    paused: list[int] = []
    for number in range(count):
        length = chance.choice(LENGTHS)
        engine.add(request_of(number, PROMPTS[length], chance.randint(1, 4), n=chance.choice((1, 1, 1, 2))))
        if number % 4 == 0:
            answers.take(engine.step())
        if number % 7 == 0:
            engine.cancel(chance.randint(0, number))
        if number % 11 == 0:
            paused.append(chance.randint(0, number))
            engine.pause(paused[-1])
        if number % 23 == 0 and paused:
            engine.resume(paused.pop(chance.randrange(len(paused))))
    for key in paused:
        engine.resume(key)
    answers.run(engine)
    assert len({key for key, _ in answers.finishes}) > 0.8 * count
    assert engine.pool.used == 0 and not list(engine.keys)
    assert sorted([*engine.pool._empty, *engine.pool._resting]) == list(range(engine.pool.total))


@pytest.mark.sample
@both
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_seed_gives_the_same_text_in_any_company(family: str) -> None:
    def drawn(engine: Engine, length: int) -> None:
        wish = Sampling(
            temperature=0.8, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=length, logprobs=0
        )
        engine.add(request_of(length, PROMPTS[length], 2 * TOKENS, n=2, sampling=wish))

    def sampler() -> BatchedSampler:
        return BatchedSampler(lambda token: b"", lambda text: [])

    alone, crowded, preempted = Answers(), Answers(), Answers()
    engine = engine_of(causal.build(family), keeps_prefixes=False, sampler=sampler())
    for length in LENGTHS:
        drawn(engine, length)
        alone.run(engine)
    for answers, blocks in ((crowded, 200), (preempted, 16)):
        engine = engine_of(causal.build(family), blocks=blocks, prefill_tokens=32, sampler=sampler())
        for length in LENGTHS:
            drawn(engine, length)
        answers.run(engine)
    assert engine.statistics().preemptions > 0
    assert alone.tokens == crowded.tokens == preempted.tokens
    assert all(alone.tokens[length, 0] != alone.tokens[length, 1] for length in LENGTHS)
    assert all(alone.tokens[length, 0][:TOKENS] != expected(family)[length][0] for length in LENGTHS)


class Dictated:
    """A matcher of the text `tokens`; where `forces` says so, the next tokens are forced."""

    def __init__(self, tokens: list[int], forces: set[int]) -> None:
        self._tokens, self._forces, self.at = tokens, forces, 0

    def consume(self, token: int) -> bool:
        if self.at >= len(self._tokens) or token != self._tokens[self.at]:
            return False
        self.at += 1
        return True

    def forced(self) -> list[int]:
        found = []
        while self.at + len(found) in self._forces:
            found.append(self._tokens[self.at + len(found)])
        return found


def dictated(engine: Engine, tokens: list[int], forces: set[int], logprobs: int | None) -> Answers:
    """The answer to a prompt whose text is given, with a grammar that forces the tokens at some places."""
    engine.add(
        request_of(
            "x",
            PROMPTS[40],
            len(tokens),
            make_matcher=lambda: Dictated(tokens, forces),
            sampling=Sampling(logprobs=logprobs),
        )
    )
    return Answers().run(engine)


def only_the_next(sequence: Choice) -> set[int] | None:
    """What the matcher of a sequence allows."""
    matcher: Any = sequence.matcher
    return None if matcher is None else {matcher._tokens[matcher.at]}


@both
def test_forced_tokens_are_part_of_the_text_and_of_what_follows() -> None:
    tokens = prompt_of(20, seed=3)
    forces = {2, 3, 4, 9, 10, 15}
    sampler = Greedy(only_the_next)
    engine = engine_of(llama(), sampler=sampler)
    answers = dictated(engine, tokens, forces, logprobs=None)
    assert answers.tokens["x", 0] == tokens
    assert len(sampler.rows) == len(tokens) - len(forces)
    llama().set_attn_implementation("eager")
    with torch.inference_mode():
        logits = llama()(torch.tensor([PROMPTS[40] + tokens])).logits[0, len(PROMPTS[40]) - 1 : -1]
    scores = torch.log_softmax(logits, dim=-1)
    for place, (token, logprob) in enumerate(zip(tokens, answers.logprobs["x", 0], strict=True)):
        if place not in forces:
            assert logprob == pytest.approx(float(scores[place, token]), abs=LOGPROB_TOLERANCE)
    assert engine.pool.used == 0


@both
def test_a_request_for_log_probabilities_forces_nothing() -> None:
    tokens = prompt_of(12, seed=4)
    sampler = Greedy(only_the_next)
    answers = dictated(engine_of(llama(), sampler=sampler), tokens, {2, 3, 4}, logprobs=0)
    assert answers.tokens["x", 0] == tokens and len(sampler.rows) == len(tokens)


@both
def test_masks_are_filled_beside_the_pass_and_only_where_a_token_is_chosen() -> None:
    engine = engine_of(llama(), prefill_tokens=16, sampler=Greedy(only_the_next))
    masks: Any = engine._masks
    tokens = prompt_of(4, seed=5)
    engine.add(request_of("plain", PROMPTS[24], TOKENS))
    answers = dictated(engine, tokens, set(), logprobs=None)
    assert answers.tokens["x", 0] == tokens
    assert [[one.request.key for one in begun] for begun in masks.begun] == [["x"]] * len(tokens)


class Breaks(Exception):
    """What a device may do in the middle."""


@both
def test_a_step_that_raises_has_changed_nothing_and_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, answers = engine_of(llama(), sampler=Greedy(only_the_next), prefill_tokens=16), Answers()
    masks: Any = engine._masks
    for length in LENGTHS:
        engine.add(request_of(length, PROMPTS[length], TOKENS))
    model_forward, calls = engine.model.forward, []

    def breaking(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        found = model_forward(*args, **kwargs)
        if len(calls) % 3 == 0:
            raise Breaks
        return found

    monkeypatch.setattr(engine.model, "forward", breaking)
    while engine.has_work:
        try:
            answers.take(engine.step())
        except Breaks:
            assert not masks.filling
    assert len(calls) > 10
    assert {length: answers.tokens[length, 0] for length in LENGTHS} == {
        length: tokens for length, (tokens, _) in expected("llama").items()
    }
    assert engine.statistics().prompt_tokens == sum(LENGTHS) and engine.pool.used == 0


@both
def test_engines_of_one_process_have_their_own_caches() -> None:
    first, second = engine_of(causal.build("qwen2")), engine_of(causal.build("olmo2"))
    for engine in (first, second):
        for length in LENGTHS:
            engine.add(request_of(length, PROMPTS[length], TOKENS))
    told = {"qwen2": Answers(), "olmo2": Answers()}
    while first.has_work or second.has_work:
        told["qwen2"].take(first.step())
        told["olmo2"].take(second.step())
    for family, answers in told.items():
        wanted = {(length, 0): tokens for length, (tokens, _) in expected(family).items()}
        assert answers.tokens == wanted


@both
def test_choices_of_one_request_share_the_blocks_of_its_prompt() -> None:
    engine = engine_of(llama(), prefill_tokens=32)
    engine.add(request_of("three", PROMPTS[100], TOKENS, n=3))
    for _ in range(6):
        engine.step()
    found = engine.statistics()
    assert found.running == 3
    whole = (len(PROMPTS[100]) - 1) // BLOCK_TOKENS
    assert found.blocks_used <= whole + 3 * 2
    assert found.prompt_tokens == len(PROMPTS[100]) + 2 * (len(PROMPTS[100]) - whole * BLOCK_TOKENS)
    assert (found.prefix_lookups, found.prefix_hits) == (3, 2)


@both
def test_a_block_that_goes_takes_its_content_out_of_the_known_beginnings() -> None:
    engine, answers = engine_of(llama(), blocks=14), Answers()
    for key, length in (("a", 100), ("b", 63), ("c", 100)):
        engine.add(request_of(key, PROMPTS[length], 4))
        answers.run(engine)
    assert engine.statistics().prefix_evictions > 0
    assert answers.cached["c"] < 96
    assert answers.tokens["a", 0] == answers.tokens["c", 0] == expected("llama")[100][0][:4]
