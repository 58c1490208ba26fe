"""ModelInfer messages that have a plan: which are found by their bytes, and that their answers are the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from frontend.grpc import received
from frontend.protocols.kserve_v2.grpc.infer import MOST_NBYTES, RAW_INPUT, Infer, PlannedHead, PlannedHeads
from frontend.scope import RequestScope, plain_scope
from frontend.services import Services
from frontend.tensors.request import Forwarding
from ipc import deadline
from ipc.catalog.model_config import ModelConfig
from ipc.errors import InvalidInput
from ipc.protos import kserve_v2_pb2 as pb
from ipc.wire.messages import Work
from tests.fakes.tensors import InferReply, ending, entry, loaded, services_of, tensor

SUM = ModelConfig(
    name="sum",
    max_batch_size=4,
    inputs=(tensor("A", "INT32", 3), tensor("B", "INT32", 3)),
    outputs=(tensor("O", "INT32", 3),),
)
ONES, TWOS = (np.full(3, value, "<i4").tobytes() for value in (1, 2))
MODEL: Any = SimpleNamespace(name="sum")


def message(*raw: bytes, rows: int = 1, **more: Any) -> pb.ModelInferRequest:
    """A request to `sum`."""
    made = pb.ModelInferRequest(model_name="sum", raw_input_contents=raw, **more)
    for name in ("A", "B"):
        made.inputs.add(name=name, datatype="INT32", shape=[rows, 3])
    return made


def noted(data: bytes, raw: list[bytes]) -> PlannedHead | None:
    """The head that is kept after this message."""
    heads = PlannedHeads()
    head = heads.note(data, raw, None, MODEL)
    found = heads.head_of(data)
    assert (found is None) is (head is None)
    return found


def test_a_message_with_the_same_head_is_found_by_its_bytes() -> None:
    found = noted(message(ONES, TWOS).SerializeToString(), [ONES, TWOS])
    assert found is not None and pb.ModelInferRequest.FromString(found.head) == message()
    contents = found.contents(message(TWOS, TWOS).SerializeToString())
    assert contents is not None and bytes(contents) == TWOS + TWOS


@pytest.mark.parametrize(
    "other",
    [
        message(ONES + b"x", TWOS[1:]),
        message(ONES, TWOS, model_version="7"),
        message(ONES, TWOS, rows=2),
        message(ONES, id="7"),
        message(ONES + TWOS),
    ],
    ids=["sizes", "version", "shape", "id", "one"],
)
def test_any_other_message_is_not(other: pb.ModelInferRequest) -> None:
    found = noted(message(ONES, TWOS).SerializeToString(), [ONES, TWOS])
    assert found is not None and found.contents(other.SerializeToString()) is None


def test_what_has_raw_contents_anywhere_else_is_not_noted() -> None:
    head = message().SerializeToString()
    first, last = (b"".join(received.parts(b"", RAW_INPUT, [raw])) for raw in (ONES, TWOS))
    assert noted(first + last + head, [ONES, TWOS]) is None
    assert noted(first + head + last, [TWOS]) is None
    assert noted(head + first + last, [ONES, TWOS]) is not None


def test_a_message_whose_last_field_holds_what_looks_like_raw_contents_is_not_noted() -> None:
    raw, unknown = b"".join(received.parts(b"", RAW_INPUT, [ONES, TWOS])), 100 << 3 | 2
    tag = bytes((unknown & 0x7F | 0x80, unknown >> 7))
    data = message(ONES, TWOS).SerializeToString() + tag + bytes((len(raw),)) + raw
    assert list(pb.ModelInferRequest.FromString(data).raw_input_contents) == [ONES, TWOS]
    assert noted(data, [ONES, TWOS]) is None


def test_long_messages_and_messages_without_raw_contents_are_not_noted() -> None:
    long = bytes(MOST_NBYTES)
    assert noted(message(long).SerializeToString(), [long]) is None
    assert noted(message().SerializeToString(), []) is None
    assert noted(b"", [ONES]) is None, "the bytes were not kept"


def services(root: Path) -> Services:
    """The model, which answers with the first of its inputs."""

    def answer(request: Work) -> InferReply:
        return InferReply.of(O=np.ones((1, 3), np.int32))

    return services_of(root, [entry("sum@1")], [loaded("sum@1", SUM)], answer)


def call_of(made: Services, raw: list[bytes], data: bytes) -> Any:
    scope = plain_scope()
    scope.deadline_ns = deadline.after(20)
    return SimpleNamespace(services=made, context=scope, raw=raw, metadata={}, data=data)


def answered(made: Services, infer: Infer, *raw: bytes) -> tuple[bytes, bool, RequestScope]:
    """The answer to a message, whether it had a plan, and its scope."""
    asked = message(*raw)
    data = asked.SerializeToString()
    call = call_of(made, list(raw), data)

    async def run() -> tuple[bytes, bool]:
        with ending(made, call.context):
            answering = infer.planned(call, data)
            if answering is not None:
                return await answering, True
            answer = await infer.alone(call, asked)
            assert isinstance(answer, bytes)
            return answer, False

    return *asyncio.run(run()), call.context


def test_a_repeated_message_has_the_same_work_answer_and_statistics(tmp_path: Path) -> None:
    made, infer = services(tmp_path), Infer(Forwarding(""))
    client, recorder = made.engine.client, made.extensions.counters  # type: ignore[attr-defined]
    try:
        first, planned, _ = answered(made, infer, ONES, TWOS)
        assert not planned
        again, planned, scope = answered(made, infer, TWOS, ONES)
        assert planned and again == first
        one, other = client.requests
        assert one.call == other.call and client.payloads[1] == TWOS + bytes(4) + ONES + bytes(4)
        assert (scope.model, recorder.booked[0]) == ("sum@1", recorder.booked[1])
    finally:
        client.inputs.close()


def test_a_model_that_was_replaced_or_unloaded_is_asked_the_long_way(tmp_path: Path) -> None:
    made, infer = services(tmp_path), Infer(Forwarding(""))
    try:
        answered(made, infer, ONES, TWOS)
        made.tensor_models.find("sum", None).plans.clear()
        assert not answered(made, infer, ONES, TWOS)[1]
    finally:
        made.engine.client.inputs.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("forwarded", ["x-.*", ""])
def test_messages_with_an_id_and_servers_that_forward_metadata_parse_each_message(
    tmp_path: Path, forwarded: str
) -> None:
    made, infer = services(tmp_path), Infer(Forwarding(forwarded))
    asked = message(ONES, TWOS, **({} if forwarded else {"id": "7"}))
    data = asked.SerializeToString()
    try:
        asyncio.run(infer.alone(call_of(made, [ONES, TWOS], data), asked))
        assert infer.planned(call_of(made, [], data), data) is None
    finally:
        made.engine.client.inputs.close()  # type: ignore[attr-defined]


def test_a_planned_message_that_the_model_refuses_is_refused_as_before(tmp_path: Path) -> None:
    refusing = False

    def answer(request: Work) -> Any:
        return InvalidInput("no") if refusing else InferReply.of(O=np.ones((1, 3), np.int32))

    made = services_of(tmp_path, [entry("sum@1")], [loaded("sum@1", SUM)], answer)
    infer = Infer(Forwarding(""))
    try:
        answered(made, infer, ONES, TWOS)
        refusing = True
        with pytest.raises(InvalidInput) as refusal:
            answered(made, infer, ONES, TWOS)
        assert refusal.value.message == "[request id: <id_unknown>] no"
    finally:
        made.engine.client.inputs.close()  # type: ignore[attr-defined]


def texts(*elements: bytes) -> pb.ModelInferRequest:
    """A request to `texts`: one element for each of its inputs."""
    made = pb.ModelInferRequest(model_name="texts")
    for name, element in zip("AB", elements, strict=True):
        made.inputs.add(name=name, datatype="BYTES", shape=[1])
        made.raw_input_contents.append(len(element).to_bytes(4, "little") + element)
    return made


def test_elements_of_other_lengths_behind_the_same_head_are_other_requests(tmp_path: Path) -> None:
    config = ModelConfig(
        name="texts",
        inputs=(tensor("A", "BYTES", 1), tensor("B", "BYTES", 1)),
        outputs=(tensor("O", "INT32", 3),),
    )
    reply = InferReply.of(O=np.ones(3, np.int32))
    made = services_of(tmp_path, [entry("texts@1")], [loaded("texts@1", config)], lambda _: reply)
    infer = Infer(Forwarding(""))
    client: Any = made.engine.client  # type: ignore[attr-defined]

    async def run(asked: pb.ModelInferRequest) -> tuple[Any, bytes]:
        data = asked.SerializeToString()
        call = call_of(made, list(asked.raw_input_contents), data)
        with ending(made, call.context):
            await (infer.planned(call, data) or infer.alone(call, asked))
        return client.requests[-1].call, bytes(client.payloads[-1])

    several = [texts(b"a", b"bcd"), texts(b"a", b"bcdefg"), texts(b"abcdefg", b""), texts(b"abc", b"d")]
    try:
        first = [asyncio.run(run(asked)) for asked in several]
        again = [asyncio.run(run(asked)) for asked in (several + several[::-1])]
        assert again == first + first[::-1]
        for asked, (call, payload) in zip(several, first, strict=True):
            given = [payload[each.start : each.start + each.nbytes] for each in call.inputs]
            assert given == list(asked.raw_input_contents)
    finally:
        client.inputs.close()
