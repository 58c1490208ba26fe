"""A gateway's process without boxes: the stream of the cluster's status, and what its start says."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from websockets.sync.client import connect

from tests.fakes.far_end import MODEL, SLOW
from tests.fakes.gateway import gateway
from tests.harness.server import PATIENCE_S, Server, make_server


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A gateway over an engine that knows no box."""
    place = tmp_path_factory.mktemp("gateway")
    nothing = make_server(place, ())
    nothing.environment |= {
        "PENSTOCK_CATALOG__DIRS": "",
        "PENSTOCK_SERVER__ENGINE": "cluster",
        "PENSTOCK_CLUSTER__URLS": "nats://127.0.0.1:4222",
    }
    with gateway(place, nothing, MODEL) as server:
        yield server


def test_the_status_of_the_cluster_comes_at_once_and_then_each_second(alone: Server) -> None:
    with connect(f"ws://127.0.0.1:{alone.port}/ws/cluster-status", open_timeout=PATIENCE_S) as stream:
        frames = [json.loads(stream.recv(timeout=PATIENCE_S)) for _ in range(2)]
    assert frames[0]["cluster"] == {"worker_count": 0, "gpu_count": 0, "models_loaded": 0, "total_qps": 0.0}
    assert frames[0]["workers"] == [] and [model["name"] for model in frames[0]["models"]] == [MODEL, SLOW]
    assert frames[1]["timestamp"] - frames[0]["timestamp"] > 0.5


def test_text_answers_of_probes_are_those_of_a_single_server(alone: Server) -> None:
    assert [alone.get(path).body for path in ("/healthz", "/readyz", "/health")] == [b"ok", b"ok", b"OK"]


def test_a_gateway_has_the_live_page(alone: Server) -> None:
    page = alone.request("GET", "/", headers={"Accept": "text/html"})
    assert page.status == 200 and page.headers["content-type"].startswith("text/html")
    assert b"<html" in page.body


def test_the_path_of_the_status_speaks_websocket_only(alone: Server) -> None:
    answer = alone.get("/ws/cluster-status")
    assert answer.status == 426 and "/ws/cluster-status" in answer.body.decode()


def test_the_status_of_the_gateway_itself_is_there(alone: Server) -> None:
    with connect(f"ws://127.0.0.1:{alone.port}/ws/status", open_timeout=PATIENCE_S) as stream:
        frame = json.loads(stream.recv(timeout=PATIENCE_S))
    assert frame["gpus"] == [] or all(gpu["memory_total_bytes"] == 0 for gpu in frame["gpus"])


def test_the_start_names_the_brokers_and_claims_no_lack_of_hosts(alone: Server) -> None:
    log = alone.log
    assert "nats://127.0.0.1:4222" in log and "several hosts" not in log
