"""State of a model over several workers, and readiness: one worker that loads does not hide one that serves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from frontend.engine.local.engine import LocalEngine
from frontend.server.drain import Drain
from ipc.catalog.entries import Catalog, DirectorySource, ModelEntry
from ipc.settings import Catalog as CatalogSettings
from ipc.settings import Settings
from ipc.wire.messages import ModelStatus


def engine(
    *workers: ModelStatus, preloaded: bool = True, preload: tuple[str, ...] = ("auto",), asked: bool = False
) -> LocalEngine:
    """An engine over one channel per worker, whose model `m` has that status."""
    channels = [
        SimpleNamespace(state="ready", responsive=True, models={"m": status}, preloaded=preloaded)
        for status in workers
    ]
    demand = SimpleNamespace(has_asked=lambda model: asked)
    client: Any = SimpleNamespace(channels=channels, demand=demand, inputs=None)
    catalog = Catalog([ModelEntry("m", DirectorySource("m"))])
    return LocalEngine(Settings(catalog=CatalogSettings(preload=preload)), catalog, client, Drain())


LOADED = ModelStatus("m", "loaded", dims={"dense": 8}, attempts=1)
FIRST_LOAD = ModelStatus("m", "loading", attempts=1)
SECOND_LOAD = ModelStatus("m", "loading", attempts=2, error_class="OOM")
FAILED = ModelStatus("m", "failed", attempts=1, error_class="OOM")
AVAILABLE = ModelStatus("m", "available")
STALE = ModelStatus("m", "loaded", attempts=2, error_class="UNKNOWN", revision="old", next="new")


@pytest.mark.parametrize("other", [FIRST_LOAD, SECOND_LOAD, FAILED, AVAILABLE])
def test_a_model_that_one_worker_serves_is_loaded_whatever_the_others_do(other: ModelStatus) -> None:
    for workers in ((LOADED, other), (other, LOADED)):
        found = engine(*workers)
        assert found.directory.status("m").dims == {"dense": 8}
        assert found.ready() == (True, "ok")


def test_a_model_whose_changed_files_are_refused_is_there_as_it_was() -> None:
    found = engine(STALE, FAILED)
    assert found.ready() == (True, "ok")
    assert [found.directory.is_loaded("m", revision) for revision in ("", "old", "new")] == [
        True,
        True,
        False,
    ]
    assert not found.directory.is_loaded("other")


def test_a_model_has_an_identity_while_all_its_workers_have_the_same() -> None:
    one, other = (ModelStatus("m", "loaded", identity=identity) for identity in ("one", "other"))
    leaving = ModelStatus("m", "unloading", identity="other")
    for workers, identity in (
        ((one,), "one"),
        ((one, one, leaving, AVAILABLE), "one"),
        ((one, other), ""),
        ((one, LOADED), ""),
        ((leaving,), ""),
    ):
        assert engine(*workers).directory.identity("m") == identity


@pytest.mark.parametrize(
    ("workers", "why"),
    [
        ((FAILED,), "no model could be loaded"),
        ((SECOND_LOAD,), "no model could be loaded"),
        ((), "no worker is up"),
    ],
)
def test_readiness_says_why_not(workers: tuple[ModelStatus, ...], why: str) -> None:
    assert engine(*workers).ready() == (False, why)


@pytest.mark.parametrize("status", [FIRST_LOAD, AVAILABLE])
def test_a_server_that_has_not_tried_all_models_of_the_start_is_not_ready(status: ModelStatus) -> None:
    assert engine(status, preloaded=False).ready() == (False, "models are loading")


@pytest.mark.parametrize("status", [FIRST_LOAD, AVAILABLE, FAILED])
def test_models_that_are_loaded_on_demand_do_not_keep_a_server_from_being_ready(status: ModelStatus) -> None:
    assert engine(status, preload=()).ready() == (True, "ok")


def test_a_draining_frontend_is_not_ready() -> None:
    found = engine(LOADED)
    found._drain.begin()
    assert found.ready() == (False, "draining")


def test_a_model_that_was_asked_for_is_loading_before_a_worker_says_so() -> None:
    assert engine(AVAILABLE).directory.status("m").state == "available"
    assert engine(AVAILABLE, asked=True).directory.status("m").state == "loading"
    for told in (LOADED, FIRST_LOAD, FAILED):
        assert engine(AVAILABLE, told, asked=True).directory.status("m") == told
    assert engine(asked=True).directory.status("m").state == "available", "no worker knows it"
