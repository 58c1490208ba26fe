"""What is counted in memory reaches prometheus_client's metrics whole, and soon."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ipc.metrics.registry import FLUSH_S, Tally, WrittenAmount

BOUNDS = (0.25, 1.0, 4.0)


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Values by name and upper bound, without the instants of creation."""
    return {
        (sample.name, sample.labels.get("le", "")): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_a_histogram_holds_what_the_library_would_have_observed_itself() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally()
    histogram = tally.observations(Histogram("h", "of ours", registry=ours, buckets=BOUNDS))
    reference = Histogram("h", "of ours", registry=theirs, buckets=BOUNDS)
    chance = random.Random(3)
    for value in (*BOUNDS, 0.0, 1e9, *(chance.random() * 6 for _ in range(200))):
        histogram.observe(value)
        reference.observe(value)
    found, expected = samples(ours), samples(theirs)
    total, same_total = found.pop(("h_sum", "")), expected.pop(("h_sum", ""))
    assert found == expected
    assert abs(total - same_total) < 1e-6 * same_total


def test_nothing_is_lost_or_counted_twice_between_two_flushes() -> None:
    registry = CollectorRegistry()
    tally = Tally()
    counter = tally.amount(Counter("c", "of ours", registry=registry))
    gauge = tally.amount(Gauge("g", "of ours", registry=registry))

    async def serve() -> None:
        tally.follow(asyncio.get_running_loop())
        for _ in range(5):
            counter.inc()
            gauge.inc()
        gauge.inc(-2)
        assert samples(registry)["c_total", ""] == 0, "written later"
        tally.flush()
        tally.flush()
        assert (samples(registry)["c_total", ""], samples(registry)["g", ""]) == (5, 3)
        counter.inc(0.5)
        gauge.inc()
        gauge.inc(-1)
        deadline = asyncio.get_running_loop().time() + 100 * FLUSH_S
        while samples(registry)["c_total", ""] != 5.5:
            assert asyncio.get_running_loop().time() < deadline, "never written"
            await asyncio.sleep(FLUSH_S)
        assert samples(registry)["g", ""] == 3

    asyncio.run(serve())


def test_without_a_loop_everything_is_written_at_once() -> None:
    registry = CollectorRegistry()
    Tally().amount(Counter("c", "of ours", registry=registry)).inc(3)
    assert samples(registry)["c_total", ""] == 3


def test_a_held_tally_writes_only_when_it_is_flushed() -> None:
    registry = CollectorRegistry()
    tally, child = Tally(), Counter("held", "h", registry=registry)
    tally.hold()
    tally.amount(child).inc(3)
    assert registry.get_sample_value("held_total") == 0
    tally.flush()
    assert registry.get_sample_value("held_total") == 3


SCRIPT = """
import sys
from prometheus_client import Counter, multiprocess, CollectorRegistry
from ipc.metrics.registry import WrittenAmount
of = Counter("seen", "s", ["model"])
amounts = [WrittenAmount(of.labels(f"m{n}")) for n in range(3)]
for turn in range(4):
    for n, amount in enumerate(amounts):
        amount.inc(n + 0.5)
    for more in range(20000 if turn == 1 else 0):
        of.labels(f"filling the file until it is mapped anew {more}")
of.labels("m0").inc(10)
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print([registry.get_sample_value("seen_total", {"model": f"m{n}"}) for n in range(3)])
"""


def test_a_written_amount_is_in_the_metric_file_at_once_and_survives_a_file_that_grows(
    tmp_path: Path,
) -> None:
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "[12.0, 6.0, 10.0]"


def test_a_written_amount_leaves_a_value_that_the_library_keeps_in_another_way_to_the_library() -> None:
    class Child:
        """A counter whose value has a file, but none of the fields by which the value is found there."""

        _value = SimpleNamespace(_file=SimpleNamespace(), _value=0.0, _timestamp=0.0, _key="seen")
        total = 0.0

        def inc(self, amount: float) -> None:
            self.total += amount

    child = Child()
    WrittenAmount(child).inc(2.5)
    assert child.total == 2.5
