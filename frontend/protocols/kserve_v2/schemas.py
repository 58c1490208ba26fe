"""JSON bodies of the protocol: their structs, reading a body, sending an answer. Unnamed fields are ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import falcon
import msgspec
from falcon.asgi import Request, Response
from msgspec import UNSET, Meta, UnsetType

from frontend.http.fields import fault_of, one_of, stray_byte
from frontend.http.threads import off_loop
from frontend.services import Services
from ipc.errors import BodyTooLarge, InvalidInput
from ipc.memory.datatypes import DATATYPES

T = TypeVar("T")
LONG_NBYTES = 64 << 10
"""Bodies above this size are parsed by a thread."""
SMALL_NBYTES = 1 << 20
"""Largest body of a management request."""
MOST_DEPTH = 100
"""Levels of nested lists in `data`."""
_CONTENT_TYPE = Meta(description="Codec of MLServer that the elements are meant for: `str`, `np`, `base64`.")


class Decoder:
    """Reads one kind of body; with `empty_ok` an empty body stands for `{}`."""

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
            decoded = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise InvalidInput(f"request JSON: {error}") from error
        except RecursionError as error:
            raise InvalidInput(f"request JSON: nested deeper than {MOST_DEPTH} levels") from error
        except (msgspec.DecodeError, ValueError, OverflowError, MemoryError) as error:
            fault = fault_of(body) or str(error)[:200]
            raise InvalidInput(f"failed to parse the request JSON: {fault}") from error
        if fault := stray_byte(body, binary=False):
            raise InvalidInput(f"failed to parse the request JSON: {fault}")
        return decoded


def send_empty(resp: Response) -> None:
    """Answer 200 with an empty body; the media type follows the examples of the contract."""
    resp.content_type = falcon.MEDIA_JSON
    resp.data = b""


async def read(services: Services, req: Request, decoder: Decoder, most_nbytes: int = SMALL_NBYTES) -> Any:
    """The body of a request, decoded. Raises as `parsed`."""
    return await parsed(services, req, decoder.decode, most_nbytes)


async def parsed(services: Services, req: Request, parse: Callable[[bytes], T], most_nbytes: int) -> T:
    """The body of a request, read by `parse`; a long body in a rendering thread.

    Raises `InvalidInput`, `BodyTooLarge`, and as `BodyReader.receive` does.
    """
    _check_length(req.content_length or 0, most_nbytes)
    async with services.bodies.receive(req, req.context.penstock.deadline_ns) as body:
        _check_length(len(body), most_nbytes)
        return await off_loop(parse, body) if len(body) > LONG_NBYTES else parse(body)


def _check_length(nbytes: int, most_nbytes: int) -> None:
    if nbytes > most_nbytes:
        raise BodyTooLarge(f"body: {nbytes} bytes, the limit of this path is {most_nbytes}")


class InputParameters(msgspec.Struct, gc=False):
    """Place and meaning of an input's bytes; null is as if absent."""

    binary_data_size: Annotated[int | None, Meta(description="Bytes of the tensor behind the JSON.")] = None
    shared_memory_region: Annotated[
        str | None, Meta(description="Registered region that holds the tensor.")
    ] = None
    shared_memory_offset: Annotated[
        int | None, Meta(description="First byte of the tensor in the region.")
    ] = None
    shared_memory_byte_size: Annotated[int | None, Meta(description="Bytes of the tensor in the region.")] = (
        None
    )
    content_type: Annotated[str | None, _CONTENT_TYPE] = None


class Input(msgspec.Struct, gc=False):
    """An input; `data` stays as written."""

    name: Annotated[str, Meta(description="The name.")]
    shape: Annotated[list[int], Meta(description="Sizes of the dimensions; -1: any.")]
    datatype: Annotated[
        Annotated[str, one_of(DATATYPES, required=True)], Meta(description="Type of the elements.")
    ]
    parameters: Annotated[InputParameters | None, Meta(description="Options, by name.")] = None
    data: Annotated[msgspec.Raw | UnsetType, Meta(description="The elements in row-major order.")] = UNSET


