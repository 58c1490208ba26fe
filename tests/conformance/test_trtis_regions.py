"""Client shared memory of TRTIS v1: registered by path or rpc, used by both transports, listed, forgotten."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from google.protobuf import text_format

from ipc.protos import trtis_v1_pb2 as pb
from tests.conformance.trtis import status_of
from tests.conformance.trtis_transports import TRANSPORTS, Asked, Stub
from tests.harness.cluster import GATEWAY
from tests.harness.rpc import address_of
from tests.harness.server import Server
from tests.harness.shared import ClientObject, client_object

A = np.arange(16, dtype="<i4")
B = np.full(16, 3, dtype="<i4")
FOLDER = "/api/sharedmemorycontrol"


@pytest.fixture
def server(trtis_server: Server) -> Server:
    """The server that the files of TRTIS share."""
    return trtis_server


@pytest.fixture(scope="module")
def stub(trtis_server: Server) -> Iterator[Stub]:
    with grpc.insecure_channel(address_of(trtis_server)) as channel:
        yield Stub(channel)


@pytest.fixture
def memory(server: Server) -> Iterator[ClientObject]:
    with client_object(256) as made:
        yield made
    assert server.request("POST", f"{FOLDER}/unregisterall").status == 200
    assert names(server) == []


def names(server: Server) -> list[str]:
    """The regions that are known."""
    text = server.get(f"{FOLDER}/status").body.decode("ascii")
    return [one.name for one in text_format.Parse(text, pb.SharedMemoryStatus()).shared_memory_region]


def part(offset: int) -> str:
    return f'shared_memory {{ name: "mine" offset: {offset} byte_size: 64 }}'


@pytest.mark.parametrize("over", TRANSPORTS)
def test_tensors_in_a_region_take_no_bytes_of_the_message(
    server: Server, stub: Stub, memory: ClientObject, over: str
) -> None:
    answer = server.request("POST", f"{FOLDER}/register/mine//{memory.key}/64/192")
    assert (answer.status, answer.body, status_of(answer).code) == (200, b"", pb.SUCCESS)
    memory.write(A, 64)
    header = (
        f'batch_size: 1 input {{ name: "INPUT0" dims: 16 {part(0)} }} input {{ name: "INPUT1" dims: 16 }} '
        f'output {{ name: "OUTPUT0" {part(64)} }} output {{ name: "OUTPUT1" }} id: 4'
    )
    told = TRANSPORTS[over](server, stub, Asked("add_sub", header, (B.tobytes(),)))
    assert told.status.code == pb.SUCCESS, told.status.msg
    assert [list(output.raw.dims) for output in told.header.output] == [[16], [16]]
    assert [output.raw.batch_byte_size for output in told.header.output] == [64, 64]
    assert (memory.read("<i4", 128, 16) == A + B).all()
    assert told.raw == [b"", (A - B).astype("<i4").tobytes()]


def test_regions_are_listed_in_text_and_in_the_wire_format(server: Server, memory: ClientObject) -> None:
    assert server.request("POST", f"{FOLDER}/register/b//{memory.key}/0/128").status == 200
    assert server.request("POST", f"{FOLDER}/register/a/{memory.key}/128/128").status == 200
    text = text_format.Parse(server.get(f"{FOLDER}/status").body.decode(), pb.SharedMemoryStatus())
    wire = pb.SharedMemoryStatus.FromString(server.get(f"{FOLDER}/status?format=binary").body)
    assert text == wire
    found = {one.name: one for one in text.shared_memory_region}
    assert set(found) == {"a", "b"} and found["a"].byte_size == 128
    assert found["a"].system_shared_memory.offset == 128
    assert server.request("POST", f"{FOLDER}/unregister/a").status == 200
    assert names(server) == ["b"]
    assert server.request("POST", f"{FOLDER}/unregister/all").status == 200 and names(server) == []


def test_the_same_by_rpc(server: Server, stub: Stub, memory: ClientObject) -> None:
    def change(**wanted: object) -> pb.SharedMemoryControlResponse:
        made = pb.SharedMemoryControlRequest(**wanted)  # type: ignore[arg-type]
        return stub.call("SharedMemoryControl", made, pb.SharedMemoryControlResponse)  # type: ignore[no-any-return]

    system = pb.SharedMemoryControlRequest.Register.SystemSharedMemory(shared_memory_key=f"/{memory.key}")
    region = pb.SharedMemoryControlRequest.Register(name="mine", system_shared_memory=system, byte_size=256)
    assert change(register=region).request_status.code == pb.SUCCESS
    assert change(register=region).request_status.code == pb.ALREADY_EXISTS
    listed = change(status=pb.SharedMemoryControlRequest.Status()).shared_memory_status
    assert [one.name for one in listed.shared_memory_region] == ["mine"] == names(server)
    old = pb.SharedMemoryStatus.FromString(listed.SerializeToString())
    assert [one.name for one in old.shared_memory_region] == ["mine"], (
        "released clients read it as this message"
    )
    gone = pb.SharedMemoryControlRequest.Unregister(name="mine")
    assert change(unregister=gone).request_status.code == pb.SUCCESS and names(server) == []


def test_what_is_wrong_is_told(server: Server, stub: Stub, memory: ClientObject) -> None:
    def code(path: str, body: bytes = b"") -> str:
        answer = server.request("POST", f"{FOLDER}/{path}", body)
        assert answer.status == 400 and answer.body == b""
        return pb.RequestStatusCode.Name(status_of(answer).code)

    assert server.request("POST", f"{FOLDER}/register/mine//{memory.key}/0/256").status == 200
    assert code(f"register/mine//{memory.key}/0/256") == "ALREADY_EXISTS"
    assert code(f"register/more//{memory.key}/0/257") == "INVALID_ARG"
    assert code(f"register/more//{memory.key}/0/{'9' * 40}") == "INVALID_ARG"
    assert code("register/more//client_nothing/0/8") == "INVALID_ARG"
    assert code("register/more//other/0/8") == "INVALID_ARG"
    assert code("cudaregister/more/8/0", bytes(64)) in ("UNSUPPORTED", "INVALID_ARG")
    nowhere = 'shared_memory { name: "none" byte_size: 64 }'
    header = f'batch_size: 1 input {{ name: "INPUT0" {nowhere} }} input {{ name: "INPUT1" }}'
    for over in TRANSPORTS.values():
        told = over(server, stub, Asked("add_sub", header, (B.tobytes(),)))
        assert told.status.code == pb.NOT_FOUND and "'none'" in told.status.msg


@pytest.mark.parametrize("either_trtis", [GATEWAY], indirect=True)
def test_a_gateway_refuses_regions_since_models_run_on_other_hosts(
    either_trtis: Server, trtis_stub: Stub
) -> None:
    for path in ("register/mine//client_x/0/64", "unregisterall", "unregister/mine"):
        answer = either_trtis.request("POST", f"{FOLDER}/{path}")
        assert (answer.status, status_of(answer).code) == (400, pb.INVALID_ARG), path
        assert "models run on other hosts" in status_of(answer).msg
    inputs = f'input {{ name: "INPUT0" dims: 16 {part(0)} }} input {{ name: "INPUT1" dims: 16 }}'
    asked = Asked("add_sub", f'batch_size: 1 {inputs} output {{ name: "OUTPUT0" }}', (B.tobytes(),))
    for over in TRANSPORTS.values():
        status = over(either_trtis, trtis_stub, asked).status
        assert (status.code, "models run on other hosts" in status.msg) == (pb.INVALID_ARG, True), status
