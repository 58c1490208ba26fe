"""Typed contents are counted before anything is made of them, and what they take is held while they are in work."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from frontend.grpc import received as wire
from frontend.grpc.received import Form
from frontend.protocols.kserve_v2.grpc import infer
from frontend.tensors.checking import MOST_DIMS
from ipc.errors import InvalidInput
from ipc.protos import kserve_v2_pb2 as pb

MIB = 1 << 20
FORM = Form(
    pb.ModelInferRequest,
    pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER,
    infer.refuse_too_many_values,
)
MANY = infer.MOST_SINGLE + 1


def wrapped(contents: bytes) -> bytes:
    """A request with one input of these contents, written by hand."""
    tensor = b"".join(wire.parts(b"\x0a\x01A\x12\x05BYTES", 5, [contents]))
    return b"".join(wire.parts(b"\x0a\x01m", 5, [tensor]))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"\x42\x00" * MANY, "strings"),
        (b"\x18\x01" * MANY, "not packed"),
        (b"\x35\x00\x00\x00\x00" * MANY, "not packed"),
        (b"".join(wire.parts(b"", 3, [b"\x01" * (infer.MOST_NUMBERS + 1)])), "numbers"),
        (b"".join(wire.parts(b"", 1, [b"\x01" * (infer.MOST_NUMBERS + 1)])), "numbers"),
        (b"".join(wire.parts(b"", 6, [bytes(4 * infer.MOST_NUMBERS + 4)])), "numbers"),
    ],
    ids=["strings", "integers", "floats", "packed integers", "packed truths", "packed floats"],
)
def test_too_many_values_become_an_error_and_no_objects(contents: bytes, words: str) -> None:
    received = FORM.receive(wrapped(contents))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match=f"typed contents: more than .*{words}.*raw_input_contents"):
            received.message()
        # The message without its raw part is joined once.
        assert tracemalloc.get_traced_memory()[1] < len(contents) + 4 * MIB
    finally:
        tracemalloc.stop()


def test_counts_of_several_inputs_are_added_up() -> None:
    half = b"".join(wire.parts(b"", 2, [b"\x01" * (infer.MOST_NUMBERS // 2 + 1)]))
    one = wire.parts(b"", 5, [b"".join(wire.parts(b"", 5, [half]))])
    with pytest.raises(InvalidInput, match="numbers"):
        FORM.receive(b"".join([*one, *one])).message()


@pytest.mark.parametrize("field", ["int_contents", "int64_contents", "fp32_contents", "bool_contents"])
def test_what_is_within_the_bounds_is_read(field: str) -> None:
    sent = pb.ModelInferRequest(model_name="m")
    tensor = sent.inputs.add(name="A", shape=[1 << 16])
    getattr(tensor.contents, field).extend([1] * (1 << 16))
    message: Any = FORM.receive(sent.SerializeToString()).message()
    assert message == sent
    assert infer.message_nbytes(message) == infer.NUMBER_NBYTES << 16


def test_strings_count_as_what_they_become() -> None:
    sent = pb.ModelInferRequest()
    sent.inputs.add().contents.bytes_contents.extend([b"x"] * 5)
    assert infer.message_nbytes(sent) == 5 * infer.STRING_NBYTES
    assert infer.message_nbytes(pb.ModelInferRequest(raw_input_contents=[b"x" * 100])) == 0


def test_a_shape_of_many_dimensions_is_refused() -> None:
    shape = b"".join(wire.parts(b"", 3, [b"\x01" * (5 * MIB)]))
    with pytest.raises(InvalidInput, match=f"dimensions, the limit is {MOST_DIMS}"):
        FORM.receive(b"".join(wire.parts(b"", 5, [shape]))).message()


def test_what_is_no_message_is_told_as_such() -> None:
    with pytest.raises(InvalidInput, match="not a message"):
        FORM.receive(wrapped(b"\x42\xff\xff\xff\x7f" + bytes(MIB))).message()
