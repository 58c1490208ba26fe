"""Messages taken apart and put together without the protobuf library, compared with what the library makes of them."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from frontend.grpc import received
from ipc.errors import InvalidInput
from ipc.protos import kserve_v2_pb2 as pb

RAW = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
contents = st.lists(st.binary(max_size=300), max_size=5)


def request(name: str, shapes: list[int], raw: list[bytes]) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=name, raw_input_contents=raw)
    for shape in shapes:
        message.inputs.add(name="x", datatype="INT32", shape=[shape])
        message.parameters[str(shape)].double_param = shape / 3
    return message


@given(st.text(max_size=40), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), contents)
def test_a_split_message_has_the_same_fields(name: str, shapes: list[int], raw: list[bytes]) -> None:
    message = request(name, shapes, raw)
    rest, found = received.split(message.SerializeToString(), RAW)
    assert [bytes(one) for one in found] == raw
    without = pb.ModelInferRequest.FromString(rest)
    del message.raw_input_contents[:]
    assert without == message


def test_fields_in_any_order_and_split_fields_are_found() -> None:
    parts = [pb.ModelInferRequest(raw_input_contents=[b"a"]), pb.ModelInferRequest(model_name="m"),
             pb.ModelInferRequest(raw_input_contents=[b"", b"b" * 200])]  # fmt: skip
    rest, found = received.split(b"".join(part.SerializeToString() for part in parts), RAW)
    assert [bytes(one) for one in found] == [b"a", b"", b"b" * 200]
    assert pb.ModelInferRequest.FromString(rest).model_name == "m"


def test_nothing_is_copied() -> None:
    data = pb.ModelInferRequest(raw_input_contents=[b"x" * 1000]).SerializeToString()
    _, found = received.split(data, RAW)
    assert found[0].obj is data


TAGS = st.sampled_from([b"\x3a\x02", b"\x0a\x01", b"\x22", b"\xba\x00"])


@given(st.lists(TAGS | st.binary(max_size=4)).map(b"".join))
def test_what_is_split_of_any_bytes_is_what_the_library_reads(data: bytes) -> None:
    try:
        rest, found = received.split(data, RAW)
        message = pb.ModelInferRequest.FromString(data)
    except (ValueError, DecodeError):
        return
    assert [bytes(one) for one in found] == list(message.raw_input_contents)
    del message.raw_input_contents[:]
    assert pb.ModelInferRequest.FromString(rest) == message


@pytest.mark.parametrize(
    "data",
    [
        b"\x3a",  # a field without its length
        b"\x3a\x05abc",  # cut short
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # a length beyond all memory
        b"\x80" * 20,  # a number that does not end
        b"\x09\x00",  # eight bytes announced, one there
        b"\x0b",  # a group, which proto3 does not have
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"cut short|too long|not in use"):
        received.split(data, RAW)


MANY = received.MAX_FIELDS + 1
INPUTS = pb.ModelInferRequest.INPUTS_FIELD_NUMBER
LIMIT = str(received.MAX_FIELDS)


@pytest.mark.parametrize("small", [b"\x3a\x00", b"\x08\x00", b"\x2a\x00"], ids=["raw", "unknown", "inputs"])
def test_more_fields_than_a_message_has_are_refused(small: bytes) -> None:
    received.split(small * received.MAX_FIELDS, RAW, (INPUTS,))
    with pytest.raises(InvalidInput, match=LIMIT):
        received.split(small * MANY, RAW, (INPUTS,))


def test_fields_of_the_messages_inside_count_too() -> None:
    def within(count: int) -> bytes:
        parameters = b"\x22\x00" * count
        return b"".join(received.parts(b"", INPUTS, [parameters, parameters]))

    received.split(within(received.MAX_FIELDS // 2 - 1), RAW, (INPUTS,))
    with pytest.raises(InvalidInput, match=LIMIT):
        received.split(within(received.MAX_FIELDS // 2), RAW, (INPUTS,))
    received.split(within(MANY), RAW)


def test_a_field_that_ends_behind_its_message_is_refused() -> None:
    with pytest.raises(ValueError, match="cut short"):
        received.split(b"\x2a\x02\x0a\x05abcdef", RAW, (INPUTS,))


@given(contents)
def test_joined_parts_are_the_message_that_the_library_makes(raw: list[bytes]) -> None:
    head = pb.ModelInferResponse(model_name="m", id="7")
    parts = received.parts(head.SerializeToString(), 6, raw)
    head.raw_output_contents.extend(raw)
    assert pb.ModelInferResponse.FromString(b"".join(parts)) == head
    wrapped = pb.ModelStreamInferResponse.FromString(b"".join(received.nested(2, parts)))
    assert wrapped.infer_response == head
