"""ModelInferRequest messages as requests, and what only this wire format can get wrong."""

from __future__ import annotations

from typing import Any

import pytest

from frontend.protocols.kserve_v2.grpc.reading import request_of, version_of
from frontend.tensors.request import RegionUse
from ipc.errors import InvalidInput
from ipc.protos import kserve_v2_pb2 as pb


def message(inputs: int = 1, **fields: Any) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name="m", **fields)
    for number in range(inputs):
        made.inputs.add(name=f"IN{number}", datatype="INT32", shape=[1, 2])
    return made


def in_region(tensor: Any, name: str = "region", offset: int | None = 8, nbytes: int | None = 16) -> None:
    tensor.parameters["shared_memory_region"].string_param = name
    if offset is not None:
        tensor.parameters["shared_memory_offset"].int64_param = offset
    if nbytes is not None:
        tensor.parameters["shared_memory_byte_size"].uint64_param = nbytes


def test_raw_contents_go_to_the_inputs_in_their_order() -> None:
    request = request_of(message(2), [b"first", b"second"])
    assert [(tensor.name, tensor.shape, tensor.data) for tensor in request.inputs] == [
        ("IN0", [1, 2], b"first"),
        ("IN1", [1, 2], b"second"),
    ]
    assert (request.model, request.version, request.outputs) == ("m", None, None)


def test_inputs_in_shared_memory_take_no_raw_entry() -> None:
    made = message(3)
    in_region(made.inputs[1])
    request = request_of(made, [b"a", b"b"])
    assert [tensor.data for tensor in request.inputs] == [b"a", None, b"b"]
    assert request.inputs[1].region == RegionUse("region", 8, 16)


@pytest.mark.parametrize(("raw", "got"), [([b"a"], 1), ([b"a", b"b", b"c"], 3)])
def test_missing_and_extra_raw_entries_are_refused(raw: list[bytes], got: int) -> None:
    with pytest.raises(InvalidInput, match=f"expected 2 entries.*got {got}"):
        request_of(message(2), raw)


def test_contents_and_raw_exclude_each_other() -> None:
    made = message()
    made.inputs[0].contents.int_contents.extend([1, 2])
    with pytest.raises(InvalidInput, match=r"'IN0'.*raw_input_contents"):
        request_of(made, [b"12345678"])


def test_contents_and_a_region_exclude_each_other() -> None:
    made = message()
    made.inputs[0].contents.int_contents.extend([1, 2])
    in_region(made.inputs[0])
    with pytest.raises(InvalidInput, match=r"'IN0'.*shared memory"):
        request_of(made, [])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensor: in_region(tensor, nbytes=None), "shared_memory_byte_size"),
        (lambda tensor: in_region(tensor, name=""), "shared_memory_region"),
        (lambda tensor: in_region(tensor, offset=-1), "shared_memory_offset"),
        (lambda tensor: tensor.parameters["odd"].SetInParent(), "'odd' has no value"),
    ],
)
def test_wrong_region_parameters_are_refused(change: Any, words: str) -> None:
    made = message()
    change(made.inputs[0])
    with pytest.raises(InvalidInput, match=words):
        request_of(made, [])


def test_parameters_go_to_their_places() -> None:
    made = message()
    made.parameters["sequence_id"].int64_param = 42
    made.parameters["sequence_start"].bool_param = True
    made.parameters["priority"].uint64_param = 2
    made.parameters["timeout"].int64_param = 5000
    made.parameters["temperature"].double_param = 0.5
    made.parameters["triton_enable_empty_final_response"].bool_param = True
    request = request_of(made, [b"12345678"])
    assert (request.sequence.id, request.sequence.start, request.sequence.end) == (42, True, False)
    assert (request.priority, request.timeout_us, request.parameters) == (2, 5000, {"temperature": 0.5})


def test_wanted_outputs_keep_their_order() -> None:
    made = message()
    made.outputs.add(name="B").parameters["classification"].int64_param = 3
    in_region(made.outputs.add(name="A"))
    request = request_of(made, [b"12345678"])
    assert request.outputs is not None
    assert [(output.name, output.classes) for output in request.outputs] == [("B", 3), ("A", None)]
    assert request.outputs[1].region == RegionUse("region", 8, 16)


def test_a_negative_classification_is_refused() -> None:
    made = message()
    made.outputs.add(name="B").parameters["classification"].int64_param = -1
    with pytest.raises(InvalidInput, match="classification"):
        request_of(made, [b"12345678"])


@pytest.mark.parametrize(("text", "version"), [("", None), ("0", 0), ("12", 12)])
def test_versions_are_numbers(text: str, version: int | None) -> None:
    assert version_of(text) == version


@pytest.mark.parametrize("text", ["latest", "-1", "1.0", "²", "9" * 30])
def test_other_versions_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="model version"):
        version_of(text)
