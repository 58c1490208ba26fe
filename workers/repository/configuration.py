"""A configuration of a model: read as the message of its schema, and converted to our `ModelConfig`.

1. config.pbtxt (text protobuf), config.yaml or JSON (the same fields) are read up to 1 MiB and parsed by the protobuf
   library, which tells line and column, or the field, of a mistake.
2. `convert` checks every field. Messages name the field with its value and limit.
3. Fields that only tune how another server runs a model (optimization, rate limits, priorities of queues) have no
   effect here. Fields that change what a model answers and that nothing here does are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

import msgspec
from google.protobuf import json_format, text_format

from ipc import yaml_text
from ipc.catalog.model_config import (
    Control,
    DynamicBatching,
    InstanceGroup,
    ModelConfig,
    SequenceBatching,
    TensorConfig,
    VersionPolicy,
    Warmup,
    WarmupInput,
)
from ipc.catalog.repository import CONFIGS, MOST_CONFIG_NBYTES
from ipc.memory.datatypes import BY_CONFIG, elements
from ipc.protos import model_config_pb2 as schema
from workers.repository import layout
from workers.repository.layout import PROGRAMS, ModelRefused

MOST_VALUES = 100_000
"""Values of a YAML document; values that an alias repeats count again."""
_MOST_CHARACTERS = 240
MOST_DELAY_US = 60_000_000
MOST_IDLE_US = 24 * 3600 * 1_000_000
IDLE_US = 1_000_000
"""Idle time of a sequence where none is given."""
ControlKind = Literal["START", "READY", "END", "CORRID"]
_PREFIX = "CONTROL_SEQUENCE_"
_PAIRS = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}
_IDS = {
    schema.TYPE_UINT64: "UINT64",
    schema.TYPE_INT64: "INT64",
    schema.TYPE_UINT32: "UINT32",
    schema.TYPE_INT32: "INT32",
    schema.TYPE_STRING: "BYTES",
}
MOST_TENSORS = 1000
MOST_DIMS = 32
MOST_BATCH = 1 << 20
MOST_WARMUPS = 64
MOST_WARMUP_RUNS = 1000
_REFUSED = (
    "cc_model_filenames",
    "ensemble_scheduling",
    "batch_input",
    "batch_output",
    "model_operations",
    "model_repository_agents",
)
_TENSOR_REFUSED = ("is_shape_tensor", "is_non_linear_format_io")
_PLATFORMS = {
    **{backend: backend for backend in PROGRAMS},
    "pytorch_libtorch": "torchscript",
    "onnxruntime_onnx": "onnx",
}
_BACKENDS = {
    **{backend: backend for backend in PROGRAMS},
    "pytorch": "torchscript",
    "onnxruntime": "onnx",
    "python": "python_model",
}


def read(root: Path, directory: Path, follow_links: bool) -> tuple[str, schema.ModelConfig] | None:
    """(file name, message) of a model's configuration, None where there is none. Raises `ModelRefused`."""
    names = [name for name in CONFIGS if (directory / name).is_symlink() or (directory / name).exists()]
    if not names:
        return None
    if len(names) > 1:
        raise ModelRefused(f"there are both {names[0]} and {names[1]}; keep one")
    path = layout.inside(root, directory / names[0], follow_links)
    data = read_bounded(path, MOST_CONFIG_NBYTES)
    return names[0], (parse_text if path.suffix == ".pbtxt" else parse_yaml)(names[0], data)


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """The content of a file. Raises `ModelRefused` when it is larger, no plain file, or cannot be read."""
    try:
        if not path.is_file():
            raise ModelRefused(f"{path.name} is no plain file")
        with path.open("rb") as stream:
            data = stream.read(most_bytes + 1)
    except OSError as error:
        raise ModelRefused(f"{path.name} cannot be read: {error.strerror or type(error).__name__}") from error
    if len(data) > most_bytes:
        raise ModelRefused(f"{path.name} has more than {most_bytes} bytes")
    return data


