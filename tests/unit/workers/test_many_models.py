"""What a worker and a frontend do for each change of a model, and at each look, does not grow with their models."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

import workers.endpoint.endpoint
from frontend.engine.local.channel import Channel
from ipc.catalog.entries import Catalog, DirectorySource, ModelEntry
from ipc.memory.arena import BLOCKS_OFFSET, Arena, LeaseTable
from ipc.processes.paths import RunPaths
from ipc.wire.messages import Models, ModelStatus
from tests.fakes.adapter import FakeAdapter
from tests.fakes.clock import Clock
from tests.unit.workers.lifecycle.test_model_states import table
from workers.device.devices import Device
from workers.endpoint.endpoint import Endpoint
from workers.endpoint.sessions import Handler
from workers.lifecycle.models import ModelTable
from workers.reports import Reporter
from workers.runtime import Runtime
from workers.scheduling.job import BatchLog

MODELS = 300


def entries(count: int = MODELS) -> list[ModelEntry]:
    """Models that share nothing."""
    adapter = "tests.fakes.weighing:WeighingAdapter"
    return [ModelEntry(f"org/m{n}", DirectorySource(f"/weights/{n}"), adapter=adapter) for n in range(count)]


@pytest.fixture
def models(tmp_path: Path) -> ModelTable:
    """The models of a worker whose threads are not started, all to be loaded at the start."""
    return table(tmp_path, *entries())


def load(models: ModelTable, name: str) -> None:
    """What a loading thread does about a load."""
    host = models.find(name)
    assert host is not None
    with models._states.lock:
        models._states.enqueue(host.instance, demanded=False)
        models._states.progressed(host.instance)
        models._states.end(host.instance, partial(host.instance.succeed, FakeAdapter({}, 512), 1, 1.0, 1.0))


def test_all_models_are_told_once_and_then_only_those_that_changed(models: ModelTable) -> None:
    told, gone = models.changes()
    assert len(told) == MODELS and not gone
    told_of = 0
    for number in range(MODELS):
        load(models, f"org/m{number}")
        changed, gone = models.changes()
        assert [(status.name, status.state) for status in changed] == [(f"org/m{number}", "loaded")]
        told_of += len(changed)
    assert told_of == MODELS and models.changes() == ([], [])
    assert {status.state for status in models.told()} == {"loaded"}


def test_a_new_session_begins_where_the_differences_of_all_others_are(models: ModelTable) -> None:
    models.changes()
    load(models, "org/m0")
    assert "loaded" not in {status.state for status in models.told()}, (
        "the difference would be told to nobody"
    )
    changed, _ = models.changes()
    assert [status.state for status in changed] == ["loaded"]
    assert [status.name for status in models.told() if status.state == "loaded"] == ["org/m0"]


def test_what_the_catalog_loses_is_told_as_gone_and_what_it_keeps_is_not_told_again(
    models: ModelTable,
) -> None:
    models.changes()
    with models._states.lock:
        models._states.serve(
            Catalog([*entries()[1:], ModelEntry("org/new", DirectorySource("/weights/new"))])
        )
    changed, gone = models.changes()
    assert [status.name for status in changed] == ["org/new"] and gone == ["org/m0"]
    assert models.changes() == ([], [])


def test_changes_until_the_turn_of_the_endpoint_are_one_message(models: ModelTable) -> None:
    posted: list[Any] = []
    sent: list[Models] = []
    runtime = Runtime.__new__(Runtime)
    runtime.models, runtime._announcing = models, False
    runtime._reporter = cast("Reporter", SimpleNamespace(models=lambda changed, gone: None))
    runtime.endpoint = cast("Endpoint", SimpleNamespace(post=posted.append, broadcast=sent.append))
    models._states._tell = runtime._models_changed
    assert models.entries.changes(models.catalog) is not None
    for number in range(MODELS):
        load(models, f"org/m{number}")
    assert len(posted) == 1
    posted.pop()()
    assert [len(message.models) for message in sent] == [MODELS]
    models.unload("org/m0")
    assert len(posted) == 1
    posted.pop()()
    assert [status.name for status in sent[1].models] == ["org/m0"]


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    """One with a handler that counts its ticks."""
    (tmp_path / "run").mkdir()
    paths = RunPaths(tmp_path / "run", "many", tmp_path)
    arena = Arena(tmp_path / "arena", BLOCKS_OFFSET + 4096, "e" * 16)
    handler = SimpleNamespace(turn_ended=lambda: None)
    made = Endpoint(paths, 0, LeaseTable(arena), cast("Handler", handler))
    yield made
    made.close()
    arena.close()


def test_the_tick_comes_between_two_of_many_things_that_were_posted(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock.of(workers.endpoint.endpoint, monkeypatch)
    order: list[str] = []

    def work() -> None:
        clock.now += 0.03
        order.append("work")

    endpoint._handler.tick = lambda: order.append("tick")  # type: ignore[method-assign]
    for _ in range(20):
        endpoint.post(work)
    endpoint.stop()
    endpoint.run()
    between = "".join("w" if each == "work" else "." for each in order).strip(".").split(".")
    assert sum(map(len, between)) == 20
    assert max(map(len, between)) <= 4, "a tick is due after 0.1 s, which is after four of them"


def test_a_frontend_takes_differences_in_and_leaves_what_others_hold_as_it_was(tmp_path: Path) -> None:
    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        channel = Channel(context, RunPaths(tmp_path, "many", tmp_path), 0, "frontend-0", lambda: None)
        channel._dispatch(Models([ModelStatus(name, "loading") for name in "abc"]), b"")
        before = channel.models
        channel._dispatch(Models([ModelStatus("a", "loaded")], ["b"], True, 7), b"")
        assert {name: status.state for name, status in channel.models.items()} == {
            "a": "loaded",
            "c": "loading",
        }
        assert (channel.preloaded, channel.free_bytes) == (True, 7)
        assert {name: status.state for name, status in before.items()} == dict.fromkeys("abc", "loading")
        context.destroy()

    asyncio.run(run())


class CountingMetrics:
    """Counts for how often a series was asked, by its model."""

    def __init__(self) -> None:
        self.worker, self.asked = "worker-0", Counter[str]()

    def __getattr__(self, name: str) -> Any:
        def labels(*values: str) -> Any:
            self.asked.update(value for value in values if value.startswith("org/"))
            return SimpleNamespace(set=lambda value: None, inc=lambda by=1: None)

        return SimpleNamespace(labels=labels)


def test_a_look_at_the_queue_costs_what_the_busy_models_cost(models: ModelTable) -> None:
    waiting = [("org/m3", "interactive", 2, 20, 0.5)]
    batches = BatchLog()
    counted = CountingMetrics()
    context: Any = SimpleNamespace(
        metrics=counted,
        queue=SimpleNamespace(snapshot=lambda: waiting),
        budgets=SimpleNamespace(tokens_of=lambda model: 64),
    )
    executor: Any = SimpleNamespace(batches=batches)
    sequences: Any = SimpleNamespace(numbers=list)
    device = cast("Device", SimpleNamespace(uuid="", torch=SimpleNamespace(type="cpu"), name="cpu"))
    reporter = Reporter(context, executor, sequences, models, device)
    reporter._report_queue()
    assert set(counted.asked) == {"org/m3"}
    waiting.clear()
    batches.note("org/m5", 1, 10, 64, 0.1)
    counted.asked.clear()
    reporter._report_queue()
    assert set(counted.asked) == {"org/m3", "org/m5"}, "the one that waited is shown as empty, once"
    counted.asked.clear()
    reporter._report_queue()
    assert set(counted.asked) == {"org/m5"}
    counted.asked.clear()
    reporter.models([ModelStatus("org/m7", "loaded")], ["org/m8"])
    assert set(counted.asked) == {"org/m7", "org/m8"}
