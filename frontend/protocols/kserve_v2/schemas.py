"""JSON bodies of the protocol as typed structs. Fields that are not named here are ignored."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from frontend.protocols.kserve_v2.json_bodies import Decoder


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


INFER = Decoder(Infer)
INDEX = Decoder(Index, empty_ok=True)
CONTROL = Decoder(Control, empty_ok=True)
REGISTER_SYSTEM = Decoder(RegisterSystem)
REGISTER_CUDA = Decoder(RegisterCuda)
LOGGING = Decoder(dict[str, Any], empty_ok=True)
TRACE = Decoder(dict[str, Any], empty_ok=True)
