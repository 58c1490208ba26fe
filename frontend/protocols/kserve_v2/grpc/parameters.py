"""Values of protobuf parameter maps, and the parts of a tensor's parameters that this protocol knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frontend.tensors.request import Parameter, RegionUse
from ipc.errors import InvalidInput
from ipc.protos import kserve_v2_pb2 as pb

REGION = "shared_memory_region"
OFFSET = "shared_memory_offset"
NBYTES = "shared_memory_byte_size"
CLASSES = "classification"


def values_of(parameters: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Parameters by name. Raises `InvalidInput` for one without a value; `where` says whose they are."""
    return {name: _value_of(name, parameter, where) for name, parameter in parameters.items()}


def _value_of(name: str, parameter: Any, where: str) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None:
        raise InvalidInput(f"{where}: parameter {name[:64]!a} has no value")
    return getattr(parameter, choice)


def region_of(given: Mapping[str, Parameter], where: str) -> RegionUse | None:
    """Where in a client's memory a tensor lies, if it does. Raises `InvalidInput`."""
    if REGION not in given:
        return None
    name = given[REGION]
    if not isinstance(name, str) or not name:
        raise InvalidInput(f"{where}: parameter '{REGION}': expected the name of a region, got {name!a}")
    if NBYTES not in given:
        raise InvalidInput(f"{where}: parameter '{NBYTES}' is missing beside '{REGION}'")
    return RegionUse(name, whole(given.get(OFFSET, 0), OFFSET, where), whole(given[NBYTES], NBYTES, where))


def whole(value: Parameter, name: str, where: str) -> int:
    """A parameter that counts something. Raises `InvalidInput`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidInput(f"{where}: parameter '{name}': expected an integer from 0, got {value!a:.64}")
    return value


def message_of(value: Parameter) -> pb.InferParameter:
    """A parameter of a response."""
    if isinstance(value, bool):
        return pb.InferParameter(bool_param=value)
    if isinstance(value, int):
        return pb.InferParameter(int64_param=value)
    if isinstance(value, float):
        return pb.InferParameter(double_param=value)
    return pb.InferParameter(string_param=value)
