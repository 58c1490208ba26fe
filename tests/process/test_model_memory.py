"""Memory of models: the budget and who has to go, idle models, pinned ones, and that nothing stays behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.harness.lifecycle import Models, load, serving_models, state, unload
from tests.harness.load import Load
from tests.harness.server import Server, wait_until

MIB = 1 << 20
BUDGET_BYTES = 25 * MIB
BUDGET = {"worker.memory_budget_bytes": BUDGET_BYTES}
WIDE = tuple(f"org/m{number}" for number in range(4))
NARROW, PINNED = ("org/a", "org/b", "org/c"), "org/pinned"


def states(server: Server, models: list[str]) -> list[str]:
    """State of each model."""
    return [state(server, name) for name in models]


def use(server: Server, *models: str) -> None:
    """One request for each, in this order."""
    for name in models:
        answer = server.encode(name, ["x"])
        assert answer.status == 200, answer.body


@pytest.fixture(scope="module")
def budgeted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Four models of 10 MiB, and four of 8 MiB of which one is pinned, in a budget of 25 MiB."""
    root = tmp_path_factory.mktemp("budget")
    models = Models(root / "models")
    for name in WIDE:
        models.write(name, hold_bytes=10 * MIB, batch_ms=5)
    for name in (*NARROW, PINNED):
        models.write(name, hold_bytes=8 * MIB)
    settings = {**BUDGET, "catalog.pinned": PINNED, "limits.load_wait_s": 30}
    with serving_models(root, models, settings, supervised=False) as running:
        yield running


def test_no_queued_request_is_lost_when_more_models_are_asked_for_than_fit(budgeted: Server) -> None:
    server = budgeted
    loads = [Load(server.port, clients=3, model=name) for name in WIDE]
    for running in loads:
        running.__enter__()
    wait_until(lambda: all(running.done > 10 for running in loads), what="answers for every model")
    outcomes = [running.stop() for running in loads]
    assert [outcome.failed for outcome in outcomes] == [0, 0, 0, 0], [o.bodies[:2] for o in outcomes]
    assert server.metric("penstock_model_unloads_total", reason="memory") >= 2
    wait_until(lambda: server.metric("sie_model_memory_bytes") <= BUDGET_BYTES, what="the budget")


def test_the_model_whose_batches_are_longest_ago_goes_and_pinned_ones_stay(budgeted: Server) -> None:
    server, pinned, (a, b, c) = budgeted, PINNED, NARROW
    use(server, pinned, a, b, a)
    assert states(server, [pinned, a, b, c]) == ["loaded", "loaded", "loaded", "available"]
    use(server, c)
    assert states(server, [pinned, a, b, c]) == ["loaded", "loaded", "available", "loaded"]
    assert server.metric("penstock_model_unloads_total", model=b, reason="memory") == 1
    use(server, b)
    assert states(server, [pinned, a, b, c]) == ["loaded", "available", "loaded", "loaded"]
    assert server.metric("penstock_model_budget_bytes") == 25 * MIB


@pytest.mark.long
def test_a_model_larger_than_the_budget_is_served_all_the_same_and_the_last_one_is_not_unloaded(
    tmp_path: Path,
) -> None:
    models = Models(tmp_path / "models")
    large, small = models.write("org/large", hold_bytes=40 * MIB), models.write("org/small", hold_bytes=MIB)
    with serving_models(tmp_path, models, BUDGET) as server:
        use(server, large)
        assert state(server, large) == "loaded"
        use(server, small)
        wait_until(lambda: states(server, [large, small]) == ["available", "loaded"], what="relief")


@pytest.mark.long
def test_an_idle_model_is_unloaded_and_comes_back(tmp_path: Path) -> None:
    models = Models(tmp_path / "models")
    idle, kept = models.write("org/idle"), models.write("org/kept")
    settings = {"worker.idle_unload_s": 1, "catalog.pinned": kept}
    with serving_models(tmp_path, models, settings) as server:
        use(server, idle, kept)
        wait_until(lambda: state(server, idle) == "available", what="idle unload")
        assert server.metric("sie_idle_evictions_total", model=idle) == 1
        assert state(server, kept) == "loaded"
        use(server, idle)


def cycles(server: Server, model: str, count: int) -> np.ndarray:
    """Resident memory of the worker after each load, use and unload."""
    worker = psutil.Process(server.worker_pid() or os.getpid())
    found = []
    for _ in range(count):
        assert load(server, model).status == 200
        use(server, model)
        assert unload(server, model).status == 200
        found.append(worker.memory_info().rss)
    return np.asarray(found)


def growth(resident: np.ndarray) -> float:
    """Bytes per cycle, from the second half, where caches are full; the median of all slopes, blind to outliers."""
    rest = resident[len(resident) // 2 :].astype(float)
    first, second = np.triu_indices(len(rest), 1)
    return float(np.median((rest[second] - rest[first]) / (second - first)))


@pytest.fixture(scope="module")
def cycled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a sound and a leaky model."""
    root = tmp_path_factory.mktemp("cycles")
    models = Models(root / "models")
    models.write("org/sound", hold_bytes=8 * MIB)
    models.write("org/leaky", hold_bytes=8 * MIB, leak=True)
    with serving_models(root, models, supervised=False) as server:
        yield server


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.long)])
def test_memory_returns_to_its_base_after_every_load_and_unload(cycled: Server, count: int) -> None:
    assert growth(cycles(cycled, "org/sound", count)) < 0.05 * 8 * MIB


@pytest.mark.long
def test_the_same_check_finds_a_leak(cycled: Server) -> None:
    assert growth(cycles(cycled, "org/leaky", 12)) > 0.9 * 8 * MIB
