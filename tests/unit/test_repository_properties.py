"""Whatever a configuration file holds, reading it gives a configuration or one `ModelRefused`, in bounded time."""

from __future__ import annotations

from typing import Any

from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.datatypes import DATATYPES
from ipc.protos import model_config_pb2 as schema
from ipc.repository import conversion, document
from ipc.repository.layout import ModelRefused

VALID = b"""
name: "m" platform: "torch_export" max_batch_size: 8
input { name: "A" data_type: TYPE_FP32 dims: [3, 4, -1] format: FORMAT_NCHW }
output [ { name: "B" data_type: TYPE_INT64 dims: 2 reshape { shape: [1, 2] } label_filename: "l" } ]
version_policy { specific { versions: [1, 2] } } instance_group { count: 1 kind: KIND_GPU gpus: 0 }
dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 100 }
model_warmup { name: "w" batch_size: 1
  inputs { key: "A" value { data_type: TYPE_FP32 dims: [3, 4, 1] zero_data: true } } }
"""
_TOKENS = (
    "{ } [ ] < > \" ' : - # \\ \\x \\777 \0 1e999 input dims 0x nan 99999999999999999999 [a.b/c] &a *a ?"
)
PIECES = st.sampled_from(
    [*(token.encode() for token in _TOKENS.split(" ")), b"\xff", b"\n", b"- ", b"input {"]
)


def read(raw: bytes, parse: Any) -> None:
    try:
        conversion.convert(parse("config", raw), "m")
    except ModelRefused as error:
        assert str(error) and "\n" not in str(error)


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_bytes(raw: bytes) -> None:
    read(raw, document.parse_text)
    read(raw, document.parse_yaml)


@given(st.lists(PIECES, max_size=60).map(b" ".join))
@settings(max_examples=300, deadline=None)
def test_any_tokens(raw: bytes) -> None:
    read(raw, document.parse_text)
    read(raw, document.parse_yaml)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_valid_file_with_bytes_replaced_cut_out_or_put_in(data: st.DataObject) -> None:
    raw = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 8))] = data.draw(PIECES | st.binary(max_size=4))
    read(bytes(raw), document.parse_text)


def tensors(kind: type) -> st.SearchStrategy[Any]:
    return st.builds(
        kind,
        name=st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=20),
        data_type=st.sampled_from([schema.DataType.Value(each.config) for each in DATATYPES.values()]),
        dims=st.lists(st.integers(-1, 100), max_size=4),
    )


@given(
    st.integers(0, 1000),
    st.lists(tensors(schema.ModelInput), max_size=5, unique_by=lambda tensor: tensor.name),
    st.lists(tensors(schema.ModelOutput), max_size=5, unique_by=lambda tensor: tensor.name),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_what_was_written_is_read(batch: int, inputs: list[Any], outputs: list[Any], as_utf8: bool) -> None:
    message = schema.ModelConfig(name="m", max_batch_size=batch, input=inputs, output=outputs)
    text = text_format.MessageToString(message, as_utf8=as_utf8, as_one_line=as_utf8)
    found = conversion.convert(document.parse_text("config.pbtxt", text.encode()), "m")
    assert found.max_batch_size == batch
    for read_back, written in ((found.inputs, inputs), (found.outputs, outputs)):
        assert [each.name for each in read_back] == [each.name for each in written]
        assert [each.dims for each in read_back] == [tuple(each.dims) for each in written]
        configs = [DATATYPES[each.datatype].config for each in read_back]
        assert configs == [schema.DataType.Name(each.data_type) for each in written]
