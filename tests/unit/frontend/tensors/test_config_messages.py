"""Configurations as messages: read back by the repository's own reader, for every field that both know."""

from __future__ import annotations

import math
from types import ModuleType

import msgspec
import pytest
from google.protobuf import text_format

from frontend.tensors.config_messages import datatype_of, message_of
from ipc.protos import model_config_pb2, trtis_v1_pb2
from workers.repository.configuration import convert

BATCHING = """
name: "m" backend: "torch_export" platform: "torch_export" max_batch_size: 8
input { name: "A" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [3, 4, 4] }
input { name: "B" data_type: TYPE_STRING dims: [-1] optional: true }
output { name: "C" data_type: TYPE_BF16 dims: [10] reshape { shape: [2, 5] } }
version_policy { specific { versions: [1, 3] } }
instance_group { name: "g" count: 2 kind: KIND_CPU }
dynamic_batching { preferred_batch_size: [2, 4] max_queue_delay_microseconds: 100 preserve_ordering: true }
metric_tags { key: "team" value: "x" }
parameters { key: "p" value { string_value: "1" } }
"""
SEQUENCES = """
name: "m" backend: "torch_export" platform: "torch_export" max_batch_size: 1
input { name: "A" data_type: TYPE_INT32 dims: [1] }
output { name: "B" data_type: TYPE_INT32 dims: [1] }
version_policy { all {} }
sequence_batching {
  max_sequence_idle_microseconds: 5000000
  control_input { name: "S" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
  control_input { name: "R" control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [0, 1] } }
  control_input { name: "I" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
}
"""


@pytest.mark.parametrize("text", [BATCHING, SEQUENCES])
def test_a_configuration_is_the_same_after_its_message(text: str) -> None:
    config = convert(text_format.Parse(text, model_config_pb2.ModelConfig()), "m")
    assert convert(message_of(model_config_pb2, config, "m"), "m") == config


def test_a_truth_value_of_a_control_is_left_out_where_the_schema_has_none() -> None:
    text = SEQUENCES.replace("int32_false_true: [0, 1]", "bool_false_true: [false, true]")
    config = convert(text_format.Parse(text, model_config_pb2.ModelConfig()), "m")
    message = message_of(trtis_v1_pb2, config, "m")
    assert [each.name for each in message.sequence_batching.control_input] == ["S", "R", "I"]


def test_a_value_of_a_control_may_be_infinite() -> None:
    text = SEQUENCES.replace("fp32_false_true: [0, 1]", "fp32_false_true: [-inf, inf]")
    config = convert(text_format.Parse(text, model_config_pb2.ModelConfig()), "m")
    for schema in (model_config_pb2, trtis_v1_pb2):
        control = message_of(schema, config, "m").sequence_batching.control_input[1].control[0]
        assert list(control.fp32_false_true) == [-math.inf, math.inf]


@pytest.mark.parametrize("text", [BATCHING, SEQUENCES])
def test_the_older_schema_has_the_same_fields_where_it_knows_them(text: str) -> None:
    config = convert(text_format.Parse(text, model_config_pb2.ModelConfig()), "m")
    old, new = (message_of(schema, config, "other") for schema in (trtis_v1_pb2, model_config_pb2))
    reread = model_config_pb2.ModelConfig.FromString(old.SerializeToString())
    new.ClearField("backend")
    for tensor in (*new.input, *new.output):
        tensor.ClearField("optional") if hasattr(tensor, "optional") else None
        if tensor.data_type == model_config_pb2.TYPE_BF16:
            tensor.data_type = model_config_pb2.TYPE_INVALID
    assert reread == new


def test_what_does_not_apply_is_absent() -> None:
    config = convert(text_format.Parse(BATCHING, model_config_pb2.ModelConfig()), "m")
    bare = msgspec.structs.replace(config, dynamic_batching=None)
    message = message_of(model_config_pb2, bare, "m")
    assert message.WhichOneof("scheduling_choice") is None
    assert not message.HasField("model_transaction_policy")


@pytest.mark.parametrize(("schema", "bf16"), [(model_config_pb2, 14), (trtis_v1_pb2, 0)])
def test_datatypes_have_the_numbers_of_their_schema(schema: ModuleType, bf16: int) -> None:
    assert (datatype_of(schema, "BOOL"), datatype_of(schema, "BYTES")) == (1, 13)
    assert datatype_of(schema, "BF16") == bf16
