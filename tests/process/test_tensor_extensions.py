"""A server of two frontends: statistics, repository control, log and trace settings, regions, each for all of it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.harness.server import Server, serving, wait_until
from tests.harness.shared import client_object, in_region, infer, register, unregister
from tests.tiny.programs import SCRIPTED, write_model, write_repository

MODELS = ("add_sub", "versions_all", "variable", "identity_bytes", "broken")
A = np.arange(16, dtype=np.int32).reshape(1, 16)
LOOKS = 12
"""Requests that are spread over both frontends, each on a connection of its own."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that models are loaded in by name, and that offers shared memory."""
    place = tmp_path_factory.mktemp("extensions")
    settings = {
        "repository.dirs": write_repository(place / "models", MODELS, SCRIPTED),
        "repository.control": "explicit",
        "repository.allow_python": "true",
        "shared_memory.enabled": "true",
        "server.frontends": 2,
    }
    with serving(place, ("fake/echo",), settings) as running:
        yield running


def load(server: Server, model: str, action: str = "load") -> Any:
    """Load or unload a model by name."""
    return server.post(f"/v2/repository/models/{model}/{action}", {})


def states(server: Server, model: str) -> list[tuple[str, str, str]]:
    """(version, state, reason) of a model in the index."""
    entries = server.post("/v2/repository/index", {}).json()
    return [
        (entry["version"], entry["state"], entry.get("reason", ""))
        for entry in entries
        if entry["name"] == model
    ]


def add_sub(array: np.ndarray = A) -> dict[str, Any]:
    """A request whose sum is twice the array and whose difference is zero."""
    return {
        "inputs": [
            {"name": name, "datatype": "INT32", "shape": list(array.shape), "data": array.tolist()}
            for name in ("INPUT0", "INPUT1")
        ]
    }


def stats(server: Server, model: str = "add_sub") -> dict[str, Any]:
    """The entry of the only version of a model."""
    (entry,) = server.get(f"/v2/models/{model}/stats").json()["model_stats"]
    return dict(entry)


def test_every_request_is_in_the_very_next_figures_whichever_frontend_is_asked(server: Server) -> None:
    first = load(server, "add_sub")
    assert first.status == 200, first.body
    before = stats(server)
    for number in range(1, LOOKS + 1):
        rows = np.repeat(A, 1 + number % 3, axis=0)
        assert infer(server, "add_sub", add_sub(rows)).status == 200
        found = stats(server)
        success = found["inference_stats"]["success"]
        assert success["count"] == before["inference_stats"]["success"]["count"] + number
    asked = sum(1 + number % 3 for number in range(1, LOOKS + 1))
    assert found["inference_count"] == before["inference_count"] + asked
    assert found["execution_count"] == before["execution_count"] + LOOKS
    assert found["last_inference"] > before["last_inference"]
    phases = found["inference_stats"]
    parts = sum(phases[name]["ns"] for name in ("queue", "compute_input", "compute_infer", "compute_output"))
    assert 0 < parts < phases["success"]["ns"]
    assert {run["batch_size"] for run in found["batch_stats"]} >= {1, 2, 3}
    assert sum(run["compute_infer"]["count"] for run in found["batch_stats"]) == found["execution_count"]
    metric = server.metric("nv_inference_count", model="add_sub", version="1")
    assert metric == found["inference_count"]


def test_failures_are_counted_apart(server: Server) -> None:
    load(server, "add_sub")
    before = stats(server)["inference_stats"]
    assert infer(server, "add_sub", add_sub(np.zeros((9, 16), np.int32))).status == 400
    after = stats(server)["inference_stats"]
    assert after["fail"]["count"] == before["fail"]["count"] + 1
    assert after["fail"]["ns"] > before["fail"]["ns"]
    assert after["success"] == before["success"]


