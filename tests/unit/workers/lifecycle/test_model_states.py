"""Models that are wanted again while they are unloaded or given up, changed ones, a catalog that cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ipc import settings
from ipc.catalog.entries import Catalog, DirectorySource, ModelEntry
from ipc.catalog.model_config import ROW_COST, ModelConfig
from ipc.catalog.repository import Wish
from ipc.errors import InvalidInput, ModelLoadFailed, ProtocolError
from ipc.metrics.registry import WorkerMetrics
from ipc.processes.paths import prepare_run_dir
from ipc.store.store import Store
from ipc.store.wishes import Wishes
from ipc.wire.catalogs import Replied, Reread
from tests.fakes.adapter import FakeAdapter
from workers.device.devices import Device
from workers.lifecycle import catalog_following, loading
from workers.lifecycle.instance import Instance
from workers.lifecycle.loading import Loaded
from workers.lifecycle.memory_budget import Budget
from workers.lifecycle.model_states import ServedModel
from workers.lifecycle.models import ModelTable
from workers.loading.failure import LoadFailure
from workers.repository.catalog_files import CatalogWatch
from workers.repository.entries import RepositoryEntry
from workers.scheduling.bound import ModelBudgets
from workers.scheduling.job_table import JobTable

ENTRY = ModelEntry("org/m", DirectorySource("/weights"), adapter="tests.fakes.weighing:WeighingAdapter")


class _Metrics:
    """Counts nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *labels: object) -> Any:
        return self


def at_once(work: Callable[[], object]) -> Future[object]:
    """Do `work` as the device thread does between two batches."""
    done = Future[object]()
    done.set_result(work())
    return done


def table(root: Path, *entries: ModelEntry, **flags: str) -> ModelTable:
    """The models of a worker whose threads are not started; `flags` as `section__field`."""
    import torch

    named = {name.replace("__", "."): value for name, value in flags.items()}
    flags = {"run.dir": str(root), "worker.memory_budget_bytes": "1000", **named}
    config = settings.load(flags=flags, environ={})
    device = cast("Device", SimpleNamespace(torch=torch.device("cpu"), name="cpu"))
    book = cast("JobTable", SimpleNamespace(adapters=set))
    metrics = cast("WorkerMetrics", _Metrics())
    catalog = Catalog(entries or [ENTRY])
    budgets = ModelBudgets(2048)
    queue = SimpleNamespace(call=at_once)
    context: Any = SimpleNamespace(settings=config, metrics=metrics, jobs=book, budgets=budgets, queue=queue)
    return ModelTable(catalog, 0, device, context, lambda: None)


def unloading(models: ModelTable) -> Instance:
    """The instance, loaded and on its way out."""
    host = models.find("org/m")
    assert host is not None
    host.instance.begin(demanded=True)
    host.instance.succeed(FakeAdapter({}, 512), 100, 1.0, 1.0)
    models.unload("org/m")
    assert host.instance.state == "unloading"
    return host.instance


def end(models: ModelTable, instance: Instance) -> None:
    """What goes on with it has ended, and nothing is held."""
    with models._states.lock:
        models._states.end(instance, instance.rest)


class Program(FakeAdapter):
    """Takes four rows in a batch."""

    config = ModelConfig("small", max_batch_size=4)  # type: ignore[assignment]


def test_the_limits_of_batches_follow_the_models_that_are_served(tmp_path: Path) -> None:
    source, adapter = DirectorySource("/weights"), ENTRY.adapter
    small = ModelEntry("org/small", source, adapter, max_batch_tokens=64)
    large = ModelEntry("org/large", source, adapter, max_batch_tokens=1 << 20)
    models = table(tmp_path, ENTRY, small, large)
    models.changes()
    budgets = models._budgets
    assert [budgets.tokens_of(name) for name in ("org/m", "org/small", "org/large")] == [2048, 64, 2048]
    host = models.find("org/small")
    assert host is not None
    host.instance.begin(demanded=True)
    host.instance.succeed(Program({}, 512), 100, 1.0, 1.0)
    with models._states.lock:
        models._states.announce(host.instance)
        models.changes()
        assert budgets.tokens_of("org/small") == 4 * ROW_COST
        models._states.serve(Catalog([ENTRY, large]))
    models.changes()
    assert budgets.tokens_of("org/small") == 2048, "of a model that is gone no number is kept"


