"""Sequences and answers in parts through gateways and boxes as real processes: the local server's answers, deaths.

Box `a` has a frontend of its own, which is the local server to compare with.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frontend.engine.streams import homes
from ipc.protos import kserve_v2_pb2 as pb
from tests.harness.broker import Broker
from tests.harness.cluster import Box, box, gateway, living
from tests.harness.decoupled import MODEL as PARTS
from tests.harness.decoupled import Events, number_of
from tests.harness.decoupled import message as ask_parts
from tests.harness.rpc import Rpc, address_of, grpc_settings
from tests.harness.server import Answer, Server, wait_until
from tests.tiny.programs import SCRIPTED, write_repository

SUMS = "accumulator"
LARGE = 1 << 19
"""Numbers of a part that is too large for a message."""
_names = itertools.count(1)


@pytest.fixture(scope="module")
def boxes(place: Path, one_broker: Broker) -> Iterator[tuple[Box, Box]]:
    repository = write_repository(place / "models", [SUMS, PARTS], SCRIPTED)
    settings = grpc_settings(
        **{
            "repository.dirs": repository,
            "repository.allow_python": "true",
            "cluster.transfer_bind": "127.0.0.1:0",
        }
    )
    with (
        box(place / "a", "a", [one_broker.url], settings={**settings, "worker.count": 1}) as a,
        box(place / "b", "b", [one_broker.url], settings={**settings, "worker.count": 1}) as b,
    ):
        yield a, b


def _gateway(place: Path, one_broker: Broker) -> Any:
    return gateway(place, [one_broker.url], grpc_settings())


@pytest.fixture(scope="module")
def near(place: Path, one_broker: Broker, boxes: tuple[Box, Box]) -> Iterator[Server]:
    with _gateway(place / "near", one_broker) as server:
        wait_until(lambda: living(server) == {"a", "b"}, what="both boxes")
        for model in (SUMS, PARTS):
            wait_until(lambda name=model: server.get(f"/v2/models/{name}/ready").status == 200, what=model)
        yield server


@pytest.fixture(scope="module")
def local(boxes: tuple[Box, Box]) -> Iterator[Server]:
    """The frontend of box a."""
    server = boxes[0].server
    server.environment["PENSTOCK_SUPERVISE"] = "0"
    server.start()
    try:
        server.wait_ready()
        yield server
    finally:
        assert server.process is not None
        server.process.terminate()
        server.process.wait(60)


def name_for(home: str) -> int:
    """A fresh id whose home is this box."""
    places = ("a/0", "b/0")
    return next(name for name in _names if homes.home(places, f"{SUMS}@1", name).startswith(home))


def add(server: Server, name: int, number: int, *, start: bool = False, end: bool = False) -> Answer:
    """One request of a sequence over REST."""
    given = {"name": "INPUT", "shape": [1, 1], "datatype": "INT32", "data": [number]}
    step = {"sequence_id": name, "sequence_start": start, "sequence_end": end}
    return server.post(f"/v2/models/{SUMS}/infer", {"inputs": [given], "parameters": step, "id": "x"})


def message(name: int, number: int, *, start: bool = False, end: bool = False) -> pb.ModelInferRequest:
    """One request of a sequence over gRPC."""
    made = pb.ModelInferRequest(model_name=SUMS, raw_input_contents=[np.int32(number).tobytes()])
    made.inputs.add(name="INPUT", datatype="INT32", shape=[1, 1])
    made.parameters["sequence_id"].int64_param = name
    made.parameters["sequence_start"].bool_param = start
    made.parameters["sequence_end"].bool_param = end
    return made


def unnamed(answer: Answer) -> bytes:
    """The body of an answer without the id of its request."""
    return re.sub(rb"req_[0-9a-f]{32}", b"", answer.body)


def total(answer: Answer) -> int:
    """The number of an answer that is no error."""
    assert answer.status == 200, answer.body
    return int(answer.json()["outputs"][0]["data"][0])


def test_a_sequence_has_the_bytes_of_the_local_server(near: Server, local: Server) -> None:
    for home in ("a", "b"):
        name = name_for(home)
        steps = [(1, True, False), (2, False, False), (3, False, True), (4, False, False)]
        told = [
            [add(server, name, number, start=start, end=end) for number, start, end in steps]
            for server in (local, near)
        ]
        assert [each.status for each in told[0]] == [200, 200, 200, 400]
        assert [unnamed(each) for each in told[0]] == [unnamed(each) for each in told[1]]


def test_a_sequence_goes_on_over_protocols_and_gateways(
    place: Path, one_broker: Broker, near: Server
) -> None:
    with _gateway(place / "second", one_broker) as second:
        wait_until(lambda: living(second) == {"a", "b"}, what="both boxes")
        wait_until(lambda: second.get(f"/v2/models/{SUMS}/ready").status == 200, what="the model")
        for name in (name_for("a"), name_for("b")):
            assert total(add(near, name, 1, start=True)) == 1
            assert total(add(second, name, 2)) == 3
            with Rpc(address_of(near)) as rpc:
                sent = [message(name, number, end=number == 9) for number in range(3, 10)]
                answers = list(rpc.stream(sent))
            found = [np.frombuffer(one.infer_response.raw_output_contents[0], "<i4")[0] for one in answers]
            assert found == list(itertools.accumulate(range(3, 10), initial=3))[1:]


def test_a_box_that_is_killed_takes_its_sequences_along(near: Server, boxes: tuple[Box, Box]) -> None:
    gone, stays = name_for("b"), name_for("a")
    for name in (gone, stays):
        assert total(add(near, name, 1, start=True)) == 1
    assert boxes[1].end(signal.SIGKILL) == -signal.SIGKILL
    refused = add(near, gone, 2)
    assert refused.status == 400 and b"must specify the START flag" in refused.body
    assert b"its worker has gone, and its state with it" in refused.body
    assert total(add(near, stays, 2, end=True)) == 3
    boxes[1].start_bridge()
    # The worker has kept the state, and nobody goes on with it behind the death of the bridge.
    assert total(add(near, name_for("b"), 5, start=True, end=True)) == 5
    refused = add(near, gone, 2)
    assert refused.status == 400 and b"it did not begin here, or it has ended" in refused.body
    assert total(add(near, gone, 7, start=True, end=True)) == 7


def test_parts_have_the_bytes_of_the_local_server(near: Server, local: Server) -> None:
    wishes: list[dict[str, Any]] = [
        {"count": 0, "empty_final": True},
        {"count": 40, "request_id": "one", "width": 3},
        {"count": 3, "width": LARGE},
        {"count": 9, "raise_at": 4},
    ]
    told = []
    for server in (local, near):
        with Rpc(address_of(server)) as rpc:
            answers = [list(rpc.stream([ask_parts(**wish)])) for wish in wishes]
        told.append([[answer.SerializeToString(deterministic=True) for answer in each] for each in answers])
    assert [len(each) for each in told[0]] == [1, 40, 3, 5]
    assert told[0] == told[1]
    with Events(local, 5) as here, Events(near, 5) as there:
        assert here.numbers() == there.numbers() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "path",
    [
        "/v2",
        f"/v2/models/{SUMS}",
        f"/v2/models/{SUMS}/config",
        f"/v2/models/{PARTS}/config",
        f"/v2/models/{SUMS}/trace/setting",
        "/v2/logging",
        "/v1/config",
    ],
)
def test_what_kserve_tells_of_models_has_the_bytes_of_the_local_server(
    near: Server, local: Server, path: str
) -> None:
    here, there = local.get(path), near.get(path)
    assert here.status == there.status == 200 and here.body == there.body


def test_statistics_of_a_gateway_count_what_all_boxes_have_run(near: Server) -> None:
    def count() -> int:
        found = near.get(f"/v2/models/{SUMS}/stats").json()["model_stats"]
        return sum(each["inference_stats"]["success"]["count"] for each in found)

    before = count()
    for home in ("a", "b"):
        assert total(add(near, name_for(home), 4, start=True, end=True)) == 4
    wait_until(lambda: count() >= before + 2, what="the figures of both boxes")


def test_the_death_of_a_box_in_the_middle_of_an_answer_is_that_of_a_worker(
    near: Server, boxes: tuple[Box, Box], tmp_path: Path
) -> None:
    # A box may still tell of an answer that has ended.
    wait_until(lambda: sum(each.items for each in boxes) == 0, what="boxes without items")
    with Rpc(address_of(near)) as rpc:
        answers = rpc.stream([ask_parts(5, gate=tmp_path / "gate", gate_at=2)])
        assert [number_of(next(answers)) for _ in range(2)] == [0, 1]
        wait_until(lambda: sum(each.items for each in boxes) == 1, what="the answer at its box")
        mine = next(each for each in boxes if each.items)
        assert mine.end(signal.SIGKILL) == -signal.SIGKILL
        [last] = list(answers)
        assert "the worker was lost in the middle of its answer" in last.error_message
    (tmp_path / "gate").touch()
    mine.start_bridge()
    wait_until(lambda: living(near) == {"a", "b"}, what="the next life of the box")


def test_a_client_that_leaves_ends_its_answer_at_the_box(
    near: Server, boxes: tuple[Box, Box], tmp_path: Path
) -> None:
    wait_until(lambda: sum(each.items for each in boxes) == 0, what="boxes without items")
    with Rpc(address_of(near)) as rpc:
        answers = rpc.stream([ask_parts(5, gate=tmp_path / "gate", gate_at=2)])
        assert number_of(next(answers)) == 0
        wait_until(lambda: sum(each.items for each in boxes) == 1, what="the answer at its box")
        answers.cancel()
        wait_until(lambda: sum(each.items for each in boxes) == 0, what="the end of the answer at its box")
