"""Models that are loaded when somebody asks for them, and unloaded when somebody says so; real processes."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.adapter import vector_of
from tests.harness.lifecycle import Models, info, load, serving_models, state, unload
from tests.harness.load import Load
from tests.harness.server import Answer, Server, wait_until

PROFILES = {"default": {}, "shout": {"runtime": {"prefix": "hey "}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that loads nothing at the start."""
    root = tmp_path_factory.mktemp("demand")
    models = Models(root / "models")
    for name in ("org/first", "org/busy", "org/admin", "org/early"):
        models.write(name)
    models.write("org/late", load_s=1.5)
    models.write("org/long", load_s=60)
    models.write("org/broken", fail_load="UNKNOWN")
    models.write("org/profiled", PROFILES)
    models.write("org/apart", {"default": {}, "wide": {"loadtime": {"batch_ms": 1}}})
    models.write("org/misspelt", bach_ms=1)
    models.write_text("org/wider", models.text("org/wider").replace('"dims": 16}}', '"dims": 24}}', 1))
    models.write_text("org/torn", "id: org/torn\nsource: {kind: directory\nadapter: dense\n")
    models.write("org/gone"), shutil.rmtree(models.weights("org/gone", 1))
    models.write("org/half"), os.truncate(models.weights("org/half", 1 << 20) / "model.safetensors", 1000)
    models.write("org/full", oom_file=str(root / "full"))
    (root / "full").touch()
    with serving_models(root, models, supervised=False) as running:
        yield running


def vector(answer: Answer) -> np.ndarray:
    """The one vector of an answer."""
    assert answer.status == 200, answer.body
    return np.asarray(answer.json()["items"][0]["dense"]["values"], np.float32)


def test_the_first_request_loads_its_model_and_no_other(server: Server) -> None:
    assert state(server, "org/first") == "available"
    assert np.allclose(vector(server.encode("org/first", ["hello"])), vector_of("hello", 16), atol=1e-6)
    assert state(server, "org/first") == "loaded"
    assert state(server, "org/early") == "available"
    assert server.metric("sie_model_loaded", model="org/first") == 1
    assert server.metric("sie_model_memory_bytes", model="org/first") == 1 << 20


def test_requests_for_one_model_wait_for_one_load(server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: server.encode("org/late", [f"text {n}"]), range(8)))
    for number, answer in enumerate(answers):
        assert np.allclose(vector(answer), vector_of(f"text {number}", 16), atol=1e-6)
    assert server.metric("penstock_model_loads_total", model="org/late", outcome="loaded") == 1


def test_loads_run_beside_serving_and_beside_each_other(server: Server) -> None:
    vector(server.encode("org/busy", ["warm"]))
    assert load(server, "org/long", wait=False).status == 202
    wait_until(lambda: state(server, "org/long") == "loading")
    began = time.monotonic()
    with Load(server.port, clients=4, model="org/busy") as running:
        wait_until(lambda: running.done > 50, what="traffic beside a load")
        vector(server.encode("org/early", ["beside"]))
    assert time.monotonic() - began < 30
    assert running.outcome.failed == 0
    assert state(server, "org/long") == "loading"
    assert unload(server, "org/long").json() == {"name": "org/long", "state": "available"}


def test_a_recorded_failure_is_answered_at_once_until_somebody_loads_the_model_by_hand(
    server: Server,
) -> None:
    answers = [server.encode("org/broken", ["x"]) for _ in range(2)]
    for answer in answers:
        detail = answer.json()["detail"]
        assert (answer.status, detail["code"]) == (502, "MODEL_LOAD_FAILED")
        assert (detail["error_class"], detail["attempts"], detail["permanent"]) == ("UNKNOWN", 1, True)
        assert "retry-after" not in answer.headers
    again = load(server, "org/broken")
    assert (again.status, again.json()["detail"]["attempts"]) == (502, 2), "a manual load tries again"


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("org/misspelt", "loadtime.bach_ms: unknown option; did you mean 'batch_ms'?"),
        ("org/wider", "outputs.dense.dims: 24 is stated, the model gives 16"),
        ("org/torn", "while parsing a flow mapping"),
    ],
)
def test_a_wrong_catalog_file_costs_its_own_model_only(server: Server, model: str, text: str) -> None:
    names = {"model": model, "input": "x"}
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    detail = server.encode(model, ["x"]).json()["detail"]
    assert (detail["code"], detail["error_class"], detail["permanent"]) == (
        "MODEL_LOAD_FAILED",
        "UNKNOWN",
        True,
    )
    assert text in detail["message"] and "/" not in detail["message"]
    assert info(server, model)["last_error"]["message"] == detail["message"]
    embedded = server.post("/v1/embeddings", names)
    assert embedded.status == 502 and text in embedded.json()["error"]["message"]
    inferred = server.post(f"/v2/models/{model.rpartition('/')[2]}/infer", {"inputs": [tensor]})
    assert inferred.status == 404 and text in inferred.json()["error"]


def test_a_file_of_which_nothing_can_be_read_answers_every_operation(server: Server) -> None:
    assert state(server, "org/torn") == "failed", "nobody has to ask first"
    texts = {"query": {"text": "x"}, "items": [{"text": "y"}]}
    for operation in ("score", "extract"):
        answer = server.post(f"/v1/{operation}/org/torn", texts)
        assert (answer.status, answer.json()["detail"]["code"]) == (502, "MODEL_LOAD_FAILED")
    assert "org-torn.yaml:3: while parsing" in server.log


