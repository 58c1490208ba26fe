"""A model's configuration for clients: as JSON with the names of Triton's `ModelConfig`, and as a protobuf message.

1. `configuration` makes the JSON of KServe v2.
2. `message_of` reads the JSON into the message of a protocol. `schema` is the module of messages of the protocol
   (`ipc.protos`); the schemas share names and numbers. What a schema lacks is left out.
"""

from __future__ import annotations

import math
from functools import cache
from types import ModuleType
from typing import Any

from google.protobuf import json_format

from ipc.catalog.model_config import Control, ModelConfig, SequenceBatching, TensorConfig, VersionPolicy
from ipc.memory.datatypes import DATATYPES


def message_of(schema: ModuleType, config: ModelConfig, name: str) -> Any:
    """The `ModelConfig` of `schema`, under the `name` that clients ask for."""
    fields = configuration(name, config)
    return json_format.ParseDict(fields, schema.ModelConfig(), ignore_unknown_fields=True)


@cache
def datatype_of(schema: ModuleType, name: str) -> Any:
    """A datatype by its name in `ipc.memory.datatypes`; one that the schema lacks is TYPE_INVALID."""
    known = DATATYPES[name].config
    return schema.DataType.Value(known if known in schema.DataType.keys() else "TYPE_INVALID")  # noqa: SIM118


def configuration(name: str, config: ModelConfig) -> dict[str, Any]:
    """The configuration as JSON, under the name that the client used. Fields that do not apply are left out."""
    fields: dict[str, Any] = {
        "name": name,
        "platform": config.platform,
        "backend": config.backend,
        "version_policy": _version_policy(config.version_policy),
        "max_batch_size": config.max_batch_size,
        "input": [_input(tensor) for tensor in config.inputs],
        "output": [_output(tensor) for tensor in config.outputs],
    }
    if config.instance_groups:
        fields["instance_group"] = [
            {"name": group.name, "kind": group.kind, "count": group.count, "gpus": list(group.gpus)}
            for group in config.instance_groups
        ]
    if config.default_model_filename:
        fields["default_model_filename"] = config.default_model_filename
    if config.sequence_batching is not None:
        fields["sequence_batching"] = _sequence_batching(config.sequence_batching)
    elif config.dynamic_batching is not None:
        fields["dynamic_batching"] = {
            "preferred_batch_size": list(config.dynamic_batching.preferred_batch_sizes),
            "max_queue_delay_microseconds": config.dynamic_batching.max_queue_delay_us,
            "preserve_ordering": config.dynamic_batching.preserve_ordering,
        }
    if config.decoupled:
        fields["model_transaction_policy"] = {"decoupled": True}
    if config.metric_tags:
        fields["metric_tags"] = dict(config.metric_tags)
    if config.parameters:
        fields["parameters"] = {name: {"string_value": value} for name, value in config.parameters.items()}
    return fields


def _version_policy(policy: VersionPolicy) -> dict[str, Any]:
    choices: dict[str, dict[str, Any]] = {
        "latest": {"num_versions": policy.latest},
        "all": {},
        "specific": {"versions": list(policy.specific)},
    }
    return {policy.kind: choices[policy.kind]}


def _configured(tensor: TensorConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": tensor.name,
        "data_type": DATATYPES[tensor.datatype].config,
        "dims": list(tensor.dims),
    }
    if tensor.reshape is not None:
        fields["reshape"] = {"shape": list(tensor.reshape)}
    return fields


def _input(tensor: TensorConfig) -> dict[str, Any]:
    return _configured(tensor) | {"format": f"FORMAT_{tensor.format}", "optional": tensor.optional}


def _output(tensor: TensorConfig) -> dict[str, Any]:
    return _configured(tensor) | {"label_filename": tensor.label_filename}


def _sequence_batching(batching: SequenceBatching) -> dict[str, Any]:
    return {
        "max_sequence_idle_microseconds": batching.max_idle_us,
        "control_input": [_control_input(control) for control in batching.controls],
    }


def _control_input(control: Control) -> dict[str, Any]:
    fields: dict[str, Any] = {"kind": f"CONTROL_SEQUENCE_{control.kind}"}
    if control.kind == "CORRID":
        fields["data_type"] = DATATYPES[control.datatype].config
    elif control.datatype == "INT32":
        fields["int32_false_true"] = [int(value) for value in control.off_on]
    elif control.datatype == "BOOL":
        fields["bool_false_true"] = [bool(value) for value in control.off_on]
    else:
        fields["fp32_false_true"] = [_json_number(value) for value in control.off_on]
    return {"name": control.name, "control": [fields]}


def _json_number(value: float) -> float | str:
    """A number as protobuf's JSON has it: JSON has no numbers for infinity and NaN."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
