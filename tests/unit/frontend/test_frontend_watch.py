"""The watch of a frontend goes on when the system refuses it something."""

from __future__ import annotations

import asyncio
import errno
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frontend import lifespan
from frontend.access.gate import Gate
from frontend.engine.interface import LOADING, NONE_LOADED
from frontend.engine.local import engine as local_engine
from frontend.engine.local.engine import LocalEngine
from frontend.lifespan import Watch
from frontend.services import Services
from ipc.catalog.reading import read_catalog
from ipc.settings import load
from tests.harness.server import FAKE_CATALOG

TURNS = 3


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Watch:
    """The watch of a supervised frontend that is ready, looking as often as it can."""
    monkeypatch.delenv("PENSTOCK_SUPERVISE", raising=False)
    monkeypatch.setattr(lifespan, "WATCH_EVERY_S", 0.001)
    monkeypatch.setattr(lifespan, "summary", lambda services: "ready")
    monkeypatch.setattr(Watch, "_report", lambda self, ready: None)
    services = Services(load(None, {"run.dir": str(tmp_path)}), read_catalog([str(FAKE_CATALOG)]), Gate())
    monkeypatch.setattr(LocalEngine, "ready", lambda self: (True, "ok"))
    client: Any = SimpleNamespace(channels=[], inputs=None)
    services.engine = LocalEngine(services.settings, services.catalog, client, services.drain)
    services.extensions = SimpleNamespace(apply=lambda: None)  # type: ignore[assignment]
    return Watch(services, None)  # type: ignore[arg-type]


async def watch_until(watched: Watch, seen: asyncio.Event) -> None:
    """Run the watch until `seen`; fails when it ends by itself."""
    watcher = asyncio.create_task(watched.run())
    waiter = asyncio.create_task(seen.wait())
    try:
        done, _ = await asyncio.wait((watcher, waiter), timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert done == {waiter}
    finally:
        watcher.cancel()
        waiter.cancel()


def test_a_lack_of_descriptors_does_not_end_the_watch_of_the_supervisor(
    watched: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        seen, loop, calls = asyncio.Event(), asyncio.get_running_loop(), 0

        def is_held(path: Path) -> bool:
            nonlocal calls
            calls += 1
            if calls <= TURNS:
                raise OSError(errno.EMFILE, "Too many open files")
            loop.call_soon_threadsafe(seen.set)
            return True

        monkeypatch.setattr(local_engine, "is_held", is_held)
        monkeypatch.setattr(lifespan, "started", lambda services, stage: None)
        await watch_until(watched, seen)

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert caplog.text.count("Too many open files") == TURNS


def test_a_start_up_block_that_cannot_be_written_keeps_nothing_else_from_being_told(
    watched: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        seen, looks = asyncio.Event(), 0

        def started(services: Services, stage: str) -> None:
            nonlocal looks
            looks += 1
            if looks <= TURNS:
                raise OSError(errno.ENOSPC, "No space left on device")
            seen.set()

        monkeypatch.setattr(local_engine, "is_held", lambda path: True)
        monkeypatch.setattr(lifespan, "started", started)
        await watch_until(watched, seen)
        assert watched._told

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert caplog.text.count("No space left") == TURNS


def test_state_that_cannot_be_read_keeps_nothing_else_from_being_told(
    watched: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        supervised, announced, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

        def apply() -> None:
            raise OSError(errno.EIO, "the server's shared state cannot be read")

        def is_held(path: Path) -> bool:
            loop.call_soon_threadsafe(supervised.set)
            return True

        watched._services.extensions = SimpleNamespace(apply=apply)  # type: ignore[assignment]
        monkeypatch.setattr(local_engine, "is_held", is_held)
        monkeypatch.setattr(lifespan, "started", lambda services, stage: announced.set())
        await watch_until(watched, supervised)
        await watch_until(watched, announced)

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert "shared state cannot be read" in caplog.text


def test_a_start_without_a_model_is_announced_and_a_model_that_loads_later_as_well(
    watched: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([(False, "models are loading"), *[(False, NONE_LOADED)] * 3])
    monkeypatch.setattr(LocalEngine, "ready", lambda self: next(answers, (True, "ok")))
    monkeypatch.setattr(local_engine, "is_held", lambda path: True)
    monkeypatch.setattr(lifespan, "_statuses", lambda services: [])

    async def scenario() -> list[str]:
        ended, told = asyncio.Event(), list[str]()

        def started(services: Services, stage: str) -> None:
            told.append(stage)
            if stage == "ready":
                ended.set()

        monkeypatch.setattr(lifespan, "started", started)
        await watch_until(watched, ended)
        return told

    assert asyncio.run(scenario()) == ["failure", "ready"]


def test_a_model_that_answers_before_the_others_are_loaded_is_announced_once(
    watched: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[str]()
    monkeypatch.setattr(lifespan, "started", lambda services, stage: told.append(stage))
    loading, ready = (False, LOADING), (True, "ok")
    steps = (
        (loading, {"available", "loading"}, []),
        (loading, {"loaded", "loading"}, ["first"]),
        (loading, {"loaded", "loading"}, ["first"]),
        (loading, {"loaded"}, ["first"]),
        (ready, {"loaded"}, ["first", "ready"]),
        (loading, {"loaded", "loading"}, ["first", "ready"]),
        ((False, NONE_LOADED), {"failed"}, ["first", "ready", "failure"]),
    )
    for answer, states, expected in steps:
        statuses = [SimpleNamespace(state=state) for state in states]
        monkeypatch.setattr(LocalEngine, "ready", lambda self, answer=answer: answer)
        monkeypatch.setattr(lifespan, "_statuses", lambda services, statuses=statuses: statuses)
        asyncio.run(watched._look(supervised=False))
        assert told == expected


def test_a_worker_that_comes_back_to_a_running_server_announces_no_first_model(
    watched: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[str]()
    monkeypatch.setattr(lifespan, "started", lambda services, stage: told.append(stage))
    asyncio.run(watched._look(supervised=False))
    statuses = [SimpleNamespace(state=state) for state in ("loaded", "loading")]
    monkeypatch.setattr(LocalEngine, "ready", lambda self: (False, LOADING))
    monkeypatch.setattr(lifespan, "_statuses", lambda services: statuses)
    asyncio.run(watched._look(supervised=False))
    assert told == ["ready"]
