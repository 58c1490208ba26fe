"""A causal model as an adapter: prompts against the context, what ends an answer, bad requests with field and limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ipc.catalog.entries import DirectorySource, ModelEntry, OutputSpec
from ipc.errors import InputTooLong, InvalidInput
from ipc.settings import Generation
from ipc.wire import tokens
from ipc.wire.messages import Ending, GenerateCall, Grammar, InputItem, Sampling, TokenizeCall
from tests.fakes.adapter import FakeAdapter
from tests.tiny import chat_models
from workers.adapters.base import LoadContext, Prepared
from workers.adapters.causal import CausalAdapter
from workers.generation.request import Emission, GenerationRequest
from workers.inputs import NOTHING
from workers.lifecycle.proof import prove
from workers.operations.items import Generate, Tokenize

CONTEXT = 64


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_models.save("chatml", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(directory: Path) -> CausalAdapter:
    return CausalAdapter.load(context(directory))


def context(directory: Path, **options: Any) -> LoadContext:
    return LoadContext(
        directory=directory,
        model_id="tiny/chat",
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_sequence_length=CONTEXT,
        options=options,
        progress=lambda phase, fraction: None,
        generation=Generation(max_sequences=2),
        free_bytes=lambda: 1 << 30,
    )


def prepare(adapter: CausalAdapter, call: GenerateCall) -> GenerationRequest:
    [prepared] = adapter.prepare(call.items, call)
    assert isinstance(prepared, Prepared)
    request: GenerationRequest = prepared.payload
    assert prepared.cost == len(request.prompt)
    return request


@pytest.mark.parametrize(("tokens", "room"), [(1, CONTEXT - 1), (CONTEXT - 2, 2), (CONTEXT - 1, 1)])
def test_an_answer_has_the_room_that_the_prompt_leaves(
    adapter: CausalAdapter, tokens: int, room: int
) -> None:
    request = prepare(adapter, GenerateCall(ids=[5] * tokens))
    assert (len(request.prompt), request.max_tokens) == (tokens, room)
    assert prepare(adapter, GenerateCall(ids=[5] * tokens, ending=Ending(max_tokens=1))).max_tokens == 1


@pytest.mark.parametrize("tokens", [CONTEXT, CONTEXT + 1])
def test_a_prompt_without_room_for_an_answer_is_refused_or_loses_its_begin(
    adapter: CausalAdapter, tokens: int
) -> None:
    ids = list(range(tokens))
    with pytest.raises(InputTooLong, match=f"the prompt has {tokens} tokens.*{CONTEXT}.*truncate_sequence"):
        prepare(adapter, GenerateCall(ids=ids))
    cut = prepare(adapter, GenerateCall(ids=ids, truncate=True, ending=Ending(max_tokens=8)))
    assert cut.prompt == ids[-(CONTEXT - 8) :]
    assert prepare(adapter, GenerateCall(ids=ids, truncate=True)).prompt == ids[-(CONTEXT - 1) :]


def test_a_cache_that_is_smaller_than_the_context_is_named(
    directory: Path, adapter: CausalAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    assert adapter.limited_by == "" and "raise generation.cache_bytes" not in caplog.text
    block = adapter.engine.attention.token_nbytes() * 16 if adapter.engine.attention else pytest.fail()
    small = Generation(max_sequences=2, cache_bytes=2 * block)
    bounded = CausalAdapter.load(dataclasses.replace(context(directory), generation=small))
    assert (bounded.limited_by, bounded.max_sequence_length) == ("generation.cache_bytes", 32)
    assert f"holds 32 tokens in {2 * block} bytes, the context of the model is {CONTEXT}" in caplog.text
    said = rf"40 tokens, the cache .* holds 32 \(generation\.cache_bytes; the context of the model is {CONTEXT}\)"
    with pytest.raises(InputTooLong, match=said):
        prepare(bounded, GenerateCall(ids=[5] * 40))
    assert prepare(bounded, GenerateCall(ids=[5] * 30, ending=Ending(max_tokens=50))).max_tokens == 2
    with pytest.raises(MemoryError, match=r"cache of keys and values: 10 bytes \(generation\.cache_bytes\)"):
        CausalAdapter.load(
            dataclasses.replace(context(directory), generation=Generation(max_sequences=2, cache_bytes=10))
        )


def test_a_prompt_of_any_length_is_counted(adapter: CausalAdapter) -> None:
    ids = list(range(CONTEXT + 7))
    assert len(prepare(adapter, GenerateCall(ids=ids, counts_only=True)).prompt) == CONTEXT + 7
    cut = prepare(adapter, GenerateCall(ids=ids, counts_only=True, truncate=True))
    assert len(cut.prompt) == CONTEXT - 1


def test_the_tokens_of_a_conversation_are_those_of_its_prompt(adapter: CausalAdapter) -> None:
    said = [{"role": "user", "content": "x" * 2 * CONTEXT}]
    prompt = GenerateCall(messages=said, variables={"add_generation_prompt": False})
    wanted = prepare(adapter, msgspec.structs.replace(prompt, counts_only=True)).prompt
    [found] = Tokenize().prepare(adapter, TokenizeCall([InputItem("")], True, prompt=prompt), 0, 1, NOTHING)
    assert isinstance(found, Prepared)
    read = tokens.unpack(found.payload.data)
    assert read.ids == wanted and found.cost == len(wanted) > CONTEXT
    assert read.strings == adapter.tokenizer.convert_ids_to_tokens(wanted)
    call = TokenizeCall([InputItem("")], True, prompt=prompt)
    model: Any = FakeAdapter({}, 512)
    model.tokenizer = adapter.tokenizer
    with pytest.raises(InvalidInput, match="continues no conversations"):
        Tokenize().prepare(model, call, 0, 1, NOTHING)


def test_pictures_are_refused_by_a_model_that_does_not_see(adapter: CausalAdapter) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "what is this"}]
    call = GenerateCall(messages=[{"role": "user", "content": parts}], images=[b"picture"])
    assert not adapter.sees
    with pytest.raises(InvalidInput, match="messages: the model takes text only, no images"):
        prepare(adapter, call)
    with pytest.raises(InvalidInput, match="takes text only"):
        adapter.prompt_ids(call)


def test_token_ids_and_biases_beyond_the_vocabulary_are_refused_by_name(adapter: CausalAdapter) -> None:
    size = adapter._vocabulary_size
    for wrong in (-1, size):
        with pytest.raises(InvalidInput, match=rf"prompt\[1\]: {wrong} is no token id.*{size}"):
            prepare(adapter, GenerateCall(ids=[1, wrong]))
        with pytest.raises(InvalidInput, match=rf"logit_bias.*{size}"):
            prepare(adapter, GenerateCall(ids=[1], sampling=Sampling(logit_bias={wrong: 1.0})))
    prepare(adapter, GenerateCall(ids=[0, size - 1], sampling=Sampling(logit_bias={size - 1: 1.0})))


def test_an_answer_ends_with_the_tokens_of_the_model_unless_they_are_ignored(adapter: CausalAdapter) -> None:
    ends = prepare(adapter, GenerateCall(ids=[5], ending=Ending(stop_ids=[7]))).stop_ids
    assert 7 in ends and len(ends) > 1
    ignoring = Ending(stop_ids=[7], ignore_eos=True)
    assert prepare(adapter, GenerateCall(ids=[5], ending=ignoring)).stop_ids == {7}


def test_an_empty_prompt_begins_with_the_first_token_or_is_refused(adapter: CausalAdapter) -> None:
    if adapter._begin_id is None:
        with pytest.raises(InvalidInput, match="prompt: no token"):
            prepare(adapter, GenerateCall(text=""))
    adapter._begin_id, before = 3, adapter._begin_id
    try:
        assert prepare(adapter, GenerateCall(text="")).prompt == [3]
    finally:
        adapter._begin_id = before


def test_the_canned_inference_gives_a_log_probability_for_each_token(adapter: CausalAdapter) -> None:
    call = GenerateCall(
        text="hello", ending=Ending(max_tokens=5, ignore_eos=True), sampling=Sampling(logprobs=0)
    )
    before = adapter.engine.statistics()
    results = Generate().run(adapter, [prepare(adapter, call)], call)
    [found] = results.loose["logprobs"]
    assert found.shape == (5,) and (found < 0).all()
    after = adapter.engine.statistics()
    assert after.blocks_used == 0
    assert (after.prompt_tokens, after.output_tokens) == (before.prompt_tokens, before.output_tokens)


def test_the_device_is_free_between_two_steps_of_the_canned_inference(
    adapter: CausalAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    step = adapter.engine.step

    def counted() -> list[Emission]:
        steps[-1] += 1
        return step()

    def run(work: Callable[[], Any]) -> Any:
        steps.append(0)
        return work()

    monkeypatch.setattr(adapter.engine, "step", counted)
    entry = ModelEntry("tiny/chat", DirectorySource("."), adapter="causal", outputs={"chat": OutputSpec()})
    [found] = prove(adapter, entry, run=run).values()
    assert len(found) == sum(steps) == 8 and max(steps) == 1
    assert adapter.engine.statistics().blocks_used == 0
    assert prove(adapter, entry).popitem()[1] == found


def test_memory_counts_weights_and_cache_and_the_context_ends_at_the_cache(
    adapter: CausalAdapter, directory: Path
) -> None:
    weights = sum(parameter.nbytes for parameter in adapter.engine.model.parameters())
    assert adapter.memory_bytes >= weights + adapter.engine.cache_nbytes > weights
    assert adapter.max_sequence_length == CONTEXT
    with pytest.raises(ValueError, match="tool_format 'klingon' is none of"):
        CausalAdapter.load(context(directory, tool_format="klingon"))


def test_forced_tokens_need_no_step_and_change_nothing(adapter: CausalAdapter) -> None:
    grammar = Grammar("regex", "[a-c]{2} and then the very same words again and again [x-z]")

    def answer(**sampling: int) -> tuple[str, int]:
        call = GenerateCall(ids=[5, 6], grammar=grammar, sampling=Sampling(**sampling))
        request = prepare(adapter, call)
        adapter.engine.add(request)
        text, steps = "", 0
        while adapter.engine.has_work:
            steps += 1
            text += "".join(emission.text for emission in adapter.engine.step())
        return text, steps

    (forced, few), (chosen, many) = answer(), answer(logprobs=0)
    assert forced == chosen
    assert len(forced) == len("aa and then the very same words again and again x")
    assert few <= 8 < many
