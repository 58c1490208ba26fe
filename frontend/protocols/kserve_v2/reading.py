"""Infer requests as they arrive: the target in the path, JSON, and in binary requests the bytes of tensors after it.

1. The JSON says of each input where its elements are: in the JSON itself, in the bytes behind it, or in a region.
2. Bytes follow each other in the order of the inputs. A size that is not given follows from shape and datatype; only a
   single BYTES input may go without, and takes them all.
3. Sizes that do not add up are refused with the tensor's name, the expected and the given size.

Below `/v2/models/` a path has the name of a model, which may hold slashes, then perhaps a version, then perhaps an
action (`Targets`).

Some parameters of a request have a meaning in the protocol (`apply_parameters`), all others go to the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from msgspec import UNSET

from frontend.protocols.kserve_v2 import elements
from frontend.protocols.kserve_v2.schemas import (
    INFER,
    Infer,
    Input,
    InputParameters,
    Output,
    OutputParameters,
)
from frontend.tensors.checking import check_dimensions
from frontend.tensors.request import InputTensor, Parameter, RegionUse, TensorRequest, WantedOutput
from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.errors import InvalidInput, PenstockError
from ipc.memory import datatypes
from ipc.memory.datatypes import BYTES, DATATYPES
from ipc.wire.codec import LARGEST, SMALLEST

RESERVED_PREFIX = "triton_"
MOST = 1024
"""Parameters of one request."""
BINARY_DATA_OUTPUT = "binary_data_output"


def apply_parameters(request: TensorRequest, given: Mapping[str, Parameter]) -> bool:
    """Put `given` into `request`; returns `binary_data_output`. Raises `InvalidInput` that names the parameter."""
    check_parameter_count(len(given))
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


def check_parameter_count(count: int) -> None:
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


MOST_STRINGS = 1 << 20
UNKNOWN_ID = "<id_unknown>"
_PREFIX = "[request id: "


@dataclass(slots=True)
class InferRequest:
    """A request, and which outputs its client wants as binary data.

    `binary` has the outputs whose parameters say yes or no; `binary_default` holds for all others. `id` is the client's
    name for the request, empty without any.
    """

    request: TensorRequest
    id: str
    binary_default: bool
    binary: dict[str, bool]

    def without_tensors(self) -> InferRequest:
        """How the answer is wanted, without the bytes that were sent."""
        request = TensorRequest(self.request.model, self.request.version, [], None)
        return InferRequest(request, self.id, self.binary_default, self.binary)


def parse(name: str, version: int | None, head: bytes | memoryview, data: memoryview | None) -> InferRequest:
    """The request whose JSON is `head`; `data` are the bytes after the JSON, None if the request is not binary.

    Raises `InvalidInput` whose message begins with the client's id of the request.
    """
    if not head and data is None:
        raise InvalidInput("the request body is empty, expected JSON")
    request_id = UNKNOWN_ID
    try:
        _check_strings(bytes(head))
        body: Infer = INFER.decode(head)
        request_id = body.id or UNKNOWN_ID
        inputs = _inputs(body.inputs, data)
        outputs, binary = _outputs(body.outputs)
        request = TensorRequest(name, version, inputs, outputs)
        given = body.parameters
        default = apply_parameters(request, without_nulls(given)) if given else False
    except InvalidInput as error:
        raise identified(error, request_id) from None
    return InferRequest(request, body.id or "", default, binary)


def _check_strings(head: bytes) -> None:
    """Keys and strings become objects many times their size, numbers in `data` do not."""
    most = 2 * MOST_STRINGS
    if len(head) <= most or head.count(b'"') <= most:
        return
    if head.replace(b"\\\\", b"").replace(b'\\"', b"").count(b'"') > most:
        raise InvalidInput(
            f"request JSON: more than {MOST_STRINGS} strings and keys; send BYTES tensors in binary"
        )


def identified(error: PenstockError, request_id: str) -> PenstockError:
    """The error; a validation error gets the client's id of the request in front, once."""
    if error.code == "INVALID_INPUT" and not error.message.startswith(_PREFIX):
        error.message = f"{_PREFIX}{request_id[:128] or UNKNOWN_ID}] {error.message}"
    return error


@contextmanager
def identifying(request_id: str) -> Iterator[None]:
    """Errors of validation inside begin with the client's id of its request."""
    try:
        yield
    except PenstockError as error:
        identified(error, request_id)
        raise


