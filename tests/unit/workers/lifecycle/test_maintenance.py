"""What the maintenance of models does at its next look: budget, idle models, failures, drains. The clock is turned."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ipc.settings import Settings
from tests.fakes.adapter import FakeAdapter
from tests.fakes.clock import Clock
from tests.unit.workers.lifecycle.test_model_states import ENTRY, table
from workers.lifecycle import memory_budget, model_states
from workers.lifecycle import models as maintenance
from workers.lifecycle.instance import Instance
from workers.lifecycle.loading import Loaded
from workers.lifecycle.loads import LOWER
from workers.lifecycle.models import ModelTable
from workers.loading.failure import LoadFailure
from workers.repository.catalog_files import EVERY_S

BUDGET = 1000
NAMES = ("org/a", "org/b", "org/c")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of maintenance and of states."""
    made = Clock.of(maintenance, monkeypatch)
    monkeypatch.setattr(model_states, "time", made)
    return made


def worker(root: Path, clock: Clock, sizes: dict[str, int], **flags: str) -> ModelTable:
    """A worker with these models loaded, one second after the other; `flags` as in `table`."""
    entries = [msgspec.structs.replace(ENTRY, id=name, description=name) for name in NAMES]
    models = table(root, *entries, **{"worker__memory_budget_bytes": str(BUDGET), **flags})
    set_jobs(models)
    follower: Any = SimpleNamespace(look=lambda: None)
    models._maintenance._follower = follower
    for name, nbytes in sizes.items():
        instance = instance_of(models, name)
        instance.begin(demanded=True)
        clock.now += 1
        instance.succeed(FakeAdapter({}, 512), nbytes, 1.0, clock.now)
    return models


def set_jobs(models: ModelTable, *busy: str) -> list[object]:
    """Requests for these models are open from now on; the adapters whose requests are failed are noted."""
    failed = list[object]()
    jobs: Any = SimpleNamespace(
        adapters=lambda: {id(instance_of(models, name).adapter) for name in busy},
        fail_all=lambda adapter, error: failed.append(adapter),
    )
    models._maintenance._jobs = models._states._jobs = jobs
    return failed


def instance_of(models: ModelTable, name: str) -> Instance:
    """The instance that serves a model."""
    found = models.find(name)
    assert found is not None
    return found.instance


def states(models: ModelTable) -> list[str]:
    """State of each model."""
    return [instance_of(models, name).state for name in NAMES]


def look(models: ModelTable, clock: Clock) -> None:
    """Let a second pass and look."""
    clock.now += EVERY_S
    models._maintenance._look()


def niceness(models: ModelTable, name: str, monkeypatch: pytest.MonkeyPatch, adapter: str = "dense") -> int:
    """By how much the priority of a load of that model, of a family, is lower than that of this thread."""
    instance = instance_of(models, name)
    instance.entries = [msgspec.structs.replace(instance.entry, adapter=adapter)]
    here = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    found = []

    def load(*_: object) -> Loaded:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return Loaded(FakeAdapter({}, 512), 1)

    loads = models._maintenance.models
    monkeypatch.setattr(loads._loader, "load", load)
    thread = threading.Thread(target=loads.carry_out, args=(instance,))
    thread.start()
    thread.join()
    return found[0] - here


