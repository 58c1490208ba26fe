"""Log probabilities of prompts are those of one pass of the model over the prompt, in any company."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from ipc.settings import Generation
from ipc.wire.messages import GenerateCall
from ipc.wire.streams import PROMPT, STARTED, PromptToken
from tests.fakes.generating import BLOCK_TOKENS, KeptOutput, NotedMasks, engine_of, request_of
from tests.tiny import causal
from workers.generation.building import build
from workers.generation.engine import Engine
from workers.generation.plain import PlainEngine
from workers.generation.request import Emission, GenerationRequest, PromptText
from workers.generation.rope import forget_lengths
from workers.generation.sampling import BatchedSampler, NoNextToken
from workers.generation.scoring import LOGITS_NBYTES, scored_tokens

FAMILIES = ("llama", "llama4", "mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "phi3")
BY_LENGTH = ("llama_dynamic", "llama_long", "phi3_long")
LENGTHS = (1, 2, 9, 24, 40, 63, 100)
TOLERANCE = 1e-4
NEAR = 3


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(5, causal.VOCABULARY), k=length)


PROMPTS = {length: prompt_of(length) for length in LENGTHS}


def scored_request(
    key: Hashable, prompt: Sequence[int], max_tokens: int = 2, n: int = 1, near: int = NEAR
) -> GenerationRequest:
    """A request whose prompt has a text of two letters for each token."""
    text = PromptText("ab" * len(prompt), range(0, 2 * len(prompt), 2), lambda token: str(token).encode())
    call = GenerateCall(n=n, tells_prompt=True, prompt_logprobs=near)
    return GenerationRequest(key, list(prompt), call, max_tokens, frozenset(), None, None, text)


class Told:
    """What an engine has told of prompts: tokens, texts, and the choices that have ended."""

    def __init__(self) -> None:
        self.tokens: dict[Hashable, list[PromptToken]] = {}
        self.texts: dict[Hashable, str] = {}
        self.ended: list[tuple[Hashable, int]] = []

    def take(self, emitted: Sequence[Emission]) -> None:
        for one in emitted:
            if one.kind == PROMPT:
                assert one.choice == 0
                self.tokens.setdefault(one.key, []).extend(one.prompt or ())
                self.texts[one.key] = self.texts.get(one.key, "") + one.text
                continue
            if one.finish is not None:
                self.ended.append((one.key, one.choice))
            if one.kind != STARTED and isinstance(one.key, int):
                assert len(self.texts[one.key]) == 2 * one.key, "the prompt is told before all choices"

    def run(self, engine: Engine) -> Told:
        while engine.has_work:
            self.take(engine.step())
        return self


@torch.inference_mode()
def reference(model: Any, prompt: Sequence[int]) -> torch.Tensor:
    """Log probabilities [tokens - 1, vocabulary] of the tokens behind the first."""
    model.set_attn_implementation("eager")
    forget_lengths(model)
    ids = torch.tensor([list(prompt)])
    logits = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)


@cache
def expected(family: str) -> dict[int, torch.Tensor]:
    model = causal.make(family)
    return {length: reference(model, prompt) for length, prompt in PROMPTS.items()}


def check(told: Sequence[PromptToken], prompt: Sequence[int], wanted: torch.Tensor) -> None:
    """Every token has its id, its bytes, its place, its log probability, and those of the likeliest."""
    assert [token.id for token in told] == list(prompt)
    assert [token.raw for token in told] == [str(token).encode() for token in prompt]
    assert [token.start for token in told] == [*range(0, 2 * len(prompt), 2)]
    assert (told[0].logprob, told[0].top) == (None, [])
    for token, row in zip(told[1:], wanted, strict=True):
        assert token.logprob == pytest.approx(float(row[token.id]), abs=TOLERANCE)
        near = [value for _, _, value in token.top]
        assert near == pytest.approx(row.topk(NEAR).values.tolist(), abs=TOLERANCE)


def alone(model: Any) -> Told:
    engine, told = engine_of(model, keeps_prefixes=False), Told()
    for length, prompt in PROMPTS.items():
        engine.add(scored_request(length, prompt))
        told.run(engine)
    return told


def in_chunks(model: Any) -> Told:
    engine = engine_of(model, prefill_tokens=20, scored_tokens=7)
    for length, prompt in PROMPTS.items():
        engine.add(scored_request(length, prompt))
    return Told().run(engine)


def in_company(model: Any) -> Told:
    engine = engine_of(model, max_sequences=5)
    for length, prompt in PROMPTS.items():
        engine.add(request_of(f"beside {length}", prompt, 9))
        engine.add(scored_request(length, prompt))
    return Told().run(engine)


def with_known_beginnings(model: Any) -> Told:
    engine, told = engine_of(model), Told()
    for length, prompt in PROMPTS.items():
        engine.add(request_of(f"before {length}", prompt, 2))
    Told().run(engine)
    for length, prompt in PROMPTS.items():
        engine.add(scored_request(length, prompt))
    told.run(engine)
    engine.add(request_of("after", PROMPTS[100], 2))
    [start] = [one.start for one in engine.step(ahead=False) if one.start is not None]
    assert start.cached_tokens == 99 // BLOCK_TOKENS * BLOCK_TOKENS, "others find the prompt"
    Told().run(engine)
    return told


def preempted(model: Any) -> Told:
    engine, told = engine_of(model, blocks=16, prefill_tokens=32, scored_tokens=1), Told()
    for length, prompt in PROMPTS.items():
        engine.add(request_of(f"older than {length}", prompt_of(9), 90))
        engine.add(scored_request(length, prompt))
        told.run(engine)
    assert engine.statistics().preemptions > 0
    return told


def three_choices(model: Any) -> Told:
    engine = engine_of(model, scored_tokens=16)
    for length, prompt in PROMPTS.items():
        engine.add(scored_request(length, prompt, n=3))
    told = Told().run(engine)
    assert sorted(told.ended) == [(length, choice) for length in LENGTHS for choice in range(3)]
    return told


def without_an_answer(model: Any) -> Told:
    engine = engine_of(model, scored_tokens=16)
    for length, prompt in PROMPTS.items():
        engine.add(scored_request(length, prompt, 0, n=2))
    told = Told().run(engine)
    assert sorted(told.ended) == [(length, choice) for length in LENGTHS for choice in range(2)]
    assert engine.statistics().output_tokens == 0
    return told


WAYS = (alone, in_chunks, in_company, with_known_beginnings, preempted, three_choices, without_an_answer)
CASES = [
    pytest.param(family, way, id=f"{family}-{way.__name__}")
    for family in FAMILIES
    for way in (WAYS if family == "llama" else (in_chunks, with_known_beginnings))
]


@pytest.mark.sample(10)
@pytest.mark.parametrize(("family", "way"), CASES)
def test_log_probabilities_are_those_of_one_pass(family: str, way: Callable[[Any], Told]) -> None:
    told = way(causal.build(family))
    for length, prompt in PROMPTS.items():
        check(told.tokens[length], prompt, expected(family)[length])
        assert told.texts[length] == "ab" * length


@pytest.mark.parametrize("family", BY_LENGTH)
def test_positions_by_length_are_those_of_the_prompt(family: str) -> None:
    told = in_chunks(causal.make(family))
    for length, prompt in PROMPTS.items():
        check(told.tokens[length], prompt, expected(family)[length])


def mamba() -> Any:
    torch.manual_seed(1)
    config = transformers.MambaConfig(
        vocab_size=causal.VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4
    )
    return transformers.MambaForCausalLM(config).eval().requires_grad_(False)


@pytest.mark.parametrize("family", ["mamba", *BY_LENGTH])
def test_models_with_a_cache_of_their_own_score_in_pieces(family: str) -> None:
    def make() -> Any:
        return mamba() if family == "mamba" else causal.make(family)

    sampler = BatchedSampler(lambda token: b"", lambda text: [])
    engine = PlainEngine(make(), 128, sampler, NotedMasks(), KeptOutput, scored_tokens=16)
    for length, prompt in PROMPTS.items():
        engine.add(scored_request(length, prompt, 2 * (length % 2), n=2))
    told = Told().run(engine)
    model = make()
    for length, prompt in PROMPTS.items():
        check(told.tokens[length], prompt, reference(model, prompt))
        assert told.texts[length] == "ab" * length
    assert sorted(told.ended) == [(length, choice) for length in LENGTHS for choice in range(2)]


def test_a_step_has_logits_of_some_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(causal.build("llama"), scored_tokens=16)
    rows: list[int] = []
    forward = engine._forward

    def noted(spans: Any) -> torch.Tensor:
        logits = forward(spans)
        rows.append(len(logits))
        return logits

    monkeypatch.setattr(engine, "_forward", noted)
    for length in (100, 63, 40):
        engine.add(scored_request(length, PROMPTS[length], 1))
    engine.add(request_of("beside", PROMPTS[24], 1))
    Told().run(engine)
    assert max(rows) <= 16 + 4
    assert scored_tokens(150_000) * 4 * 150_000 <= LOGITS_NBYTES < 2 * scored_tokens(150_000) * 4 * 150_000


def test_a_load_bounds_the_logits_of_a_step() -> None:
    engine = build(
        causal.make("llama"),
        128,
        Generation(block_tokens=8),
        1 << 24,
        BatchedSampler(lambda token: b"", lambda text: []),
        NotedMasks(),
        KeptOutput,
    )
    assert engine._scheduler._scored_tokens == scored_tokens(causal.VOCABULARY)


def test_logits_that_are_no_numbers_end_the_request_with_an_error() -> None:
    model = causal.make("llama")
    engine = engine_of(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[PROMPTS[24][5]] = float("nan")
    engine.add(scored_request("bad", PROMPTS[24], 0))
    with pytest.raises(NoNextToken) as raised:
        engine.step()
    assert [sequence.request.key for sequence in raised.value.sequences] == ["bad"]
