"""The limit of a batch, and the device thread's activity against it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from workers.watchdog import UNKNOWN_S, Activity, batch_limit_s


@pytest.mark.parametrize(
    ("floor_s", "predicted_s", "limit_s"),
    [(2.0, 0.1, 2.0), (2.0, 1.0, 5.0), (2.0, 0.0, 5 * UNKNOWN_S), (100.0, 0.0, 100.0)],
)
def test_limit_is_the_floor_or_five_times_the_prediction(
    floor_s: float, predicted_s: float, limit_s: float
) -> None:
    assert batch_limit_s(floor_s, predicted_s) == limit_s


def test_activity_is_overdue_only_while_it_runs_past_its_limit() -> None:
    activity = Activity()
    assert not activity.busy and not activity.overdue()
    activity.begin(60.0)
    assert activity.busy and not activity.overdue()
    activity.begin(0.0)
    until = time.monotonic() + 1
    while not activity.overdue():
        assert time.monotonic() < until
    activity.end()
    assert not activity.busy and not activity.overdue()


def test_a_vital_thread_that_fails_ends_the_process() -> None:
    code = (
        "import time; from workers.threads import vital_thread\n"
        "vital_thread('test', lambda: 1 / 0).start(); time.sleep(30)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=20, check=False, capture_output=True)
    assert done.returncode == 70
