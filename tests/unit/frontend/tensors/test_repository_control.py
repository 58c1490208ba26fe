"""Loading and unloading by name is refused unless the settings allow it, and what was asked before counts no more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.engine.local.engine import LocalDirectory
from frontend.engine.local.routing import Workers
from frontend.http.bodies import BodyReader
from frontend.tensors.control import LEARN_S, UNLOAD_S, RepositoryControl
from frontend.tensors.models import TensorModels
from ipc import deadline
from ipc.catalog.entries import Catalog
from ipc.catalog.repository import Wish
from ipc.errors import (
    ControlDisabled,
    DeadlineExceeded,
    InvalidInput,
    ModelLoadFailed,
    NoReplica,
    Unsupported,
)
from ipc.processes.liveness import SlotLock
from ipc.processes.paths import prepare_run_dir
from ipc.settings import load
from ipc.store.store import Store
from ipc.store.wishes import Wishes
from ipc.wire.catalogs import Replied, Spread
from ipc.wire.messages import ModelStatus
from tests.fakes.channel import FakeChannel


def control_of(tmp_path: Path, mode: str, *statuses: ModelStatus) -> RepositoryControl:
    """That of a frontend of a server in `tmp_path`, whose worker says this of its models."""
    settings = load(None, {"run.dir": str(tmp_path), "repository.control": mode}, {})
    prepare_run_dir(settings.paths)
    store = Store(settings.paths)
    asyncio.run(Wishes(settings.paths, store).put("add", Wish(loaded=False)))
    channels = [FakeChannel(0, {status.name: status for status in statuses})]
    workers = Workers(settings.paths, settings, "frontend-0")
    client: Any = SimpleNamespace(channels=channels, workers=workers)
    services: Any = SimpleNamespace(
        settings=settings,
        store=store,
        catalog=Catalog(()),
        bodies=BodyReader(settings.limits),
        directory=LocalDirectory(settings, Catalog(()), client),
    )
    return RepositoryControl(services)


def test_where_it_is_not_explicit_everything_by_name_is_refused(tmp_path: Path) -> None:
    control = control_of(tmp_path, "none")
    for asked in (control.load("add", {}, deadline.after(60)), control.unload("add", {}, deadline.after(60))):
        with pytest.raises(ControlDisabled, match=r"^explicit model load / unload is not allowed") as caught:
            asyncio.run(asked)
        assert caught.value.status == 503 and not caught.value.retryable
    assert control.wished("add") is None


def test_what_was_unloaded_by_name_is_known(tmp_path: Path) -> None:
    control = control_of(tmp_path, "explicit")
    assert control.wished("add") is False and control.wished("other") is None


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
        asyncio.run(control.load("add", parameters, deadline.after(60)))
    assert control.wished("add") is False


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


def test_a_load_of_an_unknown_name_has_the_files_read_and_is_refused_without_a_wait(tmp_path: Path) -> None:
    control = control_of(tmp_path, "explicit")
    services: Any = control._services
    read = []

    async def reread(until_ns: int) -> bool:
        read.append(until_ns)
        return False

    async def wait(done: Callable[[], bool], until_ns: int) -> None:
        assert done(), "nothing is waited for"

    services.directory.reread, services.directory._client.wait = reread, wait
    services.directory._follower.read_ns = 1
    services.tensor_models = TensorModels(services.directory, services.settings, control.wished)
    with pytest.raises(ModelLoadFailed, match="failed to load 'nope', the repository has no such model"):
        asyncio.run(control.load("nope", {}, deadline.after(60)))
    assert len(read) == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (InvalidInput("the model files have mistakes; see the log"), "model files have mistakes"),
        (DeadlineExceeded("late"), "the workers have not read its files yet; try again"),
    ],
)
def test_a_load_says_why_the_files_could_not_be_read(tmp_path: Path, error: Exception, words: str) -> None:
    control = control_of(tmp_path, "explicit")

    async def reread(until_ns: int) -> bool:
        raise error

    control._services.directory.reread = reread  # type: ignore[method-assign,assignment]
    with pytest.raises(ModelLoadFailed, match=f"^failed to load 'm', {words}"):
        asyncio.run(control.load("m", {}, deadline.after(60)))


def test_before_a_worker_has_told_its_models_an_unload_is_remembered(tmp_path: Path) -> None:
    control = control_of(tmp_path, "explicit")
    services: Any = control._services

    async def wait(done: Callable[[], bool], until_ns: int) -> None:
        assert not done()
        raise DeadlineExceeded("no worker")

    services.directory._client.wait = wait
    services.tensor_models = TensorModels(services.directory, services.settings, control.wished)
    with pytest.raises(NoReplica, match="no worker is up"):
        services.tensor_models.find("m")
    with pytest.raises(NoReplica, match="no worker is up"):
        control.index()
    asyncio.run(control.unload("m", {}, deadline.after(60)))
    assert control.wished("m") is False


def test_an_unload_ends_what_a_load_brought_although_no_worker_is_up(tmp_path: Path) -> None:
    control = control_of(tmp_path, "explicit")
    services: Any = control._services

    async def wait(done: Callable[[], bool], until_ns: int) -> None:
        if not done():
            raise DeadlineExceeded("no worker")

    services.directory._client.wait, services.directory._client.channels = wait, []
    services.tensor_models = TensorModels(services.directory, services.settings, control.wished)

    async def load_and_unload() -> None:
        await control.wishes.put("m", Wish(True, "{}"))
        await control.unload("m", {}, deadline.after(60))

    asyncio.run(load_and_unload())
    assert control.wished("m") is False and not control.wishes.brought()


def test_an_unload_says_nothing_to_workers_once_the_model_is_loaded_by_name(tmp_path: Path) -> None:
    control = control_of(tmp_path, "explicit")
    client: Any = control._services.directory._client  # type: ignore[attr-defined]
    told: list[str] = []

    async def wait(done: Callable[[], bool], until_ns: int) -> None:
        await control.wishes.wish_loaded("m")

    async def unload(entry: str, waits: bool, until: Any) -> None:
        told.append(entry)

    client.wait, client.demand = wait, SimpleNamespace(unload=unload)
    asyncio.run(control._unload_entry("m@1", deadline.after(UNLOAD_S)))
    assert not told and control.wished("m") is True


@pytest.mark.parametrize("lives", [True, False])
def test_a_frontend_that_starts_waits_for_the_models_of_workers_that_live_and_for_no_others(
    tmp_path: Path, lives: bool
) -> None:
    control = control_of(tmp_path, "explicit")
    services: Any = control._services
    looks: list[bool] = []

    async def wait(done: Callable[[], bool], until_ns: int) -> None:
        assert deadline.remaining_s(until_ns) <= LEARN_S
        looks.append(done())
        services.directory._follower.read_ns = 1
        looks.append(done())

    services.directory._client.wait = wait
    socket, lock = services.settings.paths.worker_socket(0), services.settings.paths.lock("worker-0")
    socket.touch()
    with SlotLock(lock) if lives else contextlib.nullcontext():
        asyncio.run(control.begin())
    assert looks == [not lives, True]


def test_a_change_is_told_once_all_frontends_of_living_workers_know(tmp_path: Path) -> None:
    control = control_of(tmp_path, "explicit")
    services: Any = control._services
    channels: list[Any] = [FakeChannel(slot, responsive=slot < 3) for slot in range(4)]
    asked: list[asyncio.Future[Replied]] = []
    looks: list[bool] = []

    def ask(make: Callable[[int], Spread]) -> asyncio.Future[Replied]:
        assert make(7) == Spread(7)
        asked.append(asyncio.get_running_loop().create_future())
        return asked[-1]

    async def wait(done: Callable[[], bool], until_ns: int) -> None:
        looks.append(done())
        asked[0].set_result(Replied(7))
        asked[1].set_result(Replied(7))
        looks.append(done())
        channels[2].responsive = False
        looks.append(done())

    for channel in channels:
        channel.ask = ask
    services.directory._client.channels, services.directory._client.wait = channels, wait
    asyncio.run(services.directory.spread(deadline.after(60)))
    assert looks == [False, False, True]
    assert len(asked) == 3 and asked[2].cancelled()
