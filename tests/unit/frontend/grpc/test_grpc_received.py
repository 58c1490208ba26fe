"""Messages as they come: parsed after the caller was let in, and never more of them than a message may hold."""

from __future__ import annotations

import asyncio
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import Message

from frontend.grpc import received as wire
from frontend.grpc.call import Method
from frontend.grpc.received import SPLIT_NBYTES, Form, Received
from frontend.grpc.unary import Unary
from frontend.http.bodies import BodyReader
from frontend.protocols.kserve_v2.grpc import infer
from ipc.errors import InvalidInput, PenstockError, QueueFull, RateLimited, Unauthenticated
from ipc.protos import kserve_v2_pb2 as kserve
from ipc.protos import trtis_v1_pb2 as trtis
from ipc.settings import Limits

FORMS: dict[str, Form] = {
    "kserve": Form(
        kserve.ModelInferRequest,
        kserve.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER,
        infer.refuse_too_many_values,
    ),
    "trtis": Form(trtis.InferRequest, trtis.InferRequest.RAW_INPUT_FIELD_NUMBER),
}
MIB = 1 << 20
_INPUTS_OF_V1 = b"\x12\x00" * MIB
HOSTILE = {
    "raw entries": ("kserve", b"\x3a\x00" * MIB),
    "unknown numbers": ("kserve", b"\x08\x00" * MIB),
    "inputs": ("kserve", b"\x2a\x00" * MIB),
    "outputs": ("kserve", b"\x32\x00" * MIB),
    "parameters": ("kserve", b"\x22\x00" * MIB),
    "raw entries of v1": ("trtis", b"\x22\x00" * MIB),
    "inputs of v1": ("trtis", b"".join(wire.parts(b"", 3, [_INPUTS_OF_V1]))),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", HOSTILE)
def test_millions_of_fields_become_an_error_and_no_objects(name: str) -> None:
    form, data = HOSTILE[name]
    received = FORMS[form].receive(data)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match=f"more than {wire.MAX_FIELDS} fields"):
            received.message()
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


_DIMS_OF_V1 = b"".join(wire.parts(b"", 2, [b"\x0a\x01A" + b"".join(wire.parts(b"", 2, [b"\x01" * MIB]))]))
DEEP: dict[str, tuple[Any, bytes]] = {
    "packed dims": (trtis.InferRequest, b"".join(wire.parts(b"", 3, [_DIMS_OF_V1]))),
    "dims": (
        trtis.InferRequest,
        b"".join(wire.parts(b"", 3, [b"".join(wire.parts(b"", 2, [b"\x10\x01" * MIB]))])),
    ),
    "region": (trtis.SharedMemoryControlRequest, b"".join(wire.parts(b"", 1, [b"\x0a\x00" * MIB]))),
    "regions": (trtis.SharedMemoryControlRequest, b"\x0a\x00" * MIB),
    "settings": (
        kserve.TraceSettingRequest,
        b"".join(wire.parts(b"", 1, [b"\x0a\x01a\x12" + wire._encoded(2 * MIB) + b"\x0a\x00" * MIB])),
    ),
    "unknown": (kserve.ModelMetadataRequest, b"\x50\x00" * MIB),
}


@pytest.mark.parametrize("name", DEEP)
def test_fields_are_counted_at_any_depth_in_the_requests_of_all_methods(name: str) -> None:
    request, data = DEEP[name]
    raw = request.RAW_INPUT_FIELD_NUMBER if request is trtis.InferRequest else 0
    received = Form(request, raw).receive(data)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match=f"more than {wire.MAX_FIELDS} fields"):
            received.message()
        assert tracemalloc.get_traced_memory()[1] < len(data) + 4 * MIB
    finally:
        tracemalloc.stop()


def test_a_large_message_of_few_fields_is_read() -> None:
    sent = kserve.RepositoryModelLoadRequest(model_name="m")
    sent.parameters["file:1/model.pt"].bytes_param = bytes(MIB)
    assert Form(kserve.RepositoryModelLoadRequest, 0).receive(sent.SerializeToString()).message() == sent


