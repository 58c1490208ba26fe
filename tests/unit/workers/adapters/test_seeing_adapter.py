"""A chat model that sees as an adapter: loaded, proven with a picture, and asked with pictures in messages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from ipc.errors import InputTooLong, InvalidInput, PenstockError
from ipc.settings import Generation, Settings
from ipc.wire.messages import Ending, GenerateCall, Sampling
from tests.fakes.generating import Answers
from tests.fakes.jobs import make_job
from tests.fakes.seeing import TOKENS, Chat, Seeing
from tests.tiny import seeing
from workers.adapters.base import LoadContext, Prepared
from workers.adapters.causal import CausalAdapter
from workers.generation import building
from workers.generation.engine import Engine
from workers.generation.pictures import reading
from workers.generation.plain import PlainEngine
from workers.generation.request import GenerationRequest
from workers.scheduling.preparing import Preparer

QUESTION = "What do you see?"
CHATS = (Chat((1, QUESTION)), Chat((QUESTION,)), Chat((1, "Compare.", 2, QUESTION)))


@pytest.fixture(scope="module", params=seeing.FAMILIES)
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    """Each family."""
    return Seeing(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing.save("qwen2_5_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(directory: Path) -> CausalAdapter:
    return CausalAdapter.load(context(directory))


def context(directory: Path, **settings: Any) -> LoadContext:
    return LoadContext(
        directory=directory,
        model_id="tiny/seeing",
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_sequence_length=512,
        options={},
        progress=lambda phase, fraction: None,
        generation=Generation(max_sequences=4, **settings),
        free_bytes=lambda: 1 << 30,
    )


def call_of(chat: Chat, **options: Any) -> GenerateCall:
    ending = Ending(max_tokens=TOKENS, ignore_eos=True)
    given = {"sampling": Sampling(temperature=0.0, logprobs=0), "ending": ending, **options}
    return GenerateCall(messages=chat.messages(), images=chat.files, **given)


def prepared(adapter: CausalAdapter, chat: Chat, **options: Any) -> GenerationRequest:
    call = call_of(chat, **options)
    [found] = adapter.prepare(call.items, call)
    assert isinstance(found, Prepared)
    request: GenerationRequest = found.payload
    return request


def answer(adapter: CausalAdapter, *chats: Chat, **options: Any) -> list[list[int]]:
    """The tokens of the answers to conversations that run together."""
    answers = Answers()
    for number, chat in enumerate(chats):
        request = prepared(adapter, chat, **options)
        request.key = number
        adapter.engine.add(request)
    answers.run(adapter.engine)
    return [answers.tokens[number, 0] for number in range(len(chats))]


@pytest.mark.sample(3)
def test_a_model_that_passes_the_proof_with_a_picture_runs_in_packed_steps(
    each: Seeing,
) -> None:
    adapter = CausalAdapter.load(context(each.directory))
    assert adapter.sees and type(adapter.engine) is Engine
    assert adapter.engine.statistics().pictures == 0, "those of the proof are not counted"
    assert answer(adapter, *CHATS) == [each.expected(chat)[0] for chat in CHATS]


def test_the_features_of_a_picture_are_made_once_for_each_space(adapter: CausalAdapter) -> None:
    answer(adapter, CHATS[0], space="first")
    before = adapter.engine.statistics()
    again = prepared(adapter, Chat((1, "Which colour has the bridge?")), space="first")
    assert not again.pictures[0].inputs, "a known picture is not decoded"
    answer(adapter, Chat((1, "Which colour has the bridge?")), space="first")
    assert adapter.engine.statistics().pictures == before.pictures
    assert adapter.engine.statistics().feature_bytes == before.feature_bytes > 0
    answer(adapter, CHATS[0], space="second")
    assert adapter.engine.statistics().pictures == before.pictures + 1


def test_a_prompt_whose_pictures_exceed_the_context_is_refused_and_never_cut(adapter: CausalAdapter) -> None:
    long = Chat((1, "word " * 600))
    for truncate in (False, True):
        with pytest.raises(InputTooLong, match="a prompt with images is not cut"):
            prepared(adapter, long, truncate=truncate)
    counted = prepared(adapter, Chat((1, QUESTION)), counts_only=True)
    assert not counted.pictures, "counting decodes no picture"


def test_a_torn_picture_is_refused_before_anything_runs(adapter: CausalAdapter) -> None:
    chat = Chat((1, QUESTION))
    call = GenerateCall(messages=chat.messages(), images=[chat.files[0][:200]])
    with pytest.raises(InvalidInput, match="messages: image 1: "):
        adapter.prepare(call.items, call)


def test_a_picture_gets_its_inputs_late_while_too_many_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MOST_AHEAD_NBYTES", 0)
    model = Seeing("qwen2_5_vl", tmp_path)
    packed = CausalAdapter.load(context(model.directory))
    monkeypatch.setattr(building, "packs", lambda *_: False)
    for adapter in (packed, CausalAdapter.load(context(model.directory))):
        assert not any(picture.inputs for picture in prepared(adapter, CHATS[0]).pictures)
        assert answer(adapter, *CHATS) == [model.expected(chat)[0] for chat in CHATS]


def test_the_bytes_of_stored_features_count_as_memory_of_the_model(directory: Path) -> None:
    small = CausalAdapter.load(context(directory, picture_cache_bytes=1 << 20, cache_bytes=1 << 20))
    large = CausalAdapter.load(context(directory, picture_cache_bytes=9 << 20, cache_bytes=1 << 20))
    assert large.memory_bytes - small.memory_bytes == 8 << 20


@pytest.mark.sample(2)
def test_a_model_that_fails_the_proof_sees_with_generate_alone(
    each: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "packs", lambda *_: False)
    plain = CausalAdapter.load(context(each.directory))
    assert plain.sees and type(plain.engine) is PlainEngine
    assert answer(plain, *CHATS) == [each.expected(chat)[0] for chat in CHATS]


def decoded_until_the_end(
    adapter: CausalAdapter, monkeypatch: pytest.MonkeyPatch, module: Any, ended: str
) -> int:
    """How many of sixteen pictures are decoded by a module, where the request ends during the third."""
    call = call_of(Chat((*range(20, 36), QUESTION)))
    job = make_job(call, of=adapter)
    job.prepared = [Prepared(None, 0)]
    decoded: list[int] = []
    decode = module.decoded

    def counted(data: bytes, ground: Any) -> Any:
        decoded.append(len(data))
        if len(decoded) == 3 and ended == "cancelled":
            job.state = "cancelled"
        elif len(decoded) == 3:
            job.work = msgspec.structs.replace(job.work, deadline_ns=1)
        return decode(data, ground)

    monkeypatch.setattr(module, "decoded", counted)
    failures: list[PenstockError] = []
    table: Any = SimpleNamespace(
        claim=lambda job: True, unclaim=lambda job: None, fail=lambda job, error: failures.append(error)
    )
    arena: Any = SimpleNamespace(record_preparing=lambda *_: None)
    preparing: Any = SimpleNamespace(queue=None, jobs=table, arena=arena, settings=Settings())
    preparer = Preparer(preparing, lambda job: None)
    preparer.prepare_now(job)
    preparer.close()
    [error] = failures
    assert error.code == "DEADLINE_EXCEEDED" and "images" in error.message
    return len(decoded)


@pytest.mark.parametrize("ended", ["cancelled", "late"])
def test_the_pictures_of_a_request_that_nobody_waits_for_are_not_decoded(
    adapter: CausalAdapter, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    assert decoded_until_the_end(adapter, monkeypatch, reading, ended) == 3, "of sixteen"
