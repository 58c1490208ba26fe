"""A frame of a server with GPUs, built from what channels know and what requests left behind."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

import pytest

from frontend.access.gate import Gate
from frontend.engine.interface import NONE_LOADED, WorkerView
from frontend.records.recent import Recent, RecentWriter, ring_path
from frontend.services import Services
from frontend.state.state import State
from frontend.status.frame import (
    PHASES,
    View,
    build,
    fill,
    operation_fields,
    recent_fields,
    request_fields,
    threshold_pct,
)
from frontend.status.history import Traffic, TrafficReader, latencies
from ipc.catalog.reading import read_catalog
from ipc.metrics.files import Totals
from ipc.processes.paths import RunPaths, prepare_run_dir
from ipc.settings import load
from ipc.wire.messages import Credits, ModelStatus
from ipc.wire.stats import BatchRecord, GenerationStats, QueueState, Stats
from tests.harness.server import FAKE_CATALOG

GIB = 1 << 30
MODELS = ("fake/echo", "fake/large", "fake/late")


def stats(admitted: int = 0, **fields: Any) -> Stats:
    now = time.monotonic_ns()
    plain: dict[str, Any] = {
        "memory_used": 20 * GIB,
        "memory_total": 140 * GIB,
        "resident": GIB,
        "cpu": 1.5,
        "busy": 0.9,
        "utilization": 0.734,
        "temperature_c": 61.0,
        "budget": 1000,
        "admitted": admitted,
        "bound": 5000,
        "arena_used": 0,
        "arena_total": GIB,
        "leases": 0,
        "queues": [QueueState("fake/echo", 7, 700, 0.25)],
        "batches": [BatchRecord(now, 0.02, "fake/echo", 8, 600, 1000)],
    }
    return Stats(**plain | fields)


def worker(slot: int, told: Stats | None, *models: ModelStatus) -> WorkerView:
    named = {model.name: model for model in models}
    return WorkerView(
        f"worker-{slot}", slot, "ready", True, True, "NVIDIA H200", 1, named, Credits(1, 0, 100.0), told
    )


def frame_of(*workers: WorkerView, ready: bool = True, why: str = "ok", **flags: str) -> dict[str, Any]:
    catalog = read_catalog([str(FAKE_CATALOG)], MODELS)
    services = Services(load(None, flags), catalog, Gate())
    services.state = State(services.settings)
    seen = Traffic(Totals(), [], [], latencies([], time.time(), 30.0))
    return build(services, View(workers, ready, why, int(flags.get("worker.count", "0"))), seen)


def test_every_gpu_is_listed_under_the_number_of_its_worker_with_both_spellings() -> None:
    gpus = frame_of(worker(0, stats()), worker(1, None), worker(2, stats(utilization=None)))["gpus"]
    assert [gpu["device"] for gpu in gpus] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [gpu["index"] for gpu in gpus] == [0, 1, 2]
    assert gpus[0]["gpu_type"] == "h200"
    assert gpus[0]["utilization_percent"] == gpus[0]["utilization_pct"] == 73.4
    assert (gpus[0]["memory_used_bytes"], gpus[0]["memory_total_bytes"]) == (20 * GIB, 140 * GIB)
    assert gpus[0]["temperature_c"] == 61
    assert gpus[1]["memory_total_bytes"] == 0, "this one has not told anything yet"
    assert gpus[2]["utilization_pct"] == 0


def test_a_model_is_shown_with_all_its_devices_by_memory() -> None:
    large = ModelStatus("fake/large", "loaded", memory_bytes=3 * GIB, dims={"dense": 7})
    echo = ModelStatus("fake/echo", "loaded", memory_bytes=GIB)
    frame = frame_of(
        worker(0, stats(), ModelStatus("fake/large", "loading"), echo), worker(1, stats(), large, echo)
    )
    assert [model["name"] for model in frame["models"]] == ["fake/large", "fake/echo", "fake/late"]
    first, second, third = frame["models"]
    assert (first["state"], first["device"], first["devices"]) == ("loaded", "cuda:1", ["cuda:1"])
    assert (second["memory_bytes"], second["devices"]) == (2 * GIB, ["cuda:0", "cuda:1"])
    assert second["queue_depth"] == second["queue_pending_items"] == 14
    assert second["adaptive_batching"]["fill_ratio"] == 0.6
    assert (third["state"], third["device"]) == ("available", None)
    assert frame["loaded_models"] == ["fake/large", "fake/echo"]


def test_a_model_that_generates_shows_the_sum_of_its_engines() -> None:
    def numbers(*values: int) -> GenerationStats:
        return GenerationStats("fake/echo", *values, *[0] * (11 - len(values)))

    echo = ModelStatus("fake/echo", "loaded")
    workers = [worker(n, stats(generations=[numbers(32, n, 5, 7, 100)]), echo) for n in (0, 3)]
    shown = {model["name"]: model["generation"] for model in frame_of(*workers)["models"]}
    assert shown["fake/large"] is None
    names = ("capacity", "running", "waiting", "blocks_used", "blocks_total", "preemptions")
    assert [shown["fake/echo"][name] for name in names] == [64, 3, 10, 14, 200, 0]


def test_a_server_is_saturated_when_every_worker_is() -> None:
    full, free = worker(0, stats(5000)), worker(1, stats(4999))
    assert frame_of(full)["saturated"] is True
    assert frame_of(full, free)["saturated"] is False
    assert frame_of()["saturated"] is False


@pytest.mark.parametrize(
    ("budget", "total", "expected"),
    [(0, 140 * GIB, 85.0), (70 * GIB, 140 * GIB, 50.0), (GIB, 0, 85.0), (9, 3, 100.0)],
)
def test_the_memory_threshold_follows_the_budget(budget: int, total: int, expected: float) -> None:
    assert threshold_pct(budget, total) == expected


def test_batch_fill_counts_recent_batches_only() -> None:
    now = time.monotonic_ns()
    old = BatchRecord(now - 60_000_000_000, 0.1, "a", 1, 1000, 1000)
    assert fill([old], now) is None
    assert fill([old, BatchRecord(now, 0.1, "a", 1, 250, 1000)], now) == 0.25
    assert fill([BatchRecord(now, 0.1, "a", 1, 250, 1000)], now, "b") is None
    assert fill([BatchRecord(now, 0.1, "a", 1, 4000, 1000)], now) == 1.0, "one long item may overshoot"


def test_latencies_are_those_of_recent_good_answers(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run", "test")
    prepare_run_dir(paths)
    ring, now = RecentWriter(ring_path(paths, "frontend-0")), time.time()
    for number in range(100):
        ring.add(Recent(now, str(number), "", "sie", "encode", "a", 200, "", {"total": float(number + 1)}))
    ring.add(Recent(now, "bad", "", "sie", "encode", "a", 500, "INFERENCE_ERROR", {"total": 9000.0}))
    ring.add(Recent(now - 3600, "old", "", "sie", "encode", "a", 200, "", {"total": 9000.0}))
    found = TrafficReader(paths).read()
    assert found.latencies[""] == found.latencies["a"] == {"p50_ms": 50.5, "p99_ms": 99.01, "requests": 100}
    assert [record.request_id for record in found.errors] == ["bad"]


def test_a_model_and_an_operation_have_times_of_their_own() -> None:
    now = 1000.0

    def answer(model: str, operation: str, total_ms: float, status: int = 200, at: float = now) -> Recent:
        phases = {"total": total_ms, "device": total_ms / 2}
        return Recent(at, "r", "", "sie", operation, model, status, "", phases)

    counts = {("a", "encode"): 5.0, ("a", "score"): 9.0, ("unknown", "encode"): 99.0, ("b", "encode"): 7.0}
    records = [
        answer("a", "encode", 2.0),
        answer("a", "encode", 4.0),
        answer("a", "score", 80.0),
        answer("a", "encode", 500.0, 400),
        answer("b", "encode", 1.0, at=now - 60),
    ]
    seen = Traffic(Totals(operations={"penstock_requests": counts}), records, [], {})
    told = operation_fields(seen, now)
    assert [(row["model"], row["operation"], row["requests"], row["p50_ms"]) for row in told] == [
        ("a", "score", 9.0, 80.0),
        ("b", "encode", 7.0, None),
        ("a", "encode", 5.0, 3.0),
    ]
    assert told[2]["phases"]["device"] == told[2]["phases"]["other"] == 1.5
    assert told[1]["phases"] is None


def test_phases_of_generated_text_are_told_apart_and_add_up_to_the_whole_time() -> None:
    def told(**phases: float) -> dict[str, float]:
        record = Recent(0.0, "r", "", "chat", "generate", "a", 200, "", phases)
        found: dict[str, float] = request_fields(record)["phases"]
        assert sum(found.values()) == pytest.approx(phases["total"])
        assert [*found] == [*PHASES, "other"]
        return {name: each for name, each in found.items() if each}

    plain = {"total": 100.0, "tokenize": 10.0, "queue": 5.0, "device": 80.0}
    assert told(**plain) == {"tokenize": 10.0, "queue": 5.0, "device": 80.0, "other": 5.0}
    parts = {"decode": 7.0, "see": 20.0, "prefill": 15.0, "write": 35.0}
    seen = {"tokenize": 3.0, **parts, "queue": 15.0, "other": 5.0}
    assert told(**plain, **parts) == seen, "the text waited for a place in a step for 10 ms of the 80"


def test_equal_errors_are_one_entry_with_a_count() -> None:
    def failed(number: int, message: str, status: int = 400) -> Recent:
        return Recent(float(number), str(number), "", "sie", "encode", "a", status, "BAD", {}, message)

    errors = [failed(9, "no items"), failed(8, "too long"), failed(7, "no items"), failed(6, "no items", 422)]
    told = recent_fields(Traffic(Totals(), [], errors, {}), None)["recent_errors"]
    assert [(row["request_id"], row["count"]) for row in told] == [("9", 2), ("8", 1), ("6", 1)]


def test_a_worker_tells_the_models_it_is_loading_and_how_far() -> None:
    states = [ModelStatus("fake/echo", "loaded"), ModelStatus("fake/large:query", "loading", progress=0.4321)]
    states.append(ModelStatus("fake/large", "loading", progress=0.4321))
    [device] = frame_of(worker(0, None, *states))["devices"]
    assert device["loading"] == [{"model": "fake/large", "progress": 0.432}]


def down(slot: int, state: str = "absent", since: float = 0.0) -> WorkerView:
    return WorkerView(f"worker-{slot}", slot, state, False, False, "", 1, {}, Credits(0, 0, 0.0), None, since)


def told(frame: dict[str, Any]) -> tuple[str, list[str]]:
    """State, and each problem with its instant and note."""
    health = frame["health"]
    return health["state"], [f"{p['text']}|{p['since']:g}|{p['note']}" for p in health["problems"]]


def test_a_dead_worker_makes_the_server_degraded_from_its_last_moment_on() -> None:
    two = {"worker.count": "2"}
    assert told(frame_of(worker(0, stats()), worker(1, stats()), **two)) == ("ready", [])
    dead = ("degraded", ["1 of 2 workers is down|1000|restarting"])
    assert told(frame_of(worker(0, stats()), down(1, since=1000.0), **two)) == dead
    assert told(frame_of(worker(0, stats()), down(1, "connecting", 1000.0), **two)) == dead
    both = frame_of(down(0, since=2000.0), down(1, since=1000.0), ready=False, why="no worker is up", **two)
    assert told(both) == ("down", ["2 of 2 workers are down|1000|restarting"])
    assert both["health"]["why"] == "no worker is up"


BROKEN = ModelStatus("fake/echo", "failed", error_class="CONFIG_ERROR", error_message="no file")


def loading(slot: int, **models: ModelStatus) -> WorkerView:
    return WorkerView(
        f"worker-{slot}", slot, "ready", True, False, "cpu", 1, models, Credits(1, 0, 1.0), None
    )


def test_each_kind_of_trouble_is_told_in_words() -> None:
    late = WorkerView("worker-1", 1, "ready", False, True, "cpu", 1, {}, Credits(1, 0, 1.0), None, 50.0)
    frame = frame_of(
        worker(0, stats(), BROKEN), late, loading(2), down(3, "leaving", 60.0), **{"worker.count": "6"}
    )
    assert told(frame) == (
        "degraded",
        [
            "1 of 6 workers does not answer|50|requests go to other workers",
            "1 of 6 workers is stopping|60|finishing its requests",
            "2 of 6 workers have not started yet|0|",
            "1 of 6 workers is loading its first models|0|",
            "Model fake/echo could not be loaded|0|CONFIG_ERROR",
        ],
    )


@pytest.mark.parametrize(
    ("why", "workers", "state"),
    [
        ("draining", [worker(0, None)], "draining"),
        ("no worker is up", [], "starting"),
        ("no worker is up", [down(0, since=7.0)], "down"),
        ("models are loading", [loading(0, **{BROKEN.name: BROKEN})], "starting"),
        (NONE_LOADED, [worker(0, None, BROKEN)], "down"),
    ],
)
def test_a_server_that_is_not_ready_says_whether_it_begins_or_ends(
    why: str, workers: list[WorkerView], state: str
) -> None:
    assert told(frame_of(*workers, ready=False, why=why))[0] == state


def test_a_frame_names_its_host_and_has_the_sums_of_all_processes() -> None:
    frame = frame_of(worker(0, stats()))
    assert frame["server"]["host"] == platform.node()
    assert frame["totals"] == dict.fromkeys(
        ("requests", "errors", "tokens", "busy_s", "in_flight", "waiting", "deaths"), 0.0
    )
