"""Which LoRA adapters a model holds, who makes room, and what is remembered of a load that failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from ipc import settings
from ipc.catalog.entries import DirectorySource, ModelEntry
from ipc.errors import InferenceFailed, InvalidInput, LoraLoading, PenstockError
from ipc.wire.messages import EncodeCall
from tests.fakes.adapter import FakeAdapter
from tests.harness.server import wait_until
from workers.adapters.shared.lora import FittedLora, LoraLayers
from workers.lifecycle import loras
from workers.lifecycle.instance import Instance, LoraAdapter
from workers.lifecycle.loads import LoadCrashes
from workers.lifecycle.loras import LoraLoads
from workers.lifecycle.model_states import ModelStates
from workers.loading.failure import LoadFailure

ENTRY = ModelEntry("org/m", DirectorySource("/weights"))


class Layers(LoraLayers):
    """Adapters without weights; `fit` does what a test says."""

    def __init__(self, fit: Callable[[str], FittedLora]) -> None:
        self._fit = fit
        self.removed: list[str] = []

    def fit(self, directory: Path) -> FittedLora:
        """What the test says for this name."""
        return self._fit(directory.name)

    def install(self, name: str, lora: FittedLora) -> None:
        """Nothing."""

    def remove(self, name: str, lora: FittedLora) -> None:
        """Remember the name."""
        self.removed.append(name)

    def traced(self, name: str) -> Any:
        """No layers to look at."""
        return threading.Lock()


def needing(adapter: Any, lora: str) -> Any:
    """An open job of an adapter that needs this LoRA adapter."""
    return SimpleNamespace(adapter=adapter, work=SimpleNamespace(call=SimpleNamespace(lora=lora)))


def _run(work: Callable[[], Any]) -> Any:
    """As the device thread does, at once."""
    return work()


class Worker:
    """A loader over one loaded model with a directory of adapters; `jobs` are the open requests."""

    def __init__(self, root: Path, most: int, fit: Callable[[str], FittedLora]) -> None:
        self.root = root / "loras"
        self.adapter, self.layers = FakeAdapter({}, 512), Layers(fit)
        self.adapter.loras = self.layers
        self.jobs: list[Any] = []
        states: Any = SimpleNamespace(
            lock=threading.Condition(threading.RLock()),
            announce=lambda *instances: None,
            instances=lambda: [self.instance],
        )
        flags = {
            "catalog.lora_dirs": str(self.root),
            "worker.max_loras": str(most),
            "run.dir": str(root),
        }
        self.settings = settings.load(flags=flags, environ={})
        book: Any = SimpleNamespace(jobs=lambda: self.jobs)
        crashes = LoadCrashes(self.settings.paths.root / "loading", 0)
        self.loader = LoraLoads(cast("ModelStates", states), self.settings, crashes, _run, _run, book)
        self.instance = Instance([ENTRY])
        self.instance.begin(demanded=True)
        self.instance.succeed(self.adapter, 1000, 1.0, 1.0)

    def add(self, name: str, content: str = "{}") -> None:
        """Files of an adapter."""
        (self.root / name).mkdir(parents=True, exist_ok=True)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (self.root / name / file).write_text(content)

    def require(self, name: str) -> None:
        """As for a request."""
        self.loader.require(self.instance, EncodeCall([], ["dense"], lora=name))

    def settled(self, name: str) -> PenstockError | None:
        """The answer once nothing is loading any more."""

        def attempt() -> tuple[PenstockError | None] | None:
            try:
                self.require(name)
            except LoraLoading:
                return None
            except PenstockError as error:
                return (error,)
            return (None,)

        found: tuple[PenstockError | None] = wait_until(attempt, what=f"an outcome of {name}")
        return found[0]


def ten_bytes(name: str) -> FittedLora:
    """An adapter that counts as ten bytes."""
    return Ten({})


class Ten(FittedLora):
    """Ten bytes."""

    @property
    def nbytes(self) -> int:
        """Ten."""
        return 10


def test_the_first_request_begins_one_load_and_memory_is_counted(tmp_path: Path) -> None:
    gate, fitted = threading.Event(), []

    def fit(name: str) -> FittedLora:
        fitted.append(name)
        gate.wait(60)
        return Ten({})

    worker = Worker(tmp_path, 2, fit)
    worker.add("a")
    for _ in range(3):
        with pytest.raises(LoraLoading) as caught:
            worker.require("a")
        assert caught.value.retry_after_s == 1
    assert worker.instance.status(ENTRY, "cpu").loras == {"a": "loading"}
    gate.set()
    assert worker.settled("a") is None
    assert (fitted, worker.instance.memory_bytes) == (["a"], 1010)
    assert worker.instance.status(ENTRY, "cpu").loras == {"a": "loaded"}
    with pytest.raises(InvalidInput, match=r"params\.options\.lora"):
        worker.require("b")


def test_the_one_used_longest_ago_leaves_unless_an_open_request_needs_it(tmp_path: Path) -> None:
    worker = Worker(tmp_path, 2, ten_bytes)
    for name in "abcd":
        worker.add(name)
    for name in "aba":
        assert worker.settled(name) is None
    assert worker.settled("c") is None
    assert set(worker.instance.loras) == {"a", "c"} and worker.layers.removed == ["b"]
    worker.jobs = [needing(worker.adapter, "a")]
    assert worker.settled("d") is None
    assert set(worker.instance.loras) == {"a", "d"}, "c was used later than a, but a is in use"
    assert worker.instance.memory_bytes == 1020


def test_an_adapter_in_line_for_a_thread_is_told_as_loading(tmp_path: Path) -> None:
    go_on = threading.Event()

    def fit(name: str) -> FittedLora:
        assert go_on.wait(60)
        return Ten({})

    worker = Worker(tmp_path, 2, fit)
    worker.loader._most = 1
    for name in "abc":
        worker.add(name)
        with pytest.raises(LoraLoading):
            worker.require(name)
    try:
        assert [lora.state for lora in worker.instance.loras.values()] == [
            "loading",
            "available",
            "available",
        ]
        assert worker.instance.status(ENTRY, "cpu").loras == {"a": "loading", "b": "loading"}, (
            "c lacks a place, which another request has to make"
        )
    finally:
        go_on.set()
    assert worker.settled("b") is None
    assert worker.instance.status(ENTRY, "cpu").loras["b"] == "loaded"


def test_without_a_place_nothing_begins_until_one_is_free(tmp_path: Path) -> None:
    worker = Worker(tmp_path, 1, ten_bytes)
    for name in "ab":
        worker.add(name)
    assert worker.settled("a") is None
    worker.jobs = [needing(worker.adapter, "a")]
    for _ in range(3):
        with pytest.raises(LoraLoading):
            worker.require("b")
    assert {name: lora.state for name, lora in worker.instance.loras.items()} == {
        "a": "loaded",
        "b": "available",
    }
    assert worker.instance.status(ENTRY, "cpu").loras == {"a": "loaded"}
    worker.jobs = [needing(FakeAdapter({}, 512), "a")]
    assert worker.settled("b") is None, "an open request of another model does not count"


def test_under_load_on_all_of_them_turns_end_so_that_another_one_comes_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loras, "TURN_S", 60.0)
    worker = Worker(tmp_path, 2, ten_bytes)
    for name in "abc":
        worker.add(name)
    for name in "ab":
        assert worker.settled(name) is None
    worker.jobs = [needing(worker.adapter, name) for name in "ab"]

    def states_when_c_is_wanted() -> list[str]:
        with pytest.raises(LoraLoading):
            worker.require("c")
        return [worker.instance.loras[name].state for name in "ab"]

    assert states_when_c_is_wanted() == ["loaded", "loaded"]
    for name in "ab":
        worker.instance.loras[name].since -= 61
    assert states_when_c_is_wanted() == ["unloading", "loaded"]
    assert states_when_c_is_wanted() == ["unloading", "loaded"], "one at a time"
    with pytest.raises(LoraLoading):
        worker.require("a")
    worker.jobs = worker.jobs[1:]
    assert worker.settled("c") is None
    assert set(worker.instance.loras) == {"b", "c"}


def test_an_adapter_whose_turn_has_ended_comes_back_after_the_one_that_was_in_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loras, "TURN_S", 60.0)
    fitted: list[str] = []

    def fit(name: str) -> FittedLora:
        fitted.append(name)
        return Ten({})

    worker = Worker(tmp_path, 1, fit)
    for name in "ab":
        worker.add(name)
    assert worker.settled("a") is None
    worker.jobs = [needing(worker.adapter, "a")]
    worker.instance.loras["a"].since -= 61
    for name in "ba":
        with pytest.raises(LoraLoading):
            worker.require(name)
    assert worker.instance.loras["a"].state == "unloading", "open requests go on with it"
    worker.jobs = []
    assert worker.settled("a") is None
    assert (fitted, worker.layers.removed) == (["a", "b", "a"], ["a", "b"])
    assert worker.instance.memory_bytes == 1010


def test_drained_adapters_go_without_another_request(tmp_path: Path) -> None:
    worker = Worker(tmp_path, 2, ten_bytes)
    worker.add("a")
    assert worker.settled("a") is None
    worker.jobs = [needing(worker.adapter, "a")]
    worker.instance.loras["a"].drain("memory", 0.0)
    assert worker.loader.finish_drains() and set(worker.instance.loras) == {"a"}
    worker.jobs = []
    assert not worker.loader.finish_drains() and worker.instance.loras == {}
    assert worker.instance.memory_bytes == 1000


def test_an_adapter_in_line_for_a_model_that_has_gone_is_not_loaded(tmp_path: Path) -> None:
    worker = Worker(tmp_path, 1, ten_bytes)
    for name in "ab":
        worker.add(name)
    assert worker.settled("a") is None
    worker.jobs = [needing(worker.adapter, "a")]
    with pytest.raises(LoraLoading):
        worker.require("b")
    waiting = worker.instance.loras["b"]
    worker.instance.drain("idle", 0.0)
    worker.loader.start()
    assert waiting.state == "available"
    worker.instance.rest()
    worker.loader.start()
    assert not worker.loader.line.withdraw(waiting), "it has left the line"


def test_a_failure_is_answered_at_once_until_the_files_change(tmp_path: Path) -> None:
    tried = []

    def fit(name: str) -> FittedLora:
        tried.append(name)
        if len(tried) == 1:
            raise ValueError("no such layer")
        return Ten({})

    worker = Worker(tmp_path, 1, fit)
    worker.add("a")
    for _ in range(3):
        error = worker.settled("a")
        assert isinstance(error, InferenceFailed) and error.message == "LoRA load failed: no such layer"
    assert len(tried) == 1 and worker.instance.status(ENTRY, "cpu").loras == {}
    worker.add("a", content="{} ")
    assert worker.settled("a") is None


def test_lack_of_memory_is_tried_again_when_its_time_has_come(tmp_path: Path) -> None:
    tried = []

    def fit(name: str) -> FittedLora:
        tried.append(name)
        if len(tried) == 1:
            raise MemoryError
        return Ten({})

    worker = Worker(tmp_path, 1, fit)
    worker.add("a")
    for _ in range(3):
        assert isinstance(worker.settled("a"), InferenceFailed)
    assert len(tried) == 1
    worker.instance.loras["a"].retry_at = time.monotonic()
    assert worker.settled("a") is None
    assert len(tried) == 2


def test_a_model_that_is_unloaded_meanwhile_forgets_its_adapters(tmp_path: Path) -> None:
    gate = threading.Event()

    def fit(name: str) -> FittedLora:
        gate.wait(60)
        return Ten({})

    worker = Worker(tmp_path, 1, fit)
    worker.add("a")
    with pytest.raises(LoraLoading):
        worker.require("a")
    worker.instance.drain("idle", 0.0)
    worker.instance.rest()
    gate.set()
    wait_until(lambda: worker.loader.running == 0, what="the end of the load")
    assert worker.instance.loras == {} and worker.instance.memory_bytes == 0


def test_an_adapter_that_killed_the_process_twice_is_left_alone(tmp_path: Path) -> None:
    for _ in range(2):
        LoadCrashes(tmp_path / "loading", 0).begin("org/m a")
    worker = Worker(tmp_path, 1, ten_bytes)
    worker.add("a")
    error = worker.settled("a")
    assert isinstance(error, InferenceFailed) and "died twice" in error.message


def test_an_adapter_whose_source_in_the_entry_changed_is_loaded_anew_once_no_request_needs_it(
    tmp_path: Path,
) -> None:
    fitted: list[str] = []

    def fit(name: str) -> FittedLora:
        fitted.append(name)
        return Ten({})

    worker = Worker(tmp_path, 2, fit)
    for version in ("v1", "v2"):
        worker.add(version)

    def entry(version: str) -> ModelEntry:
        return replace(ENTRY, loras={"law": DirectorySource(str(worker.root / version))})

    worker.instance.entries = [entry("v1")]
    assert worker.settled("law") is None
    worker.instance.entries = [entry("v2")]
    worker.jobs = [needing(worker.adapter, "law")]
    with pytest.raises(LoraLoading):
        worker.require("law")
    assert fitted == ["v1"] and not worker.layers.removed
    worker.jobs = []
    assert worker.settled("law") is None
    assert (fitted, worker.layers.removed) == (["v1", "v2"], ["law"])
    assert worker.instance.memory_bytes == 1010


class Guarded(dict[str, LoraAdapter]):
    """Adapters of a model, which only a holder of the lock changes: another thread may go through them."""

    def __init__(self, lock: Any) -> None:
        super().__init__()
        self._lock = lock

    def __setitem__(self, key: str, lora: LoraAdapter) -> None:
        assert self._lock._is_owned(), "changed without the lock"
        super().__setitem__(key, lora)


def test_adapters_of_profiles_are_entered_under_the_lock_and_go_with_a_load_that_fails(
    tmp_path: Path,
) -> None:
    worker = Worker(tmp_path, 2, ten_bytes)
    for name in ("a", "b"):
        worker.add(name)
    entries = [replace(ENTRY, runtime={"lora": name}) for name in ("a", "b")]
    instance = Instance(entries)
    instance.loras = Guarded(worker.loader.states.lock)
    instance.begin(demanded=True)
    worker.loader.load_first(instance, worker.adapter)
    assert {name: lora.state for name, lora in instance.loras.items()} == {"a": "loaded", "b": "loaded"}
    assert instance.held_bytes == 0, "the load has its reservation until its end"
    failure = LoadFailure(error_class="UNKNOWN", permanent=True, retry_after_s=None, message="no")
    instance.fail(failure, 1.0)
    assert instance.loras == {} and instance.status(ENTRY, "cpu").loras == {}
