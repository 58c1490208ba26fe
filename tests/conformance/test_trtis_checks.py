"""Every check of TRTIS v1 in the order of its table, over HTTP, gRPC and a stream, and the same answers over all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ipc.protos import trtis_v1_pb2 as pb
from tests.conformance.trtis import KANA, STRICT, status_of
from tests.conformance.trtis_transports import TRANSPORTS, Asked, Stub, over_grpc, over_http
from tests.harness.server import Server

A = np.arange(16, dtype="<i4")
B = np.full(16, 3, dtype="<i4")
RAW = (A.tobytes(), B.tobytes())
INPUTS = 'input { name: "INPUT0" dims: 16 } input { name: "INPUT1" dims: 16 }'
OUTPUTS = 'output { name: "OUTPUT0" } output { name: "OUTPUT1" }'
GOOD = f"batch_size: 1 {INPUTS} {OUTPUTS} id: 7"
_ids = itertools.count(1000)


@pytest.fixture
def server(either_trtis: Server) -> Server:
    """The server, and a gateway whose only box is the server."""
    return either_trtis


@pytest.fixture
def stub(trtis_stub: Stub) -> Stub:
    return trtis_stub


def fp16(*values: float) -> bytes:
    return np.array(values, "<f2").tobytes()


def single(more: str, raw: bytes, model: str) -> Asked:
    """A request of one input and one output."""
    return Asked(model, f"batch_size: 1 {more} id: 7", (raw,))


UNKNOWN = "Inference request for unknown model"
CHECKS = {
    "1 model": (Asked("nobody", GOOD, RAW), "UNAVAILABLE", f"{UNKNOWN} 'nobody'"),
    "1 version": (Asked("add_sub", GOOD, RAW, 9), "UNAVAILABLE", f"{UNKNOWN} 'add_sub'"),
    "1 version 0": (Asked("add_sub", GOOD, RAW, 0), "UNAVAILABLE", f"{UNKNOWN} 'add_sub'"),
    "1 not chosen": (
        Asked("versions_specific", GOOD, RAW, 2),
        "UNAVAILABLE",
        f"{UNKNOWN} 'versions_specific'",
    ),
    "2": (
        Asked("add_sub", GOOD.replace("batch_size: 1", ""), RAW),
        "INVALID_ARG",
        "inference request batch-size must be >= 1 for 'add_sub'",
    ),
    "3": (
        Asked("add_sub", GOOD.replace("batch_size: 1", "batch_size: 9"), RAW),
        "INVALID_ARG",
        "inference request batch-size must be <= 8 for 'add_sub'",
    ),
    "3 unbatched": (
        Asked("add_sub_unbatched", GOOD.replace("batch_size: 1", "batch_size: 2"), RAW),
        "INVALID_ARG",
        "inference request batch-size must be <= 0 for 'add_sub_unbatched'",
    ),
    "4": (
        Asked("add_sub", f'batch_size: 1 input {{ name: "INPUT0" }} {OUTPUTS} id: 7', RAW),
        "INVALID_ARG",
        "expected 2 inputs but got 1 inputs for model 'add_sub'",
    ),
    "5": (
        Asked("add_sub", GOOD.replace("INPUT1", "INPUTX"), RAW),
        "INVALID_ARG",
        "unexpected inference input 'INPUTX' for model 'add_sub'",
    ),
    "6": (
        Asked("add_sub", GOOD.replace("dims: 16 }", "dims: 15 }", 1), RAW),
        "INVALID_ARG",
        "unexpected shape for input 'INPUT0' for model 'add_sub': expected [16], got [15]",
    ),
    "7": (single('input { name: "INPUT" }', b"", "variable"), "INVALID_ARG", "input 'INPUT' of model"),
    "8": (
        Asked("add_sub", GOOD.replace("dims: 16 }", "dims: 16 batch_byte_size: 4 }", 1), RAW),
        "INVALID_ARG",
        "specified batch-byte-size for input 'INPUT0' for model 'add_sub' does not match",
    ),
    "8 strings": (
        single('input { name: "INPUT" dims: 1 }', b"", "identity_bytes"),
        "INVALID_ARG",
        "batch-byte-size must be specified for input 'INPUT'",
    ),
    "14": (
        Asked("add_sub", GOOD.replace("OUTPUT1", "OUTPUTX"), RAW),
        "INVALID_ARG",
        "unexpected inference output 'OUTPUTX' for model 'add_sub'",
    ),
    "15": (
        Asked(
            STRICT,
            'batch_size: 1 input { name: "A" } input { name: "B" } output { name: "O" } id: 7 correlation_id: 9 '
            "flags: 3",
            (fp16(9, 9), fp16(0, 0)),
        ),
        "INVALID_ARG",
        "model 'strict': output 'O': the model gave shape [4, 3], its configuration says [4, 2]",
    ),
    **{
        f"16 {kind}": (
            single(
                f'input {{ name: "INPUT" dims: 1 {size} }} output {{ name: "OUTPUT" cls {{ count: 1 }} }}',
                raw,
                f"identity_{kind}",
            ),
            "INVALID_ARG",
            "class result not available for output",
        )
        for kind, raw, size in (
            ("fp16", b"\0\0", ""),
            ("bool", b"\1", ""),
            ("bytes", b"\0\0\0\0", "batch_byte_size: 4"),
        )
    },
    "17": (
        Asked(
            "accumulator",
            'batch_size: 2 input { name: "INPUT" } output { name: "OUTPUT" } correlation_id: 4 id: 7',
            (bytes(8),),
        ),
        "INVALID_ARG",
        "inference request to model 'accumulator' must specify batch-size 1 due to requirements of sequence batcher",
    ),
    "18": (
        single('input { name: "INPUT" } output { name: "OUTPUT" }', bytes(4), "accumulator"),
        "INVALID_ARG",
        "inference request to model 'accumulator' must specify a non-zero correlation ID",
    ),
    "19": (
        single(
            'input { name: "INPUT" } output { name: "OUTPUT" } correlation_id: 5', bytes(4), "accumulator"
        ),
        "INVALID_ARG",
        "inference request for sequence 5 to model 'accumulator' must specify the START flag on the first request of "
        "the sequence: ",
    ),
}
"""By the number of the check: the request, its code, and how the message begins."""
CARRIED = {
    "http": {
        "9": ((RAW[0], RAW[1][:-4]), "unexpected size for input 'INPUT1', expecting 4 bytes"),
        "9 empty": ((), "unexpected size for input 'INPUT0', expecting 64 bytes"),
        "10": ((*RAW, b"\0"), "unexpected additional input data for model 'add_sub'"),
    },
    "grpc": {
        "11": (RAW[:1], "expected tensor data for 2 inputs but got 1"),
        "11 many": ((*RAW, b""), "expected tensor data for 2 inputs but got 3"),
        "12": ((RAW[0], RAW[1][:-4]), "unexpected size 60 for input 'INPUT1', expecting 64"),
    },
}
CARRIED["stream"] = CARRIED["grpc"]


@pytest.mark.parametrize("over", TRANSPORTS)
@pytest.mark.parametrize("check", CHECKS)
def test_every_check_has_its_code_and_words(server: Server, stub: Stub, check: str, over: str) -> None:
    asked, code, begins = CHECKS[check]
    told = TRANSPORTS[over](server, stub, asked)
    assert pb.RequestStatusCode.Name(told.status.code) == code, told.status.msg
    assert told.status.msg.startswith(begins) and told.status.server_id == "inference:0"
    assert (told.status.request_id > 0) == (int(check.split()[0]) > 12)
    assert told.header == pb.InferResponseHeader(id=7) and told.raw == []


@pytest.mark.parametrize(
    ("over", "check"), [(over, check) for over, checks in CARRIED.items() for check in checks]
)
def test_bytes_that_do_not_fit(server: Server, stub: Stub, over: str, check: str) -> None:
    raw, begins = CARRIED[over][check]
    told = TRANSPORTS[over](server, stub, Asked("add_sub", GOOD, raw))
    assert told.status.code == pb.INVALID_ARG and told.status.msg.startswith(begins), told.status.msg
    assert told.status.request_id == 0 and told.header == pb.InferResponseHeader(id=7)


def _mended(over: str) -> Iterator[tuple[Asked, str]]:
    """A request in which everything is wrong, then with one mistake less after the other, and what it is told."""
    model, size, rest = "nobody", 0, "id: 3"
    inputs, raw = 'input { name: "A" dims: 3 }', (b"\0",)

    def asked(output: str) -> Asked:
        return Asked(model, f"batch_size: {size} {inputs} {output} {rest}", raw)

    none, ranked, good = (
        f'output {{ name: "{name}" {more} }}'
        for name, more in (("Z", ""), ("O", "cls { count: 1 }"), ("O", ""))
    )
    yield asked(none), UNKNOWN
    model = STRICT
    yield asked(none), "inference request batch-size must be >= 1"
    size = 5
    yield asked(none), "inference request batch-size must be <= 4"
    size = 2
    yield asked(none), "expected 2 inputs but got 1 inputs"
    inputs = 'input { name: "A" dims: 2 } input { name: "X" dims: 3 batch_byte_size: 1 }'
    yield asked(none), "unexpected inference input 'X'"
    inputs = inputs.replace("X", "B")
    yield asked(none), "unexpected shape for input 'B'"
    inputs = inputs.replace("dims: 3", "dims: 2")
    yield asked(none), "specified batch-byte-size for input 'B'"
    inputs = 'input { name: "A" } input { name: "B" }'
    if over == "http":
        yield asked(none), "unexpected size for input 'A', expecting 7 bytes"
        raw = (bytes(17),)
        yield asked(none), "unexpected additional input data"
    else:
        yield asked(none), "expected tensor data for 2 inputs but got 1"
        raw = (bytes(8), bytes(9))
        yield asked(none), "unexpected size 9 for input 'B', expecting 8"
    raw = (bytes(8), bytes(8))
    yield asked(none), "unexpected inference output 'Z'"
    yield asked(ranked), "class result not available for output"
    yield asked(good), "inference request to model 'strict' must specify batch-size 1"
    size, raw = 1, (fp16(1, 2), fp16(0, 0))
    yield asked(good), "inference request to model 'strict' must specify a non-zero correlation ID"
    rest += f" correlation_id: {next(_ids)}"
    yield asked(good), "inference request for sequence"
    rest += " flags: 3"
    yield asked(good), ""


@pytest.mark.parametrize("over", TRANSPORTS)
def test_the_first_mistake_by_the_table_is_the_one_that_is_told(
    server: Server, stub: Stub, over: str
) -> None:
    for asked, begins in _mended(over):
        told = TRANSPORTS[over](server, stub, asked)
        assert told.status.msg.startswith(begins), (asked, told.status.msg)
        assert (told.status.code == pb.SUCCESS) == (not begins)
    assert told.raw == [fp16(1, 2)]


RANKED = 'batch_size: 2 input { name: "image" } output { name: "scores" cls { count: 3 } } id: 8'
ANSWERED = {
    "raw": Asked("add_sub", f"{GOOD} correlation_id: 5", RAW),
    "the other order": Asked(
        "add_sub", f'batch_size: 1 {INPUTS} output {{ name: "OUTPUT1" }} output {{ name: "OUTPUT0" }}', RAW
    ),
    "no outputs": Asked("add_sub", f"batch_size: 1 {INPUTS}", RAW),
    "unbatched": Asked("add_sub_unbatched", GOOD, RAW),
    "classes": Asked("classifier", RANKED, (np.linspace(0, 255, 6144, dtype="<f4").tobytes(),)),
    "name": Asked(KANA, GOOD, RAW),
    "version": Asked(
        "versions_specific",
        'batch_size: 1 input { name: "INPUT" } output { name: "OUTPUT" }',
        (A[:4].tobytes(),),
        1,
    ),
}


@pytest.mark.parametrize("name", ANSWERED)
def test_answers_are_the_same_over_every_transport(server: Server, stub: Stub, name: str) -> None:
    asked = ANSWERED[name]
    first, *others = (over(server, stub, asked) for over in TRANSPORTS.values())
    assert first.status.code == pb.SUCCESS, first.status.msg
    assert first.header.model_name == asked.model and first.header.id == asked.message.id
    for told in others:
        assert (told.header, told.raw) == (first.header, first.raw)


def test_numbers_rise_by_one_over_transports_frontends_and_kinds(server: Server, stub: Stub) -> None:
    def status(_: int) -> int:
        return status_of(server.get("/api/status/add_sub")).request_id

    def health(_: int) -> int:
        found = stub.call("Health", pb.HealthRequest(mode="live"), pb.HealthResponse)
        return int(found.request_status.request_id)

    def posted(_: int) -> int:
        return over_http(server, stub, ANSWERED["raw"]).status.request_id

    def called(_: int) -> int:
        return over_grpc(server, stub, ANSWERED["raw"]).status.request_id

    before = status(0)
    with ThreadPoolExecutor(8) as threads:
        kinds = (status, health, posted, called)
        given = list(threads.map(lambda number: kinds[number % 4](number), range(80)))
    assert sorted(given) == list(range(before + 1, before + 81))
    assert health(0) == before + 81
