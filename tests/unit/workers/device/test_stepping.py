"""Long computations step by step: the watchdog's limit holds for a step, and what nobody waits for is dropped."""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import greenlet
import pytest
import torch

from ipc.wire.extraction import Extraction
from ipc.wire.messages import ExtractCall, InputItem
from tests.tiny.models import build
from tests.tiny.pictures import encoded, picture
from workers.adapters.base import Adapter, ItemFailure, LoadContext, Prepared
from workers.adapters.registry import resolve
from workers.device import stepping
from workers.device.stepping import Activity
from workers.scheduling.job import Piece


def piece(state: str = "open", left_s: float = 60.0) -> Any:
    """What the steps look at of a piece."""
    deadline_ns = time.monotonic_ns() + int(left_s * 1e9)
    work = SimpleNamespace(deadline_ns=deadline_ns)
    return SimpleNamespace(job=SimpleNamespace(state=state, work=work))


def test_each_step_starts_the_limit_anew() -> None:
    activity = Activity()
    activity.begin(0.0)
    until = time.monotonic() + 1
    while not activity.overdue():
        assert time.monotonic() < until
    activity.begin(60.0)
    before = activity._since
    with stepping.Running(activity, []):
        stepping.current().step()
    assert activity._since >= before and not activity.overdue()
    activity.end()
    with stepping.Running(activity, []):
        stepping.current().step()
    assert not activity.busy, "a step does not begin anything"


def test_the_first_of_several_parts_has_its_share_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1.0]
    monkeypatch.setattr("workers.device.stepping.time.monotonic", lambda: clock[0])
    activity = Activity()
    with stepping.Running(activity, []):
        for tokens, limit_s in (([100, 300], 100.0), ([400], 400.0)):
            activity.begin(400.0)
            next(stepping.each(tokens, tokens))
            clock[0] += limit_s
            assert not activity.overdue()
            clock[0] += 0.01
            assert activity.overdue()


def test_parts_ask_nothing_of_a_device_that_the_process_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    monkeypatch.setattr(
        "torch.cuda.current_stream", lambda: pytest.fail("this makes a context on the device")
    )
    assert list(stepping.each("ab", [1, 1])) == ["a", "b"]


def test_between_two_parts_the_work_on_the_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append(1))
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: stream)
    assert list(stepping.each("abc", [1, 1, 1])) == ["a", "b", "c"]
    assert len(waits) == 2


def test_a_turn_leaves_the_thread_between_two_steps_and_another_one_leaves_its_steps_as_they_were() -> None:
    told: list[str] = []

    def batch_of(name: str, state: str) -> Any:
        def run(batch: Any) -> str:
            turn = greenlet.getcurrent()
            with stepping.Running(Activity(), [piece(state)], lambda: turn.parent.switch()):
                for _ in range(2):
                    told.append(f"{name} {stepping.current().abandoned(0)}")
                    stepping.current().step()
            return name

        return SimpleNamespace(first=SimpleNamespace(strategy=SimpleNamespace(run=run)))

    batches = [batch_of("first", "cancelled"), batch_of("second", "open")]
    turns = [stepping.Turn(), stepping.Turn()]
    for turn, batch in zip(turns, batches, strict=True):
        turn.done = False
        turn.switch(batch)
    assert not stepping.current().abandoned(0), "outside of the turns nothing is abandoned"
    for _ in range(2):
        assert not any(turn.done for turn in turns)
        ends = [turn.switch(batch) for turn, batch in zip(turns, batches, strict=True)]
    assert told == ["first True", "second False"] * 2
    assert ends == ["first", "second"] and all(turn.done for turn in turns)
    turns[0].switch(batches[1])
    assert told[-1] == "second False", "a turn that is done runs another batch"


class Ran:
    """A batch as a turn sees it."""

    def __init__(self, pieces: list[Any]) -> None:
        self.pieces, self.first = pieces, pieces[0].job


def test_a_turn_keeps_nothing_of_a_batch_that_is_done() -> None:
    pieces = [piece(), piece()]
    pieces[0].job.strategy = SimpleNamespace(run=lambda batch: len(batch.pieces))
    turn = stepping.Turn()
    for _ in range(2):
        batch = Ran(pieces)
        gone = weakref.ref(batch)
        assert turn.switch(batch) == 2
        del batch
        assert gone() is None


def test_an_item_is_abandoned_when_its_job_ended_or_its_deadline_passed() -> None:
    pieces = [piece(), piece("cancelled"), piece(left_s=-1.0)]
    with stepping.Running(Activity(), pieces):
        assert [stepping.current().abandoned(at) for at in range(3)] == [False, True, True]
    assert not stepping.current().abandoned(1), "outside of a batch nothing is abandoned"


@pytest.fixture(scope="module")
def donut(tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    """A tiny Donut."""
    directory: Path = build("donut", tmp_path_factory.mktemp("stepping") / "donut")
    context = LoadContext(
        directory, "tiny", torch.device("cpu"), torch.float32, None, {}, lambda phase, fraction: None
    )
    return resolve("donut").load(context)


@pytest.mark.parametrize("beams", [1, 2])
def test_writing_goes_on_for_those_who_wait_and_ends_for_the_others(donut: Adapter, beams: int) -> None:
    items = [InputItem(images=[encoded(picture(number))]) for number in (1, 2, 3)]
    options = {"task": "<s_cord-v2>", "max_new_tokens": 30, "num_beams": beams}
    prepared = _prepared(donut, ExtractCall(items, options=options))
    alone = donut.extract(donut.collate(prepared))
    pieces: list[Piece] = [piece(), piece("cancelled"), piece()]
    with stepping.Running(Activity(), pieces):
        found = donut.extract(donut.collate(prepared))
    assert isinstance(found[1], ItemFailure) and isinstance(alone[1], Extraction)
    assert [found[0], found[2]] == [alone[0], alone[2]]


def test_a_batch_that_nobody_waits_for_ends_at_the_next_token(
    donut: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [InputItem(images=[encoded(picture(number))]) for number in (1, 2)]
    prepared = _prepared(donut, ExtractCall(items, options={"task": "<s_cord-v2>", "max_new_tokens": 100}))
    steps = []
    monkeypatch.setattr(stepping.Steps, "step", lambda self: steps.append(1))
    with stepping.Running(Activity(), [piece("cancelled"), piece("failed")]):
        found = donut.extract(donut.collate(prepared))
    assert len(steps) == 1
    assert all(isinstance(one, ItemFailure) for one in found)


def test_scores_that_are_no_numbers_fail_their_item(donut: Adapter) -> None:
    items = [InputItem(images=[encoded(picture(number))]) for number in (1, 2)]
    prepared = _prepared(donut, ExtractCall(items, options={"task": "<s_cord-v2>", "max_new_tokens": 4}))
    whole = donut.extract(donut.collate(prepared))
    prepared[0].payload.inputs["pixel_values"][:] = float("nan")
    found = donut.extract(donut.collate(prepared))
    assert isinstance(found[0], ItemFailure) and found[0].code == "INFERENCE_ERROR"
    assert found[1] == whole[1]


def _prepared(adapter: Adapter, call: ExtractCall) -> list[Prepared]:
    """All items, which must be sound."""
    adapter.refuse_unsupported(call)
    found = adapter.prepare(call.items, call)
    return [item for item in found if isinstance(item, Prepared)]
