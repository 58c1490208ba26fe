"""Labels of what is counted while the catalog changes."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

from frontend.recording import Recorder
from ipc.metrics import UNKNOWN, FrontendMetrics
from ipc.tally import Tally


class _Family:
    """A gauge or counter that keeps one value for each set of labels."""

    def __init__(self) -> None:
        self.values: Counter[tuple[str, ...]] = Counter()

    def labels(self, *labels: str) -> Any:
        """The child with these labels."""
        values = self.values

        class Child:
            """One value."""

            def inc(self, amount: float) -> None:
                """More, or less."""
                values[labels] += int(amount)

        return Child()


class _Families:
    """The two gauges, written at once."""

    def __init__(self) -> None:
        self.in_flight, self.sie_active, self.tally = _Family(), _Family(), Tally()


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
