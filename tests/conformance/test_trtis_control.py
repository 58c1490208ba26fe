"""Models in and out of memory by TRTIS v1, over HTTP and gRPC alike; and the labels that their figures have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import grpc
import numpy as np
import pytest

from ipc.protos import trtis_v1_pb2 as pb
from tests.conformance.trtis import infer, status_of
from tests.conformance.trtis_transports import Stub
from tests.harness.rpc import address_of, grpc_settings
from tests.harness.server import Server, serving, wait_until
from tests.harness.status import wait_joined
from tests.tiny.programs import SCRIPTED, write_repository

A = np.arange(16, dtype="<i4")
GOOD = 'batch_size: 1 input { name: "INPUT0" } input { name: "INPUT1" } output { name: "OUTPUT0" }'
LOOKS = 8
"""Requests that are spread over both frontends, each on a connection of its own."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("trtis-control")
    repository = write_repository(place / "models", ("add_sub", "broken"), SCRIPTED)
    with (repository / "add_sub" / "config.pbtxt").open("a") as config:
        config.write('\nmetric_tags { key: "team" value: "search" }\n')
    settings = {
        "repository.dirs": repository,
        "repository.control": "explicit",
        "repository.allow_python": "true",
        "server.frontends": 2,
    }
    with serving(place, ("fake/echo",), grpc_settings(**settings), supervised=False) as running:
        wait_joined(running)
        yield running


def over_http(server: Server, action: str, model: str) -> pb.RequestStatus:
    """What POST /api/modelcontrol says."""
    answer = server.request("POST", f"/api/modelcontrol/{action}/{model}")
    told = status_of(answer)
    assert (answer.status, answer.body) == (200 if told.code == pb.SUCCESS else 400, b"")
    return told


def over_grpc(server: Server, action: str, model: str) -> pb.RequestStatus:
    """What ModelControl says, whose zero is to unload."""
    asked = pb.ModelControlRequest(model_name=model)
    if action == "load":
        asked.type = pb.ModelControlRequest.LOAD
    with grpc.insecure_channel(address_of(server)) as channel:
        told: pb.RequestStatus = (
            Stub(channel).call("ModelControl", asked, pb.ModelControlResponse).request_status
        )
    return told


WAYS: dict[str, Callable[[Server, str, str], pb.RequestStatus]] = {"http": over_http, "grpc": over_grpc}


def ready_state(server: Server) -> str:
    """That of the only version of `add_sub`."""
    found = pb.ServerStatus.FromString(server.get("/api/status/add_sub?format=binary").body)
    return pb.ModelReadyState.Name(found.model_status["add_sub"].version_status[1].ready_state)


def refusal(server: Server) -> str:
    """Why a request is refused; "" when it is answered."""
    found = infer(server, "add_sub", GOOD, A.tobytes() * 2)
    return "" if found.answer.status == 200 else found.status.msg


def test_readiness_counts_what_was_asked_to_be_loaded(server: Server) -> None:
    def ready() -> set[int]:
        return {server.get("/api/health/ready").status for _ in range(LOOKS)}

    assert ready() == {200}, "nobody has asked for any of the models"
    assert over_http(server, "load", "broken").code == pb.UNAVAILABLE
    wait_until(lambda: ready() == {400}, what="every frontend to know of the failure")
    assert over_http(server, "unload", "broken").code == pb.SUCCESS
    wait_until(lambda: ready() == {200}, what="every frontend to know of the unload")


@pytest.mark.sample
@pytest.mark.parametrize(("load", "unload"), list(product(WAYS, WAYS)))
def test_a_model_comes_and_goes_by_its_name(server: Server, load: str, unload: str) -> None:
    told = WAYS[load](server, "load", "add_sub")
    assert told.code == pb.SUCCESS and told.request_id > 0, told.msg
    wait_until(lambda: ready_state(server) == "MODEL_READY", what="the load at the frontend that is asked")
    refused = {refusal(server) for _ in range(LOOKS)}
    assert refused == {""}, "a load that was answered holds for every frontend"
    assert WAYS[load](server, "load", "add_sub").code == pb.SUCCESS
    assert WAYS[unload](server, "unload", "add_sub").code == pb.SUCCESS
    wait_until(lambda: ready_state(server) == "MODEL_UNAVAILABLE", what="the end of the unloading")
    for _ in range(LOOKS):
        assert refusal(server)
    assert WAYS[unload](server, "unload", "add_sub").code == pb.SUCCESS, "it is what was asked for"


@pytest.mark.parametrize("way", WAYS)
def test_a_load_that_fails_and_a_model_that_nobody_has(server: Server, way: str) -> None:
    for model in ("broken", "nobody"):
        told = WAYS[way](server, "load", model)
        assert told.code == pb.UNAVAILABLE and model in told.msg, told
        assert "Traceback" not in told.msg and "/" not in told.msg


def test_regions_are_not_offered_where_shared_memory_is_off(server: Server) -> None:
    asked = pb.SharedMemoryControlRequest(status=pb.SharedMemoryControlRequest.Status())
    with grpc.insecure_channel(address_of(server)) as channel:
        found = Stub(channel).call("SharedMemoryControl", asked, pb.SharedMemoryControlResponse)
    assert found.request_status.code == pb.UNSUPPORTED and found.request_status.msg


def test_the_tags_of_a_configuration_are_labels_of_its_figures(server: Server) -> None:
    assert over_http(server, "load", "add_sub").code == pb.SUCCESS
    assert refusal(server) == ""
    labels = {"model": "add_sub", "version": "1", "_team": "search"}
    for name in ("request_success", "count", "exec_count", "request_duration_us", "load_ratio"):
        assert server.metric(f"nv_inference_{name}", **labels) > 0, name
    assert server.metric("nv_inference_count", model="fake/echo", _team="search") == 0
    assert "gpu_uuid" not in server.get("/metrics").body.decode(), "nothing of it ran on a GPU"