def parse_text(name: str, data: bytes) -> schema.ModelConfig:
    """Text protobuf. Raises `ModelRefused` with `name`, line and column."""
    try:
        return text_format.Parse(data.decode("utf-8"), schema.ModelConfig())
    except UnicodeDecodeError as error:
        lines, start = data.count(b"\n", 0, error.start), data.rfind(b"\n", 0, error.start)
        raise ModelRefused(f"{name}:{lines + 1}:{error.start - start}: no UTF-8") from error
    except text_format.ParseError as error:
        line, column = error.GetLine(), error.GetColumn()
        where = f"{name}:{line}:{column}" if line else name
        prefix = f"{line}:{column} : " if line else ""
        raise ModelRefused(f"{where}: {_shown(str(error).removeprefix(prefix))}") from error
    except (RecursionError, ValueError, OverflowError) as error:
        raise ModelRefused(f"{name}: {_shown(str(error) or type(error).__name__)}") from error


def parse_yaml(name: str, data: bytes) -> schema.ModelConfig:
    """YAML with the field names of the schema. Raises `ModelRefused` with `name`, and line or field."""
    return _parse(name, data, yaml_text.decode)


def parse_json(name: str, data: bytes) -> schema.ModelConfig:
    """JSON with the field names of the schema. Raises `ModelRefused` as `parse_yaml`."""
    if len(data) > MOST_CONFIG_NBYTES:
        raise ModelRefused(f"{name} has more than {MOST_CONFIG_NBYTES} bytes")
    return _parse(name, data, msgspec.json.decode)


def _parse(name: str, data: bytes, decode: Callable[[bytes], Any]) -> schema.ModelConfig:
    try:
        raw = decode(data)
        if not isinstance(raw, dict):
            raise ModelRefused(f"{name}: expected a map of fields")
        _count(name, raw)
        return json_format.ParseDict(raw, schema.ModelConfig())
    except (
        json_format.Error,
        msgspec.DecodeError,
        RecursionError,
        ValueError,
        OverflowError,
        TypeError,
    ) as error:
        raise ModelRefused(f"{name}: {_shown(str(error) or type(error).__name__)}") from error


def _count(name: str, raw: Any) -> None:
    """Refuse a document that its aliases make larger than any configuration."""
    values, places = 0, [raw]
    while places:
        place = places.pop()
        values += 1
        if values > MOST_VALUES:
            raise ModelRefused(f"{name}: more than {MOST_VALUES} values")
        if isinstance(place, dict):
            places += place.values()
        elif isinstance(place, list):
            places += place


