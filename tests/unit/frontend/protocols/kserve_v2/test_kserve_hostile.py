"""Whatever bytes arrive: requests of KServe v2 are read or refused with `InvalidInput`, and nothing else happens."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.http.threads import at_once
from frontend.protocols.kserve_v2 import conversions, elements, infer, reading
from frontend.tensors.request import InputTensor
from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.errors import InvalidInput
from ipc.memory import datatypes
from ipc.memory.datatypes import DATATYPES
from ipc.settings import Limits
from tests.fakes.tensors import finish

FEW = settings(max_examples=60, deadline=None)
NAMES = st.sampled_from([*DATATYPES, "INT9", ""])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.just({"b64": "YQ=="}),
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=5), max_leaves=20)
SIZES = st.integers(-3, 40) | st.sampled_from([1 << 31, 1 << 63, 1 << 64])
TENSORS = st.fixed_dictionaries(
    {"name": st.sampled_from("ab"), "shape": st.lists(SIZES, max_size=3), "datatype": NAMES},
    optional={"data": VALUES, "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": SIZES})},
)
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\2\0\0\0\2"
STARTS = [b"", PNG + b"\x10\2", PNG + b"\x10\4", PNG + b"\x10\6", PNG + b"\x08\3", b"\xff\xd8\xff"]
MODEL = ModelConfig(
    name="m", max_batch_size=4, inputs=(TensorConfig(name="x", datatype="FP32", dims=(2, 2, 3)),)
)


@FEW
@given(st.lists(TENSORS, max_size=3), st.none() | st.binary(max_size=64))
def test_requests(inputs: list[dict[str, Any]], data: bytes | None) -> None:
    head = json.dumps({"inputs": inputs}).encode()
    with contextlib.suppress(InvalidInput):
        found = reading.parse("m", None, head, None if data is None else memoryview(data))
        for given_input, tensor in zip(inputs, found.request.inputs, strict=True):
            nbytes = DATATYPES[given_input["datatype"]].nbytes
            count = 1
            for dim in given_input["shape"]:
                count *= dim
            assert tensor.data is not None
            assert not nbytes or len(tensor.data) == count * nbytes


@FEW
@given(st.binary(max_size=200))
def test_heads_that_are_anything(head: bytes) -> None:
    with contextlib.suppress(InvalidInput):
        reading.parse("m", None, head, None)


@FEW
@given(VALUES, st.sampled_from(list(DATATYPES)), st.integers(0, 8))
def test_data_is_what_a_json_parser_reads(value: Any, datatype: str, count: int) -> None:
    text = json.dumps(value)
    if "NaN" in text or "Infinity" in text:
        return
    with contextlib.suppress(InvalidInput):
        found = elements.read(text.encode(), datatype, count, "x")
        nbytes = DATATYPES[datatype].nbytes
        assert not nbytes or len(found) == count * nbytes


@FEW
@given(st.binary(max_size=100), st.sampled_from(infer.OFFERED))
def test_packed_bodies_that_are_anything(body: bytes, encoding: str) -> None:
    with contextlib.suppress(InvalidInput):
        at_once(infer.unpack(body, encoding, 1000, 10))


@FEW
@given(
    st.binary(max_size=60),
    st.sampled_from([b"", PNG + b"\x10\2", PNG + b"\x10\6", PNG + b"\x08\3", b"\xff\xd8\xff"]),
)
def test_images_that_are_anything(data: bytes, start: bytes) -> None:
    with contextlib.suppress(InvalidInput):
        conversions.decode(start + data, "x")
    tensor = InputTensor("x", "BYTES", [1], datatypes.join([start + data]))
    with contextlib.suppress(InvalidInput):
        conversions.defer(MODEL, [tensor], Limits())
        finish(tensor)


@FEW
@given(st.binary(max_size=60), st.integers(0, 5))
def test_prefixes_that_lie(data: bytes, count: int) -> None:
    tensor = InputTensor("x", "BYTES", [count], data)
    with contextlib.suppress(InvalidInput):
        conversions.defer(MODEL, [tensor], Limits())
        finish(tensor)


@FEW
@given(st.text(max_size=40))
def test_accept_encodings_that_are_anything(header: str) -> None:
    assert infer.choose(header, binary=True) in ("", *infer.OFFERED)
