"""Loads that bring something, in the frontend: what is taken back when one fails, and the memory that they hold."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.engine.local.directory import LocalDirectory
from frontend.http.bodies import BodyReader
from frontend.tensors import load_parameters
from frontend.tensors.control import LONG_NBYTES, RepositoryControl
from frontend.tensors.load_parameters import Brought
from frontend.tensors.overriding import Overriding
from ipc import deadline
from ipc.catalog.entries import Catalog
from ipc.catalog.repository import Override
from ipc.errors import BodyTooLarge, DeadlineExceeded, InvalidInput, ModelLoadFailed
from ipc.processes.paths import prepare_run_dir
from ipc.settings import Settings, load
from ipc.store.overrides import Overrides
from ipc.store.store import Marks, Store
from tests.tiny.program_sources import IDENTITY
from workers.repository.entries import refuse_draft

PROGRAM = IDENTITY.encode()


class Workers(LocalDirectory):
    """One worker that looks at drafts as a real one does, and reads nothing; `refuses` makes the files wrong."""

    def __init__(self, settings: Settings, overrides: Overrides) -> None:
        super().__init__(settings, Catalog(()), SimpleNamespace(channels=[]))  # type: ignore[arg-type]
        self.refuses, self._overrides, self._repository = False, overrides, settings.repository

    async def reread(self, until_ns: int, draft: Override | None = None) -> bool:
        """One look."""
        if draft is not None:
            refuse_draft(self._repository, self._overrides, draft)
        elif self.refuses:
            raise InvalidInput("the model files have mistakes; the server's log names them")
        return True


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
        directory=Workers(settings, Overrides(settings.paths, store)),
        bodies=BodyReader(settings.limits),
    )


@pytest.fixture
def overrides(services: Any) -> Overrides:
    """Those in the run directory."""
    return Overrides(services.settings.paths, services.store)


def overriding_of(services: Any) -> Overriding:
    return Overriding(services, Marks(services.store))


def brought(config: str = "{}") -> Brought:
    return Brought(config, {"1/model.py": PROGRAM})


def left(overrides: Overrides) -> list[str]:
    """The models with overrides, and what lies in the directory beside the lock."""
    files = [path.name for path in overrides.directory.iterdir() if path.name != ".lock"]
    return [*overrides.read(), *files]


async def put(services: Any, what: Brought, model: str = "m") -> None:
    """A load that succeeds."""
    async with overriding_of(services).change(model, what, deadline.after(5)):
        pass


def test_memory_counts_until_the_files_are_written_and_no_longer(services: Any, overrides: Overrides) -> None:
    what, bodies = brought(), services.bodies

    async def work() -> None:
        change = overriding_of(services).change("m", what, deadline.after(5))
        async with overrides.locked(deadline.after(1)):
            waiting = asyncio.create_task(change.__aenter__())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting), 0.05)
            assert bodies.held_nbytes == what.nbytes == len(PROGRAM), "while it waits for another load"
        await waiting
        assert (bodies.held_nbytes, what.files) == (0, {}), "while its model is loaded"
        await change.__aexit__(None, None, None)

    asyncio.run(work())
    assert len(left(overrides)) == 2


def test_a_load_that_waits_too_long_for_another_is_told_so(services: Any, overrides: Overrides) -> None:
    change = overriding_of(services).change("m", brought(), deadline.after(0))

    async def work() -> None:
        async with overrides.locked(deadline.after(1)), change:
            raise AssertionError

    with pytest.raises(DeadlineExceeded, match="before another load with parameters had ended"):
        asyncio.run(work())
    assert services.bodies.held_nbytes == 0 and not left(overrides)


@pytest.mark.parametrize("error", [ModelLoadFailed("no"), asyncio.CancelledError(), RuntimeError()])
def test_a_load_that_fails_leaves_what_was_before(
    services: Any, overrides: Overrides, error: BaseException
) -> None:
    async def work() -> None:
        await put(services, brought())
        before = overrides.get("m")
        with pytest.raises(type(error)):
            async with overriding_of(services).change(
                "m", brought('{"max_batch_size": 2}'), deadline.after(5)
            ):
                assert overrides.get("m") != before
                raise error
        assert overrides.get("m") == before is not None
        assert len(left(overrides)) == 2

    asyncio.run(work())


@pytest.mark.parametrize("unloaded", [True, False])
def test_a_load_that_fails_does_not_undo_an_unload_of_meanwhile(services: Any, unloaded: bool) -> None:
    async def work() -> None:
        overriding = overriding_of(services)
        marks = overriding._marks
        with pytest.raises(ModelLoadFailed):
            async with overriding.change("m", brought(), deadline.after(5)):
                assert marks.get("m") is True
                if unloaded:
                    await marks.put("m", loaded=False)
                raise ModelLoadFailed("no")
        assert marks.get("m") is (False if unloaded else None)

    asyncio.run(work())


def test_a_load_whose_mark_cannot_be_written_leaves_nothing(
    services: Any, overrides: Overrides, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(self: Marks, model: str, *, loaded: bool, until_ns: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Marks, "put", full)
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(put(services, brought()))
    assert not left(overrides)


def test_files_of_a_client_that_has_gone_are_deleted_before_the_next_load(
    services: Any, overrides: Overrides, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()
    real = Overrides.draft

    def slow(self: Overrides, model: str, config: str, files: Mapping[str, bytes]) -> Any:
        writing.set()
        assert go_on.wait(60)
        return real(self, model, config, files)

    async def work() -> None:
        monkeypatch.setattr(Overrides, "draft", slow)
        loading = asyncio.create_task(put(services, brought()))
        await asyncio.to_thread(writing.wait, 20)
        loading.cancel()
        with pytest.raises(DeadlineExceeded):
            await overrides.locked(deadline.after(0.1)).__aenter__()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert not left(overrides)
        async with overrides.locked(deadline.after(0)):
            pass

    asyncio.run(work())


def test_what_cannot_be_served_or_kept_leaves_nothing(services: Any, overrides: Overrides) -> None:
    long = Brought('{"default_model_filename": "' + "x" * 300 + '.py"}', {"1/model.py": PROGRAM})
    large = Brought("{}", {"1/model.py": PROGRAM, "more": b"x" * 100_000})
    broken = Brought("{}", {"1/" + "x" * 300: PROGRAM})
    for what, error in ((long, InvalidInput), (large, BodyTooLarge), (broken, ModelLoadFailed)):
        with pytest.raises(error, match="failed to load 'm', "):
            asyncio.run(put(services, what))
        assert not left(overrides)
    with pytest.raises(ModelLoadFailed, match="failed to load"):
        asyncio.run(put(services, brought(), "\U0001f600" * 100))
    assert not left(overrides)


def test_files_that_a_dead_process_left_do_not_count(services: Any, overrides: Overrides) -> None:
    overrides.draft("m", "{}", {"1/model.py": b"x" * 99_999})
    asyncio.run(put(services, brought()))
    assert len(left(overrides)) == 2


def test_an_unload_ends_an_override_whatever_the_files_say(services: Any, overrides: Overrides) -> None:
    asyncio.run(put(services, brought()))
    services.directory.refuses = True
    overriding = overriding_of(services)
    assert asyncio.run(overriding.end("m", deadline.after(1))) is False, "the load is later than the unload"
    assert len(left(overrides)) == 2
    asyncio.run(overriding._marks.put("m", loaded=False))
    assert asyncio.run(overriding.end("m", deadline.after(1))) is True
    assert not left(overrides)
    assert asyncio.run(overriding.end("m", deadline.after(1))) is False


@pytest.mark.parametrize(("nbytes", "thread"), [(100, "MainThread"), (LONG_NBYTES + 1, "render")])
def test_long_parameters_are_read_by_a_thread_and_forgotten(
    services: Any, monkeypatch: pytest.MonkeyPatch, nbytes: int, thread: str
) -> None:
    seen, real = list[str](), load_parameters.read

    def read(parameters: Mapping[str, Any], settings: Settings) -> Brought | None:
        seen.append(threading.current_thread().name)
        assert services.bodies.held_nbytes >= nbytes
        return real(parameters, settings)

    monkeypatch.setattr(load_parameters, "read", read)
    given = {"config": "[]", "file:1/model.py": b"x" * nbytes}
    with pytest.raises(InvalidInput, match="failed to load 'm', config"):
        asyncio.run(RepositoryControl(services).load("m", given, deadline.after(5)))
    assert seen[0].startswith(thread) and not given and services.bodies.held_nbytes == 0
