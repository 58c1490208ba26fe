"""A model's configuration as the protobuf message of a protocol; the schemas of the protocols share names and numbers.

`schema` is the protocol's module of messages (`ipc.protos`). What a schema lacks is left out.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

from ipc.catalog.model_config import Control, ModelConfig, TensorConfig
from ipc.memory.datatypes import DATATYPES


def message_of(schema: ModuleType, config: ModelConfig, name: str) -> Any:
    """The `ModelConfig` of `schema`, under the `name` that clients ask for."""
    message = schema.ModelConfig(
        name=name,
        platform=config.platform,
        max_batch_size=config.max_batch_size,
        input=[_input(schema, tensor) for tensor in config.inputs],
        output=[_output(schema, tensor) for tensor in config.outputs],
        default_model_filename=config.default_model_filename,
        metric_tags=config.metric_tags,
    )
    for key, value in config.parameters.items():
        message.parameters[key].string_value = value
    for group in config.instance_groups:
        kind = schema.ModelInstanceGroup.Kind.Value(group.kind)
        message.instance_group.add(name=group.name, count=group.count, gpus=group.gpus, kind=kind)
    _set_policy(message.version_policy, config)
    _set_schedule(schema, message, config)
    _set_later_fields(message, config)
    return message


@cache
def datatype_of(schema: ModuleType, name: str) -> Any:
    """A datatype by its name in `ipc.memory.datatypes`; one that the schema lacks is TYPE_INVALID."""
    known = DATATYPES[name].config
    return schema.DataType.Value(known if known in schema.DataType.keys() else "TYPE_INVALID")  # noqa: SIM118


def _input(schema: ModuleType, tensor: TensorConfig) -> Any:
    message = _tensor(schema.ModelInput, schema, tensor)
    message.format = schema.ModelInput.Format.Value(f"FORMAT_{tensor.format}")
    if tensor.optional and "optional" in message.DESCRIPTOR.fields_by_name:
        message.optional = True
    return message


def _output(schema: ModuleType, tensor: TensorConfig) -> Any:
    message = _tensor(schema.ModelOutput, schema, tensor)
    message.label_filename = tensor.label_filename
    return message


def _tensor(kind: Any, schema: ModuleType, tensor: TensorConfig) -> Any:
    message = kind(name=tensor.name, data_type=datatype_of(schema, tensor.datatype), dims=tensor.dims)
    if tensor.reshape is not None:
        message.reshape.SetInParent()
        message.reshape.shape.extend(tensor.reshape)
    return message


def _set_policy(message: Any, config: ModelConfig) -> None:
    policy = config.version_policy
    if policy.kind == "all":
        message.all.SetInParent()
    elif policy.kind == "specific":
        message.specific.versions.extend(policy.specific)
    else:
        message.latest.num_versions = policy.latest


def _set_schedule(schema: ModuleType, message: Any, config: ModelConfig) -> None:
    sequence, dynamic = config.sequence_batching, config.dynamic_batching
    if sequence is not None:
        message.sequence_batching.max_sequence_idle_microseconds = sequence.max_idle_us
        for control in sequence.controls:
            message.sequence_batching.control_input.add(
                name=control.name, control=[_control(schema, control)]
            )
    elif dynamic is not None:
        message.dynamic_batching.SetInParent()
        message.dynamic_batching.preferred_batch_size.extend(dynamic.preferred_batch_sizes)
        message.dynamic_batching.max_queue_delay_microseconds = dynamic.max_queue_delay_us
        message.dynamic_batching.preserve_ordering = dynamic.preserve_ordering


def _control(schema: ModuleType, control: Control) -> Any:
    kind = schema.ModelSequenceBatching.Control
    message = kind(kind=kind.Kind.Value(f"CONTROL_SEQUENCE_{control.kind}"))
    if control.kind == "CORRID":
        message.data_type = datatype_of(schema, control.datatype)
    elif control.datatype == "INT32":
        message.int32_false_true.extend(map(int, control.off_on))
    elif control.datatype == "BOOL":
        if "bool_false_true" in message.DESCRIPTOR.fields_by_name:
            message.bool_false_true.extend(map(bool, control.off_on))
    else:
        message.fp32_false_true.extend(control.off_on)
    return message


def _set_later_fields(message: Any, config: ModelConfig) -> None:
    """Fields that only the later schema has."""
    if "backend" not in message.DESCRIPTOR.fields_by_name:
        return
    message.backend = config.backend
    if config.decoupled:
        message.model_transaction_policy.decoupled = True
