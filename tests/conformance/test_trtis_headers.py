"""Headers, types, patterns of paths, and text of TRTIS v1: what programs of the first release read, and its limits."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory, text_format

from frontend.protocols.trtis_v1.requests import as_of_1_4
from ipc.protos import trtis_v1_pb2 as pb
from tests.conformance.trtis import KANA, infer, status_of
from tests.conformance.trtis_transports import Stub
from tests.harness.raw import RawClient
from tests.harness.server import Server, wait_until
from tests.harness.status import only_frontend

HEAD_LIMIT = 256 << 10
RAW = np.arange(16, dtype="<i4").tobytes() + np.full(16, 3, dtype="<i4").tobytes()
INPUTS = 'input { name: "INPUT0" dims: 16 } input { name: "INPUT1" dims: 16 }'
GOOD = f'batch_size: 1 {INPUTS} output {{ name: "OUTPUT0" }} output {{ name: "OUTPUT1" }} id: 7'
RANKED = 'batch_size: 1 input { name: "image" } output { name: "scores" cls { count: 3 } } id: 8'
PICTURE = np.linspace(0, 255, 3072, dtype="<f4").tobytes()


@pytest.fixture
def server(either_trtis: Server) -> Server:
    """The server, and a gateway whose only box is the server."""
    return either_trtis


@pytest.fixture
def stub(trtis_stub: Stub) -> Stub:
    return trtis_stub


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/api/status", None),
        ("/api/status/add_sub", None),
        ("/api/status/nobody", None),
        ("/api/status?format=binary", "application/octet-stream"),
        ("/api/status?format=text", None),
        ("/api/health/live", None),
        ("/api/health/other", None),
        ("/api/repository/index", None),
        ("/api/repository/index?format=binary", "application/octet-stream"),
        ("/api/profile?cmd=start", None),
        ("/api/health/live/now", None),
        ("/api/infer/add_sub", None),
    ],
)
def test_text_has_no_type(server: Server, path: str, kind: str | None) -> None:
    assert server.get(path).headers.get("content-type") == kind


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/infer/add_sub/-1"),
        ("POST", "/api/infer/add_sub/+1"),
        ("POST", "/api/infer/add_sub/1.0"),
        ("POST", "/api/infer/add_sub/latest"),
        ("POST", "/api/infer/add_sub/%D9%A1"),
        ("POST", "/api/infer/add_sub/"),
        ("POST", "/api/infer/add_sub/1/"),
        ("POST", "/api/infer/"),
        ("POST", "/api/infer"),
        ("POST", "/api/infer/org/add_sub"),
        ("POST", "/api/infer/org/add_sub/1"),
        ("POST", "/api/modelcontrol/reload/add_sub"),
        ("POST", "/api/modelcontrol/add_sub"),
        ("POST", "/api/sharedmemorycontrol/register/name/key/zero/8"),
        ("POST", "/api/sharedmemorycontrol/register/name/key/0/-8"),
        ("POST", "/api/sharedmemorycontrol/register/name/8"),
        ("POST", "/api/sharedmemorycontrol/cudaregister/name/8/gpu"),
        ("POST", "/api/sharedmemorycontrol/unregister/"),
        ("POST", "/api/sharedmemorycontrol/forget/name"),
    ],
)
def test_a_path_that_fails_its_pattern_is_400_without_a_status(
    server: Server, method: str, path: str
) -> None:
    answer = server.request(method, path, RAW, {"NV-InferRequest": GOOD})
    assert answer.status == 400 and answer.body == b"" and "nv-status" not in answer.headers
    assert "nv-inferresponse" not in answer.headers


@pytest.mark.parametrize(
    ("version", "served"),
    [("1", True), ("01", True), ("0" * 60 + "1", True), ("2", False), ("0", False), ("9" * 5000, False)],
)
def test_every_number_is_a_version(server: Server, version: str, served: bool) -> None:
    found = infer(server, f"add_sub/{version}", GOOD, RAW)
    assert (found.status.code == pb.SUCCESS) == served
    assert served or found.status.msg.startswith("Inference request for unknown model 'add_sub'")


def first_release() -> Any:
    """InferResponseHeader as release 1.0 knew it."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    [header] = [message for message in file.message_type if message.name == "InferResponseHeader"]
    [output] = [message for message in header.nested_type if message.name == "Output"]
    [later] = [field for field in output.field if field.name == "data_type"]
    output.field.remove(later)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName(pb.InferResponseHeader.DESCRIPTOR.full_name)
    )


