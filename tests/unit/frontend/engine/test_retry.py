"""The retry rule as a table: who may try again, how often, and what the caller is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.engine.local import retry
from ipc import deadline
from ipc.errors import (
    Draining,
    InferenceFailed,
    InvalidInput,
    LoraLoading,
    ModelLoading,
    ModelNotLoaded,
    PenstockError,
    QueueFull,
    SequenceLost,
    WorkerCrashed,
    WorkerLost,
)
from ipc.settings import Limits
from ipc.wire.messages import Call, GenerateCall, InferCall, ModelStatus, Step, Work
from tests.fakes.channel import FakeChannel

SUSPECT, BYSTANDER = True, False


def work(left_s: float) -> Work:
    """A request with so much time left."""
    return Work("m", InferCall([], []), deadline.after(left_s), 16, "req")


def attempt(
    history: list[bool], budget: retry.RetryBudget | None = None, left_s: float = 60.0
) -> tuple[retry.Attempts, object]:
    """Attempts and last error of a request that was lost as this history says, on slots 0, 1, 2 ..."""
    attempts, budget = retry.Attempts(work(left_s)), budget or retry.RetryBudget()
    error: object = None
    for slot, suspect in enumerate(history):
        lost = WorkerLost("the worker process died", suspect=suspect, retry_after_s=1)
        error = attempts.next_error(lost, slot, budget)
    return attempts, error


@pytest.mark.parametrize(
    ("history", "outcome", "solo"),
    [
        ([BYSTANDER], None, False),
        ([SUSPECT], None, True),
        ([BYSTANDER] * 5, None, False),
        ([BYSTANDER] * 6, WorkerLost, False),
        ([SUSPECT, BYSTANDER], None, True),
        ([BYSTANDER, SUSPECT], None, True),
        ([SUSPECT, SUSPECT], WorkerCrashed, True),
        ([SUSPECT, BYSTANDER, SUSPECT], WorkerCrashed, True),
        ([BYSTANDER] * 4 + [SUSPECT], None, True),
        ([BYSTANDER] * 5 + [SUSPECT], WorkerLost, True),
        ([SUSPECT] + [BYSTANDER] * 5, WorkerLost, True),
    ],
)
def test_what_follows_a_history_of_losses(
    history: list[bool], outcome: type[Exception] | None, solo: bool
) -> None:
    attempts, error = attempt(history)
    assert (error is None) if outcome is None else (type(error) is outcome)
    assert attempts.solo is solo


def test_the_next_attempt_avoids_the_slot_that_was_lost_last() -> None:
    attempts, _ = attempt([BYSTANDER, BYSTANDER])
    assert attempts.avoid == {1}


def test_nothing_is_tried_after_the_deadline() -> None:
    _, error = attempt([BYSTANDER], left_s=-1)
    assert isinstance(error, WorkerLost)
    assert error.retryable and error.retry_after_s == 1


def test_a_poison_is_named_even_after_its_deadline() -> None:
    _, error = attempt([SUSPECT, SUSPECT], left_s=-1)
    assert isinstance(error, WorkerCrashed)
    assert not error.retryable


@pytest.mark.parametrize(
    ("call", "error"), [(InferCall([], []), WorkerCrashed), (GenerateCall(text="a"), type(None))]
)
def test_the_next_death_under_an_input_that_was_suspect_before_is_its_second(call: Call, error: type) -> None:
    poison: Any = SimpleNamespace(
        check=lambda *given: False, is_suspect=lambda *given: True, is_accused=lambda *given: False
    )
    rule = retry.Retries(SimpleNamespace(channels=[]), Limits(), poison, lambda reason: None)  # type: ignore[arg-type]
    attempts = rule.begin(Work("m", call, deadline.after(60), 16, "req"), None)
    assert attempts.solo
    lost = WorkerLost("the worker process died", suspect=True, retry_after_s=1)
    assert type(attempts.next_error(lost, 0, retry.RetryBudget())) is error


@pytest.mark.parametrize(("left_s", "suspected"), [(60, []), (-1, ["m"])])
def test_a_suspect_without_time_for_another_run_stays_suspect(left_s: float, suspected: list[str]) -> None:
    told: list[str] = []
    poison: Any = SimpleNamespace(suspect=lambda model, call, raw, alone: told.append(model))
    workers: Any = SimpleNamespace(channels=[FakeChannel(0, {})])
    rule = retry.Retries(workers, Limits(), poison, lambda reason: None)
    lost = WorkerLost("the worker process died", suspect=True, alone=True, retry_after_s=1)

    async def run() -> None:
        attempts = retry.Attempts(work(left_s))
        if left_s > 0:
            assert await rule.again(attempts, workers.channels[0], lost)
        else:
            with pytest.raises(WorkerLost):
                await rule.again(attempts, workers.channels[0], lost)

    asyncio.run(run())
    assert told == suspected


def test_retries_stop_when_their_budget_is_used_up_and_start_again_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(retry.time, "monotonic", lambda: now[0])
    budget = retry.RetryBudget()
    assert [budget.take() for _ in range(retry.BUDGET_FLOOR + 1)] == [True] * retry.BUDGET_FLOOR + [False]
    _, error = attempt([SUSPECT], budget)
    assert isinstance(error, WorkerLost)
    now[0] += retry.BUDGET_WINDOW_S + 1
    assert budget.take()


def test_bystanders_of_a_death_need_no_budget() -> None:
    budget = retry.RetryBudget()
    while budget.take():
        continue
    lost = [attempt([BYSTANDER], budget)[1] for _ in range(2000)]
    assert lost == [None] * 2000


def test_much_traffic_allows_more_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry.time, "monotonic", lambda: 1000.0)
    budget = retry.RetryBudget()
    for _ in range(10_000):
        budget.count_request()
    granted = 0
    while budget.take():
        granted += 1
    assert granted == 10_000 * retry.BUDGET_RATIO


AGAIN, ANSWER, OTHER = True, False, SequenceLost
"""Try again, give the error to the caller, or give another error in its place."""


@pytest.mark.parametrize(
    ("error", "alone", "in_sequence"),
    [
        (Draining("stopping"), AGAIN, AGAIN),
        (ModelLoading("loading"), AGAIN, AGAIN),
        (ModelNotLoaded("unloaded on the way"), AGAIN, AGAIN),
        (LoraLoading("loading"), AGAIN, AGAIN),
        (QueueFull("full"), AGAIN, ANSWER),
        (WorkerLost("died", suspect=True), AGAIN, OTHER),
        (InvalidInput("no such tensor"), ANSWER, ANSWER),
        (InferenceFailed("the model failed"), ANSWER, ANSWER),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
@pytest.mark.parametrize("sequence", [False, True])
def test_what_follows_each_error(
    error: PenstockError, alone: Any, in_sequence: Any, sequence: bool, tmp_path: Path
) -> None:
    loaded = ModelStatus("m", "loaded")
    asked: Any = SimpleNamespace(slot=0, models={"m": loaded}, leave=lambda: None)
    workers: Any = SimpleNamespace(channels=[FakeChannel(0, {"m": loaded}), FakeChannel(1, {"m": loaded})])
    suspects: list[str] = []
    poison: Any = SimpleNamespace(
        check=lambda *given: False,
        is_suspect=lambda *given: sequence,
        is_accused=lambda *given: False,
        add=lambda *given: suspects.append("poison"),
    )
    retries = retry.Retries(workers, Limits(), poison, lambda reason: None)
    step = Step(7, False, False) if sequence else None
    asking = Work("m", InferCall([], [], step=step), deadline.after(60), 16, "req")

    async def follow() -> bool:
        attempts = retries.begin(asking, None)
        assert attempts.solo is sequence, "an input on which a worker died runs alone in its sequence"
        return await retries.again(attempts, asked, error)

    expected = in_sequence if sequence else alone
    if expected is OTHER:
        with pytest.raises(SequenceLost, match="the state of sequence 7, which must begin again"):
            asyncio.run(follow())
        assert suspects == ["poison"]
    else:
        assert asyncio.run(follow()) is expected and not suspects


def test_a_full_queue_everywhere_is_the_answer_unless_the_request_was_lost_before() -> None:
    loaded = ModelStatus("m", "loaded")
    workers: Any = SimpleNamespace(channels=[FakeChannel(0, {"m": loaded})])
    poison: Any = SimpleNamespace(check=lambda *given: False, is_suspect=lambda *given: False)
    retries = retry.Retries(workers, Limits(), poison, lambda reason: None)
    attempts, full = retries.begin(work(60), None), QueueFull("full")
    channel: Any = workers.channels[0]
    assert not asyncio.run(retries.again(attempts, channel, full))
    attempts.losses = 1
    assert asyncio.run(retries.again(attempts, channel, full)) and not attempts.avoid
