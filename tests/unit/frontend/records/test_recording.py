"""Labels of what is counted while the catalog changes."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, Histogram

from frontend.records.finishing import Recorder
from ipc.errors import InputRefused, PenstockError, WorkerCrashed, WorkerLost
from ipc.metrics.families import UNKNOWN
from ipc.metrics.registry import FrontendMetrics, Tally


class _Family:
    """A gauge or counter that keeps one value for each set of labels."""

    def __init__(self) -> None:
        self.values: Counter[tuple[str, ...]] = Counter()

    def labels(self, *labels: str) -> Any:
        """The child with these labels."""
        values = self.values

        class Child:
            """One value."""

            def inc(self, amount: float = 1) -> None:
                """More, or less."""
                values[labels] += int(amount)

        return Child()


class _Ended:
    """The families that the end of a request is written to."""

    def __init__(self) -> None:
        labels = ("operation", "model", "phase", "outcome")
        self.registry = CollectorRegistry()
        self.duration = Histogram("duration", "", labels, registry=self.registry)
        self.requests, self.rejected, self.tally = _Family(), _Family(), Tally()
        self.continuation_bytes = _Family().labels()


class _Families:
    """The two gauges, written at once."""

    def __init__(self) -> None:
        self.in_flight, self.sie_active, self.tally = _Family(), _Family(), Tally()
        self.poison, self.continuation_bytes = _Family(), _Family().labels()


def test_a_request_ends_under_the_label_it_began_with_though_its_model_has_left_the_catalog() -> None:
    models, families = {"org/m"}, _Families()
    recorder = Recorder(cast("FrontendMetrics", families), models)
    with recorder.in_flight("org/m", "interactive"):
        assert families.in_flight.values == {("org/m", "interactive"): 1}
        models.clear()
        with recorder.in_flight("org/m", "interactive"):
            assert families.in_flight.values[UNKNOWN, "interactive"] == 1
    assert families.in_flight.values == {("org/m", "interactive"): 0, (UNKNOWN, "interactive"): 0}
    assert families.sie_active.values == {("org/m",): 0, (UNKNOWN,): 0}
    assert not families.poison.values


@pytest.mark.parametrize(
    ("error", "counted"),
    [
        (WorkerCrashed("died twice"), {("crashed",): 1}),
        (InputRefused("it did before"), {("refused",): 1}),
        (WorkerLost("died"), {}),
    ],
)
def test_inputs_that_crash_workers_are_counted_where_their_request_ends(
    error: PenstockError, counted: dict[tuple[str], int]
) -> None:
    families = _Families()
    recorder = Recorder(cast("FrontendMetrics", families), {"m"})
    with pytest.raises(type(error)), recorder.in_flight("m", "bulk"):
        raise error
    assert families.in_flight.values["m", "bulk"] == 0 and families.poison.values == counted


def test_phases_of_answers_and_of_refusals_are_apart() -> None:
    families = _Ended()
    recorder = Recorder(cast("FrontendMetrics", families), {"m"})
    for status, code in (("200", ""), ("400", "INVALID_INPUT"), ("404", ""), ("504", "DEADLINE_EXCEEDED")):
        recorder.finished("kserve", "infer", "m", status, code, {"total": 20})
    families.tally.flush()
    name, labels = "duration_count", {"operation": "infer", "model": "m", "phase": "total"}
    counted = [families.registry.get_sample_value(name, {**labels, "outcome": o}) for o in ("ok", "error")]
    assert counted == [1, 3]