@pytest.mark.parametrize(
    ("model", "header", "body"), [("add_sub", GOOD, RAW), ("classifier", RANKED, PICTURE)]
)
def test_a_program_of_the_first_release_reads_the_answer_as_text(
    server: Server, model: str, header: str, body: bytes
) -> None:
    old = first_release()
    found = infer(server, model, header, body, query="")
    short = text_format.Parse(found.answer.headers["nv-inferresponse"], old())
    assert short.model_name == model and short.id == found.header.id
    nbytes = sum(output.raw.batch_byte_size for output in short.output)
    full = text_format.Parse(found.answer.body[nbytes:].decode(), old())
    assert full.SerializeToString() == found.header.SerializeToString()
    if model == "classifier":
        assert [text_format.MessageToString(one, as_one_line=True) for one in short.output] == [
            'name: "scores"'
        ]


@pytest.mark.parametrize(
    ("model", "header", "body"), [("add_sub", GOOD, RAW), ("classifier", RANKED, PICTURE)]
)
def test_text_and_wire_format_of_an_answer_are_equal(
    server: Server, model: str, header: str, body: bytes
) -> None:
    text, wire = (infer(server, model, header, body, query) for query in ("", "?format=binary"))
    assert text.header == wire.header and text.raw == wire.raw
    assert text.answer.headers["nv-inferresponse"] == wire.answer.headers["nv-inferresponse"]


def test_text_wire_format_and_json_of_a_status_are_equal(server: Server) -> None:
    def same(status: pb.ServerStatus) -> pb.ServerStatus:
        assert status.uptime_ns > 0 and status.status_stats.success.count > 0
        status.uptime_ns = 0
        status.ClearField("status_stats")
        return status

    for path in ("/api/status", "/api/status/classifier"):
        shown = server.request("GET", path, headers={"Accept": "application/json"})
        assert shown.headers["content-type"] == "application/json"
        from_json = same(json_format.Parse(shown.body, pb.ServerStatus()))
        text = text_format.Parse(server.get(path).body.decode("ascii"), pb.ServerStatus())
        assert same(text) == as_of_1_4(from_json)
        assert same(pb.ServerStatus.FromString(server.get(f"{path}?format=binary").body)) == from_json
    assert server.get("/api/status/classifier").body.startswith(b'id: "inference:0"\n')


def test_names_that_are_not_ascii_go_in_and_out(server: Server, stub: Stub) -> None:
    quoted = "".join(f"%{byte:02X}" for byte in KANA.encode())
    found = infer(server, quoted, GOOD, RAW)
    assert found.status.code == pb.SUCCESS and found.header.model_name == KANA
    assert found.answer.headers["nv-inferresponse"].isascii()
    status = text_format.Parse(server.get(f"/api/status/{quoted}").body.decode("ascii"), pb.ServerStatus())
    assert set(status.model_status) == {KANA} and status.model_status[KANA].config.name == KANA
    refused = infer(server, f"{quoted}{quoted}", GOOD, RAW)
    assert KANA * 2 in refused.status.msg
    header = GOOD.replace('"INPUT0"', '"入力"').encode().decode("latin-1")
    assert "'\\u5165\\u529b'" in infer(server, quoted, header, RAW).status.msg
    found = stub.call("Status", pb.StatusRequest(model_name=KANA), pb.StatusResponse)
    assert set(found.server_status.model_status) == {KANA}