def test_a_model_that_is_wanted_while_it_is_unloaded_is_loaded_again(tmp_path: Path) -> None:
    models = table(tmp_path)
    instance = unloading(models)
    models.want("org/m")
    assert instance.state == "unloading"
    end(models, instance)
    assert (instance.state, instance.demanded, instance.attempts) == ("loading", True, 2)
    assert models._states.due.next(lambda each: True) is instance


def test_the_last_word_counts(tmp_path: Path) -> None:
    models = table(tmp_path)
    instance = unloading(models)
    models.want("org/m")
    models.unload("org/m")
    end(models, instance)
    assert instance.state == "available"


def test_a_model_that_the_catalog_has_lost_is_not_loaded_again(tmp_path: Path) -> None:
    models = table(tmp_path)
    instance = unloading(models)
    models.want("org/m")
    with models._states.lock:
        models._states.serve(Catalog([ModelEntry("org/other", ENTRY.source)]))
    end(models, instance)
    assert instance.state == "available" and instance not in models._states.instances()


def test_a_load_that_is_wanted_after_it_was_given_up_begins_anew(tmp_path: Path) -> None:
    models = table(tmp_path)
    models.want("org/m")
    instance = models._states.due.next(lambda each: True)
    assert instance is not None
    models.unload("org/m")
    models.want("org/m")
    end(models, instance)
    assert instance.state == "loading", "its thread had seen that nobody wanted it"


def test_requests_leave_a_model_its_place_in_the_line(tmp_path: Path) -> None:
    names = ["org/m", "org/second", "org/start"]
    models = table(tmp_path, *(ModelEntry(name, ENTRY.source) for name in names))
    due = models._states.due
    start = models.find("org/start")
    assert start is not None
    with models._states.lock:
        models._states.enqueue(start.instance, demanded=False)
    for name in ("org/m", "org/second", "org/m", "org/start", "org/m", "org/start"):
        models.want(name)
    begun = [due.next(lambda each: True) for _ in range(4)]
    assert [each and each.name for each in begun] == [*names, None]


def test_what_an_operator_unloaded_is_loaded_for_no_request(tmp_path: Path) -> None:
    """The request's word may come after the unload, from a frontend that saw the model loaded by name before."""
    models = table(tmp_path, version("old"), ENTRY, repository__control="explicit")
    paths = settings.load(flags={"run.dir": str(tmp_path)}, environ={}).paths
    prepare_run_dir(paths)
    wishes = Wishes(paths, Store(paths))
    asyncio.run(wishes.put("m", Wish(loaded=False)))
    models.want("m@1")
    assert host(models).instance.state == "available"
    models.want("m@1", explicit=True)
    assert host(models).instance.state == "loading"
    asyncio.run(wishes.put("org/m", Wish(loaded=False)))
    models.want("org/m")
    found = models.find("org/m")
    assert found is not None and found.instance.state == "loading", "SIE's requests load whatever they name"


def test_a_request_is_not_answered_by_a_load_while_nobody_can_say_what_was_unloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def short(self: Wishes, model: str) -> bool | None:
        raise OSError(24, "Too many open files")

    models = table(tmp_path, version("old"), repository__control="explicit")
    monkeypatch.setattr(Wishes, "get", short)
    models.want("m@1")
    assert host(models).instance.state == "available" and "Too many open files" in caplog.text


@pytest.mark.parametrize("unloaded", [True, False])
def test_a_load_of_the_start_does_not_outlast_an_unload_that_it_was_not_told_of(
    tmp_path: Path, unloaded: bool
) -> None:
    models = table(tmp_path, version("old"), repository__control="explicit")
    instance = host(models).instance
    with models._states.lock:
        models._states.enqueue(instance, demanded=False)
    paths = settings.load(flags={"run.dir": str(tmp_path)}, environ={}).paths
    prepare_run_dir(paths)
    asyncio.run(Wishes(paths, Store(paths)).put("m", Wish(loaded=not unloaded)))
    with models._states.lock:
        models._maintenance.models.succeeded(instance, Loaded(FakeAdapter({}, 512), 100), 1.0)
    assert instance.state == ("unloading" if unloaded else "loaded")


