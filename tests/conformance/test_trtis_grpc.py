"""TRTIS v1 over gRPC: every rpc, the outcome within the message, streams whose answers may overtake."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from ipc.protos import trtis_v1_pb2 as pb
from tests.conformance.trtis import MODELS, infer
from tests.conformance.trtis_transports import Stub
from tests.fakes.holding import holding, is_waited_for
from tests.harness.server import PATIENCE_S, Server, wait_until

A = np.arange(16, dtype="<i4")
B = np.full(16, 3, dtype="<i4")


@pytest.fixture
def server(either_trtis: Server) -> Server:
    """The server, and a gateway whose only box is the server."""
    return either_trtis


@pytest.fixture
def stub(trtis_stub: Stub) -> Stub:
    return trtis_stub


def request(number: int = 0, model: str = "add_sub", version: int = -1, **header: Any) -> pb.InferRequest:
    """A request of `A` and `B` for both outputs."""
    made = pb.InferRequest(model_name=model, model_version=version, raw_input=[A.tobytes(), B.tobytes()])
    made.meta_data.batch_size, made.meta_data.id = 1, number
    for name in ("INPUT0", "INPUT1"):
        made.meta_data.input.add(name=name, dims=[16])
    for name in ("OUTPUT0", "OUTPUT1"):
        made.meta_data.output.add(name=name)
    made.meta_data.MergeFrom(pb.InferRequestHeader(**header))
    return made


def slow(number: int, milliseconds: float, timeout_us: int = 0) -> pb.InferRequest:
    """A request that takes as long as it says, once it runs."""
    made = pb.InferRequest(model_name="slow", model_version=-1)
    made.raw_input.append(np.array([milliseconds], "<f4").tobytes())
    made.meta_data.batch_size, made.meta_data.id = 1, number
    made.meta_data.timeout_microseconds = timeout_us
    made.meta_data.input.add(name="INPUT", dims=[1])
    made.meta_data.output.add(name="OUTPUT")
    return made


def test_infer(stub: Stub) -> None:
    found = stub.infer(request(7))
    assert found.request_status.code == pb.SUCCESS and found.request_status.request_id > 0
    assert found.meta_data.id == 7 and found.meta_data.model_version == 1
    assert [np.frombuffer(raw, "<i4").tolist() for raw in found.raw_output] == [
        (A + B).tolist(),
        (A - B).tolist(),
    ]
    assert [output.raw.batch_byte_size for output in found.meta_data.output] == [64, 64]


def test_class_outputs_keep_their_place_with_an_empty_entry(stub: Stub) -> None:
    made = pb.InferRequest(model_name="classifier", model_version=-1)
    made.raw_input.append(np.zeros(3 * 32 * 32, "<f4").tobytes())
    made.meta_data.batch_size = 1
    made.meta_data.input.add(name="image", dims=[3, 32, 32])
    made.meta_data.output.add(name="scores").cls.count = 2
    found = stub.infer(made)
    assert found.request_status.code == pb.SUCCESS, found.request_status.msg
    assert list(found.raw_output) == [b""] and len(found.meta_data.output[0].batch_classes[0].cls) == 2


@pytest.mark.parametrize(("mode", "code"), [("live", "SUCCESS"), ("ready", "SUCCESS"), ("well", "UNKNOWN")])
def test_health(stub: Stub, mode: str, code: str) -> None:
    found = stub.call("Health", pb.HealthRequest(mode=mode), pb.HealthResponse)
    assert found.request_status.code == pb.RequestStatusCode.Value(code)
    assert found.health == (code == "SUCCESS")


def test_status(stub: Stub) -> None:
    found = stub.call("Status", pb.StatusRequest(model_name="add_sub"), pb.StatusResponse)
    assert found.request_status.code == pb.SUCCESS
    assert found.server_status.model_status["add_sub"].config.max_batch_size == 8
    every = stub.call("Status", pb.StatusRequest(), pb.StatusResponse)
    assert set(MODELS) <= set(every.server_status.model_status)
    unknown = stub.call("Status", pb.StatusRequest(model_name="nobody"), pb.StatusResponse)
    assert unknown.request_status.code == pb.INVALID_ARG
    assert unknown.request_status.msg.startswith("no status available for unknown model")


@pytest.mark.parametrize(
    ("method", "sent", "response", "code"),
    [
        ("Profile", pb.ProfileRequest(cmd="start"), pb.ProfileResponse, "UNSUPPORTED"),
        (
            "ModelControl",
            pb.ModelControlRequest(model_name="add_sub", type=pb.ModelControlRequest.LOAD),
            pb.ModelControlResponse,
            "UNSUPPORTED",
        ),
        (
            "SharedMemoryControl",
            pb.SharedMemoryControlRequest(),
            pb.SharedMemoryControlResponse,
            "INVALID_ARG",
        ),
    ],
)
def test_what_is_not_offered_says_so_in_the_message(
    stub: Stub, method: str, sent: Any, response: Any, code: str
) -> None:
    found = stub.call(method, sent, response)
    assert found.request_status.code == pb.RequestStatusCode.Value(code), found.request_status.msg
    assert found.request_status.msg


def test_the_repository_lists_its_models(stub: Stub) -> None:
    found = stub.call("Repository", pb.RepositoryRequest(index=True), pb.RepositoryResponse)
    assert set(MODELS) <= {entry.name for entry in found.index.models}


def test_answers_of_a_stream_may_overtake_and_are_paired_by_id(stub: Stub) -> None:
    sent = [slow(1, 3000), request(2), request(3, model="nobody"), request(4)]
    found = list(stub.stream(sent))
    assert sorted(answer.meta_data.id for answer in found) == [1, 2, 3, 4]
    order = [answer.meta_data.id for answer in found]
    assert order.index(3) < order.index(1), "an answer does not wait for those of earlier requests"
    codes = {answer.meta_data.id: answer.request_status.code for answer in found}
    assert codes == {1: pb.SUCCESS, 2: pb.SUCCESS, 3: pb.UNAVAILABLE, 4: pb.SUCCESS}


def test_a_long_stream_is_answered_whole(stub: Stub) -> None:
    found = list(stub.stream(request(number) for number in range(1, 301)))
    assert sorted(answer.meta_data.id for answer in found) == list(range(1, 301))
    assert all(answer.request_status.code == pb.SUCCESS for answer in found)


def test_many_tiny_streams_leave_nothing_behind(server: Server, stub: Stub) -> None:
    for number in range(50):
        assert len(list(stub.stream([request(number + 1)]))) == 1
    assert server.metric("penstock_requests_in_flight", model="add_sub@1") == 0


def test_a_timeout_that_passes_in_the_queue_is_unavailable_and_says_when_to_come_again(
    server: Server, stub: Stub, tmp_path: Path
) -> None:
    late = slow(2, 1, timeout_us=100_000)
    rpc = stub.rpc("Infer", late, pb.InferResponse)

    def called() -> tuple[pb.RequestStatus, str | None]:
        found, done = rpc.with_call(late, timeout=PATIENCE_S)
        assert found.meta_data.id == 2
        return found.request_status, dict(done.trailing_metadata()).get("retry-after")

    def posted() -> tuple[pb.RequestStatus, str | None]:
        line = text_format.MessageToString(late.meta_data, as_one_line=True)
        found = infer(server, "slow", line, late.raw_input[0])
        return found.status, found.answer.headers.get("retry-after")

    with ThreadPoolExecutor(1) as threads, holding(tmp_path) as hold:
        column = {"name": "INPUT", "shape": [1, 1], "datatype": "FP32", "data": [1]}
        body = {"inputs": [column], "parameters": {"hold": str(hold)}}
        busy = threads.submit(server.post, "/v2/models/slow/infer", body)
        wait_until(lambda: is_waited_for(hold), what="a busy device")
        expired = [called(), posted()]
        hold.unlink()
        assert busy.result().status == 200
    for status, retry_after in expired:
        assert status.code == pb.UNAVAILABLE and "timeout" in status.msg and retry_after == "1"


def test_a_message_over_the_old_limit_of_four_mebibytes(stub: Stub) -> None:
    made = request(1)
    made.raw_input[0] = bytes(8 << 20)
    assert stub.infer(made).request_status.code == pb.INVALID_ARG
