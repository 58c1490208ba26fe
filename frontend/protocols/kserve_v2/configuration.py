"""Model configurations as JSON, with the names of `inference.ModelConfig`; fields that do not apply are left out."""

from __future__ import annotations

from typing import Any

from ipc.catalog.model_config import Control, ModelConfig, SequenceBatching, TensorConfig, VersionPolicy
from ipc.memory.datatypes import DATATYPES


def configuration(name: str, config: ModelConfig) -> dict[str, Any]:
    """The configuration of a model under the name that it was asked for by."""
    made: dict[str, Any] = {
        "name": name,
        "platform": config.platform,
        "backend": config.backend,
        "version_policy": _version_policy(config.version_policy),
        "max_batch_size": config.max_batch_size,
        "input": [_input(tensor) for tensor in config.inputs],
        "output": [_output(tensor) for tensor in config.outputs],
    }
    if config.instance_groups:
        made["instance_group"] = [
            {"name": group.name, "kind": group.kind, "count": group.count, "gpus": list(group.gpus)}
            for group in config.instance_groups
        ]
    if config.default_model_filename:
        made["default_model_filename"] = config.default_model_filename
    if config.dynamic_batching is not None:
        made["dynamic_batching"] = {
            "preferred_batch_size": list(config.dynamic_batching.preferred_batch_sizes),
            "max_queue_delay_microseconds": config.dynamic_batching.max_queue_delay_us,
            "preserve_ordering": config.dynamic_batching.preserve_ordering,
        }
    if config.sequence_batching is not None:
        made["sequence_batching"] = _sequence_batching(config.sequence_batching)
    if config.decoupled:
        made["model_transaction_policy"] = {"decoupled": True}
    if config.metric_tags:
        made["metric_tags"] = dict(config.metric_tags)
    if config.parameters:
        made["parameters"] = {name: {"string_value": value} for name, value in config.parameters.items()}
    return made


def _version_policy(policy: VersionPolicy) -> dict[str, Any]:
    choices: dict[str, dict[str, Any]] = {
        "latest": {"num_versions": policy.latest},
        "all": {},
        "specific": {"versions": list(policy.specific)},
    }
    return {policy.kind: choices[policy.kind]}


def _tensor(tensor: TensorConfig) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": tensor.name,
        "data_type": DATATYPES[tensor.datatype].config,
        "dims": list(tensor.dims),
    }
    if tensor.reshape is not None:
        made["reshape"] = {"shape": list(tensor.reshape)}
    return made


def _input(tensor: TensorConfig) -> dict[str, Any]:
    return _tensor(tensor) | {"format": f"FORMAT_{tensor.format}", "optional": tensor.optional}


def _output(tensor: TensorConfig) -> dict[str, Any]:
    return _tensor(tensor) | {"label_filename": tensor.label_filename}


def _sequence_batching(batching: SequenceBatching) -> dict[str, Any]:
    return {
        "max_sequence_idle_microseconds": batching.max_idle_us,
        "control_input": [_control(control) for control in batching.controls],
    }


def _control(control: Control) -> dict[str, Any]:
    made: dict[str, Any] = {"kind": f"CONTROL_SEQUENCE_{control.kind}"}
    if control.kind == "CORRID":
        made["data_type"] = DATATYPES[control.datatype].config
    elif control.datatype == "INT32":
        made["int32_false_true"] = [int(value) for value in control.off_on]
    elif control.datatype == "BOOL":
        made["bool_false_true"] = [bool(value) for value in control.off_on]
    else:
        made["fp32_false_true"] = list(control.off_on)
    return {"name": control.name, "control": [made]}
