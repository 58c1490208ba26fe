"""Shared memory of clients: every row of the specification's table, over HTTP and gRPC."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest

from ipc.protos import kserve_v2_pb2 as pb
from tests.conformance.kserve import A, B, tensor
from tests.harness.rpc import Rpc, address_of
from tests.harness.server import Server
from tests.harness.shared import ClientObject, client_object

NBYTES = A.nbytes
SIZE = 4 * NBYTES
FOLDER = "/v2/systemsharedmemory"
CODES = {
    400: ("INVALID_ARGUMENT",),
    404: ("NOT_FOUND",),
    501: ("UNIMPLEMENTED",),
}


@pytest.fixture
def server(kserve_server: Server) -> Server:
    """The server that the files of KServe share."""
    return kserve_server


@pytest.fixture
def region(server: Server) -> Iterator[ClientObject]:
    """An object with INPUT0, INPUT1 and room for both outputs, registered as `r`."""
    with client_object(SIZE) as made:
        made.write(A)
        made.write(B, NBYTES)
        answer = server.post(f"{FOLDER}/region/r/register", {"key": made.key, "byte_size": SIZE})
        assert answer.status == 200 and answer.body == b""
        yield made
        server.request("POST", f"{FOLDER}/unregister")


@dataclass(frozen=True)
class Transport:
    """The same calls over either; each gives (0, "") or what was refused: (HTTP status or gRPC code, text)."""

    register: Callable[[str, str, int, int], tuple[Any, str]]
    status: Callable[[str], tuple[Any, str]]
    unregister: Callable[[str], tuple[Any, str]]
    infer: Callable[[list[Any], list[Any]], tuple[Any, str]]


def over_http(server: Server) -> Transport:
    """The calls as HTTP requests."""

    def told(answer: Any) -> tuple[Any, str]:
        return (0, "") if answer.status == 200 else (answer.status, answer.json()["error"])

    def register(name: str, key: str, offset: int, nbytes: int) -> tuple[Any, str]:
        body = {"key": key, "offset": offset, "byte_size": nbytes}
        return told(server.post(f"{FOLDER}/region/{name}/register", body))

    def infer(inputs: list[Any], outputs: list[Any]) -> tuple[Any, str]:
        return told(server.post("/v2/models/add_sub/infer", {"inputs": inputs, "outputs": outputs}))

    return Transport(
        register,
        lambda name: told(server.get(f"{FOLDER}/region/{name}/status")),
        lambda name: told(server.request("POST", f"{FOLDER}/region/{name}/unregister")),
        infer,
    )


def over_grpc(server: Server) -> Transport:
    """The calls as rpcs."""

    def told(method: str, request: Any) -> tuple[Any, str]:
        with Rpc(address_of(server)) as rpc:
            try:
                rpc.call(method, request)
            except grpc.RpcError as error:
                return error.code().name, error.details()
        return 0, ""

    def infer(inputs: list[Any], outputs: list[Any]) -> tuple[Any, str]:
        message = pb.ModelInferRequest(model_name="add_sub")
        for given, side in [(one, message.inputs.add()) for one in inputs]:
            side.name, side.datatype = given["name"], given["datatype"]
            side.shape.extend(given["shape"])
            side.contents.int_contents.extend(given.get("data", ()))
            _set(side.parameters, given.get("parameters", {}))
        for given, wanted in [(one, message.outputs.add()) for one in outputs]:
            wanted.name = given["name"]
            _set(wanted.parameters, given.get("parameters", {}))
        return told("ModelInfer", message)

    named = {"key": "", "offset": 0, "byte_size": 0}
    return Transport(
        lambda name, key, offset, nbytes: told(
            "SystemSharedMemoryRegister",
            pb.SystemSharedMemoryRegisterRequest(
                name=name, **(named | {"key": key, "offset": offset, "byte_size": nbytes})
            ),
        ),
        lambda name: told("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name=name)),
        lambda name: told("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name=name)),
        infer,
    )


def _set(parameters: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        kind = (
            "bool_param"
            if isinstance(value, bool)
            else "string_param"
            if isinstance(value, str)
            else "int64_param"
        )
        setattr(parameters[name], kind, value)


@pytest.fixture(params=[over_http, over_grpc], ids=["http", "grpc"])
def transport(request: pytest.FixtureRequest, server: Server) -> Transport:
    made: Transport = request.param(server)
    return made


def expect(told: tuple[Any, str], status: int, *words: str) -> None:
    """What was refused has this status, in the words of the transport, and these words."""
    code, text = told
    assert code == status or code in CODES.get(status, ()), told
    for word in words:
        assert word in text, text
    assert "/dev/shm" not in text and "Traceback" not in text


def within(name: str = "r", offset: int = 0, nbytes: int = NBYTES) -> dict[str, Any]:
    """Parameters of a tensor in a region."""
    found: dict[str, Any] = {"shared_memory_region": name, "shared_memory_byte_size": nbytes}
    return found | ({"shared_memory_offset": offset} if offset else {})


def inputs(**first: Any) -> list[Any]:
    """INPUT0 in a region (`first` changes its parameters), INPUT1 with its elements."""
    return [tensor("INPUT0", A, parameters=within(**first)), tensor("INPUT1", B, data=B.ravel().tolist())]


def test_tensors_go_in_and_out_of_a_region(transport: Transport, region: ClientObject) -> None:
    both = [
        tensor("INPUT0", A, parameters=within()),
        tensor("INPUT1", B, parameters=within(offset=NBYTES)),
    ]
    wanted = [
        {"name": "OUTPUT0", "parameters": within(offset=2 * NBYTES)},
        {"name": "OUTPUT1", "parameters": within(offset=3 * NBYTES)},
    ]
    assert transport.infer(both, wanted) == (0, "")
    found = region.read("<i4", 2 * NBYTES, 32)
    assert np.array_equal(found, np.concatenate([(A + B).ravel(), (A - B).ravel()]))


@pytest.mark.parametrize(
    ("name", "key", "offset", "nbytes", "words"),
    [
        ("n", "/client_nothing", 0, 64, "Unable to open shared memory region: '/client_nothing'"),
        ("n", "{key}", 0, SIZE + 1, "Invalid shared memory region: '{key}'"),
        ("n", "/{key}", 1, SIZE, "Invalid shared memory region: '/{key}'"),
        ("r", "{key}", 0, NBYTES, "shared memory region 'r' already in manager"),
        ("n", "", 0, 64, "key"),
        ("n", "{key}", 0, 0, "byte_size"),
        ("n", "{key}", 0, (1 << 20) + 1, "shared_memory.max_region_bytes"),
        ("n", "/penstock.1", 0, 64, "reserved"),
        ("n", "///", 0, 64, "must not be empty"),
        ("n", "other_object", 0, 64, "client_"),
        ("n", "client_/../x", 0, 64, "without slashes"),
    ],
)
def test_what_cannot_be_registered(
    transport: Transport, region: ClientObject, name: str, key: str, offset: int, nbytes: int, words: str
) -> None:
    code, text = transport.register(name, key.format(key=region.key), offset, nbytes)
    assert words.format(key=region.key) in text, text
    assert code in (400, "INVALID_ARGUMENT", "ALREADY_EXISTS")
    assert (code == "ALREADY_EXISTS") == (name == "r" and code != 400)


@pytest.mark.parametrize(
    ("given", "status", "words"),
    [
        ({"name": "nothing"}, 404, "Unable to find shared memory region: 'nothing'"),
        ({"offset": SIZE}, 400, "Invalid offset for shared memory region"),
        ({"offset": SIZE - 1}, 400, "Invalid offset + byte size for shared memory region"),
        ({"offset": (1 << 63) - 1}, 400, "offset"),
        ({"offset": 1, "nbytes": (1 << 63) - 1}, 400, "size"),
        ({"nbytes": NBYTES - 4}, 400, "64"),
        ({"nbytes": NBYTES + 4}, 400, "64"),
    ],
)
def test_wrong_places_of_an_input(
    transport: Transport, region: ClientObject, given: dict[str, Any], status: int, words: str
) -> None:
    expect(transport.infer(inputs(**given), []), status, words)


@pytest.mark.parametrize(
    ("given", "status", "words"),
    [
        (within(nbytes=NBYTES - 1), 400, ("63", "64")),
        (within(name="nothing"), 404, ("'nothing'",)),
        (within() | {"classification": 2}, 400, ("classification",)),
        (within(offset=SIZE), 400, ("Invalid offset",)),
    ],
)
def test_wrong_places_of_an_output(
    transport: Transport, region: ClientObject, given: dict[str, Any], status: int, words: tuple[str, ...]
) -> None:
    whole = [tensor("INPUT0", A, data=A.ravel().tolist()), tensor("INPUT1", B, data=B.ravel().tolist())]
    expect(transport.infer(whole, [{"name": "OUTPUT0", "parameters": given}]), status, *words)


def test_names_that_are_not_known(transport: Transport) -> None:
    expect(transport.status("nothing"), 404, "nothing")
    assert transport.unregister("nothing") == (0, "")


def test_elements_beside_a_region(transport: Transport, region: ClientObject) -> None:
    both = tensor("INPUT0", A, data=A.ravel().tolist(), parameters=within())
    expect(transport.infer([both, inputs()[1]], []), 400, "INPUT0")


def test_a_region_with_a_binary_output(server: Server, region: ClientObject) -> None:
    wanted = [{"name": "OUTPUT0", "parameters": within() | {"binary_data": True}}]
    answer = server.post("/v2/models/add_sub/infer", {"inputs": inputs(), "outputs": wanted})
    assert answer.status == 400 and "binary_data" in answer.json()["error"]


def test_an_output_in_a_region_has_neither_data_nor_parameters(server: Server, region: ClientObject) -> None:
    wanted = [{"name": "OUTPUT0", "parameters": within(offset=2 * NBYTES)}]
    answer = server.post("/v2/models/add_sub/infer", {"inputs": inputs(), "outputs": wanted})
    assert answer.json()["outputs"] == [{"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 16]}]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/region/n/register", b"", 400),
        ("/region/n/register", b"no json", 400),
        ("/region/n/register", b"[]", 400),
        ("/region/n/register", b"{}", 400),
        ("/region/n/register", b'{"key": "client_x"}', 400),
        ("/region/n/register", b'{"byte_size": 64}', 400),
        ("/region/n/register", b'{"key": "client_x", "byte_size": -1}', 400),
        ("/region/n/register", b'{"key": "client_x", "byte_size": 64, "offset": -1}', 400),
        ("/region/n/register", b'{"key": 1, "byte_size": 64}', 400),
        ("/region//register", b'{"key": "client_x", "byte_size": 64}', 400),
        ("/register", b'{"key": "client_x", "byte_size": 64}', 400),
        ("/region/n/nothing", b"{}", 404),
        ("/region/n/status", b"{}", 405),
    ],
)
def test_bodies_and_paths_of_a_registration(server: Server, path: str, body: bytes, status: int) -> None:
    answer = server.request("POST", FOLDER + path, body)
    assert answer.status == status, answer.body
    assert answer.json()["error"]


def test_cuda_without_a_gpu(server: Server) -> None:
    cuda = "/v2/cudasharedmemory"
    for path in ("/unregister", "/region/x/unregister"):
        assert server.request("POST", cuda + path).status == 200
    handle = json.dumps({"raw_handle": {"b64": "eA=="}, "device_id": 0, "byte_size": 64}).encode()
    assert server.request("POST", f"{cuda}/region/x/register", handle).status == 501
    assert server.get(f"{cuda}/status").status == 501