class OutputParameters(msgspec.Struct, gc=False):
    """The wanted form of an output; null is as if absent."""

    binary_data: Annotated[bool | None, Meta(description="Send the tensor behind the JSON as bytes.")] = None
    classification: Annotated[
        int | None, Meta(description="Tell so many of the highest values with their labels.")
    ] = None
    shared_memory_region: Annotated[
        str | None, Meta(description="Registered region that holds the tensor.")
    ] = None
    shared_memory_offset: Annotated[
        int | None, Meta(description="First byte of the tensor in the region.")
    ] = None
    shared_memory_byte_size: Annotated[int | None, Meta(description="Bytes of the tensor in the region.")] = (
        None
    )
    content_type: Annotated[str | None, _CONTENT_TYPE] = None


class Output(msgspec.Struct, gc=False):
    """A wanted output."""

    name: Annotated[str, Meta(description="The name.")]
    parameters: Annotated[OutputParameters | None, Meta(description="Options, by name.")] = None


class Infer(msgspec.Struct):
    """The body of an infer request."""

    inputs: Annotated[list[Input], Meta(description="The inputs.")]
    id: Annotated[str | None, Meta(description="Id that the client gives; the answer has the same.")] = ""
    parameters: Annotated[
        dict[str, bool | int | float | str | None] | None,
        Meta(description="Options, by name; null is as if absent."),
    ] = None
    outputs: Annotated[list[Output] | None, Meta(description="The outputs.")] = None


class InferredOutput(msgspec.Struct):
    """One output: `data`, or the size of its bytes behind the JSON."""

    name: Annotated[str, Meta(description="The name.")]
    datatype: Annotated[str, Meta(description="Type of the elements.")]
    shape: Annotated[list[int], Meta(description="Sizes of the dimensions; -1: any.")]
    parameters: Annotated[dict[str, int] | UnsetType, Meta(description="Options, by name.")] = UNSET
    data: Annotated[list[Any] | UnsetType, Meta(description="The elements in row-major order.")] = UNSET


class InferResponse(msgspec.Struct):
    """The answer to an infer request."""

    id: Annotated[str, Meta(description="Id that the request had; empty without.")]
    model_name: Annotated[str, Meta(description="Name of the model.")]
    model_version: Annotated[str, Meta(description="Version that answered.")]
    outputs: Annotated[list[InferredOutput], Meta(description="The outputs.")]


class Index(msgspec.Struct):
    """The body of a request for the index of the repository."""

    ready: Annotated[bool, Meta(description="Whether requests are answered.")] = False


class Control(msgspec.Struct):
    """The body of a load or an unload."""

    parameters: Annotated[dict[str, Any], Meta(description="Options, by name.")] = {}


class RegisterSystem(msgspec.Struct):
    """The body of a registration of POSIX shared memory."""

    key: Annotated[str, Meta(description="Name of the shared memory object.")]
    byte_size: Annotated[int, Meta(description="Bytes of the region.")]
    offset: Annotated[int, Meta(description="First byte of the region in its object.")] = 0


class Handle(msgspec.Struct):
    """An IPC handle of device memory in base64."""

    b64: Annotated[bytes, Meta(description="The handle in base64.")]


class RegisterCuda(msgspec.Struct):
    """The body of a registration of device memory."""

    raw_handle: Annotated[Handle, Meta(description="Handle of the device memory.")]
    byte_size: Annotated[int, Meta(description="Bytes of the region.")]
    device_id: Annotated[int, Meta(description="Number of the device.")] = 0


INFER = Decoder(Infer)
INDEX = Decoder(Index, empty_ok=True)
CONTROL = Decoder(Control, empty_ok=True)
REGISTER_SYSTEM = Decoder(RegisterSystem)
REGISTER_CUDA = Decoder(RegisterCuda)
LOGGING = Decoder(dict[str, Any], empty_ok=True)
TRACE = Decoder(dict[str, Any], empty_ok=True)