def test_a_worker_follows_an_unload_that_no_frontend_told_it_of(tmp_path: Path) -> None:
    models = table(tmp_path, version("old"), repository__control="explicit", catalog__watch="false")
    paths = settings.load(flags={"run.dir": str(tmp_path)}, environ={}).paths
    prepare_run_dir(paths)
    wishes, instance = Wishes(paths, Store(paths)), host(models).instance

    def load() -> None:
        models.want("m@1", explicit=True)
        with models._states.lock:
            models._maintenance.models.succeeded(instance, Loaded(FakeAdapter({}, 512), 100), 1.0)

    load()
    asyncio.run(wishes.put("m", Wish(loaded=True)))
    models._follower.look()
    assert instance.state == "loaded"
    asyncio.run(wishes.put("m", Wish(loaded=False)))
    models._follower.look()
    assert instance.state == "unloading"
    with models._states.lock:
        models._states.end(instance, instance.rest)
    load()
    models._follower.look()
    assert instance.state == "loaded", "by an order that came later than the unload"


def test_a_failed_model_of_the_start_is_not_tried_again_once_somebody_unloads_it(tmp_path: Path) -> None:
    models = table(tmp_path, ENTRY, catalog__preload="org/m")
    found = models.find("org/m")
    assert found is not None and models._states.is_preloaded(found.instance)
    found.instance.begin(demanded=False)
    away = LoadFailure(error_class="NETWORK", permanent=False, retry_after_s=30.0, message="the hub is away")
    with models._states.lock:
        models._states.end(found.instance, partial(found.instance.fail, away, 1.0))
    models.unload("org/m")
    with models._states.lock:
        models._maintenance._try_again(31.0)
    assert found.instance.state == "available"


