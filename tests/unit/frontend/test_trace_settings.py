"""The trace settings of the tensor protocols, and which requests they let the tracer take."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from frontend.tensors.live_settings import TraceSettings
from frontend.tracing import Ended, Sampling, Tracer
from ipc import deadline
from ipc.errors import InvalidInput, Unsupported
from ipc.processes.paths import prepare_run_dir
from ipc.settings import Settings, load
from ipc.store.store import Store

_random = random.Random(5)
IDS = [f"{_random.getrandbits(128):032x}" for _ in range(4000)]
SAMPLED, UNSAMPLED = (f"00-{IDS[0]}-{1:016x}-0{flag}" for flag in (1, 0))


class Nowhere:
    """A sink that keeps nothing."""

    def put(self, ended: Ended) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def settings_of(tmp_path: Path, ratio: float = 1.0) -> Settings:
    """Settings of a server in `tmp_path`."""
    found = load(None, {"run.dir": str(tmp_path), "tracing.sample_ratio": str(ratio)}, {})
    prepare_run_dir(found.paths)
    return found


def trace_settings(settings: Settings, tracer: Tracer | None) -> TraceSettings:
    """The trace settings of one frontend."""
    return TraceSettings(settings, Store(settings.paths), tracer)


def update(traces: TraceSettings, changes: dict[str, Any], model: str = "") -> dict[str, Any]:
    """Change what is named, of the server or of a model."""
    return asyncio.run(traces.update(changes, deadline.after(60), model))


def share(tracer: Tracer, model: str = "") -> float:
    """Which part of requests without a `traceparent` is exported."""
    taken = [i for i in IDS if tracer.sampling.begins(i, "") and tracer.sampling.keeps(i, "", model)]
    return len(taken) / len(IDS)


@pytest.fixture
def tracer() -> Tracer:
    """One that takes every request."""
    return Tracer(Nowhere(), 1.0)


def test_a_request_whose_parent_is_sampled_is_traced_until_somebody_says_off(tmp_path: Path) -> None:
    tracer = Tracer(Nowhere(), 0.0)
    traces = trace_settings(settings_of(tmp_path, 0.0), tracer)
    traces.apply()
    assert tracer.sampling.begins(IDS[0], SAMPLED) and not tracer.sampling.begins(IDS[0], UNSAMPLED)
    assert share(tracer) == 0
    update(traces, {"trace_level": "OFF"})
    assert not tracer.sampling.begins(IDS[0], SAMPLED)


def test_all_values_are_texts_and_levels_a_list(tmp_path: Path, tracer: Tracer) -> None:
    assert trace_settings(settings_of(tmp_path, 0.25), tracer).get() == {
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": "4",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": "",
        "trace_mode": "opentelemetry",
    }


def test_the_rate_of_the_server_and_that_of_a_model_are_kept(tmp_path: Path, tracer: Tracer) -> None:
    traces = trace_settings(settings_of(tmp_path), tracer)
    update(traces, {"trace_rate": "10"})
    assert share(tracer) == pytest.approx(0.1, abs=0.02)
    update(traces, {"trace_rate": "2"}, "add")
    assert (share(tracer, "add"), share(tracer, "other")) == pytest.approx((0.5, 0.1), abs=0.03)
    assert (traces.get("add")["trace_rate"], traces.get()["trace_rate"]) == ("2", "10")
    update(traces, {"trace_level": ["OFF"]})
    assert (share(tracer, "add"), share(tracer, "other")) == (0, 0)
    update(traces, {"trace_level": ["TIMESTAMPS"]}, "add")
    assert share(tracer, "add") == pytest.approx(0.5, abs=0.03) and share(tracer, "other") == 0
    update(traces, {"trace_level": None, "trace_rate": None}, "add")
    assert traces.get("add") == traces.get() and share(tracer, "add") == 0
    update(traces, {"trace_level": None, "trace_rate": None})
    assert share(tracer) == 1.0


def test_a_change_is_followed_by_every_frontend(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    tracers = [Tracer(Nowhere(), 1.0) for _ in range(2)]
    first, second = (trace_settings(settings, tracer) for tracer in tracers)
    update(first, {"trace_level": "OFF"})
    second.apply()
    assert [share(tracer) for tracer in tracers] == [0, 0] and second.get() == first.get()


@pytest.mark.parametrize(
    ("of_all", "sampled", "unsampled"), [(None, False, False), (0.0, True, False), (1.0, True, False)]
)
def test_a_traceparent_decides_unless_tracing_is_off(
    of_all: float | None, sampled: bool, unsampled: bool
) -> None:
    sampling = Sampling(of_all)
    for parent, expected in ((SAMPLED, sampled), (UNSAMPLED, unsampled)):
        begun = sampling.begins(IDS[0], parent)
        assert (begun and sampling.keeps(IDS[0], parent, "add")) is expected


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"trace_rate": "0"}, InvalidInput),
        ({"trace_rate": "-1"}, InvalidInput),
        ({"trace_rate": "1.5"}, InvalidInput),
        ({"trace_rate": "9" * 5000}, InvalidInput),
        ({"trace_rate": "²"}, InvalidInput),
        ({"trace_rate": []}, InvalidInput),
        ({"trace_level": ["TIMESTAMPS", "OFF"]}, InvalidInput),
        ({"trace_level": ["LOUD"]}, InvalidInput),
        ({"trace_level": []}, InvalidInput),
        ({"unheard_of": "1"}, InvalidInput),
        ({"trace_file": "/tmp/x"}, Unsupported),
        ({"trace_count": "5"}, Unsupported),
        ({"trace_mode": "triton"}, Unsupported),
        ({"trace_rate": "5", "trace_file": "x"}, Unsupported),
    ],
)
def test_what_cannot_be_had_is_refused_and_changes_nothing(
    tmp_path: Path, tracer: Tracer, changes: dict[str, Any], error: type[Exception]
) -> None:
    traces = trace_settings(settings_of(tmp_path), tracer)
    before = traces.get()
    with pytest.raises(error, match=next(reversed(changes))):
        update(traces, changes)
    assert traces.get() == before


def test_where_tracing_is_not_configured_it_stays_off(tmp_path: Path) -> None:
    traces = trace_settings(settings_of(tmp_path), None)
    assert traces.get()["trace_level"] == ["OFF"]
    with pytest.raises(Unsupported, match=r"tracing\.endpoint"):
        update(traces, {"trace_level": ["TIMESTAMPS"]})
    assert update(traces, {"trace_level": ["OFF"], "trace_count": None})["trace_level"] == ["OFF"]