def test_a_large_request_that_tells_what_it_needs_is_not_parsed_for_a_stranger() -> None:
    sent = trtis.SharedMemoryControlRequest()
    sent.register.name = "x" * 2 * SPLIT_NBYTES
    needs: list[str] = []

    def admit(need: str) -> None:
        needs.append(need)
        raise Unauthenticated("a key is needed")

    calls = _Calls(None)
    calls.unary.method = Method(calls._answer, need=lambda request: "infer")
    calls.call.admit = admit
    received = Form(trtis.SharedMemoryControlRequest, 0).receive(sent.SerializeToString())
    with pytest.raises(Unauthenticated):
        calls.answer(received)
    assert needs == ["admin"] and received._message is None


@pytest.mark.parametrize("nbytes", [10, 2 * SPLIT_NBYTES])
def test_a_message_and_its_raw_values_are_read_whatever_their_size(nbytes: int) -> None:
    sent = kserve.ModelInferRequest(model_name="m", id="7", raw_input_contents=[b"x" * nbytes, b"y"])
    received = FORMS["kserve"].receive(sent.SerializeToString())
    message: Any = received.message()
    assert (message.model_name, message.id) == ("m", "7")
    assert [bytes(raw) for raw in received.raw] == [b"x" * nbytes, b"y"]
    assert received.nbytes == sent.ByteSize() and received.message() is message


def test_what_is_no_message_stays_none() -> None:
    received = FORMS["kserve"].receive(b"\xff\xff")
    for _ in range(2):
        with pytest.raises(InvalidInput, match="not a message"):
            received.message()


class _Calls:
    """A message of a stream whose admission ends with `refusal`, of a method that tells the id that it was given."""

    def __init__(self, refusal: PenstockError | None) -> None:
        self.finished: list[PenstockError | None] = []
        self.told: list[Message | None] = []
        services: Any = SimpleNamespace(bodies=BodyReader(Limits()))
        self.unary = Unary(services, None, Method(self._answer, failed=self._failed), "/x", FORMS["kserve"])  # type: ignore[arg-type]
        self.call: Any = SimpleNamespace(spend=self._spend, number=1, finish=self.finished.append, raw=())
        self._refusal = refusal

    def _spend(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    async def _answer(self, call: Any, message: Any) -> bytes:
        return message.id.encode() + bytes(call.raw[0])

    def _failed(self, call: Any, message: Any, error: PenstockError) -> bytes:
        self.told.append(message)
        return b""

    def answer(self, received: Received) -> Any:
        return asyncio.run(self.unary.answer(self.call, received))


def test_a_stranger_has_nothing_parsed() -> None:
    calls, received = _Calls(Unauthenticated("a key is needed")), FORMS["kserve"].receive(b"\xff\xff")
    with pytest.raises(Unauthenticated) as caught:
        calls.answer(received)
    calls.unary.told(calls.call, received, caught.value)
    assert calls.told == [None] and calls.finished == [caught.value]
    assert received._message is None and not received._wrong


@pytest.mark.parametrize("error", [RateLimited("slowly"), QueueFull("full")])
def test_other_failures_before_parsing_are_told_with_the_request(error: PenstockError) -> None:
    calls = _Calls(error)
    sent = kserve.ModelInferRequest(id="7", raw_input_contents=[b"x"])
    received = FORMS["kserve"].receive(sent.SerializeToString())
    with pytest.raises(type(error)):
        calls.answer(received)
    calls.unary.told(calls.call, received, error)
    assert calls.told == [sent]


def test_who_is_let_in_gets_an_answer() -> None:
    sent = kserve.ModelInferRequest(id="7", raw_input_contents=[b"x"])
    calls = _Calls(None)
    assert calls.answer(FORMS["kserve"].receive(sent.SerializeToString())) == b"7x"
    assert calls.finished == [None]
