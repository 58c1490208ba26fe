"""Models that are wanted again while they are being unloaded or given up, and a keeper that cannot look at files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ipc import settings
from ipc.catalog import Catalog, DirectorySource, ModelEntry
from ipc.catalog_watch import CatalogWatch
from ipc.metrics import WorkerMetrics
from tests.fakes.adapter import FakeAdapter
from workers.device import Device
from workers.jobs import JobBook
from workers.lifecycle.instance import Instance
from workers.models import ModelTable

ENTRY = ModelEntry("org/m", DirectorySource("/weights"), adapter="tests.fakes.weighing:WeighingAdapter")


class _Metrics:
    """Counts nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *labels: object) -> Any:
        return self


def table(root: Path) -> ModelTable:
    """The models of a worker whose threads are not started."""
    import torch

    config = settings.load(flags={"run.dir": str(root), "worker.memory_budget_bytes": "1000"}, environ={})
    device = cast("Device", SimpleNamespace(torch=torch.device("cpu"), name="cpu"))
    book = cast("JobBook", SimpleNamespace(adapters=set))
    metrics = cast("WorkerMetrics", _Metrics())
    return ModelTable(Catalog([ENTRY]), config, 0, device, lambda work: work(), lambda: None, book, metrics)


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
    with models._shelf.lock:
        models._shelf.end(instance, instance.rest)


def test_a_model_that_is_wanted_while_it_is_unloaded_is_loaded_again(tmp_path: Path) -> None:
    models = table(tmp_path)
    instance = unloading(models)
    models.load("org/m")
    assert instance.state == "unloading"
    end(models, instance)
    assert (instance.state, instance.demanded, instance.attempts) == ("loading", True, 2)
    assert models._shelf.next_due(lambda each: True) is instance


def test_the_last_word_counts(tmp_path: Path) -> None:
    models = table(tmp_path)
    instance = unloading(models)
    models.load("org/m")
    models.unload("org/m")
    end(models, instance)
    assert instance.state == "available"


def test_a_model_that_the_catalog_has_lost_is_not_loaded_again(tmp_path: Path) -> None:
    models = table(tmp_path)
    instance = unloading(models)
    models.load("org/m")
    with models._shelf.lock:
        models._shelf.take(Catalog([ModelEntry("org/other", ENTRY.source)]))
    end(models, instance)
    assert instance.state == "available" and instance not in models._shelf.instances()


def test_a_load_that_is_wanted_after_it_was_given_up_begins_anew(tmp_path: Path) -> None:
    models = table(tmp_path)
    models.load("org/m")
    instance = models._shelf.next_due(lambda each: True)
    assert instance is not None
    models.unload("org/m")
    models.load("org/m")
    end(models, instance)
    assert instance.state == "loading", "its thread had seen that nobody wanted it"


@pytest.mark.parametrize("error", [OSError("gone"), ValueError("strange"), RecursionError("deep")])
def test_whatever_a_look_at_the_catalog_finds_the_keeper_lives(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    models = table(tmp_path)

    class Watch:
        """Cannot look."""

        def changed(self) -> bool:
            """It fails."""
            raise error

    models._keeper._watch = cast("CatalogWatch", Watch())
    models._keeper._follow_catalog()
    assert "the old catalog stays" in caplog.text and list(models._shelf.hosts) == ["org/m"]
