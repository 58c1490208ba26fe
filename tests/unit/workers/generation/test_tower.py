"""The vision tower between the steps of text: turns, failures, the store of features, positions in three axes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.generating import Answers, request_of
from tests.fakes.seeing import TOKENS, Chat, Seeing
from workers.generation.engine import Engine
from workers.generation.features import FeatureStore
from workers.generation.pictures.family import Features, Picture
from workers.generation.scheduler import Unseen
from workers.generation.sight import Sight, three_axes

QUESTION = "What do you see?"
ONE, ANOTHER, TWO = Chat((1, QUESTION)), Chat((4, QUESTION)), Chat((1, 2, QUESTION))
WORDS = list(range(5, 30))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing("qwen2_5_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture
def encoded(model: Seeing, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that the tower has begun."""
    sizes: list[int] = []
    encode = model.family.encode

    def noted(whole: Any, pictures: Sequence[Picture]) -> list[Features]:
        sizes.append(len(pictures))
        return encode(whole, pictures)

    monkeypatch.setattr(model.family, "encode", noted)
    return sizes


def failing(
    model: Seeing, monkeypatch: pytest.MonkeyPatch, error: Exception, is_bad: Callable[[Picture], bool]
) -> None:
    """The tower raises on batches with a bad picture."""
    encode = model.family.encode

    def checked(whole: Any, pictures: Sequence[Picture]) -> list[Features]:
        if any(map(is_bad, pictures)):
            raise error
        return encode(whole, pictures)

    monkeypatch.setattr(model.family, "encode", checked)


def run(engine: Engine, answers: Answers) -> list[Unseen]:
    """Step to the end; requests whose pictures cannot be seen end, as the strategy has it."""
    unseen = []
    while engine.has_work:
        try:
            answers.take(engine.step())
        except Unseen as error:
            unseen.append(error)
            for sequence in error.sequences:
                engine.cancel(sequence.request.key)
    return unseen


def test_text_gets_a_token_in_every_turn_of_a_picture_that_takes_many(model: Seeing) -> None:
    engine, answers = model.engine(prefill_tokens=8), Answers()
    engine.add(request_of("text", WORDS, 40))
    while ("text", 0) not in answers.tokens:
        answers.take(engine.step())
    engine.tower.turn_tokens = lambda prefill_tokens: 1  # type: ignore[method-assign, union-attr]
    engine.add(model.request("seen", ONE))
    turns = 0
    while not engine.tower.pictures_seen:
        before = len(answers.tokens["text", 0])
        answers.take(engine.step())
        assert len(answers.tokens["text", 0]) == before + 1
        turns += 1
    assert turns > 2, "one turn for each layer of the tower"
    answers.run(engine)
    assert answers.tokens["seen", 0] == model.expected(ONE)[0]


def test_requests_behind_one_that_waits_for_features_are_not_held_up(model: Seeing) -> None:
    engine, answers = model.engine(), Answers()
    engine.tower.turn_tokens = lambda prefill_tokens: 1  # type: ignore[method-assign, union-attr]
    engine.add(model.request("seen", TWO))
    engine.add(request_of("text", WORDS, 1))
    while ("text", 0) not in answers.finishes:
        answers.take(engine.step())
    assert engine.tower.pictures_seen == 0
    answers.run(engine)
    assert answers.tokens["seen", 0] == model.expected(TWO)[0]


def test_pictures_of_several_requests_are_one_batch_within_the_tokens_of_a_turn(
    model: Seeing, encoded: list[int]
) -> None:
    engine = model.engine()
    for number, chat in enumerate((ONE, ANOTHER, TWO)):
        engine.add(model.request(number, chat))
    Answers().run(engine)
    assert encoded == [3]
    engine, encoded[:] = model.engine(), []
    engine.tower.turn_tokens = lambda prefill_tokens: 1  # type: ignore[method-assign, union-attr]
    engine.add(model.request(0, TWO))
    Answers().run(engine)
    assert encoded == [1, 1]