def header_length(header: str | None, nbytes: int | None) -> int | None:
    """Bytes of JSON that `Inference-Header-Content-Length` announces, of a body of `nbytes` (None: not known yet).

    None without the header. Raises `InvalidInput` unless it is a number from 0 to the length of the body.
    """
    if header is None:
        return None
    text = header.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InvalidInput(
            f"header Inference-Header-Content-Length: expected a number of bytes, got {text[:64]!r}"
        )
    length = int(text)
    if nbytes is not None:
        check_header_length(length, nbytes)
    return length


def check_header_length(length: int, nbytes: int) -> None:
    """Raise `InvalidInput` when a body of `nbytes` has less than that many bytes of JSON."""
    if length > nbytes:
        raise InvalidInput(
            f"header Inference-Header-Content-Length: {length} bytes of JSON announced, the body has {nbytes}"
        )


def _inputs(inputs: list[Input], data: memoryview | None) -> list[InputTensor]:
    if not inputs:
        raise InvalidInput("'inputs' is empty, expected at least one input")
    seen: set[str] = set()
    tensors: list[InputTensor] = []
    at = 0
    for given in inputs:
        if given.name in seen:
            raise InvalidInput(f"input '{given.name[:200]}' is given twice")
        seen.add(given.name)
        tensor, size = _input(given, data, at, len(inputs) == 1)
        at += size
        tensors.append(tensor)
    if data is not None and at != len(data):
        raise InvalidInput(
            f"expected {at} bytes after the JSON, got {len(data)}: {len(data) - at} bytes belong to no input"
        )
    return tensors


def _input(given: Input, data: memoryview | None, at: int, alone: bool) -> tuple[InputTensor, int]:
    """One input, and how many of the bytes behind the JSON it takes."""
    where = f"input '{given.name[:200]}'"
    count = _count(given, where)
    tensor = InputTensor(given.name, given.datatype, given.shape, None)
    source, announced = given.parameters, None
    if source is not None:
        tensor.content_type, announced = source.content_type or "", source.binary_data_size
        if source.shared_memory_region is not None:
            if given.data is not UNSET or announced is not None:
                raise InvalidInput(f"{where}: 'shared_memory_region' excludes 'data' and 'binary_data_size'")
            tensor.region = _region(source, where)
            return tensor, 0
    if given.data is not UNSET:
        if announced is not None:
            raise InvalidInput(f"{where}: has both 'data' and 'binary_data_size', expected one of them")
        tensor.data = elements.read(bytes(given.data), given.datatype, count, where)
        return tensor, 0
    if data is None:
        raise InvalidInput(
            f"{where}: has no 'data'; for binary data the header Inference-Header-Content-Length is needed"
        )
    size = _size(given, announced, count, len(data) - at if alone else None, where)
    if at + size > len(data):
        raise InvalidInput(f"{where}: expected {at + size} bytes after the JSON, got {len(data)}")
    tensor.data = data[at : at + size]
    return tensor, size


def _count(given: Input, where: str) -> int:
    if given.datatype not in DATATYPES:
        raise InvalidInput(
            f"{where}: unknown datatype '{given.datatype[:64]}', expected one of {', '.join(DATATYPES)}"
        )
    check_dimensions(len(given.shape), where)
    try:
        return datatypes.elements(given.shape)
    except ValueError as error:
        raise InvalidInput(f"{where}: {str(error)[:300]}") from None


def _size(given: Input, announced: int | None, count: int, rest: int | None, where: str) -> int:
    """Bytes of a binary input; `rest` is the number of bytes left if the input is the only one, else None."""
    nbytes = DATATYPES[given.datatype].nbytes
    if announced is not None and announced < 0:
        raise InvalidInput(f"{where}: binary_data_size is {announced}, expected 0 or more")
    if nbytes:
        if announced is not None and announced != count * nbytes:
            raise InvalidInput(
                f"{where}: binary_data_size is {announced}, but shape {given.shape} of {given.datatype} "
                f"takes {count * nbytes} bytes"
            )
        return count * nbytes
    if announced is not None:
        return announced
    if rest is None:
        raise InvalidInput(f"{where}: 'binary_data_size' is needed for {BYTES} beside other inputs")
    return rest


def _region(place: InputParameters | OutputParameters, where: str) -> RegionUse:
    name, offset, nbytes = (
        place.shared_memory_region,
        place.shared_memory_offset or 0,
        place.shared_memory_byte_size,
    )
    assert name is not None
    if nbytes is None:
        raise InvalidInput(f"{where}: 'shared_memory_byte_size' is needed with 'shared_memory_region'")
    if offset < 0 or nbytes < 0:
        raise InvalidInput(
            f"{where}: offset {offset} and size {nbytes} in shared memory must not be negative"
        )
    return RegionUse(name, offset, nbytes)


