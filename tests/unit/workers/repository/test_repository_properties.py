"""Whatever a configuration file holds, reading it gives a configuration or one `ModelRefused`, in bounded time."""

from __future__ import annotations

from typing import Any

from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.memory.datatypes import DATATYPES
from ipc.protos import model_config_pb2 as schema
from ipc.wire import codec
from ipc.wire.messages import ModelStatus
from workers.repository import configuration
from workers.repository.layout import ModelRefused

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
        configuration.convert(parse("config", raw), "m")
    except ModelRefused as error:
        assert str(error) and "\n" not in str(error)


@given(st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_any_bytes(raw: bytes) -> None:
    read(raw, configuration.parse_text)
    read(raw, configuration.parse_yaml)


@given(st.lists(PIECES, max_size=60).map(b" ".join))
@settings(max_examples=100, deadline=None)
def test_any_tokens(raw: bytes) -> None:
    read(raw, configuration.parse_text)
    read(raw, configuration.parse_yaml)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_valid_file_with_bytes_replaced_cut_out_or_put_in(data: st.DataObject) -> None:
    raw = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 8))] = data.draw(PIECES | st.binary(max_size=4))
    read(bytes(raw), configuration.parse_text)


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
@settings(max_examples=70, deadline=None)
def test_what_was_written_is_read(batch: int, inputs: list[Any], outputs: list[Any], as_utf8: bool) -> None:
    message = schema.ModelConfig(name="m", max_batch_size=batch, input=inputs, output=outputs)
    text = text_format.MessageToString(message, as_utf8=as_utf8, as_one_line=as_utf8)
    found = configuration.convert(configuration.parse_text("config.pbtxt", text.encode()), "m")
    assert found.max_batch_size == batch
    for read_back, written in ((found.inputs, inputs), (found.outputs, outputs)):
        assert [each.name for each in read_back] == [each.name for each in written]
        assert [each.dims for each in read_back] == [tuple(each.dims) for each in written]
        configs = [DATATYPES[each.datatype].config for each in read_back]
        assert configs == [schema.DataType.Name(each.data_type) for each in written]


PAIRS = {
    "int32_false_true": st.integers(-(2**31), 2**31 - 1),
    "fp32_false_true": st.floats(width=32),
    "bool_false_true": st.booleans(),
}
KINDS = [f"CONTROL_SEQUENCE_{kind}" for kind in ("START", "READY", "END", "CORRID")]


def draw_sequences(data: st.DataObject, message: Any) -> None:
    """Control tensors of any kinds with any values."""
    batching = message.sequence_batching
    batching.max_sequence_idle_microseconds = data.draw(st.integers(0, 10**9))
    for kind in data.draw(st.lists(st.sampled_from(KINDS), unique=True, min_size=1)):
        control = batching.control_input.add(name=f"the {kind}").control.add()
        control.kind = schema.ModelSequenceBatching.Control.Kind.Value(kind)
        if kind.endswith("CORRID"):
            control.data_type = data.draw(st.sampled_from([schema.TYPE_UINT64, schema.TYPE_STRING]))
        else:
            pair = data.draw(st.sampled_from(list(PAIRS)))
            getattr(control, pair).extend([data.draw(PAIRS[pair]), data.draw(PAIRS[pair])])


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_whatever_configuration_is_accepted_can_be_told_to_frontends(data: st.DataObject) -> None:
    texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
    message = configuration.parse_text("config.pbtxt", VALID)
    message.max_batch_size = data.draw(st.sampled_from([8, 2**20]))
    message.input.extend(data.draw(st.lists(tensors(schema.ModelInput), max_size=2, unique_by=str)))
    message.output[0].label_filename = data.draw(texts)
    message.default_model_filename = data.draw(texts)
    message.version_policy.specific.versions.append(data.draw(st.integers(0, 2**63 - 1)))
    message.dynamic_batching.max_queue_delay_microseconds = data.draw(st.integers(0, 60_000_000))
    message.dynamic_batching.preserve_ordering = data.draw(st.booleans())
    group = message.instance_group[0]
    group.name, group.count = data.draw(texts), data.draw(st.integers(0, 2**31 - 1))
    message.model_transaction_policy.decoupled = data.draw(st.booleans())
    message.metric_tags[data.draw(texts)] = data.draw(texts)
    message.parameters[data.draw(texts)].string_value = data.draw(texts)
    message.model_warmup[0].name, message.model_warmup[0].count = (
        data.draw(texts),
        data.draw(st.integers(0, 1000)),
    )
    if data.draw(st.booleans()):
        message.ClearField("dynamic_batching")
        draw_sequences(data, message)
    try:
        config = configuration.convert(message, "m")
    except ModelRefused as refused:
        assert "input" in str(refused), "of what is drawn only names of inputs may clash"
        return
    codec.check_status(ModelStatus("m@1", "loaded", config=config))
