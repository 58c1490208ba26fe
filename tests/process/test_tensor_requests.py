"""Tensor requests through a whole server: catalog models as tensor models, and large bodies through the input arena."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.harness.server import PATIENCE_S, Answer, Server, serving, wait_until
from tests.tiny.programs import SCRIPTED, write_repository

MIB = 1 << 20
ARENA = 12 * MIB


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("tensors")
    repository = write_repository(place / "models", ["identity_uint8", "add_sub", "versions_all"], SCRIPTED)
    settings = {
        "repository.dirs": repository,
        "arena.input_bytes": ARENA,
        "arena.bytes": 64 * MIB,
        "arena.lease_copy_after_s": 0.2,
    }
    with serving(place, ("fake/echo", "fake/score"), settings, supervised=False) as running:
        yield running


def texts(name: str, *values: str) -> dict[str, Any]:
    """A BYTES input in JSON."""
    return {"name": name, "shape": [len(values)], "datatype": "BYTES", "data": list(values)}


def infer(server: Server, model: str, *inputs: dict[str, Any], **more: Any) -> Answer:
    """One request in JSON."""
    return server.post(f"/v2/models/{model}/infer", {"inputs": list(inputs), **more})


def head_of(nbytes: int) -> bytes:
    """The JSON of a request that sends that many bytes to be given back."""
    given = {
        "name": "INPUT",
        "shape": [1, nbytes],
        "datatype": "UINT8",
        "parameters": {"binary_data_size": nbytes},
    }
    return json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()


def echoed(server: Server, data: bytes) -> bytes:
    """These bytes, there and back in binary."""
    head = head_of(len(data))
    sent = {"Inference-Header-Content-Length": str(len(head))}
    answer = server.request("POST", "/v2/models/identity_uint8/infer", head + data, sent)
    assert answer.status == 200, answer.body[:500]
    return answer.body[int(answer.headers["inference-header-content-length"]) :]


def random_bytes(nbytes: int, seed: int) -> bytes:
    """Bytes that differ from those of other seeds."""
    return np.random.default_rng(seed).bytes(nbytes)


@pytest.mark.parametrize("name", ["fake/echo", "echo"])
def test_vectors_are_those_of_the_encode_route(server: Server, name: str) -> None:
    words = ["hello", "wörld", ""]
    expected = [item["dense"]["values"] for item in server.encode("fake/echo", words).json()["items"]]
    answer = infer(server, name, texts("text", *words)).json()
    (output,) = answer["outputs"]
    assert (answer["model_name"], answer["model_version"]) == (name, "1")
    assert (output["name"], output["datatype"]) == ("dense", "FP32")
    assert output["shape"] == [3, len(expected[0])]
    found = np.array(output["data"], np.float32).reshape(output["shape"])
    assert np.array_equal(found, np.array(expected, np.float32))


def test_scores_are_those_of_the_score_route(server: Server) -> None:
    documents = ["best 2.5", "worst -1", "1"]
    body = {"query": {"text": "q"}, "items": [{"text": text} for text in documents]}
    ranked = server.post("/v1/score/fake/score", body).json()["scores"]
    expected = {entry["item_id"]: entry["score"] for entry in ranked}
    (output,) = infer(server, "score", texts("query", "q"), texts("documents", *documents)).json()["outputs"]
    assert output["data"] == pytest.approx([expected[f"item-{at}"] for at in range(3)], rel=1e-6)


def test_what_is_wrong_with_a_catalog_request_is_named(server: Server) -> None:
    answer = infer(server, "echo", texts("text", "a"), parameters={"treshold": 1})
    assert answer.status == 400
    assert "'treshold'" in answer.json()["error"]


def test_the_latest_version_answers_unless_another_is_named(server: Server) -> None:
    given = {"name": "INPUT", "shape": [1, 4], "datatype": "INT32", "data": [0, 0, 0, 0]}
    for path, number in (("", 3), ("/versions/1", 1), ("/versions/2", 2)):
        answer = infer(server, f"versions_all{path}", given).json()
        assert answer["model_version"] == str(number)
        assert answer["outputs"][0]["data"] == [number] * 4


def test_a_large_body_is_copied_once_on_its_way_in(server: Server) -> None:
    def copied() -> float:
        return server.metric("penstock_tensor_copied_bytes_total", place="receive")

    before, data = copied(), random_bytes(8 * MIB, 1)
    assert echoed(server, data) == data
    wait_until(lambda: copied() - before >= len(data), what="the count of copies")
    assert copied() - before == len(data)


def test_more_large_bodies_than_fit_take_turns(server: Server) -> None:
    sent = [random_bytes(5 * MIB + at, at) for at in range(9)]
    with ThreadPoolExecutor(9) as clients:
        assert list(clients.map(lambda data: echoed(server, data), sent)) == sent
    _is_empty(server)


def _is_empty(server: Server) -> None:
    wait_until(lambda: server.metric("penstock_input_shm_bytes_used") == 0, what="an empty input arena")


def _begin(server: Server, data: bytes, part: int) -> socket.socket:
    """A connection on which a request was begun: its head and the first part of its body."""
    head = head_of(len(data))
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
    lines = (
        "POST /v2/models/identity_uint8/infer HTTP/1.1",
        "Host: x",
        f"Content-Length: {len(head) + len(data)}",
        f"Inference-Header-Content-Length: {len(head)}",
        "Connection: close",
    )
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + head + data[:part])
    return connection


def test_a_slow_sender_keeps_no_room_from_others_and_is_served(server: Server) -> None:
    slow = random_bytes(9 * MIB, 7)
    with _begin(server, slow, MIB) as connection:
        wait_until(lambda: server.metric("penstock_input_shm_bytes_used") >= 9 * MIB, what="the block")
        other = random_bytes(6 * MIB, 8)
        assert echoed(server, other) == other
        connection.sendall(slow[MIB:])
        answer = b"".join(iter(lambda: connection.recv(MIB), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(slow)
    _is_empty(server)


def test_a_client_that_goes_away_in_its_body_leaves_nothing(server: Server) -> None:
    with _begin(server, bytes(9 * MIB), MIB) as connection:
        wait_until(lambda: server.metric("penstock_input_shm_bytes_used") >= 9 * MIB, what="the block")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    _is_empty(server)
