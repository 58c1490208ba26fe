"""KServe v2 over gRPC below the public client: what no polite client sends, keys, ids, limits, health, reflection."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from ipc.protos import kserve_v2_pb2 as pb
from tests.conformance.conftest import Keyed
from tests.conformance.kserve_limits import MAX_MESSAGE_BYTES
from tests.fakes.holding import holding
from tests.fuzz import http2
from tests.harness.cluster import in_flight, is_gateway, ways_to
from tests.harness.keys import bearer
from tests.harness.rpc import (
    Rpc,
    address_of,
    failure_of,
    is_vector_of,
    text_request,
    trailers_of,
)
from tests.harness.server import PATIENCE_S, Server, wait_until

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
Code = grpc.StatusCode


server = ways_to("limited_server")


@pytest.fixture
def rpc(server: Server) -> Iterator[Rpc]:
    with Rpc(address_of(server)) as opened:
        yield opened


def typed(text: str) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="fake/echo")
    request.inputs.add(name="text", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    return request


def test_typed_and_raw_requests_get_the_same_raw_answer(rpc: Rpc) -> None:
    answers = [rpc.call("ModelInfer", one) for one in (typed("x"), text_request("fake/echo", "x"))]
    assert answers[0] == answers[1]
    assert is_vector_of("x", answers[0])
    assert not answers[0].outputs[0].HasField("contents")


def _changed(**changes: Any) -> pb.ModelInferRequest:
    request = text_request("fake/echo", "x")
    for name, value in changes.items():
        setattr(request.inputs[0], name, value)
    return request


def _both() -> pb.ModelInferRequest:
    request = typed("x")
    request.raw_input_contents.append(b"\x01\x00\x00\x00x")
    return request


def _lying() -> pb.ModelInferRequest:
    request = text_request("fake/echo", "x")
    request.raw_input_contents[0] = b"\xff\xff\xff\xffx"
    return request


def _extra() -> pb.ModelInferRequest:
    request = text_request("fake/echo", "x")
    request.raw_input_contents.append(b"more")
    return request


def _shaped(*shape: int) -> pb.ModelInferRequest:
    request = text_request("fake/echo", "x")
    del request.inputs[0].shape[:]
    request.inputs[0].shape.extend(shape)
    return request


def _parameter(name: str) -> pb.ModelInferRequest:
    request = text_request("fake/echo", "x")
    request.parameters[name].string_param = "x"
    return request


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (_both(), "exclude each other"),
        (_extra(), "expected 1 entries"),
        (_lying(), "text"),
        (_shaped(-1), "batch-size must be >= 1"),
        (_shaped(2**40, 2**40), "batch-size must be <= 10000"),
        (_shaped(2), "text"),
        (_changed(datatype="TEXT"), "TEXT"),
        (_changed(datatype="INT32"), "INT32"),
        (_changed(name="other"), "other"),
        (_parameter("triton_x"), "triton_"),
        (_parameter("sequence_start"), "sequence_start"),
        (b"\xff\xff\xff\xff", "not a message"),
        (b"\x3a\xff\xff\xff\x7f" + b"x" * 20_000, "not a message"),
    ],
)
def test_what_no_polite_client_sends_is_an_invalid_argument(rpc: Rpc, request_: Any, word: str) -> None:
    error = failure_of(lambda: rpc.call("ModelInfer", request_))
    assert error.code() is Code.INVALID_ARGUMENT, error.details()
    assert word in error.details()
    assert trailers_of(error)["penstock-code"] == "INVALID_INPUT"
    assert is_vector_of("still", rpc.call("ModelInfer", text_request("fake/echo", "still")))


def test_a_stream_survives_what_is_no_message(rpc: Rpc) -> None:
    requests = [text_request("fake/echo", "a", "1"), b"\xff\xff", text_request("fake/echo", "b", "2")]
    first, wrong, last = rpc.stream(requests)
    assert is_vector_of("a", first.infer_response) and is_vector_of("b", last.infer_response)
    assert "not a message" in wrong.error_message and not wrong.infer_response.id


def test_an_unknown_method_is_unimplemented(rpc: Rpc) -> None:
    unknown = rpc.channel.unary_unary("/inference.GRPCInferenceService/Nothing", bytes, bytes)
    assert failure_of(lambda: unknown(b"")).code() is Code.UNIMPLEMENTED


def test_a_message_over_the_limit_is_refused_and_one_at_it_is_taken(rpc: Rpc) -> None:
    request = text_request("fake/echo", "x")
    room = MAX_MESSAGE_BYTES - request.ByteSize()
    request.id = "i" * (room - 5)
    assert request.ByteSize() == MAX_MESSAGE_BYTES
    assert rpc.call("ModelInfer", request).id == request.id
    request.id += "i"
    assert failure_of(lambda: rpc.call("ModelInfer", request)).code() is Code.RESOURCE_EXHAUSTED


def test_a_bomb_is_refused_by_what_it_unpacks_to(rpc: Rpc) -> None:
    request = text_request("fake/echo", "x")
    request.id = "0" * (64 << 20)
    error = failure_of(lambda: rpc.call("ModelInfer", request, compression=grpc.Compression.Gzip))
    assert error.code() is Code.RESOURCE_EXHAUSTED, error.details()


def test_ids_are_echoed_and_unsafe_ones_replaced(rpc: Rpc) -> None:
    traceparent = f"00-{TRACE_ID}-00f067aa0ba902b7-00"
    metadata = (("x-request-id", "mine-7"), ("traceparent", traceparent))
    good = rpc.start("ModelInfer", text_request("fake/echo", "x"), metadata=metadata)
    good.result()
    assert trailers_of(good) == {
        "x-request-id": "mine-7",
        "x-trace-id": TRACE_ID,
        "traceparent": traceparent,
    }
    unknown = text_request("unknown", "x")
    error = failure_of(lambda: rpc.call("ModelInfer", unknown, metadata=(("x-request-id", "a b"),)))
    assert trailers_of(error)["x-request-id"].startswith("req_")
    assert "traceparent" not in trailers_of(error)


def test_binary_metadata_and_odd_names_do_no_harm(rpc: Rpc) -> None:
    metadata = (("x-request-id-bin", b"\xff"), ("authorization", "Basic eA=="), ("x-other", "y" * 1000))
    rpc.call("ModelInfer", text_request("fake/echo", "x"), metadata=metadata)


def test_a_request_with_a_deadline_that_has_passed_fails(rpc: Rpc, tmp_path: Path) -> None:
    """The client library may round the deadline up to a millisecond, within which a short text is answered."""
    with holding(tmp_path) as hold:
        request = text_request("fake/echo", f"#hold {hold} x")
        error = failure_of(lambda: rpc.call("ModelInfer", request, timeout_s=1e-6))
    assert error.code() is Code.DEADLINE_EXCEEDED


def test_rpcs_are_counted_with_those_of_http(server: Server, rpc: Rpc) -> None:
    def count(code: str) -> float:
        return server.metric("penstock_requests_total", protocol="kserve", operation="infer", code=code)

    # A client that has given up may leave a request that goes on for a moment.
    wait_until(lambda: in_flight(server) == 0, what="the end of the requests before")
    good, bad = count("200"), count("400")
    rpc.call("ModelInfer", text_request("fake/echo", "x"))
    failure_of(lambda: rpc.call("ModelInfer", _extra()))
    list(rpc.stream([text_request("fake/echo", str(number)) for number in range(3)]))
    wait_until(lambda: (count("200"), count("400")) == (good + 4, bad + 1), what="the counts")


def test_health_by_service(rpc: Rpc) -> None:
    serving_ = health_pb2.HealthCheckResponse.SERVING
    assert rpc.health() == rpc.health("inference.GRPCInferenceService") == serving_
    assert failure_of(lambda: rpc.health("unknown")).code() is Code.NOT_FOUND
    assert next(rpc.watch("unknown")) == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def test_reflection_lists_the_services(rpc: Rpc) -> None:
    call = rpc.channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.ModelInferRequest"),
    ]
    listed, file = call(iter(asked), timeout=PATIENCE_S)
    names = {service.name for service in listed.list_services_response.service}
    assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= names
    assert len(file.file_descriptor_response.file_descriptor_proto) >= 1


def test_keepalive_pings_are_tolerated(server: Server) -> None:
    options = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    with Rpc(address_of(server), options) as rpc:
        stream = rpc.stream(_slowly())
        assert len(list(stream)) == 2


def _slowly() -> Iterator[pb.ModelInferRequest]:
    """Two requests with time for several pings between them."""
    yield text_request("fake/echo", "a")
    until = time.monotonic() + 4
    wait_until(lambda: time.monotonic() > until)
    yield text_request("fake/echo", "b")


def test_results_in_a_typed_number_field(rpc: Rpc) -> None:
    metadata = rpc.call("ModelMetadata", pb.ModelMetadataRequest(name="fake/echo"))
    assert [output.datatype for output in metadata.outputs] == ["FP32"]
    answer = rpc.call("ModelInfer", typed("number"))
    assert len(answer.raw_output_contents[0]) == 4 * int(np.prod(answer.outputs[0].shape))


def with_key(key: str) -> tuple[tuple[str, str], ...]:
    return tuple((name.lower(), value) for name, value in bearer(key).items())


def test_keys_and_scopes(either_keyed: Keyed) -> None:
    server, keys = either_keyed
    request, load = text_request("fake/echo", "x"), pb.RepositoryModelLoadRequest(model_name="x")
    with Rpc(address_of(server)) as rpc:
        rpc.call("ModelInfer", request, metadata=with_key(keys["infer"]))
        for metadata in ((), with_key("pk_wrong"), (("authorization", "Basic eDp5"),)):
            error = failure_of(lambda metadata=metadata: rpc.call("ModelInfer", request, metadata=metadata))
            assert error.code() is Code.UNAUTHENTICATED
        error = failure_of(lambda: rpc.call("RepositoryModelLoad", load, metadata=with_key(keys["infer"])))
        assert error.code() is Code.PERMISSION_DENIED and "admin" in error.details()
        error = failure_of(lambda: rpc.call("RepositoryModelLoad", load, metadata=with_key(keys["both"])))
        off = Code.UNIMPLEMENTED if is_gateway(server) else Code.UNAVAILABLE
        assert error.code() is off, "let in, and told that there is no control"
        assert rpc.call("ServerLive", pb.ServerLiveRequest()).live, "probes need no key"
        assert rpc.health() == health_pb2.HealthCheckResponse.SERVING


def test_a_stream_without_a_key_ends_with_a_status(either_keyed: Keyed) -> None:
    server, keys = either_keyed
    with Rpc(address_of(server)) as rpc:
        error = failure_of(lambda: list(rpc.stream([text_request("fake/echo", "x")])))
        assert error.code() is Code.UNAUTHENTICATED
        answers = list(rpc.stream([text_request("fake/echo", "x")], metadata=with_key(keys["infer"])))
        assert is_vector_of("x", answers[0].infer_response)


def test_a_rate_counts_messages_of_streams_and_rpcs_alike(either_keyed: Keyed) -> None:
    server, keys = either_keyed
    metadata = with_key(keys["slow-grpc"])
    with Rpc(address_of(server)) as rpc:
        requests = [text_request("fake/echo", str(number)) for number in range(3)]
        told = [answer.error_message for answer in rpc.stream(requests, metadata=metadata)]
        assert told[:2] == ["", ""] and "requests per second" in told[2]
        error = failure_of(lambda: rpc.call("ModelInfer", requests[0], metadata=metadata))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert int(trailers_of(error)["retry-after"]) > 1


def _kinds_of_frames(heard: bytes) -> list[int]:
    """Kinds of the whole HTTP/2 frames in these bytes."""
    found, at = [], 0
    while at + 9 <= len(heard):
        end = at + 9 + int.from_bytes(heard[at : at + 3], "big")
        if end <= len(heard):
            found.append(heard[at + 3])
        at = end
    return found


@pytest.mark.parametrize(
    "path", ["/\xff", "/inference.GRPCInferenceService/ModelInfer\xff", "", "/", "/none/None"]
)
def test_a_path_that_no_method_has_ends_nothing_but_its_own_call(server: Server, rpc: Rpc, path: str) -> None:
    flags = http2.END_HEADERS | http2.END_STREAM
    opened = http2.frame(http2.HEADERS, flags, 1, http2.block(http2.fields_of(path)))
    host, _, port = address_of(server).rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
        client.sendall(b"".join([*http2.opening(), opened]))
        heard = b""
        while not {http2.HEADERS, http2.RST_STREAM} & {*_kinds_of_frames(heard)}:
            piece = client.recv(4096)
            assert piece, "the connection ended without an answer"
            heard += piece
    assert is_vector_of("x", rpc.call("ModelInfer", text_request("fake/echo", "x")))