def test_a_model_goes_and_comes_back_by_its_name(server: Server) -> None:
    assert load(server, "versions_all").status == 200
    assert states(server, "versions_all") == [(str(number), "READY", "") for number in (1, 2, 3)]
    assert load(server, "versions_all", "unload").status == 200
    gone = [(str(number), "UNAVAILABLE", "unloaded") for number in (1, 2, 3)]
    wait_until(lambda: states(server, "versions_all") == gone, what="the end of the unloading")
    request = {"inputs": [{"name": "INPUT", "datatype": "INT32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
    for _ in range(LOOKS):
        answer = infer(server, "versions_all", request)
        assert answer.status == 404 and "has no available versions" in answer.json()["error"]
        assert server.get("/v2/models/versions_all/ready").status == 400
    assert states(server, "versions_all") == gone
    assert server.get("/v2/health/ready").status == 200
    assert load(server, "versions_all").status == 200
    assert infer(server, "versions_all", request).json()["outputs"][0]["data"] == [4, 5, 6, 7]


def test_a_catalog_model_is_unloaded_like_any_other(server: Server) -> None:
    assert load(server, "fake/echo").status == 200
    assert states(server, "fake/echo") == [("1", "READY", "")]
    assert load(server, "fake/echo", "unload").status == 200
    wait_until(
        lambda: states(server, "fake/echo") == [("1", "UNAVAILABLE", "unloaded")], what="the unloading"
    )
    request = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}
    for _ in range(LOOKS):
        assert infer(server, "fake/echo", request).status == 404
    assert load(server, "fake/echo").status == 200


@pytest.mark.parametrize("model", ["unheard_of", "broken"])
def test_a_load_that_fails_says_so(server: Server, model: str) -> None:
    answer = load(server, model)
    assert answer.status == 500
    assert answer.json()["error"].startswith(f"failed to load '{model}', ")
    assert load(server, model, "unload").status == 200


def test_a_model_that_was_put_into_the_repository_just_now_is_loaded(server: Server) -> None:
    write_model(server.run_dir.parent / "models", "add_sub", "newcomer")
    assert load(server, "newcomer").status == 200
    assert infer(server, "newcomer", add_sub()).status == 200


@pytest.mark.parametrize(
    ("action", "parameters", "status"),
    [
        ("load", {"config": "{"}, 400),
        ("load", {"config": 1}, 400),
        ("load", {"file:1/model.pt2": "AAAA"}, 501),
        ("load", {"unheard_of": 1}, 400),
        ("unload", {"unload_dependents": True}, 200),
        ("unload", {"unload_dependents": 1}, 400),
        ("unload", {"config": "{}"}, 400),
    ],
)
def test_parameters_of_load_and_unload(
    server: Server, action: str, parameters: dict[str, Any], status: int
) -> None:
    answer = server.post(f"/v2/repository/models/variable/{action}", {"parameters": parameters})
    assert answer.status == status, answer.body


@pytest.mark.long
def test_a_worker_that_starts_again_keeps_to_what_was_asked_by_name(server: Server) -> None:
    load(server, "add_sub")
    load(server, "variable")
    load(server, "variable", "unload")
    wait_until(lambda: states(server, "variable")[0][1] == "UNAVAILABLE", what="the unloading")
    before = server.worker_pid()
    assert before is not None
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: server.worker_pid() not in (None, before), what="another worker")
    wait_until(lambda: infer(server, "add_sub", add_sub()).status == 200, what="the model")
    assert states(server, "variable")[0][1] == "UNAVAILABLE"


def test_log_settings_are_those_of_every_frontend(server: Server) -> None:
    before = server.get("/v2/logging").json()
    after = server.post("/v2/logging", {"log_info": False, "log_verbose_level": 1}).json()
    assert after == before | {"log_info": False, "log_verbose_level": 1}
    assert all(server.get("/v2/logging").json() == after for _ in range(LOOKS))
    assert server.post("/v2/logging", {"log_file": "/tmp/x"}).status == 501
    assert server.post("/v2/logging", before).json() == before


def test_a_process_that_holds_the_locks_keeps_no_frontend_from_answering(server: Server) -> None:
    numbers = server.run_dir / "control" / "request-number"
    state = server.run_dir / "store" / "current"
    with contextlib.ExitStack() as locks:
        fcntl.flock(locks.enter_context(numbers.open("a")), fcntl.LOCK_EX)
        writing = locks.enter_context(contextlib.closing(sqlite3.connect(state)))
        writing.execute("BEGIN IMMEDIATE")
        with ThreadPoolExecutor(4) as threads:
            asked = [
                threads.submit(server.request, "POST", path, b"{}", {"X-Request-Timeout": "2"})
                for path in ("/v2/logging", "/v2/trace/setting") * 2
            ]
            probes = [server.request("GET", "/api/health/live", timeout_s=20).status for _ in range(LOOKS)]
            assert probes == [200] * LOOKS
            assert [change.result().status for change in asked] == [504] * 4
    assert server.post("/v2/logging", {}).status == 200


def test_trace_settings_are_off_where_tracing_is(server: Server) -> None:
    found = server.get("/v2/trace/setting").json()
    assert found["trace_level"] == ["OFF"]
    assert server.get("/v2/models/add_sub/trace/setting").json() == found
    assert server.get("/v2/models/unheard_of/trace/setting").status == 400
    assert server.post("/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]}).status == 501
    assert server.post("/v2/trace/setting", {"trace_rate": "7"}).json() == found | {"trace_rate": "7"}
    assert server.post("/v2/trace/setting", {"trace_rate": None}).json() == found


def test_tensors_in_regions_are_those_of_the_client(server: Server) -> None:
    load(server, "add_sub")
    with client_object(256) as memory:
        assert register(server, "both", f"/{memory.key}", 256).status == 200
        memory.write(A, 0)
        memory.write(np.full((1, 16), 5, np.int32), 64)
        facts = {"datatype": "INT32", "shape": [1, 16]}
        request = {
            "inputs": [
                in_region("INPUT0", "both", 0, 64, **facts),
                in_region("INPUT1", "both", 64, 64, **facts),
            ],
            "outputs": [in_region("OUTPUT0", "both", 128, 64), in_region("OUTPUT1", "both", 192, 64)],
        }
        for _ in range(LOOKS):
            memory.write(np.zeros(32, np.int32), 128)
            answer = infer(server, "add_sub", request)
            assert answer.status == 200, answer.body
            assert answer.json()["outputs"] == [
                {"name": name, "datatype": "INT32", "shape": [1, 16]} for name in ("OUTPUT0", "OUTPUT1")
            ]
            assert (memory.read("<i4", 128, 16) == A[0] + 5).all()
            assert (memory.read("<i4", 192, 16) == A[0] - 5).all()
        assert unregister(server, "both").status == 200
        answer = infer(server, "add_sub", request)
        assert answer.status == 404
        assert "Unable to find shared memory region: 'both'" in answer.json()["error"]


def test_texts_are_length_prefixed_in_regions(server: Server) -> None:
    load(server, "identity_bytes")
    texts = [b"", b"one", "zwölf".encode(), b"\xff\xfe"]
    raw = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    with client_object(2 * len(raw)) as memory:
        memory.write(np.frombuffer(raw, np.uint8))
        register(server, "texts", memory.key, 2 * len(raw))
        request = {
            "inputs": [in_region("INPUT", "texts", 0, len(raw), datatype="BYTES", shape=[1, 4])],
            "outputs": [in_region("OUTPUT", "texts", len(raw), len(raw))],
        }
        answer = infer(server, "identity_bytes", request)
        assert answer.status == 200, answer.body
        assert memory.read("u1", len(raw), len(raw)).tobytes() == raw
        unregister(server, "texts")


@pytest.mark.parametrize(
    ("where", "offset", "nbytes", "message"),
    [
        ("inputs", 256, 64, "Invalid offset for shared memory region"),
        ("inputs", 224, 64, "Invalid offset + byte size for shared memory region"),
        ("inputs", 0, 60, "60"),
        ("inputs", 0, 68, "68"),
        ("outputs", 256, 64, "Invalid offset for shared memory region"),
        ("outputs", 0, 63, "64"),
    ],
)
def test_wrong_places_in_a_region_are_refused(
    server: Server, where: str, offset: int, nbytes: int, message: str
) -> None:
    load(server, "add_sub")
    with client_object(256) as memory:
        register(server, "wrong", memory.key, 256)
        request = add_sub()
        if where == "inputs":
            request["inputs"][0] = in_region(
                "INPUT0", "wrong", offset, nbytes, datatype="INT32", shape=[1, 16]
            )
        else:
            request["outputs"] = [in_region("OUTPUT0", "wrong", offset, nbytes)]
        answer = infer(server, "add_sub", request)
        assert answer.status == 400 and message in answer.json()["error"], answer.body
        assert not memory.read("u1", 0, 256).any()
        unregister(server, "wrong")


def test_regions_outlive_the_client_and_are_listed_until_somebody_unregisters_them(server: Server) -> None:
    with client_object(64) as memory:
        register(server, "orphan", memory.key, 64)
        assert register(server, "orphan", memory.key, 64).status == 400
    listed = server.get("/v2/systemsharedmemory/status").json()
    assert listed == [{"name": "orphan", "key": memory.key, "offset": 0, "byte_size": 64}]
    request = add_sub()
    request["inputs"][0] = in_region("INPUT0", "orphan", 0, 64, datatype="INT32", shape=[1, 16])
    answer = infer(server, "add_sub", request)
    assert answer.status == 400 and "Unable to open shared memory region" in answer.json()["error"]
    assert server.request("POST", "/v2/systemsharedmemory/unregister").status == 200
    assert server.get("/v2/systemsharedmemory/status").json() == []
    assert server.request("POST", "/v2/cudasharedmemory/unregister").status == 200
