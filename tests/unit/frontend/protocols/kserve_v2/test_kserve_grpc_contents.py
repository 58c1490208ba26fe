"""Typed contents of every field to raw bytes, and what is refused."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from frontend.protocols.kserve_v2.grpc.reading import raw_of
from ipc.errors import InvalidInput
from ipc.protos import kserve_v2_pb2 as pb


def tensor(datatype: str, shape: list[int], **contents: Any) -> pb.ModelInferRequest.InferInputTensor:
    made = pb.ModelInferRequest.InferInputTensor(name="X", datatype=datatype, shape=shape)
    made.contents.CopyFrom(pb.InferTensorContents(**contents))
    return made


@pytest.mark.parametrize(
    ("datatype", "field", "values", "form"),
    [
        ("BOOL", "bool_contents", [True, False, True], "<???"),
        ("INT8", "int_contents", [-128, 0, 127], "<3b"),
        ("INT16", "int_contents", [-(2**15), 0, 2**15 - 1], "<3h"),
        ("INT32", "int_contents", [-(2**31), 0, 2**31 - 1], "<3i"),
        ("INT64", "int64_contents", [-(2**63), 0, 2**63 - 1], "<3q"),
        ("UINT8", "uint_contents", [0, 1, 255], "<3B"),
        ("UINT16", "uint_contents", [0, 1, 2**16 - 1], "<3H"),
        ("UINT32", "uint_contents", [0, 1, 2**32 - 1], "<3I"),
        ("UINT64", "uint64_contents", [0, 1, 2**64 - 1], "<3Q"),
        ("FP32", "fp32_contents", [0.5, -2.0, float("inf")], "<3f"),
        ("FP64", "fp64_contents", [0.1, -1e300, float("-inf")], "<3d"),
    ],
)
def test_numbers_become_little_endian_elements(
    datatype: str, field: str, values: list[Any], form: str
) -> None:
    assert raw_of(tensor(datatype, [3], **{field: values})) == struct.pack(form, *values)


def test_bytes_get_their_lengths_in_front() -> None:
    raw = raw_of(tensor("BYTES", [2, 1], bytes_contents=[b"", b"\x00\xff\xfe"]))
    assert raw == b"\x00\x00\x00\x00" + b"\x03\x00\x00\x00" + b"\x00\xff\xfe"


@pytest.mark.parametrize("shape", [[0], [2, 0, 5]])
def test_a_tensor_without_elements_needs_no_contents(shape: list[int]) -> None:
    assert raw_of(pb.ModelInferRequest.InferInputTensor(name="X", datatype="INT16", shape=shape)) == b""


def test_a_scalar_has_one_element() -> None:
    assert raw_of(tensor("INT16", [], int_contents=[7])) == np.int16(7).tobytes()


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (tensor("FP16", [1], fp32_contents=[1]), ["FP16", "raw_input_contents"]),
        (tensor("BF16", [1], fp32_contents=[1]), ["BF16", "raw_input_contents"]),
        (tensor("INT32", [1], int64_contents=[1]), ["int64_contents", "INT32", "int_contents"]),
        (tensor("INT32", [1], int_contents=[1], fp32_contents=[1]), ["fp32_contents"]),
        (tensor("UINT8", [1], uint_contents=[256]), ["256", "0..255", "UINT8"]),
        (tensor("INT8", [2], int_contents=[0, -129]), ["-129", "-128..127", "INT8"]),
        (tensor("INT8", [2], int_contents=[0]), ["expected 2", "got 1"]),
        (tensor("INT8", [2], int_contents=[0, 0, 0]), ["expected 2", "got 3"]),
        (tensor("INT8", [-2], int_contents=[0]), ["negative"]),
        (tensor("INT8", [2**40, 2**40], int_contents=[0]), ["2^59"]),
        (tensor("FLOAT", [1], fp32_contents=[1]), ["'FLOAT'", "FP32"]),
        (tensor("BYTES", [2], bytes_contents=[b"x"]), ["expected 2", "got 1"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_inputs_name(made: Any, words: list[str]) -> None:
    with pytest.raises(InvalidInput) as refusal:
        raw_of(made)
    for word in ["'X'", *words]:
        assert word in refusal.value.message
