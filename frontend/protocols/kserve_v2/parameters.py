"""Request parameters of the protocol: some have a meaning of their own, all others go to the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frontend.tensors.request import Parameter, TensorRequest
from ipc.errors import InvalidInput
from ipc.wire.codec import LARGEST, SMALLEST

RESERVED_PREFIX = "triton_"
MOST = 1024
"""Parameters of one request."""
BINARY_DATA_OUTPUT = "binary_data_output"


def apply(request: TensorRequest, given: Mapping[str, Parameter]) -> bool:
    """Put `given` into `request`; returns `binary_data_output`. Raises `InvalidInput` that names the parameter."""
    check_count(len(given))
    binary = False
    for name, value in given.items():
        if name == BINARY_DATA_OUTPUT:
            binary = _flag(name, value)
        elif name in _PLACES:
            _PLACES[name](request, name, value)
        elif name == "headers":
            raise InvalidInput("parameter 'headers' is reserved")
        elif name.startswith(RESERVED_PREFIX):
            raise InvalidInput(
                f"parameter {name[:64]!r}: names that begin with '{RESERVED_PREFIX}' are reserved"
            )
        else:
            request.parameters[name] = _carried(name, value)
    return binary


def without_nulls(given: Mapping[str, Parameter | None]) -> dict[str, Parameter]:
    """The parameters that have a value: null is as if absent."""
    return {name: value for name, value in given.items() if value is not None}


def check_count(count: int) -> None:
    """Raise `InvalidInput` for more parameters than a request may have."""
    if count > MOST:
        raise InvalidInput(f"parameters: {count} given, the limit is {MOST}")


def _carried(name: str, value: Parameter) -> Parameter:
    if isinstance(value, int) and not SMALLEST <= value <= LARGEST:
        raise InvalidInput(
            f"parameter {name[:64]!a}: expected an integer from {SMALLEST} to {LARGEST}, got {_shown(value)}"
        )
    return value


def _flag(name: str, value: Parameter) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"parameter '{name}': expected true or false, got {_shown(value)}")
    return value


def _number(name: str, value: Parameter) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise InvalidInput(
            f"parameter '{name}': expected an integer from 0 to {LARGEST}, got {_shown(value)}"
        )
    return value


def _shown(value: Any) -> str:
    try:
        return repr(value)[:64]
    except ValueError:
        # NOTE: Python refuses to print integers of more than 4300 digits.
        return "a number of thousands of digits"


def _sequence_id(request: TensorRequest, name: str, value: Parameter) -> None:
    request.sequence.id = value if isinstance(value, str) else _number(name, value)


def _sequence_start(request: TensorRequest, name: str, value: Parameter) -> None:
    request.sequence.start = _flag(name, value)


def _sequence_end(request: TensorRequest, name: str, value: Parameter) -> None:
    request.sequence.end = _flag(name, value)


def _priority(request: TensorRequest, name: str, value: Parameter) -> None:
    request.priority = _number(name, value)


def _timeout(request: TensorRequest, name: str, value: Parameter) -> None:
    request.timeout_us = _number(name, value)


_PLACES = {
    "sequence_id": _sequence_id,
    "sequence_start": _sequence_start,
    "sequence_end": _sequence_end,
    "priority": _priority,
    "timeout": _timeout,
}
