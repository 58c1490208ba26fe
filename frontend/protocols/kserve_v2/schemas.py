"""JSON bodies of the protocol as typed structs. Fields that are not named here are ignored."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from ipc.errors import InvalidInput

T = TypeVar("T")
MOST_DEPTH = 100
"""Levels of nested lists in `data`."""


class InputParameters(msgspec.Struct, gc=False):
    """Where the bytes of an input are, when they are not in the JSON."""

    binary_data_size: int | UnsetType = UNSET
    shared_memory_region: str | UnsetType = UNSET
    shared_memory_offset: int = 0
    shared_memory_byte_size: int | UnsetType = UNSET


class Input(msgspec.Struct, gc=False):
    """An input; `data` stays as written."""

    name: str
    shape: list[int]
    datatype: str
    parameters: InputParameters | None = None
    data: msgspec.Raw | UnsetType = UNSET


class OutputParameters(msgspec.Struct, gc=False):
    """The wanted form of an output."""

    binary_data: bool | UnsetType = UNSET
    classification: int = 0
    shared_memory_region: str | UnsetType = UNSET
    shared_memory_offset: int = 0
    shared_memory_byte_size: int | UnsetType = UNSET


class Output(msgspec.Struct, gc=False):
    """A wanted output."""

    name: str
    parameters: OutputParameters | None = None


class Infer(msgspec.Struct):
    """The body of an infer request."""

    inputs: list[Input]
    id: str | None = ""
    parameters: dict[str, bool | int | float | str] | None = None
    outputs: list[Output] | None = None


class Index(msgspec.Struct):
    """The body of a request for the index of the repository."""

    ready: bool = False


class Control(msgspec.Struct):
    """The body of a load or an unload."""

    parameters: dict[str, Any] = {}


class RegisterSystem(msgspec.Struct):
    """The body of a registration of POSIX shared memory."""

    key: str
    byte_size: int
    offset: int = 0


class Handle(msgspec.Struct):
    """An IPC handle of device memory in base64."""

    b64: bytes


class RegisterCuda(msgspec.Struct):
    """The body of a registration of device memory."""

    raw_handle: Handle
    byte_size: int
    device_id: int = 0


class Decoder:
    """Reads one kind of body; `empty_ok` says whether an empty one stands for `{}`."""

    def __init__(self, kind: type[Any], *, empty_ok: bool = False) -> None:
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)
        self._empty_ok = empty_ok

    def decode(self, body: bytes | memoryview) -> Any:
        """The body as its struct. Raises `InvalidInput` with the place of the mistake."""
        if not body:
            if not self._empty_ok:
                raise InvalidInput("the request body is empty, expected JSON")
            body = b"{}"
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise InvalidInput(f"request JSON: {error}") from error
        except msgspec.DecodeError as error:
            raise InvalidInput(f"failed to parse the request JSON: {error}") from error
        except RecursionError as error:
            raise InvalidInput(f"request JSON: nested deeper than {MOST_DEPTH} levels") from error
        except (ValueError, OverflowError, MemoryError) as error:
            raise InvalidInput(f"failed to parse the request JSON: {str(error)[:200]}") from error


INFER = Decoder(Infer)
INDEX = Decoder(Index, empty_ok=True)
CONTROL = Decoder(Control, empty_ok=True)
REGISTER_SYSTEM = Decoder(RegisterSystem)
REGISTER_CUDA = Decoder(RegisterCuda)
LOGGING = Decoder(dict[str, Any], empty_ok=True)
TRACE = Decoder(dict[str, Any], empty_ok=True)
GENERATE = Decoder(dict[str, msgspec.Raw])
