"""TRTIS v1 over gRPC: every rpc, the outcome within the message, streams whose answers may overtake."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from ipc.protos import trtis_v1_pb2 as pb
from tests.harness.server import Server, free_port, serving
from tests.tiny.programs import write_repository

MODELS = ("add_sub", "add_sub_string", "classifier", "slow", "accumulator", "versions_specific")
A = np.arange(16, dtype="<i4")
B = np.full(16, 3, dtype="<i4")
_SERVICE = "/nvidia.inferenceserver.GRPCService/"


class Stub:
    """The service by its wire names, over one channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def call(self, method: str, request: Any, response: Any, **options: Any) -> Any:
        """One unary rpc."""
        serialize: Callable[[Any], bytes] = type(request).SerializeToString
        rpc = self._channel.unary_unary(_SERVICE + method, serialize, response.FromString)
        return rpc(request, timeout=30, **options)

    def infer(self, request: pb.InferRequest) -> pb.InferResponse:
        """Infer."""
        return self.call("Infer", request, pb.InferResponse)

    def stream(self, requests: Iterable[pb.InferRequest]) -> Iterator[pb.InferResponse]:
        """StreamInfer."""
        rpc = self._channel.stream_stream(
            _SERVICE + "StreamInfer", pb.InferRequest.SerializeToString, pb.InferResponse.FromString
        )
        return rpc(iter(requests), timeout=60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("trtis-grpc")
    repository = write_repository(place / "models", MODELS)
    settings = {
        "repository.dirs": repository,
        "repository.allow_python": "true",
        "grpc.enabled": "true",
        "grpc.bind": f"127.0.0.1:{free_port()}",
    }
    with serving(place, ("fake/echo",), settings) as running:
        yield running


@pytest.fixture(scope="module")
def stub(server: Server) -> Iterator[Stub]:
    address = server.environment["PENSTOCK_GRPC__BIND"]
    with grpc.insecure_channel(address) as channel:
        yield Stub(channel)


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


def slow(number: int, milliseconds: float) -> pb.InferRequest:
    """A request that takes as long as it says."""
    made = pb.InferRequest(model_name="slow", model_version=-1)
    made.raw_input.append(np.array([milliseconds], "<f4").tobytes())
    made.meta_data.batch_size, made.meta_data.id = 1, number
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


@pytest.mark.parametrize(
    ("made", "code", "message"),
    [
        (request(1, model="nobody"), pb.UNAVAILABLE, "Inference request for unknown model 'nobody'"),
        (request(1, version=0), pb.UNAVAILABLE, "Inference request for unknown model 'add_sub'"),
        (request(1, batch_size=9), pb.INVALID_ARG, "batch-size must be <= 8 for 'add_sub'"),
    ],
)
def test_failures_are_answers(stub: Stub, made: pb.InferRequest, code: int, message: str) -> None:
    found = stub.infer(made)
    assert found.request_status.code == code and message in found.request_status.msg
    assert found.meta_data.id == 1


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([A.tobytes()], "expected tensor data for 2 inputs but got 1"),
        ([A.tobytes()] * 3, "expected tensor data for 2 inputs but got 3"),
        ([A.tobytes(), B.tobytes()[:-4]], "unexpected size 60 for input 'INPUT1', expecting 64"),
        ([A.tobytes() + b"\0", B.tobytes()], "unexpected size 65 for input 'INPUT0', expecting 64"),
    ],
)
def test_raw_inputs_that_do_not_fit(stub: Stub, raw: list[bytes], message: str) -> None:
    made = request(2)
    del made.raw_input[:]
    made.raw_input.extend(raw)
    found = stub.infer(made)
    assert found.request_status.code == pb.INVALID_ARG and message in found.request_status.msg
    assert found.request_status.request_id == 0 and not found.raw_output and not found.meta_data.output


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
            pb.SharedMemoryControlRequest(status=pb.SharedMemoryControlRequest.Status()),
            pb.SharedMemoryControlResponse,
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
    sent = [slow(1, 400), request(2), request(3, model="nobody"), request(4)]
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


def test_a_message_over_the_old_limit_of_four_mebibytes(stub: Stub) -> None:
    made = request(1)
    made.raw_input[0] = bytes(8 << 20)
    assert stub.infer(made).request_status.code == pb.INVALID_ARG
