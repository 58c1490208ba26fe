"""Loads that bring something, in the frontend: what is taken back when one fails, and the memory that they hold."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.engine.local.engine import LocalDirectory
from frontend.http.bodies import BodyReader
from frontend.tensors import control
from frontend.tensors.control import LONG_NBYTES, Brought, RepositoryControl
from frontend.tensors.request import UnavailableModel
from ipc import deadline
from ipc.catalog.entries import Catalog
from ipc.catalog.repository import Wish
from ipc.errors import BodyTooLarge, DeadlineExceeded, InvalidInput, ModelLoadFailed
from ipc.processes.paths import prepare_run_dir
from ipc.settings import Settings, load
from ipc.store.store import Store
from ipc.store.wishes import Wishes
from tests.tiny.program_sources import IDENTITY
from workers.repository.entries import refuse_draft

PROGRAM = IDENTITY.encode()


class Workers(LocalDirectory):
    """One worker that looks at drafts as a real one does, and reads nothing; `refuses` makes the files wrong."""

    def __init__(self, settings: Settings, wishes: Wishes) -> None:
        super().__init__(settings, Catalog(()), SimpleNamespace(channels=[]))  # type: ignore[arg-type]
        self.refuses, self._wishes, self._repository = False, wishes, settings.repository

    async def reread(self, until_ns: int, model: str = "", draft: Wish | None = None) -> bool:
        """One look."""
        if draft is not None:
            refuse_draft(self._repository, self._wishes, model, draft)
        elif self.refuses:
            raise InvalidInput("the model files have mistakes; the server's log names them")
        return True

    async def spread(self, until_ns: int) -> None:
        """No other frontend has to hear."""


@pytest.fixture
def services(tmp_path: Path) -> Any:
    """Those of a frontend whose loads may bring 100 kB of files."""
    chosen = {
        "run.dir": str(tmp_path / "run"),
        "repository.control": "explicit",
        "repository.allow_files": "true",
        "repository.allow_python": "true",
        "repository.max_upload_bytes": "100000",
    }
    settings: Settings = load(None, chosen, {})
    prepare_run_dir(settings.paths)
    store = Store(settings.paths)
    return SimpleNamespace(
        settings=settings,
        store=store,
        catalog=Catalog(()),
        directory=Workers(settings, Wishes(settings.paths, store)),
        bodies=BodyReader(settings.limits),
    )


@pytest.fixture
def wishes(services: Any) -> Wishes:
    """Those in the run directory."""
    return Wishes(services.settings.paths, services.store)


def brought(config: str = "{}") -> Brought:
    return Brought(config, {"1/model.py": PROGRAM})


def left(wishes: Wishes) -> list[str]:
    """The models that a load brought, and what lies in the directory beside the lock."""
    files = [path.name for path in wishes.directory.iterdir() if path.name != ".lock"]
    return [*wishes.brought(), *files]


async def unavailable(model: str, deadline_ns: int) -> None:
    """No worker has told a model of that name."""
    raise UnavailableModel(model, None, "model")


async def put(services: Any, what: Brought, model: str = "m") -> None:
    """A load that succeeds."""
    async with RepositoryControl(services).change(model, what, deadline.after(60)):
        pass


def test_memory_counts_until_the_files_are_written_and_no_longer(services: Any, wishes: Wishes) -> None:
    what, bodies = brought(), services.bodies

    async def work() -> None:
        change = RepositoryControl(services).change("m", what, deadline.after(60))
        async with wishes.locked(deadline.after(60)):
            waiting = asyncio.create_task(change.__aenter__())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting), 0.05)
            assert bodies.held_nbytes == what.nbytes == len(PROGRAM), "while it waits for another load"
        await waiting
        assert (bodies.held_nbytes, what.files) == (0, {}), "while its model is loaded"
        await change.__aexit__(None, None, None)

    asyncio.run(work())
    assert len(left(wishes)) == 2


def test_a_load_that_waits_too_long_for_another_is_told_so(services: Any, wishes: Wishes) -> None:
    change = RepositoryControl(services).change("m", brought(), deadline.after(0))

    async def work() -> None:
        async with wishes.locked(deadline.after(60)), change:
            raise AssertionError

    with pytest.raises(DeadlineExceeded, match="before another load with parameters had ended"):
        asyncio.run(work())
    assert services.bodies.held_nbytes == 0 and not left(wishes)


@pytest.mark.parametrize("error", [ModelLoadFailed("no"), asyncio.CancelledError(), RuntimeError()])
def test_a_load_that_fails_leaves_what_was_before(
    services: Any, wishes: Wishes, error: BaseException
) -> None:
    async def work() -> None:
        await put(services, brought())
        before = wishes.get("m")
        with pytest.raises(type(error)):
            async with RepositoryControl(services).change(
                "m", brought('{"max_batch_size": 2}'), deadline.after(60)
            ):
                assert wishes.get("m") != before
                raise error
        assert wishes.get("m") == before is not None
        assert len(left(wishes)) == 2

    asyncio.run(work())


@pytest.mark.parametrize("unloaded", [True, False])
def test_a_load_that_fails_does_not_undo_an_unload_of_meanwhile(services: Any, unloaded: bool) -> None:
    async def work() -> None:
        control = RepositoryControl(services)
        with pytest.raises(ModelLoadFailed):
            async with control.change("m", brought(), deadline.after(60)):
                assert control.wished("m") is True
                if unloaded:
                    await control.wishes.put("m", Wish(loaded=False))
                raise ModelLoadFailed("no")
        assert control.wished("m") is (False if unloaded else None)
        assert not left(control.wishes)

    asyncio.run(work())


def test_a_load_whose_wish_cannot_be_written_leaves_nothing(
    services: Any, wishes: Wishes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(self: Wishes, model: str, wish: Wish, until_ns: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Wishes, "put", full)
    with pytest.raises(ModelLoadFailed, match="cannot be kept: No space left"):
        asyncio.run(put(services, brought()))
    assert not left(wishes)


def test_a_load_leaves_nothing_when_the_wish_of_before_cannot_be_read(
    services: Any, wishes: Wishes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(self: Wishes, model: str) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Wishes, "get", unreadable)
    with pytest.raises(ModelLoadFailed, match="cannot be kept: Too many open files"):
        asyncio.run(put(services, brought()))
    assert not left(wishes)


def test_files_of_a_client_that_has_gone_are_deleted_before_the_next_load(
    services: Any, wishes: Wishes, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()
    real = Wishes.draft

    def slow(self: Wishes, model: str, config: str, files: Mapping[str, bytes]) -> Any:
        writing.set()
        assert go_on.wait(60)
        return real(self, model, config, files)

    async def work() -> None:
        monkeypatch.setattr(Wishes, "draft", slow)
        loading = asyncio.create_task(put(services, brought()))
        await asyncio.to_thread(writing.wait, 20)
        loading.cancel()
        with pytest.raises(DeadlineExceeded):
            await wishes.locked(deadline.after(0.1)).__aenter__()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert not left(wishes)
        async with wishes.locked(deadline.after(0)):
            pass

    asyncio.run(work())


def test_what_cannot_be_served_or_kept_leaves_nothing(services: Any, wishes: Wishes) -> None:
    long = Brought('{"default_model_filename": "' + "x" * 300 + '.py"}', {"1/model.py": PROGRAM})
    large = Brought("{}", {"1/model.py": PROGRAM, "more": b"x" * 100_000})
    broken = Brought("{}", {"1/" + "x" * 300: PROGRAM})
    for what, error in ((long, InvalidInput), (large, BodyTooLarge), (broken, ModelLoadFailed)):
        with pytest.raises(error, match="failed to load 'm', "):
            asyncio.run(put(services, what))
        assert not left(wishes)
    with pytest.raises(ModelLoadFailed, match="failed to load"):
        asyncio.run(put(services, brought(), "\U0001f600" * 100))
    assert not left(wishes)


def test_files_that_a_dead_process_left_do_not_count(services: Any, wishes: Wishes) -> None:
    wishes.draft("m", "{}", {"1/model.py": b"x" * 99_999})
    asyncio.run(put(services, brought()))
    assert len(left(wishes)) == 2


def test_an_unload_ends_what_a_load_brought_whatever_the_files_say(services: Any, wishes: Wishes) -> None:
    asyncio.run(put(services, brought()))
    services.directory.refuses = True
    services.tensor_models = SimpleNamespace(told_versions=unavailable)
    asyncio.run(RepositoryControl(services).unload("m", {}, deadline.after(60)))
    assert not left(wishes) and wishes.loaded("m") is False


def test_an_unload_of_an_unknown_name_leaves_no_row(services: Any, wishes: Wishes) -> None:
    services.tensor_models = SimpleNamespace(told_versions=unavailable)
    asyncio.run(RepositoryControl(services).unload("m", {}, deadline.after(60)))
    assert wishes.get("m") is None


def test_an_unload_during_a_load_that_brings_something_ends_what_was_in_force_before_too(
    services: Any, wishes: Wishes
) -> None:
    """The unload waits for no load, and the load that fails then restores nothing."""
    services.tensor_models = SimpleNamespace(told_versions=unavailable)

    async def work() -> None:
        await put(services, brought())
        control = RepositoryControl(services)
        with pytest.raises(ModelLoadFailed):
            async with control.change("m", brought('{"max_batch_size": 2}'), deadline.after(60)):
                await control.unload("m", {}, deadline.after(60))
                raise ModelLoadFailed("the load was given up")
        assert wishes.loaded("m") is False and not left(wishes)

    asyncio.run(work())


def test_a_load_is_told_that_it_was_given_up_though_the_model_is_wished_loaded_again(
    services: Any, wishes: Wishes
) -> None:
    services.tensor_models = SimpleNamespace(told_versions=unavailable)

    async def work() -> None:
        control = RepositoryControl(services)
        with pytest.raises(ModelLoadFailed, match="given up: the model was unloaded meanwhile"):
            async with control.change("m", brought(), deadline.after(60)):
                await control.unload("m", {}, deadline.after(60))
                await control.wishes.wish_loaded("m")
        assert wishes.get("m") == Wish(loaded=True) and not left(wishes)

    asyncio.run(work())


@pytest.mark.parametrize(("nbytes", "thread"), [(100, "MainThread"), (LONG_NBYTES + 1, "render")])
def test_long_parameters_are_read_by_a_thread_and_forgotten(
    services: Any, monkeypatch: pytest.MonkeyPatch, nbytes: int, thread: str
) -> None:
    seen, real = list[str](), control.read_brought

    def read(parameters: Mapping[str, Any], settings: Settings) -> Brought | None:
        seen.append(threading.current_thread().name)
        assert services.bodies.held_nbytes >= nbytes
        return real(parameters, settings)

    monkeypatch.setattr(control, "read_brought", read)
    given = {"config": "[]", "file:1/model.py": b"x" * nbytes}
    with pytest.raises(InvalidInput, match="failed to load 'm', config"):
        asyncio.run(RepositoryControl(services).load("m", given, deadline.after(60)))
    assert seen[0].startswith(thread) and not given and services.bodies.held_nbytes == 0
