"""Models that packed steps do not suit generate with their own cache; the proof tells both kinds of models apart."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from typing import Any

import pytest
import torch
import transformers

from ipc.settings import Generation
from ipc.wire.messages import Ending, GenerateCall
from ipc.wire.streams import FINISHED
from tests.fakes.generating import NotedMasks
from tests.tiny import causal
from workers.generation.attention import PagedAttention
from workers.generation.building import build, cache_blocks
from workers.generation.plain import PlainEngine
from workers.generation.proof import packs
from workers.generation.request import Emission, GenerationRequest
from workers.generation.sampling import BatchedSampler

TOKENS = 9


class Collected:
    """An output that keeps the tokens and ends after some."""

    def __init__(self, request: GenerationRequest, choice: int, found: dict[Any, list[int]]) -> None:
        self.ended: str | None = None
        self._request, self._choice = request, choice
        self._found = found.setdefault((request.key, choice), [])

    def push(self, token: int, logprob: Any) -> list[Emission]:
        self._found.append(token)
        if len(self._found) == self._request.max_tokens:
            self.ended = "length"
        return []

    def finish(self, reason: str) -> list[Emission]:
        return [Emission(self._request.key, self._choice, FINISHED)]


def mamba() -> Any:
    """A model whose every token depends on all before: tied or narrow weights repeat the last token."""
    torch.manual_seed(1)
    spread: dict[str, Any] = {"tie_word_embeddings": False, "initializer_range": 0.5, "eos_token_id": None}
    config = transformers.MambaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4, **spread
    )
    return transformers.MambaForCausalLM(config).eval().requires_grad_(False)


def llama() -> Any:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "initializer_range": 0.2,
    }
    config = transformers.LlamaConfig(
        vocab_size=64, num_hidden_layers=2, max_position_embeddings=256, **sizes
    )
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def request_of(key: int, prompt: list[int], n: int = 1) -> GenerationRequest:
    call = GenerateCall(ids=prompt, n=n, ending=Ending(max_tokens=TOKENS))
    return GenerationRequest(key, prompt, call, TOKENS, frozenset())


def engine_of(model: Any, found: dict[Any, list[int]]) -> Any:
    return build(
        model,
        128,
        Generation(block_tokens=8),
        1 << 24,
        BatchedSampler(lambda token: b"", lambda text: []),
        NotedMasks(),
        lambda request, choice: Collected(request, choice, found),
    )


def greedy(model: Any, prompt: list[int]) -> list[int]:
    plain = transformers.GenerationConfig(max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    ids = torch.tensor([prompt])
    found: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=plain)[
        0
    ].tolist()
    return found[len(prompt) :]


def test_a_model_with_a_state_of_its_own_generates_one_sequence_at_a_time() -> None:
    model = mamba()
    found: dict[Any, list[int]] = {}
    engine = engine_of(model, found)
    assert isinstance(engine, PlainEngine)
    prompts = [[1, 2, 3], [9, 8, 7, 6, 5]]
    for key, prompt in enumerate(prompts):
        engine.add(request_of(key, prompt, n=2 - key))
    while engine.has_work:
        engine.step()
        assert engine.statistics().running <= 1
        assert torch.is_grad_enabled(), "the thread keeps its mode beside a run that waits"
    wanted = [greedy(mamba(), prompt) for prompt in prompts]
    assert found == {(0, 0): wanted[0], (0, 1): wanted[0], (1, 0): wanted[1]}
    assert engine.statistics().blocks_used == 0


def test_stored_settings_of_generation_neither_end_a_text_nor_change_it() -> None:
    prompt = [1, 2, 3]
    wanted = greedy(mamba(), prompt)
    model = mamba()
    model.generation_config.update(
        eos_token_id=wanted[:4], repetition_penalty=5.0, min_new_tokens=3, suppress_tokens=[wanted[0]]
    )
    found: dict[Any, list[int]] = {}
    engine = engine_of(model, found)
    engine.add(request_of(0, prompt))
    while engine.has_work:
        engine.step()
    assert found == {(0, 0): wanted}


@pytest.mark.parametrize("family", ["llama_dynamic", "llama_long", "phi3_long"])
def test_positions_by_length_are_those_of_the_text_alone_also_after_another_text(family: str) -> None:
    draw = random.Random(family)
    prompts = [draw.choices(range(5, causal.VOCABULARY), k=length) for length in (50, 30, 35, 6)]
    found: dict[Any, list[int]] = {}
    engine = PlainEngine(
        causal.make(family),
        80,
        BatchedSampler(lambda token: b"", lambda text: []),
        NotedMasks(),
        lambda request, choice: Collected(request, choice, found),
    )
    for key, prompt in enumerate(prompts):
        engine.add(request_of(key, prompt))
    for number in itertools.count():
        if not engine.has_work:
            break
        engine.step()
        if number % 4 == 3 and (running := next(iter(engine.keys), None)) is not None:
            engine.pause(running)
            engine.step()
            engine.resume(running)
    wanted = {}
    for key, prompt in enumerate(prompts):
        model = causal.make(family)
        model.generation_config.eos_token_id = None
        wanted[key, 0] = greedy(model, prompt)
    assert found == wanted


def test_a_sequence_goes_on_after_a_pause_and_after_the_end_of_another() -> None:
    found: dict[Any, list[int]] = {}
    engine = engine_of(mamba(), found)
    engine.add(request_of(0, [1, 2, 3]))
    for _ in range(3):
        engine.step()
    engine.pause(0)
    engine.add(request_of(1, [4, 5]))
    engine.add(request_of(2, [6, 5]))
    engine.step()
    engine.cancel(1)
    engine.resume(0)
    assert torch.is_grad_enabled()
    while engine.has_work:
        engine.step()
    assert found[0, 0] == greedy(mamba(), [1, 2, 3])
    assert found[2, 0] == greedy(mamba(), [6, 5])
    assert len(found[1, 0]) < TOKENS


class Passes:
    """Counts the passes of a model, and fails those of single tokens behind the place `fails_at`."""

    def __init__(self, model: Any) -> None:
        self.count, self.fails_at = 0, 1 << 30
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _: Any, __: Any, given: dict[str, Any]) -> None:
        self.count += 1
        if int(given["position_ids"].max()) >= self.fails_at:
            raise ValueError("too far")


def resting(outputs: list[weakref.ref[Collected]]) -> tuple[PlainEngine, Passes, dict[Any, list[int]]]:
    """An engine of a model that reads token by token; the run of request 0 ended when another text began."""
    found: dict[Any, list[int]] = {}

    def make_output(request: GenerationRequest, choice: int) -> Collected:
        output = Collected(request, choice, found)
        outputs.append(weakref.ref(output))
        return output

    model = causal.make("llama_dynamic")
    sampler = BatchedSampler(lambda token: b"", lambda text: [])
    engine = PlainEngine(model, 80, sampler, NotedMasks(), make_output)
    engine.add(request_of(0, [7, 8, 9]))
    for _ in range(TOKENS - 2):
        engine.step()
    engine.pause(0)
    engine.add(request_of(1, [6, 5]))
    while engine.has_work:
        engine.step()
    engine.resume(0)
    return engine, Passes(model), found


def test_a_text_that_goes_on_takes_one_pass_a_step_and_ends_between_two() -> None:
    model = causal.make("llama_dynamic")
    model.generation_config.eos_token_id = None
    engine, passes, found = resting([])
    counts = []
    while engine.has_work:
        before = passes.count
        engine.step()
        counts.append(passes.count - before)
    assert counts == [1] * TOKENS, "the prompt, seven tokens, and one that is chosen behind them"
    assert found[0, 0] == greedy(model, [7, 8, 9])
    engine, passes, found = resting([])
    engine.step()
    engine.step()
    engine.cancel(0)
    assert not engine.has_work and passes.count == 2


def test_a_text_that_cannot_go_on_fails_alone_too() -> None:
    engine, passes, _ = resting([])
    passes.fails_at = 5
    with pytest.raises(ValueError, match="too far"):
        while engine.has_work:
            engine.step()
    with pytest.raises(ValueError, match="too far"):
        engine.step()
    passes.fails_at = 1 << 30
    while engine.has_work:
        engine.step()


def test_nothing_is_kept_of_a_text_that_has_ended() -> None:
    outputs: list[weakref.ref[Collected]] = []
    engine, _, _ = resting(outputs)
    engine.step()
    engine.cancel(0)
    gc.collect()
    assert [output() for output in outputs] == [None, None]
    outputs.clear()
    engine, passes, _ = resting(outputs)
    passes.fails_at = 0
    with pytest.raises(ValueError, match="too far"):
        engine.step()
    passes.fails_at = 1 << 30
    engine.cancel(0)
    gc.collect()
    assert [output() for output in outputs] == [None, None], "nor of a text that has failed"
    engine.add(request_of(2, [7, 8, 9]))
    while engine.has_work:
        engine.step()
    gc.collect()
    assert outputs[2]() is None


def test_the_proof_passes_a_model_that_packs_and_refuses_attention_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, attention = llama(), PagedAttention(8)
    assert packs(model, attention)
    assert model.config._attn_implementation == attention.name
    whole = PagedAttention.attend

    def wrong(self: Any, module: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
        return whole(self, module, query * 1.1, key, value, *rest, **named)

    monkeypatch.setattr(PagedAttention, "attend", wrong)
    model = llama()
    assert not packs(model, PagedAttention(8))
    assert model.config._attn_implementation == "sdpa"


def test_the_cache_is_what_the_sequences_need_at_most_and_refused_when_nothing_fits() -> None:
    model, attention = llama(), PagedAttention(8)
    assert packs(model, attention)
    device, settings = torch.device("cpu"), Generation(block_tokens=8)
    block_nbytes = attention.token_nbytes() * 8
    assert cache_blocks(attention, device, 39, settings, 1 << 30) == 39
    assert cache_blocks(attention, device, 39, settings, 100 * block_nbytes) == 10
    few = Generation(block_tokens=8, cache_bytes=5 * block_nbytes)
    assert cache_blocks(attention, device, 39, few, 1 << 30) == 5
    with pytest.raises(MemoryError, match=f"a block of 8 tokens takes {block_nbytes}"):
        cache_blocks(attention, device, 39, settings, block_nbytes)


def test_memory_that_is_short_at_the_proof_is_told_and_costs_the_model_no_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def short(self: Any, *_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory, for this test")

    monkeypatch.setattr(PagedAttention, "allocate", short)
    with pytest.raises(torch.OutOfMemoryError):
        packs(llama(), PagedAttention(8))
