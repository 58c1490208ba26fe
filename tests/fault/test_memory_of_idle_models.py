"""R5: a lone item without room is tried again, then in the memory of an idle model, and only then fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.adapter import vector_of
from tests.fault import serving
from tests.harness.lifecycle import ON_DEMAND, Models, state
from tests.harness.raw import RawClient
from tests.harness.server import Answer, Server, wait_until

NEEDY, IDLE, PINNED = "org/needy", "org/idle", "org/pinned"
DEVICE_TOKENS = 100
LONE = "needs " * 50
"""300 characters: 76 tokens of the fake family, more than the others leave."""
TOO_LARGE = "too large " * 60


def write(models: Models, name: str, **options: Any) -> None:
    """A model of the crowded family."""
    entry = {
        "id": name,
        "source": {"kind": "directory", "path": str(models.weights(name, 1 << 10))},
        "adapter": "tests.fakes.crowded:CrowdedAdapter",
        "max_sequence_length": 512,
        "loadtime": {"dims": 16, "device_tokens": DEVICE_TOKENS, **options},
    }
    models.write_text(name, json.dumps(entry))


@dataclass(frozen=True)
class World:
    """A server, the file that makes the next batch run out of memory, and what had been counted before the test."""

    server: Server
    once: Path
    before: dict[str, float]

    def recovered(self) -> None:
        """Wait until a recovery is counted, which happens after the answer."""
        wait_until(lambda: self.count("recoveries_succeeded") == 1, what="the count of a recovery")

    def count(self, what: str) -> float:
        """What the test added to one of the counters about memory trouble."""
        return counters(self.server)[what] - self.before[what]


def counters(server: Server) -> dict[str, float]:
    """The counters about memory trouble; `unloads` are those of the idle model."""
    names = ("recoveries_succeeded", "cache_clears", "evictions_triggered", "terminal_failures")
    found = {name: server.metric(f"sie_oom_{name}_total", model=NEEDY) for name in names}
    return found | {"unloads": server.metric("penstock_model_unloads_total", model=IDLE, reason="oom")}


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """Three models for one device that just holds them."""
    root = tmp_path_factory.mktemp("crowded")
    models, once = Models(root / "models"), root / "once"
    write(models, NEEDY, oom_file=str(once))
    write(models, IDLE, hold_tokens=40, batch_ms=300)
    write(models, PINNED, hold_tokens=5)
    settings = {**ON_DEMAND, "catalog.pinned": PINNED, "limits.exhausted_retry_s": 7}
    with serving(root, models=(), settings=settings, catalog=models.directory) as server:
        yield server, once


@pytest.fixture
def world(crowded: tuple[Server, Path]) -> World:
    """All three models loaded."""
    server, once = crowded
    for name in (PINNED, IDLE, NEEDY):
        assert server.encode(name, ["x"]).status == 200
    return World(server, once, counters(server))


def is_right(answer: Answer, sent: str) -> bool:
    """Whether the one vector of an answer is that of its text."""
    assert answer.status == 200, answer.body
    values = np.asarray(answer.json()["items"][0]["dense"]["values"], np.float32)
    return np.allclose(values, vector_of(sent, 16), atol=1e-6)


def test_a_lone_item_that_runs_out_of_memory_once_is_answered(world: World) -> None:
    server = world.server
    world.once.touch()
    assert is_right(server.encode(NEEDY, ["small"]), "small")
    assert not world.once.exists()
    world.recovered()
    assert world.count("cache_clears") == 1
    assert world.count("evictions_triggered") == world.count("terminal_failures") == 0
    assert state(server, IDLE) == "loaded"


def test_an_idle_model_makes_room_for_an_item_that_fits_without_it(world: World) -> None:
    server = world.server
    assert is_right(server.encode(NEEDY, [LONE]), LONE)
    assert (state(server, IDLE), state(server, PINNED)) == ("available", "loaded")
    world.recovered()
    assert world.count("evictions_triggered") == 1
    assert world.count("unloads") == 1
    assert is_right(server.encode(IDLE, ["again"]), "again"), "it is loaded again when somebody asks"


def test_a_model_with_work_is_not_taken_away(world: World) -> None:
    server = world.server
    with RawClient(server.port) as busy:
        busy.encode(IDLE, [f"{number} " + "w" * 150 for number in range(24)])
        wait_until(lambda: server.metric("penstock_requests_in_flight", model=IDLE) > 0, what="its work")
        answer = server.encode(NEEDY, [LONE])
        assert answer.status == 503, answer.body
        assert state(server, IDLE) == "loaded"
    assert (answer.json()["detail"]["code"], answer.headers["retry-after"]) == ("RESOURCE_EXHAUSTED", "7")
    assert world.count("evictions_triggered") == 0


@pytest.mark.long
def test_items_too_large_for_the_device_do_not_clear_it_of_all_models(world: World) -> None:
    server = world.server
    assert server.encode(NEEDY, [TOO_LARGE]).status == 503
    assert world.count("evictions_triggered") == world.count("terminal_failures") == 1
    assert is_right(server.encode(IDLE, ["back"]), "back")
    assert server.encode(NEEDY, [TOO_LARGE]).status == 503
    assert state(server, IDLE) == "loaded", "an eviction that did not help was repeated"
    assert world.count("evictions_triggered") == 1