def test_a_load_that_only_the_start_wants_gives_way_to_models_that_serve(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = worker(tmp_path, clock, {})
    instance_of(models, "org/b").begin(demanded=False)
    assert niceness(models, "org/b", monkeypatch) == 0, "no model serves"
    models = worker(tmp_path, clock, {"org/a": 1})
    instance_of(models, "org/b").begin(demanded=False)
    instance_of(models, "org/c").begin(demanded=True)
    assert niceness(models, "org/b", monkeypatch) == LOWER
    assert niceness(models, "org/c", monkeypatch) == 0, "a request waits for the load"


@pytest.mark.parametrize("adapter", ["onnx", "python_model", "embedders:Embedder"])
def test_a_load_whose_threads_serve_later_keeps_its_priority(
    adapter: str, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = worker(tmp_path, clock, {"org/a": 1})
    instance_of(models, "org/b").begin(demanded=False)
    assert niceness(models, "org/b", monkeypatch, adapter) == 0


def end_drains(models: ModelTable) -> None:
    """What drains and has no requests is gone."""
    models._maintenance._finish_drains()


def test_over_the_budget_the_oldest_goes_and_the_last_one_never(tmp_path: Path, clock: Clock) -> None:
    models = worker(tmp_path, clock, {"org/a": 400, "org/b": 400, "org/c": 5000})
    look(models, clock)
    assert states(models) == ["unloading", "unloading", "loaded"]
    end_drains(models)
    for _ in range(3):
        look(models, clock)
        assert states(models) == ["available", "available", "loaded"]


def test_exactly_the_budget_is_within_the_budget(tmp_path: Path, clock: Clock) -> None:
    models = worker(tmp_path, clock, {"org/a": 400, "org/b": 600})
    look(models, clock)
    assert states(models)[:2] == ["loaded", "loaded"]
    instance_of(models, "org/b").own_bytes += 1
    look(models, clock)
    assert states(models)[:2] == ["unloading", "loaded"]


@pytest.mark.parametrize("state", ["loading", "unloading"])
def test_nothing_goes_for_the_budget_while_another_model_comes_or_goes(
    tmp_path: Path, clock: Clock, state: str
) -> None:
    models = worker(tmp_path, clock, {"org/a": 600, "org/b": 600})
    other = instance_of(models, "org/c")
    other.begin(demanded=True)
    if state == "unloading":
        other.succeed(FakeAdapter({}, 512), 1, 1.0, clock.now)
        other.drain("admin", clock.now + 30)
    look(models, clock)
    assert states(models) == ["loaded", "loaded", state]


def test_without_a_budget_of_its_own_a_worker_keeps_to_its_share_of_the_device(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = [Settings().worker.memory_pressure_percent / 100]
    monkeypatch.setattr(memory_budget, "device_share", lambda device: share[0])
    models = worker(tmp_path, clock, {"org/a": 1, "org/b": 1}, worker__memory_budget_bytes="0")
    look(models, clock)
    assert states(models)[:2] == ["loaded", "loaded"], "exactly the share"
    share[0] += 0.001
    look(models, clock)
    assert states(models)[:2] == ["unloading", "loaded"]
    by_hand = worker(tmp_path, clock, {"org/a": 1, "org/b": 1})
    look(by_hand, clock)
    assert states(by_hand)[:2] == ["loaded", "loaded"]


def test_what_is_idle_goes_unless_pinned_or_busy(tmp_path: Path, clock: Clock) -> None:
    flags = {"worker__idle_unload_s": "10", "catalog__pinned": "org/b"}
    models = worker(tmp_path, clock, {"org/a": 1, "org/b": 1, "org/c": 1}, **flags)
    set_jobs(models, "org/c")
    clock.now = instance_of(models, "org/a").last_used + 10 - EVERY_S
    look(models, clock)
    assert states(models) == ["loaded"] * 3, "exactly so long"
    look(models, clock)
    assert states(models) == ["unloading", "loaded", "loaded"]
    set_jobs(models)
    clock.now += 10
    models._states.touch("org/c")
    look(models, clock)
    assert states(models)[2] == "loaded", "used just now"
    clock.now += 10
    look(models, clock)
    assert states(models) == ["unloading", "loaded", "unloading"]
    assert instance_of(models, "org/c").unload_reason == "idle"


def test_a_second_passes_between_two_looks(tmp_path: Path, clock: Clock) -> None:
    models = worker(tmp_path, clock, {"org/a": 600})
    look(models, clock)
    instance_of(models, "org/b").begin(demanded=True)
    instance_of(models, "org/b").succeed(FakeAdapter({}, 512), 600, 1.0, clock.now)
    clock.now += EVERY_S / 2
    models._maintenance._look()
    assert states(models)[:2] == ["loaded", "loaded"]
    clock.now += EVERY_S / 2
    models._maintenance._look()
    assert states(models)[:2] == ["unloading", "loaded"]


def test_a_failure_is_forgotten_in_its_time_and_a_pinned_model_is_tried_again(
    tmp_path: Path, clock: Clock
) -> None:
    models = worker(tmp_path, clock, {}, catalog__pinned="org/b", catalog__preload="")
    for name, retry_after_s in (("org/a", 30.0), ("org/b", 30.0), ("org/c", None)):
        failure = LoadFailure(
            error_class="OOM", permanent=retry_after_s is None, retry_after_s=retry_after_s, message="no"
        )
        instance_of(models, name).begin(demanded=True)
        instance_of(models, name).fail(failure, clock.now)
    for passed_s, expected in ((29.5, ["failed"] * 3), (0.5, ["available", "loading", "failed"])):
        clock.now += passed_s
        models._maintenance._next_look = 0.0
        models._maintenance._look()
        assert states(models) == expected


def test_a_drain_waits_for_requests_until_its_time_is_up(tmp_path: Path, clock: Clock) -> None:
    models = worker(tmp_path, clock, {"org/a": 1}, worker__unload_drain_s="30")
    leaving, failed = instance_of(models, "org/a"), set_jobs(models, "org/a")
    models.unload("org/a")
    adapter = leaving.adapter
    clock.now += 29.999
    end_drains(models)
    assert (leaving.state, failed) == ("unloading", [])
    clock.now += 0.001
    end_drains(models)
    assert (leaving.state, leaving.adapter, failed) == ("available", None, [adapter])
