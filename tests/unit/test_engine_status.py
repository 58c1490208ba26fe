"""State of a model over several workers, and readiness: one worker that loads does not hide one that serves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from frontend.engine import Engine
from frontend.server.drain import Drain
from ipc.messages import ModelStatus


def engine(*workers: ModelStatus) -> Engine:
    """An engine over one channel per worker, whose model `m` has that status."""
    channels = [SimpleNamespace(state="ready", responsive=True, models={"m": status}) for status in workers]
    client: Any = SimpleNamespace(channels=channels)
    catalog: Any = {"m": None}
    nothing: Any = None
    return Engine(nothing, catalog, client, nothing, Drain())


LOADED = ModelStatus("m", "loaded", dims={"dense": 8}, attempts=1)
FIRST_LOAD = ModelStatus("m", "loading", attempts=1)
SECOND_LOAD = ModelStatus("m", "loading", attempts=2)
FAILED = ModelStatus("m", "failed", attempts=1)


@pytest.mark.parametrize("other", [FIRST_LOAD, SECOND_LOAD, FAILED, ModelStatus("m", "available")])
def test_a_model_that_one_worker_serves_is_loaded_whatever_the_others_do(other: ModelStatus) -> None:
    for workers in ((LOADED, other), (other, LOADED)):
        found = engine(*workers)
        assert found.status("m").dims == {"dense": 8}
        assert found.ready() == (True, "ok")


@pytest.mark.parametrize(
    ("workers", "why"),
    [
        ((FIRST_LOAD,), "models are loading"),
        ((ModelStatus("m", "available"),), "models are loading"),
        ((FAILED,), "no model could be loaded"),
        ((SECOND_LOAD,), "no model could be loaded"),
        ((), "no worker is up"),
    ],
)
def test_readiness_says_why_not(workers: tuple[ModelStatus, ...], why: str) -> None:
    assert engine(*workers).ready() == (False, why)


def test_a_draining_frontend_is_not_ready() -> None:
    found = engine(LOADED)
    found.drain.begin()
    assert found.ready() == (False, "draining")