@pytest.mark.parametrize("piece", [1 << 20, 4096, 5000])
@pytest.mark.parametrize(("beyond", "status"), [(-1, 200), (0, 200), (1, 431)])
def test_a_head_is_taken_up_to_the_limit(server: Server, beyond: int, status: int, piece: int) -> None:
    path = "/api/infer/add_sub"
    fields = {"host": "h", "content-length": str(len(RAW)), "nv-inferrequest": GOOD}
    taken = len(path) + sum(len(name) + len(value) + 4 for name, value in fields.items())
    fields["nv-inferrequest"] += " " * (HEAD_LIMIT + beyond - taken - 2) + "#x"
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    sent = head.encode() + b"\r\n" + RAW
    with RawClient(server.port) as client:
        for start in range(0, len(sent), piece):
            client.socket.sendall(sent[start : start + piece])
        answer = client.answer()
    assert answer[0] == status
    assert status == 200 or "gRPC has no such limit" in answer[1]["nv-status"]


def test_ids_and_traces_come_back_on_every_route_and_in_metadata(server: Server, stub: Stub) -> None:
    trace = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
    sent = {"X-Request-ID": "mine-1", "traceparent": trace}
    for method, path in (
        ("GET", "/api/health/live"),
        ("GET", "/api/status/nobody"),
        ("GET", "/api/profile"),
        ("GET", "/api/nothing"),
        ("POST", "/api/infer/add_sub"),
        ("POST", "/api/modelcontrol/load/add_sub"),
        ("POST", "/api/sharedmemorycontrol/unregister/all"),
        ("POST", "/api/sharedmemorycontrol/unregisterall"),
    ):
        got = server.request(method, path, b"" if method == "POST" else None, sent).headers
        assert (got["x-request-id"], got["traceparent"], got["x-trace-id"]) == ("mine-1", trace, trace[3:35])
    assert "traceparent" not in server.get("/api/health/live").headers
    rpc = stub.rpc("Status", pb.StatusRequest(), pb.StatusResponse)
    for model in ("add_sub", "nobody"):
        metadata = tuple((name.lower(), value) for name, value in sent.items())
        _, done = rpc.with_call(pb.StatusRequest(model_name=model), metadata=metadata)
        got = dict(done.trailing_metadata())
        assert (got["x-request-id"], got["traceparent"]) == ("mine-1", trace)


def test_a_failure_is_booked_and_counted_for_what_it_is(server: Server) -> None:
    def failed(version: int, rows: int) -> int:
        found = pb.ServerStatus.FromString(server.get("/api/status/add_sub?format=binary").body)
        return found.model_status["add_sub"].version_status[version].infer_stats[rows].failed.count

    def counted(code: str) -> float:
        return server.metric("penstock_requests_total", protocol="trtis_v1", operation="infer", code=code)

    for pid in server.frontend_pids():
        with only_frontend(server, pid):
            counted("400")  # the frontend writes down what it has counted in the tests before
    three = GOOD.replace("batch_size: 1", "batch_size: 3")
    cases = [
        ("add_sub", three.replace("INPUT1", "X"), (1, 3), "400"),
        ("add_sub", GOOD.replace("batch_size: 1", "batch_size: 99"), (1, 0), "400"),
        ("add_sub", "no header {", (-1, 0), "400"),
        ("add_sub/1", "no header {", (1, 0), "400"),
        ("add_sub/5", three, (-1, 0), "404"),
    ]
    for path, header, place, code in cases:
        before = failed(*place), counted(code)
        assert infer(server, path, header, RAW).answer.status == 400
        # The other frontend writes down what it counted a moment later.
        wait_until(lambda at=place, was=before: failed(*at) == was[0] + 1, what="the failure in the status")
        wait_until(lambda of=code, was=before: counted(of) == was[1] + 1, what="the failure in the metrics")


def test_a_request_refused_before_its_header_was_read_has_the_headers_of_infer(server: Server) -> None:
    answer = server.request("POST", "/api/infer/add_sub", RAW, {"X-Request-Timeout": "soon"})
    assert answer.status == 400 and status_of(answer).code == pb.INVALID_ARG and answer.body == b""
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["nv-inferresponse"] == ""
