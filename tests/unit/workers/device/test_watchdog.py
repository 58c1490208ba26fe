"""The limit of a batch, and the device thread's activity against it."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ipc.settings import Settings
from ipc.wire.messages import Credits
from tests.fakes.clock import Clock
from tests.harness.server import PATIENCE_S
from workers.device import stepping
from workers.device.stepping import LEAST_STEP_S, UNKNOWN_S, UNKNOWN_TOKENS_PER_S, Activity, batch_limit_s
from workers.runtime import Runtime
from workers.scheduling.queue import WorkQueue


@pytest.mark.parametrize(
    ("hang_timeout_s", "predicted_s", "limit_s"),
    [(2.0, 0.1, 2.0), (2.0, 1.0, 5.0), (2.0, 0.0, 5 * UNKNOWN_S), (100.0, 0.0, 100.0), (60.0, 0.001, 60.0)],
)
def test_a_prediction_only_lengthens_the_limit(
    hang_timeout_s: float, predicted_s: float, limit_s: float
) -> None:
    assert batch_limit_s(hang_timeout_s, predicted_s) == limit_s


@pytest.mark.parametrize(
    ("awaited_s", "predicted_s", "limit_s"),
    [(30.0, 0.001, 30.0), (600.0, 0.001, 60.0), (0.5, 0.001, LEAST_STEP_S), (30.0, 20.0, 100.0)],
)
def test_a_step_may_take_as_long_as_its_last_request_is_waited_for(
    awaited_s: float, predicted_s: float, limit_s: float
) -> None:
    assert batch_limit_s(60.0, predicted_s, 100, awaited_s) == limit_s
    assert batch_limit_s(2.0, 0.001, 100, awaited_s) == 2.0, (
        "what the operator allows is never exceeded by a deadline"
    )


def test_a_step_of_ten_seconds_of_a_fast_model_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock.of(stepping, monkeypatch)
    worker = Settings().worker
    activity = Activity(worker.hang_timeout_s)
    activity.begin(batch_limit_s(worker.hang_timeout_s, 0.001, 16, awaited_s=0.2))
    clock.now += 10.0
    assert activity.running_s == 10.0 and not activity.overdue()
    activity.begin(batch_limit_s(worker.hang_timeout_s, 0.001, 16, awaited_s=3600.0))
    clock.now += 59.9
    assert not activity.overdue()
    clock.now += 0.2
    assert activity.overdue()
    activity.end()
    assert activity.running_s == 0.0


def test_an_unknown_model_gets_longer_for_more_tokens() -> None:
    assert batch_limit_s(2.0, 0.0, 100) == 5 * UNKNOWN_S
    assert batch_limit_s(2.0, 0.0, 100_000) == 5 * 100_000 / UNKNOWN_TOKENS_PER_S
    assert batch_limit_s(2.0, 1.0, 100_000) == 5.0, "what is known counts"


@pytest.mark.parametrize(
    ("floor_s", "limit_s", "share", "step_s"),
    [
        (2.0, 400.0, 0.5, 200.0),
        (2.0, 400.0, 0.001, LEAST_STEP_S),
        (60.0, 400.0, 0.001, 60.0),
        (2.0, 3.0, 0.001, 3.0),
        (2.0, 400.0, 1.0, 400.0),
    ],
)
def test_a_step_gets_its_share_of_the_limit(
    monkeypatch: pytest.MonkeyPatch, floor_s: float, limit_s: float, share: float, step_s: float
) -> None:
    clock = [1.0]
    monkeypatch.setattr("workers.device.stepping.time.monotonic", lambda: clock[0])
    activity = Activity(floor_s)
    activity.begin(limit_s)
    activity.renew(share)
    clock[0] += step_s
    assert not activity.overdue() and activity.limit_s == limit_s
    clock[0] += 0.01
    assert activity.overdue()
    activity.renew()
    clock[0] += limit_s
    assert not activity.overdue(), "a step that says nothing of its share has the whole limit"


def test_activity_is_overdue_only_while_it_runs_past_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock.of(stepping, monkeypatch)
    activity = Activity()
    assert not activity.busy and not activity.overdue()
    activity.begin(60.0)
    assert activity.busy and not activity.overdue()
    clock.now += 60.1
    assert activity.overdue()
    activity.end()
    assert not activity.busy and not activity.overdue()


def test_a_standstill_of_the_whole_process_is_no_hang_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock.of(stepping, monkeypatch)
    activity = Activity()
    activity.begin(60.0)
    clock.now += 10.0
    assert not activity.overdue(0.1)
    clock.now += 3600.0
    assert not activity.overdue(3600.0), "40 of 60 seconds count"
    clock.now += 19.9
    assert not activity.overdue(0.1)
    clock.now += 0.2
    assert activity.overdue(0.1), "the step hangs after the standstill as well"
    activity.begin(60.0)
    clock.now += 60.1
    assert activity.overdue(0.1), "the standstill is none of the next step"
    activity.begin(60.0)
    assert not activity.overdue(3600.0), "the step has begun after the standstill"


def test_a_vital_thread_that_fails_ends_the_process() -> None:
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            stepping.vital_thread("test", lambda: 1 / 0).start()
            threading.Event().wait(PATIENCE_S)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 70


def test_frontends_are_told_for_how_many_seconds_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock.of(stepping, monkeypatch)
    sent: list[Credits] = []
    runtime: Any = Runtime.__new__(Runtime)
    activity = Activity(60.0)
    runtime._context = SimpleNamespace(queue=WorkQueue(Settings()), activity=activity)
    session = SimpleNamespace(key=b"frontend-0", credits=None)
    runtime.endpoint = SimpleNamespace(sessions=[session], tell=lambda session, credits: sent.append(credits))
    activity.begin(60.0)
    for _ in range(25):
        runtime._send_credits()
        clock.now += 0.1
    activity.end()
    runtime._send_credits()
    assert [credits.step_s for credits in sent] == [0, 1, 2, 0]