def _outputs(outputs: list[Output] | None) -> tuple[list[WantedOutput] | None, dict[str, bool]]:
    """The outputs that are wanted, and which of them say whether they are wanted in binary.

    An empty list is none, as in gRPC, where the two cannot be told apart: all outputs are wanted.
    """
    if outputs is None:
        return None, {}
    by_name: dict[str, WantedOutput] = {}
    binary: dict[str, bool] = {}
    for given in outputs:
        where = f"output '{given.name[:200]}'"
        if given.name in by_name:
            raise InvalidInput(f"{where} is given twice")
        by_name[given.name] = output = WantedOutput(given.name)
        if given.parameters is None:
            continue
        if given.parameters.binary_data is not None:
            binary[given.name] = given.parameters.binary_data
        _place(given.parameters, output, where)
    return list(by_name.values()) or None, binary


def _place(given: OutputParameters, output: WantedOutput, where: str) -> None:
    classes = given.classification or 0
    output.classes, output.content_type = classes or None, given.content_type or ""
    if classes < 0:
        raise InvalidInput(f"{where}: classification is {classes}, expected 0 or more")
    if given.shared_memory_region is None:
        return
    if output.classes is not None or given.binary_data is True:
        raise InvalidInput(f"{where}: 'shared_memory_region' excludes 'classification' and 'binary_data'")
    output.region = _region(given, where)


def parse_raw(name: str, version: int | None, config: ModelConfig, data: memoryview) -> InferRequest:
    """A request without JSON (`Inference-Header-Content-Length: 0`): the body is the only input of a batch of 1.

    All outputs are wanted in binary. Raises `InvalidInput` when the model has several inputs, or when the shape of the
    only input cannot be told from the bytes.
    """
    if len(config.inputs) != 1:
        raise InvalidInput(
            f"a request without JSON needs a model of one input, '{name[:200]}' has {len(config.inputs)}"
        )
    expected = config.inputs[0]
    where = f"input '{expected.name}'"
    if expected.datatype == BYTES:
        dims = _raw_string_dims(expected, where)
        given: bytes | memoryview = datatypes.join([data], where)
    else:
        dims, given = _raw_dims(expected, len(data), where), data
    shape = [1, *dims] if config.batches else dims
    tensor = InputTensor(expected.name, expected.datatype, shape, given)
    return InferRequest(TensorRequest(name, version, [tensor], None), "", True, {})


def _raw_string_dims(expected: TensorConfig, where: str) -> list[int]:
    if any(dim not in (1, -1) for dim in expected.dims):
        raise InvalidInput(
            f"{where}: a request without JSON carries one string, the model takes shape {list(expected.dims)}"
        )
    return [1] * len(expected.dims)


def _raw_dims(expected: TensorConfig, nbytes: int, where: str) -> list[int]:
    """The dims of the model's input; the variable dim follows from the size of the body."""
    dims = list(expected.dims)
    unit = math.prod(dim for dim in dims if dim >= 0) * DATATYPES[expected.datatype].nbytes
    unknown = dims.count(-1)
    if unknown > 1:
        raise InvalidInput(f"{where}: a request without JSON leaves {unknown} dimensions of {dims} open")
    if not unknown:
        if nbytes != unit:
            raise InvalidInput(f"{where}: expected {unit} bytes for shape {dims}, got {nbytes}")
        return dims
    if not unit or nbytes % unit:
        raise InvalidInput(f"{where}: expected a multiple of {unit} bytes for shape {dims}, got {nbytes}")
    dims[dims.index(-1)] = nbytes // unit
    return dims


_VERSIONS = "/versions/"
_CACHED_CHARACTERS = 512


class Target(NamedTuple):
    """The target of a path; `version` None is the latest, `action` "" the model itself."""

    name: str
    version: int | None
    action: str


class Targets:
    """Reads the rest of a path after `/v2/models/` from its end, where one of `actions` may stand.

    Targets of short paths are kept.
    """

    def __init__(self, actions: Iterable[str]) -> None:
        words = "|".join(map(re.escape, filter(None, actions)))
        self._pattern = re.compile(
            rf"(?P<name>.+?)(?:/versions/(?P<version>[0-9]{{1,18}}))?(?:/(?P<action>{words}))?/?", re.DOTALL
        )
        self._kept = lru_cache(maxsize=4096)(self._read)

    def at(self, tail: str) -> Target | None:
        """The target; None for an impossible path. A version that is no number makes the path unknown."""
        return self._kept(tail) if len(tail) <= _CACHED_CHARACTERS else self._read(tail)

    def _read(self, tail: str) -> Target | None:
        match = self._pattern.fullmatch(tail)
        if match is None or _VERSIONS in match["name"]:
            return None
        version = int(match["version"]) if match["version"] else None
        return Target(match["name"], version, match["action"] or "")