@pytest.mark.parametrize("error", [OSError("gone"), ValueError("strange"), RecursionError("deep")])
def test_whatever_a_look_at_the_catalog_finds_the_thread_lives(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    models = table(tmp_path)

    class Watch:
        """Cannot look."""

        def changed(self) -> bool:
            """It fails."""
            raise error

    models._follower._watch = cast("CatalogWatch", Watch())
    models._follower.look()
    assert "the old catalog stays" in caplog.text and list(models._states.served) == ["org/m"]


MODEL = (
    "id: org/{}\nsource: {{kind: directory, path: /weights}}\nadapter: tests.fakes.weighing:WeighingAdapter\n"
)


def test_a_frontend_has_changed_files_read_at_once_and_taken_back_ones_do_not_stay(tmp_path: Path) -> None:
    files = tmp_path / "models"
    files.mkdir()
    (files / "m.yaml").write_text(MODEL.format("m"))
    models = table(tmp_path / "run", catalog__dirs=str(files), catalog__watch="false")
    (tmp_path / "run").mkdir()
    models._follower._watch = CatalogWatch([str(files)])
    assert not models._follower.reread(Reread(0))
    (files / "new.yaml").write_text(MODEL.format("new"))
    assert models._follower.reread(Reread(0)) and sorted(models._states.served) == ["org/m", "org/new"]
    (files / "new.yaml").unlink()
    assert models._follower.reread(Reread(0)) and sorted(models.catalog) == ["org/m"]
    files.rename(tmp_path / "gone")
    with pytest.raises(InvalidInput, match=r"^the model files have mistakes; the server's log names them"):
        models._follower.reread(Reread(0))
    assert list(models._states.served) == ["org/m"]


def test_the_maintenance_thread_answers_who_asks(tmp_path: Path) -> None:
    models = table(tmp_path)
    answers: list[Replied] = []
    models.reread(Reread(1, "m", Wish(True, "{}")), answers.append)
    models.reread(Reread(2), answers.append)
    for work in models._maintenance._asked:
        work()
    refused, unchanged = answers
    assert (refused.id, refused.code) == (1, ModelLoadFailed.code)
    assert "the repository has no such model" in refused.message
    assert unchanged.id == 2 and not unchanged.code

    def stumble(message: Reread) -> bool:
        raise KeyError("unforeseen")

    models._follower.reread = stumble  # type: ignore[method-assign]
    models.reread(Reread(3), answers.append)
    models._maintenance._asked[-1]()
    assert (answers[-1].id, bool(answers[-1].code)) == (3, True), "the thread lives"


FAILURE = LoadFailure(error_class="UNKNOWN", permanent=True, retry_after_s=None, message="no such program")


def version(revision: str, number: int = 1) -> RepositoryEntry:
    """A version of a repository model, with files of that revision."""
    return RepositoryEntry(
        id=f"m@{number}",
        source=ENTRY.source,
        adapter=ENTRY.adapter,
        model="m",
        version=number,
        config=ModelConfig("m"),
        directory="/nowhere",
        code=revision,
    )


def load(models: ModelTable, instance: Instance) -> None:
    """Its load begins, if it has not, and ends well."""
    if instance.state != "loading":
        instance.begin(demanded=True)
    with models._states.lock:
        how = partial(instance.succeed, FakeAdapter({}, 512), 100, 1.0, 1.0)
        models._states.end(instance, how)


def changed(root: Path) -> tuple[ModelTable, Instance, Instance]:
    """A repository model that is loaded, with what serves it, and what is being loaded since its files changed."""
    models = table(root, version("old"))
    old = host(models).instance
    load(models, old)
    models._follower.apply(Catalog([version("new")]))
    coming = host(models).next
    assert coming is not None
    return models, old, coming.instance


def host(models: ModelTable) -> ServedModel:
    """That of the repository model."""
    found = models.find("m@1")
    assert found is not None
    return found


def told(models: ModelTable) -> tuple[str, str, str, str]:
    """State, revision, the one that is coming, and the error of the repository model, as frontends see them."""
    [status] = models.statuses()
    return status.state, status.revision, status.next, status.error_message


def refuse(models: ModelTable, instance: Instance) -> None:
    """Its load ends badly."""
    with models._states.lock:
        models._states.end(instance, partial(instance.fail, FAILURE, 1.0))


def test_a_changed_version_serves_until_the_new_one_is_loaded(tmp_path: Path) -> None:
    models, old, new = changed(tmp_path)
    assert (old.state, new.state, host(models).adapter) == ("loaded", "loading", old.adapter)
    assert told(models) == ("loaded", "old", "new", "")
    load(models, new)
    assert (old.state, old.unload_reason, host(models).adapter) == ("unloading", "catalog", new.adapter)
    assert told(models) == ("loaded", "new", "", "")
    end(models, old)
    assert models._states.instances() == [new]


def test_a_changed_version_that_cannot_be_loaded_replaces_nothing_and_says_why(tmp_path: Path) -> None:
    models, old, new = changed(tmp_path)
    refuse(models, new)
    assert told(models) == ("loaded", "old", "new", "no such program")
    assert models.statuses()[0].attempts == 2
    models._follower.apply(Catalog([version("new")]))
    assert (old.state, new.state, host(models).adapter) == ("loaded", "failed", old.adapter)
    models.want("m@1")
    assert new.state == "failed", "a request is content with the old one"
    models.want("m@1", explicit=True)
    assert new.state == "loading" and told(models) == ("loaded", "old", "new", "")


def test_a_change_that_is_taken_back_leaves_what_serves(tmp_path: Path) -> None:
    models, old, new = changed(tmp_path)
    models._follower.apply(Catalog([version("old")]))
    assert (host(models).instance, told(models)) == (old, ("loaded", "old", "", ""))
    assert new.state == "available" and models._states.instances() == [old]


def test_of_two_changes_the_last_one_counts(tmp_path: Path) -> None:
    models, old, new = changed(tmp_path)
    models._follower.apply(Catalog([version("newest")]))
    assert told(models) == ("loaded", "old", "newest", "") and new.state == "available"
    coming = host(models).next
    assert coming is not None
    load(models, coming.instance)
    assert old.state == "unloading" and told(models) == ("loaded", "newest", "", "")


def test_an_unload_ends_what_serves_and_what_is_coming(tmp_path: Path) -> None:
    models, old, new = changed(tmp_path)
    models.unload("m@1")
    assert (old.state, new.state, told(models)) == ("unloading", "available", ("available", "new", "", ""))
    end(models, old)
    models.want("m@1")
    assert (old.state, new.state) == ("available", "loading") and models._states.instances() == [new]


def test_what_serves_goes_first_where_there_is_no_room_for_both(tmp_path: Path) -> None:
    models, old, new = changed(tmp_path)
    with models._states.lock:
        assert models._states.make_way(new) and not models._states.make_way(new)
    assert (old.state, told(models)) == ("unloading", ("loading", "new", "", ""))


def test_a_changed_version_that_failed_for_a_while_is_tried_again(tmp_path: Path) -> None:
    models, old, new = changed(tmp_path)
    models._states._preloaded.clear()
    away = LoadFailure(error_class="NETWORK", permanent=False, retry_after_s=30.0, message="the hub is away")
    with models._states.lock:
        models._states.end(new, partial(new.fail, away, 1.0))
        models._maintenance._try_again(30.0)
        assert new.state == "failed"
        models._maintenance._try_again(31.0)
    assert (old.state, new.state) == ("loaded", "loading")


def test_nobody_gives_way_to_what_is_then_not_loaded(tmp_path: Path) -> None:
    models, old, new = changed(tmp_path)
    states = models._states
    states.budget = Budget(150, 10**9)
    assert not new.demanded
    # The loading thread waits here for what is unloaded.
    states.lock.wait = lambda timeout=None: bool(end(models, old))  # type: ignore[method-assign,func-returns-value]
    models._maintenance.models._room(new, 1000)
    assert old.state == "available" and host(models).instance is new


def test_a_version_whose_place_was_taken_stays_until_no_request_for_it_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = table(tmp_path, version("old"))
    load(models, host(models).instance)
    follower, wanted = models._follower, Catalog([version("new", 2)])
    follower._coming = wanted
    follower.apply(follower._with_retained(wanted))
    follower._retire_retained()
    assert sorted(models._states.served) == ["m@1", "m@2"], "the new one is not loaded"
    newer = models.find("m@2")
    assert newer is not None
    load(models, newer.instance)
    follower._retire_retained()
    assert host(models).instance.state == "loaded"
    monkeypatch.setattr(catalog_following, "RETIRE_AFTER_S", 0.0)
    follower._retire_retained()
    assert list(models._states.served) == ["m@2"] and follower._coming is None


def test_a_change_of_the_catalog_loads_what_is_new_and_nothing_else(tmp_path: Path) -> None:
    """One that this worker has never tried is another worker's."""
    models = table(tmp_path, version("old"))
    assert models._states.is_preloaded(host(models).instance)
    models._follower.apply(Catalog([version("old"), version("old", 2)]))
    newer = models.find("m@2")
    assert newer is not None
    assert (host(models).instance.state, newer.instance.state) == ("available", "loading")


def test_a_model_of_the_catalog_that_changed_goes_at_once(tmp_path: Path) -> None:
    models = table(tmp_path)
    found = models.find("org/m")
    assert found is not None
    load(models, found.instance)
    models._follower.apply(Catalog([ModelEntry("org/m", DirectorySource("/other"), adapter=ENTRY.adapter)]))
    after = models.find("org/m")
    assert found.instance.state == "unloading"
    assert after is not None and after.instance is not found.instance and after.next is None


class _Unsayable(FakeAdapter):
    """Its widths are numbers of numpy, which no message can say."""

    dims = cast("Any", {"dense": np.int64(4)})

    @classmethod
    def load(cls, context: Any) -> Any:
        """Without weights."""
        return cls({}, 8)


def test_a_model_that_frontends_cannot_be_told_of_fails_its_load_with_the_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = table(tmp_path)
    loader, instance = models._maintenance.models._loader, Instance([ENTRY])
    monkeypatch.setattr(loading, "fetch", lambda *of: tmp_path)
    monkeypatch.setattr(loading, "resolve", lambda *of, **files: _Unsayable)
    with pytest.raises(ProtocolError, match=r"cannot be told: dims: .*int64"):
        loader.load(instance, lambda *of: None, lambda: None)


def test_a_loaded_model_that_cannot_be_told_any_more_is_told_as_failed_and_no_other_is(
    tmp_path: Path,
) -> None:
    models = table(tmp_path, version("old"), ENTRY)
    load(models, host(models).instance)
    host(models).instance.load_s = cast("Any", b"1")
    models.changes()
    told = {status.name: status for status in models.told()}
    assert {name: status.state for name, status in told.items()} == {"m@1": "failed", "org/m": "available"}
    assert "load_s: Expected `float`, got `bytes`" in told["m@1"].error_message
