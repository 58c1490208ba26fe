"""Files of the catalog that change while the server runs: added, changed, removed and broken ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.fakes.adapter import vector_of
from tests.harness.lifecycle import Models, info, serving_models, state
from tests.harness.load import Load
from tests.harness.server import Server, wait_until

UNLOADS = "penstock_model_unloads_total"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Models]]:
    """A server and the catalog that it follows."""
    root = tmp_path_factory.mktemp("reload")
    models = Models(root / "models")
    for name in ("org/stays", "org/changes", "org/goes", "org/breaks"):
        models.write(name)
    with serving_models(root, models, supervised=False) as server:
        for name in ("org/stays", "org/changes", "org/goes"):
            assert server.encode(name, ["x"]).status == 200
        yield server, models


def test_a_new_model_appears_and_is_loaded_when_asked_for(world: tuple[Server, Models]) -> None:
    server, models = world
    models.write("org/new")
    wait_until(lambda: state(server, "org/new") != "MODEL_NOT_FOUND", what="the new model")
    answer = server.encode("org/new", ["hello"])
    assert np.allclose(answer.json()["items"][0]["dense"]["values"], vector_of("hello", 16), atol=1e-6)
    assert server.metric("sie_requests_total", model="org/new", status="success") == 1


def test_a_changed_model_is_loaded_anew_and_no_request_fails_meanwhile(world: tuple[Server, Models]) -> None:
    server, models = world
    with Load(server.port, clients=4, model="org/changes") as running:
        wait_until(lambda: running.done > 20, what="traffic")
        models.write("org/changes", dims=24)
        wait_until(lambda: info(server, "org/changes")["dims"] == {"dense": 24}, what="the change")
        wait_until(lambda: server.metric(UNLOADS, model="org/changes") == 1, what="the old one's end")
        seen = running.done
        wait_until(lambda: running.done > seen + 20, what="traffic after it")
        outcome = running.stop()
    assert outcome.failed == 0, (outcome.statuses, outcome.broken[:3], outcome.bodies[:3])
    values = server.encode("org/changes", ["hello"]).json()["items"][0]["dense"]["values"]
    assert np.allclose(values, vector_of("hello", 24), atol=1e-6)
    assert server.metric(UNLOADS, model="org/changes", reason="catalog") == 1
    assert server.metric("penstock_model_loads_total", model="org/stays") == 1, "others are left alone"


def test_a_removed_model_is_unloaded_and_unknown(world: tuple[Server, Models]) -> None:
    server, models = world
    models.remove("org/goes")
    wait_until(lambda: server.encode("org/goes", ["x"]).status == 404, what="the removal")
    wait_until(lambda: server.metric("sie_model_loaded", model="org/goes") == 0, what="the unloading")
    assert server.encode("org/stays", ["x"]).status == 200


def test_a_broken_file_changes_nothing_and_is_told_with_file_and_field(world: tuple[Server, Models]) -> None:
    server, models = world
    models.write_text("org/breaks", "id: org/breaks\nsource: {kind: directory, path: /x}\nadaptor: dense\n")
    models.write("org/beside")
    place = "org-breaks.yaml:3: Object contains unknown field `adaptor`"
    wait_until(lambda: place in server.log, what="the refusal in the worker")
    wait_until(lambda: state(server, "org/beside") != "MODEL_NOT_FOUND", what="what else has changed")
    assert server.encode("org/breaks", ["x"]).status == 200
    assert server.encode("org/stays", ["x"]).status == 200
    models.write("org/breaks")
    models.write("org/mended")
    wait_until(lambda: state(server, "org/mended") != "MODEL_NOT_FOUND", what="the mended catalog")