def test_a_picture_on_which_the_tower_fails_is_the_error_of_its_request_alone(
    model: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = model.request("bad", ANOTHER)
    error = RuntimeError("no such pixels")
    failing(model, monkeypatch, error, lambda each: each.digest == bad.pictures[0].digest)
    engine, answers = model.engine(), Answers()
    engine.add(request_of("text", WORDS, TOKENS))
    engine.add(model.request("good", TWO))
    engine.add(bad)
    [unseen] = run(engine, answers)
    assert [each.request.key for each in unseen.sequences] == ["bad"] and unseen.error is error
    assert answers.tokens["good", 0] == model.expected(TWO)[0]
    assert answers.finishes.keys() == {("text", 0), ("good", 0)}
    assert engine.pool.used == 0 and engine.tower.store.held_nbytes == 0


def test_a_tower_goes_on_after_a_batch_was_cancelled_or_put_to_rest(
    model: Seeing, encoded: list[int]
) -> None:
    engine, answers = model.engine(), Answers()
    engine.tower.turn_tokens = lambda prefill_tokens: 1  # type: ignore[method-assign, union-attr]
    for key in ("cancelled", "rests"):
        engine.add(model.request(key, ONE))
        while not encoded:
            answers.take(engine.step())
        if key == "cancelled":
            engine.cancel(key)
        else:
            engine.pause(key)
        encoded.clear()
        engine.add(model.request(f"after {key}", ANOTHER))
        answers.run(engine)
        assert answers.tokens[f"after {key}", 0] == model.expected(ANOTHER)[0]
        engine.tower.forget()
        encoded.clear()
    assert not torch.is_inference_mode_enabled()
    engine.resume("rests")
    answers.run(engine)
    assert answers.tokens["rests", 0] == model.expected(ONE)[0]


def test_inputs_of_a_picture_whose_features_were_given_up_are_made_again(model: Seeing) -> None:
    engine, answers = model.engine(), Answers()
    engine.add(model.request("seen", TWO, processed=False))
    answers.run(engine)
    assert answers.tokens["seen", 0] == model.expected(TWO)[0]


def test_few_inputs_are_made_ahead_of_their_turn(model: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, answers, made = model.engine(), Answers(), list[bytes]()
    ready, processed = threading.Event(), model.reader.processed

    def counted(picture: Picture) -> Picture:
        made.append(picture.digest)
        ready.wait(10)
        return processed(picture)

    monkeypatch.setattr(model.reader, "processed", counted)
    chats = [Chat((number, QUESTION)) for number in range(1, 7)]
    for chat in chats:
        engine.add(model.request(chat, chat, processed=False))
    while not made:
        engine.step()
    assert engine.tower is not None and len(engine.tower._processing) == 2
    ready.set()
    answers.run(engine)
    assert [answers.tokens[chat, 0] for chat in chats] == [model.expected(chat)[0] for chat in chats]
    assert len(made) == len(chats)


def test_inputs_are_let_go_once_the_features_are_there(model: Seeing) -> None:
    engine, request = model.engine(), model.request("seen", TWO)
    assert all(picture.inputs for picture in request.pictures)
    engine.add(request)
    Answers().run(engine)
    assert not any(picture.inputs for picture in request.pictures)


def test_a_store_that_holds_less_than_a_prompt_needs_still_serves_and_keeps_its_bound(model: Seeing) -> None:
    engine, answers = model.engine(store_nbytes=1, keeps_prefixes=False), Answers()
    for number in range(3):
        engine.add(model.request(number, TWO if number else ONE))
    answers.run(engine)
    assert [answers.tokens[number, 0] for number in range(3)] == [
        model.expected(chat)[0] for chat in (ONE, TWO, TWO)
    ]
    assert engine.tower.store.nbytes == 0 and engine.statistics().feature_evictions > 0


def features(rows: int) -> Features:
    return Features(torch.zeros(rows, 4))


def test_features_that_rested_longest_go_first_and_held_ones_stay() -> None:
    store = FeatureStore(3 * 16)
    store.put(b"held", features(1), holders=1)
    for digest in (b"a", b"b"):
        store.put(digest, features(1), holders=0)
    assert store.hold(b"a") is not None
    store.release(b"a")
    store.put(b"c", features(1), holders=0)
    assert [digest in store for digest in (b"held", b"a", b"b", b"c")] == [True, True, False, True]
    store.put(b"large", features(9), holders=2)
    assert [digest in store for digest in (b"held", b"a", b"c", b"large")] == [True, False, False, True]
    store.release(b"large")
    assert b"large" in store and store.held_nbytes == 10 * 16
    store.release(b"large")
    assert b"large" not in store and store.nbytes == store.held_nbytes == 16
    assert (store.lookups, store.hits, store.evictions) == (1, 1, 4)


def picture(places: range, grid: tuple[int, int] | None = None) -> Picture:
    return Picture(bytes([places.start]), np.array(places), len(places), grid, 1, alone=True, data=b"")


def test_positions_count_rows_and_columns_and_go_on_behind_the_longer_side() -> None:
    pictures = [picture(range(2, 8), (2, 3)), picture(range(9, 11), (2, 1))]
    sight = Sight(pictures, 4, in_axes=True)
    positions, shift = three_axes(pictures, sight.borders)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6],
    ]
    assert shift == -3 == sight.shift
    assert sight.positions_of(10, 13).tolist() == [[6, 8, 9], [7, 8, 9], [6, 8, 9]]


def test_blocks_are_marked_with_the_pictures_in_them() -> None:
    sight = Sight([picture(range(2, 9)), picture(range(9, 11))], 4)
    assert sight.marks == {0: (b"\2", 0), 1: (b"\2", 2), 2: (b"\2", 6, b"\t", 0)}


@pytest.mark.parametrize(
    ("start", "stop", "moved"), [(0, 2, 2), (0, 5, 2), (2, 5, 9), (5, 6, 9), (0, 9, 9), (0, 12, 12)]
)
def test_a_span_ends_at_the_border_of_a_picture_that_is_seen_both_ways(
    start: int, stop: int, moved: int
) -> None:
    assert Sight([picture(range(2, 9))], 4, both_ways=True).fitted(start, stop) == moved
    assert Sight([picture(range(2, 9))], 4).fitted(start, stop) == stop