def _shown(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."


def convert(message: schema.ModelConfig, name: str) -> ModelConfig:
    """The configuration of the model in the directory `name`. Raises `ModelRefused`."""
    _refuse(message, _REFUSED, "")
    if message.name not in ("", name):
        raise ModelRefused(f"name: {message.name[:200]!a} is not the name of the model's directory")
    if not 0 <= message.max_batch_size <= MOST_BATCH:
        raise ModelRefused(f"max_batch_size: {message.max_batch_size} is not within 0 and {MOST_BATCH}")
    batch = message.max_batch_size
    config = ModelConfig(
        name=name,
        platform=message.platform,
        backend=backend_of(message),
        max_batch_size=batch,
        inputs=_tensors("input", message.input, batch),
        outputs=_tensors("output", message.output, batch),
        version_policy=_policy(message),
        instance_groups=tuple(
            _group(f"instance_group[{i}]", group) for i, group in enumerate(message.instance_group)
        ),
        default_model_filename=message.default_model_filename,
        dynamic_batching=dynamic(message, batch),
        sequence_batching=sequence(message),
        decoupled=message.model_transaction_policy.decoupled,
        metric_tags=dict(sorted(message.metric_tags.items())),
        parameters={key: value.string_value for key, value in sorted(message.parameters.items())},
        warmups=_warmups(message.model_warmup, batch),
    )
    check_controls(config)
    return config


def backend_of(message: schema.ModelConfig) -> str:
    """The backend that platform or backend stand for, "" where neither is given. Raises `ModelRefused`."""
    backends = {}
    for field, given, known in (
        ("platform", message.platform, _PLATFORMS),
        ("backend", message.backend, _BACKENDS),
    ):
        if given and given not in known:
            raise ModelRefused(f"{field}: {given[:200]!a} is not supported; known are {', '.join(known)}")
        if given:
            backends[field] = known[given]
    if len(set(backends.values())) > 1:
        raise ModelRefused(f"backend: {message.backend!a} contradicts platform {message.platform!a}")
    return next(iter(backends.values()), "")


def _refuse(message: Any, fields: Iterable[str], where: str) -> None:
    given = {descriptor.name for descriptor, _ in message.ListFields()}
    unsupported = next((field for field in fields if field in given), None)
    if unsupported:
        raise ModelRefused(f"{where}{unsupported}: not supported")


def _tensors(kind: str, messages: Sequence[Any], batch: int) -> tuple[TensorConfig, ...]:
    if len(messages) > MOST_TENSORS:
        raise ModelRefused(f"{kind}: {len(messages)} of them; the limit is {MOST_TENSORS}")
    tensors: dict[str, TensorConfig] = {}
    for i, message in enumerate(messages):
        where = f"{kind}[{i}]"
        if not message.name or len(message.name) > 1024 or not message.name.isprintable():
            raise ModelRefused(
                f"{where}.name: {message.name[:200]!a} is no name of 1 to 1024 printable characters"
            )
        if message.name in tensors:
            raise ModelRefused(f"{where}.name: {message.name[:200]!a} is given twice")
        tensors[message.name] = _tensor(f"{kind} {message.name[:200]!a}", message, batch)
    return tuple(tensors.values())


def _tensor(where: str, message: Any, batch: int) -> TensorConfig:
    _refuse(message, _TENSOR_REFUSED, f"{where}: ")
    dims = dims_of(f"{where}: dims", message.dims)
    is_input = isinstance(message, schema.ModelInput)
    layout = schema.ModelInput.Format.Name(message.format).removeprefix("FORMAT_") if is_input else "NONE"
    sides = 3 if batch else 4
    if layout != "NONE" and len(dims) not in (3, sides):
        raise ModelRefused(f"{where}: format {layout} needs 3 dims, got {list(dims)}")
    return TensorConfig(
        name=message.name,
        datatype=datatype_of(f"{where}: data_type", message.data_type),
        dims=dims,
        format=layout,
        reshape=_reshape(where, dims, message) if message.HasField("reshape") else None,
        optional=is_input and message.optional,
        label_filename="" if is_input else message.label_filename,
    )


def datatype_of(where: str, number: int) -> str:
    """Name of a datatype by its number in the schema. Raises `ModelRefused`."""
    config = schema.DataType.Name(number) if number in schema.DataType.values() else str(number)
    if config not in BY_CONFIG:
        raise ModelRefused(f"{where}: {config} is none of {', '.join(BY_CONFIG)}")
    return BY_CONFIG[config].name


def dims_of(where: str, dims: Sequence[int]) -> tuple[int, ...]:
    """Checked dims. Raises `ModelRefused`."""
    if len(dims) > MOST_DIMS:
        raise ModelRefused(f"{where}: {len(dims)} of them; the limit is {MOST_DIMS}")
    if any(dim < -1 for dim in dims):
        raise ModelRefused(f"{where}: {min(dims)} in {list(dims)} is neither a size nor -1")
    try:
        elements([dim for dim in dims if dim >= 0])
    except ValueError as error:
        raise ModelRefused(f"{where}: {error}") from error
    return tuple(dims)


def _reshape(where: str, dims: tuple[int, ...], message: Any) -> tuple[int, ...]:
    shape = dims_of(f"{where}: reshape", message.reshape.shape)
    fixed = [math.prod(dim for dim in each if dim >= 0) for each in (dims, shape)]
    if fixed[0] != fixed[1] or dims.count(-1) != shape.count(-1):
        raise ModelRefused(
            f"{where}: reshape {list(shape)} has another number of elements than dims {list(dims)}"
        )
    return shape


def _policy(message: schema.ModelConfig) -> VersionPolicy:
    policy = message.version_policy
    kind = policy.WhichOneof("policy_choice")
    if kind == "all":
        return VersionPolicy("all")
    if kind == "specific":
        chosen = tuple(dict.fromkeys(policy.specific.versions))
        if not chosen or min(chosen) < 0:
            raise ModelRefused(
                f"version_policy.specific.versions: {list(chosen)} needs versions, none below 0"
            )
        return VersionPolicy("specific", specific=chosen)
    latest = policy.latest.num_versions if kind == "latest" else 1
    if latest < 1:
        raise ModelRefused("version_policy.latest.num_versions: 0 serves nothing; at least 1")
    return VersionPolicy("latest", latest=latest)


def _group(where: str, group: schema.ModelInstanceGroup) -> InstanceGroup:
    kind = schema.ModelInstanceGroup.Kind.Name(group.kind)
    if group.count < 0:
        raise ModelRefused(f"{where}.count: {group.count} is below 0")
    if group.gpus and (kind == "KIND_CPU" or min(group.gpus) < 0):
        raise ModelRefused(f"{where}.gpus: {list(group.gpus)} does not go with {kind}, or is below 0")
    return InstanceGroup(group.name, group.count or 1, kind, tuple(dict.fromkeys(group.gpus)))


def _warmups(messages: Sequence[schema.ModelWarmup], batch: int) -> tuple[Warmup, ...]:
    if len(messages) > MOST_WARMUPS:
        raise ModelRefused(f"model_warmup: {len(messages)} of them; the limit is {MOST_WARMUPS}")
    return tuple(_warmup(f"model_warmup[{i}]", message, batch) for i, message in enumerate(messages))


def _warmup(where: str, message: schema.ModelWarmup, batch: int) -> Warmup:
    if message.batch_size > max(batch, 1):
        raise ModelRefused(f"{where}.batch_size: {message.batch_size} is above max_batch_size {batch}")
    if message.count > MOST_WARMUP_RUNS:
        raise ModelRefused(f"{where}.count: {message.count} is above {MOST_WARMUP_RUNS}")
    inputs = {
        name: _warmup_input(f"{where}.inputs {name[:200]!a}", each) for name, each in message.inputs.items()
    }
    return Warmup(message.name, dict(sorted(inputs.items())), message.batch_size, message.count or 1)


def _warmup_input(where: str, message: schema.ModelWarmup.Input) -> WarmupInput:
    dims = dims_of(f"{where}: dims", message.dims)
    if -1 in dims:
        raise ModelRefused(f"{where}: dims {list(dims)} must all have a size")
    kind = message.WhichOneof("input_data_type")
    if kind is None:
        raise ModelRefused(f"{where}: give one of zero_data, random_data and input_data_file")
    datatype = datatype_of(f"{where}: data_type", message.data_type)
    if kind == "input_data_file":
        return WarmupInput(datatype, dims, "file", message.input_data_file)
    return WarmupInput(datatype, dims, "random" if kind == "random_data" and message.random_data else "zero")


def dynamic(message: schema.ModelConfig, batch: int) -> DynamicBatching | None:
    """Dynamic batching of a configuration. Raises `ModelRefused`."""
    if not message.HasField("dynamic_batching"):
        return None
    given = message.dynamic_batching
    if not batch:
        raise ModelRefused("dynamic_batching: needs max_batch_size of at least 1")
    wrong = next((size for size in given.preferred_batch_size if not 1 <= size <= batch), None)
    if wrong is not None:
        raise ModelRefused(
            f"dynamic_batching.preferred_batch_size: {wrong} is not within 1 and max_batch_size {batch}"
        )
    delay_us = given.max_queue_delay_microseconds
    if delay_us > MOST_DELAY_US:
        raise ModelRefused(
            f"dynamic_batching.max_queue_delay_microseconds: {delay_us} is above {MOST_DELAY_US}"
        )
    return DynamicBatching(tuple(sorted(set(given.preferred_batch_size))), delay_us, given.preserve_ordering)


def sequence(message: schema.ModelConfig) -> SequenceBatching | None:
    """Sequence batching of a configuration. Raises `ModelRefused`."""
    if not message.HasField("sequence_batching"):
        return None
    given = message.sequence_batching
    for field in ("oldest", "state"):
        if field in {descriptor.name for descriptor, _ in given.ListFields()}:
            raise ModelRefused(f"sequence_batching.{field}: not supported")
    if given.iterative_sequence:
        raise ModelRefused("sequence_batching.iterative_sequence: not supported")
    idle_us = given.max_sequence_idle_microseconds
    if idle_us > MOST_IDLE_US:
        raise ModelRefused(
            f"sequence_batching.max_sequence_idle_microseconds: {idle_us} is above {MOST_IDLE_US}"
        )
    return SequenceBatching(idle_us or IDLE_US, tuple(_control(each) for each in given.control_input))


def _control(message: schema.ModelSequenceBatching.ControlInput) -> Control:
    where = f"control_input {message.name[:200]!a}"
    if not message.name or len(message.control) != 1:
        raise ModelRefused(f"{where}: needs a name and one control, got {len(message.control)}")
    control = message.control[0]
    name = schema.ModelSequenceBatching.Control.Kind.Name(control.kind).removeprefix(_PREFIX)
    assert name in get_args(ControlKind), name
    kind = cast(ControlKind, name)
    given = [field for field in _PAIRS if len(getattr(control, field))]
    if kind == "CORRID":
        if given or control.data_type not in _IDS:
            raise ModelRefused(
                f"{where}: CORRID needs data_type, one of TYPE_[U]INT32, TYPE_[U]INT64, TYPE_STRING"
            )
        return Control(message.name, kind, _IDS[control.data_type])
    if len(given) != 1 or len(getattr(control, given[0])) != 2:
        raise ModelRefused(f"{where}: {kind} needs one of {', '.join(_PAIRS)}, with two values")
    off, on = getattr(control, given[0])
    return Control(message.name, kind, _PAIRS[given[0]], (float(off), float(on)))


def check_decoupled(config: ModelConfig, backend: str) -> None:
    """Raise `ModelRefused` for a setting that a decoupled model cannot have, or a `backend` without such models."""
    if not config.decoupled:
        return
    if backend != "python_model":
        raise ModelRefused(
            "model_transaction_policy.decoupled: only a model.py can give several responses to a request"
        )
    if config.sequence_batching is not None:
        raise ModelRefused("sequence_batching: not supported with model_transaction_policy.decoupled")
    if config.dynamic_batching is not None and config.dynamic_batching.preserve_ordering:
        raise ModelRefused(
            "dynamic_batching.preserve_ordering: not supported with model_transaction_policy.decoupled"
        )


def check_controls(config: ModelConfig) -> None:
    """Raise `ModelRefused` for control tensors that clash with each other or with an input."""
    controls = config.sequence_batching.controls if config.sequence_batching else ()
    for i, control in enumerate(controls):
        before = controls[:i]
        if config.input(control.name) or any(other.name == control.name for other in before):
            raise ModelRefused(f"control_input {control.name[:200]!a}: there is another input of that name")
        if any(other.kind == control.kind for other in before):
            raise ModelRefused(f"control_input {control.name[:200]!a}: {control.kind} is given twice")