@pytest.mark.parametrize(
    ("model", "error_class", "text"),
    [("org/gone", "NOT_FOUND", "does not exist"), ("org/half", "UNKNOWN", "model.safetensors is damaged")],
)
def test_a_directory_that_vanished_or_was_half_written_is_a_recorded_failure(
    server: Server, model: str, error_class: str, text: str
) -> None:
    detail = server.encode(model, ["x"]).json()["detail"]
    assert (detail["code"], detail["error_class"], detail["permanent"]) == (
        "MODEL_LOAD_FAILED",
        error_class,
        True,
    )
    assert text in detail["message"] and "/" not in detail["message"]
    assert info(server, model)["last_error"]["code"] == error_class


def test_a_load_that_runs_out_of_memory_evicts_the_oldest_model_and_is_tried_once_more(
    server: Server,
) -> None:
    vector(server.encode("org/first", ["loaded"]))
    before = server.metric("penstock_model_unloads_total", reason="oom")
    vector(server.encode("org/full", ["x"]))
    assert server.metric("penstock_model_unloads_total", reason="oom") == before + 1


def test_profiles_that_differ_in_options_of_a_call_share_one_load(server: Server) -> None:
    assert np.allclose(vector(server.encode("org/profiled", ["you"])), vector_of("you", 16), atol=1e-6)
    assert state(server, "org/profiled:shout") == "loaded"
    shouted = vector(server.encode("org/profiled:shout", ["you"]))
    assert np.allclose(shouted, vector_of("hey you", 16), atol=1e-6)
    assert server.metric("penstock_model_loads_total", outcome="loaded", model="org/profiled") == 1
    assert server.metric("penstock_model_loads_total", model="org/profiled:shout", outcome="loaded") == 0


def test_a_profile_named_in_the_options_loads_its_own_entry_and_no_other(server: Server) -> None:
    answer = server.encode("org/apart", ["hello"], options={"profile": "wide"})
    assert np.allclose(vector(answer), vector_of("hello", 16), atol=1e-6)
    assert (state(server, "org/apart:wide"), state(server, "org/apart")) == ("loaded", "available")
    assert server.metric("penstock_model_loads_total", model="org/apart") == 0


def test_loading_and_unloading_by_hand(server: Server) -> None:
    for _ in range(2):
        assert load(server, "org/admin").json() == {"name": "org/admin", "state": "loaded"}
    assert info(server, "org/admin")["loaded"]
    for _ in range(2):
        answer = unload(server, "org/admin")
        assert (answer.status, answer.json()) == (200, {"name": "org/admin", "state": "available"})
    assert server.metric("sie_model_loaded", model="org/admin") == 0
    assert server.metric("sie_model_memory_bytes", model="org/admin") == 0
    vector(server.encode("org/admin", ["loaded again"]))


@pytest.mark.parametrize("action", ["load", "unload"])
def test_admin_calls_say_what_is_wrong(server: Server, action: str) -> None:
    assert server.post(f"/v1/admin/{action}/org/nope", {}).status == 404
    bad = server.post(f"/v1/admin/{action}/org/admin", {"wait": "yes"})
    assert (bad.status, bad.json()["detail"]["code"]) == (400, "INVALID_INPUT")
    assert server.get(f"/v1/admin/{action}/org/admin").status == 405
    assert server.request("POST", f"/v1/admin/{action}/org/admin").status == 200, "the body is optional"


def test_no_request_is_lost_while_its_model_is_unloaded_again_and_again(server: Server) -> None:
    with Load(server.port, clients=8, model="org/busy") as running:
        for _ in range(5):
            seen = running.done
            wait_until(lambda seen=seen: running.done > seen + 40, what="traffic")
            assert unload(server, "org/busy").status in (200, 202)
        outcome = running.stop()
    assert outcome.failed == 0, (outcome.statuses, outcome.broken[:3], outcome.bodies[:3])


@pytest.mark.long
def test_without_waiting_a_loading_model_is_a_503_that_clients_retry(tmp_path: Path) -> None:
    models = Models(tmp_path / "models")
    late = models.write("org/late", load_s=2)
    settings = {"limits.load_wait_s": 0, "server.admin": "false"}
    with serving_models(tmp_path, models, settings) as server:
        answer = server.encode(late, ["x"])
        assert (answer.status, answer.json()["detail"]["code"]) == (503, "MODEL_NOT_LOADED")
        assert answer.headers["x-sie-error-code"] == "MODEL_LOADING"
        assert int(answer.headers["retry-after"]) >= 1
        wait_until(lambda: server.encode(late, ["x"]).status == 200, what="the load")
        gone = server.post(f"/v1/admin/load/{late}", {})
        assert (gone.status, gone.json()) == (404, {"detail": "Not Found"}), "switched off"


@pytest.mark.long
def test_without_loading_on_demand_only_the_models_of_the_start_are_served(tmp_path: Path) -> None:
    models = Models(tmp_path / "models")
    first, other = models.write("org/first", load_s=0.5), models.write("org/other")
    settings = {"catalog.on_demand": "false", "catalog.preload": first}
    with serving_models(tmp_path, models, settings) as server:
        assert state(server, first) == "loaded", "readiness comes after the models of the start"
        answer = server.encode(other, ["x"])
        assert (answer.status, answer.json()["detail"]["code"]) == (503, "MODEL_NOT_LOADED")
        assert answer.headers["x-sie-error-code"] == "MODEL_NOT_LOADED", "no load is running"
        assert json.loads(load(server, other).body)["state"] == "loaded"
        assert server.encode(other, ["x"]).status == 200
