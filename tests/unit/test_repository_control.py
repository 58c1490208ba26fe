"""Loading and unloading by name is refused unless the settings allow it, and what was asked before counts no more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.engine.local.directory import LocalDirectory
from frontend.http.bodies import BodyReader
from frontend.tensors.agreement import Agreement
from frontend.tensors.control import UNLOAD_S, RepositoryControl
from frontend.tensors.models import TensorModels
from ipc import deadline
from ipc.catalog.entries import Catalog, DirectorySource, ModelEntry
from ipc.errors import ControlDisabled, DeadlineExceeded, InvalidInput, ModelLoadFailed, Unsupported
from ipc.processes.liveness import SlotLock
from ipc.processes.paths import prepare_run_dir
from ipc.settings import load
from ipc.store.store import Marks, Store
from ipc.wire.messages import ModelStatus
from tests.fakes.channel import FakeChannel


def control_of(tmp_path: Path, mode: str, slot: int = 0, *statuses: ModelStatus) -> RepositoryControl:
    """That of a frontend of a server in `tmp_path`, whose worker says this of its models."""
    settings = load(None, {"run.dir": str(tmp_path), "repository.control": mode}, {})
    prepare_run_dir(settings.paths)
    store = Store(settings.paths)
    asyncio.run(Marks(store).put("add", loaded=False))
    client: Any = SimpleNamespace(channels=[FakeChannel(0, {status.name: status for status in statuses})])
    services: Any = SimpleNamespace(
        settings=settings,
        store=store,
        slot=slot,
        catalog=Catalog(()),
        bodies=BodyReader(settings.limits),
        directory=LocalDirectory(settings, Catalog(()), client),
    )
    return RepositoryControl(services)


def test_where_it_is_not_explicit_everything_by_name_is_refused(tmp_path: Path) -> None:
    control = control_of(tmp_path, "none")
    for asked in (control.load("add", {}, deadline.after(1)), control.unload("add", {}, deadline.after(1))):
        with pytest.raises(ControlDisabled, match=r"^explicit model load / unload is not allowed") as caught:
            asyncio.run(asked)
        assert caught.value.status == 503 and not caught.value.retryable
    assert control.mark("add") is None


def test_what_was_unloaded_by_name_is_known(tmp_path: Path) -> None:
    control = control_of(tmp_path, "explicit")
    assert control.mark("add") is False and control.mark("other") is None


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"config": 1}, InvalidInput),
        ({"file:1/model.pt2": "AA"}, Unsupported),
        ({"config ": "{}"}, InvalidInput),
        ({"": 1}, InvalidInput),
        ({"unload_dependents": True}, InvalidInput),
    ],
)
def test_parameters_of_a_load_are_refused_before_anything_is_loaded(
    tmp_path: Path, parameters: dict[str, Any], error: type[Exception]
) -> None:
    control = control_of(tmp_path, "explicit")
    with pytest.raises(error, match="load parameter"):
        asyncio.run(control.load("add", parameters, deadline.after(1)))
    assert control.mark("add") is False


def test_frontends_agree_when_those_that_live_serve_the_same_files(tmp_path: Path) -> None:
    paths = load(None, {"run.dir": str(tmp_path)}, {}).paths
    prepare_run_dir(paths)
    old, new = (Catalog((), frozenset({(f"/models/{name}", 1, 2, 3)})) for name in ("a", "b"))
    store = Store(paths)
    first, second = (
        Agreement(paths, store, "frontend-0", old),
        Agreement(paths, store, "frontend-1", old),
    )
    with SlotLock(paths.lock("frontend-1")):
        assert first.reached() and second.reached()
        old_files = old.files
        second = Agreement(paths, store, "frontend-1", new)
        second.tell()
        assert not first.reached()
        old.replace(new)
        assert old.files != old_files and first.reached()
        Agreement(paths, store, "frontend-1", Catalog(())).tell()
        assert not first.reached()
    assert first.reached()


def test_frontends_agree_entirely_when_none_serves_what_another_does_not(tmp_path: Path) -> None:
    paths = load(None, {"run.dir": str(tmp_path)}, {}).paths
    prepare_run_dir(paths)
    files = frozenset({("/models/m", 1, 2, 3)})
    new = Catalog([ModelEntry("m@2", DirectorySource("/m/2"))], files)
    retaining = Catalog([*new.sources, ModelEntry("m@1", DirectorySource("/m/1"))], files)
    store = Store(paths)
    first, second = (
        Agreement(paths, store, "frontend-0", new),
        Agreement(paths, store, "frontend-1", retaining),
    )
    with SlotLock(paths.lock("frontend-1")):
        second.tell()
        assert first.reached() and not first.reached(entirely=True)
        retaining.replace(new)
        second.tell()
        assert first.reached(entirely=True)
        first = Agreement(paths, store, "frontend-0", new, lambda: {("m@2", "new files")})
        assert first.reached() and not first.reached(entirely=True), "the second has not heard of them"
        Agreement(paths, store, "frontend-1", new, lambda: {("m@2", "new files")}).tell()
        assert first.reached(entirely=True)


@pytest.mark.parametrize(("lives", "joins"), [(True, True), (True, False), (False, False)])
def test_an_unload_waits_for_workers_that_are_being_joined(tmp_path: Path, lives: bool, joins: bool) -> None:
    """And not for one whose process is gone."""
    control = control_of(tmp_path, "explicit")
    services: Any = control._services
    worker, told = FakeChannel(0, state="connecting"), list[str]()

    async def wait(done: Callable[[], bool], until_ns: int) -> None:
        assert done() is not lives and deadline.remaining_s(until_ns) < UNLOAD_S
        if not lives:
            return
        if not joins:
            raise DeadlineExceeded("not joined")
        worker.state = "ready"
        assert done()

    async def unload(entry: str, waits: bool, until: Any) -> None:
        told.append(worker.state)

    client = services.directory._client
    client.channels, client.wait, client.demand = [worker], wait, SimpleNamespace(unload=unload)
    lock = services.settings.paths.lock("worker-0")
    with SlotLock(lock) if lives else contextlib.nullcontext():
        asyncio.run(control._unload_entry("m@1", deadline.after(UNLOAD_S)))
    assert told == ["ready" if joins else "connecting"]


def test_a_frontend_that_has_not_heard_of_a_load_does_not_agree_by_the_load_before(tmp_path: Path) -> None:
    before, after = (ModelStatus("m@1", "loaded", revision="r", attempts=attempts) for attempts in (1, 2))
    first, second = (control_of(tmp_path, "explicit", slot, after) for slot in (0, 1))
    stale = control_of(tmp_path, "explicit", 1, before)
    with SlotLock(load(None, {"run.dir": str(tmp_path)}, {}).paths.lock("frontend-1")):
        stale.tell()
        assert not first._agreement.reached(entirely=True)
        second.tell()
        assert first._agreement.reached(entirely=True)


def test_a_load_of_an_unknown_name_reads_the_files_and_is_refused_without_a_wait(tmp_path: Path) -> None:
    control = control_of(tmp_path, "explicit")
    services: Any = control._services
    read = []

    async def reload(changed_only: bool) -> None:
        read.append(changed_only)

    async def wait(done: Callable[[], bool], until_ns: int) -> None:
        assert done(), "nothing is waited for"

    services.follower = SimpleNamespace(reload=reload)
    services.models = TensorModels(services.directory, services.settings, control.mark)
    services.directory._client.wait = wait
    with pytest.raises(ModelLoadFailed, match="failed to load 'nope', the repository has no such model"):
        asyncio.run(control.load("nope", {}, deadline.after(60)))
    assert read == [True]
