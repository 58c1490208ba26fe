"""From a request header and its raw bytes to the neutral request; both transports of this contract share it.

Protobuf text: the one-line form of headers, the form of bodies, and the reader of `NV-InferRequest`.

From a result to the response header; both transports of this contract share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from google.protobuf import text_format
from google.protobuf.message import Message

from frontend.tensors import config_messages
from frontend.tensors.checking import check_dimensions, default_dims, expected_nbytes
from frontend.tensors.models import TensorModel
from frontend.tensors.request import InputTensor, RegionUse, TensorRequest, WantedOutput
from frontend.tensors.request import Sequence as SequencePlace
from frontend.tensors.result import OutputTensor, TensorResult
from ipc.errors import InvalidInput
from ipc.protos import trtis_v1_pb2 as pb

CACHED_CHARACTERS = 2048
"""Headers up to this length are remembered, since clients send the same header again and again."""
MOST_MARKS = 8192
"""`MARKS` in a long header: everything that costs the parser time has at least one of these marks."""
MARKS = ":{}<>[],;\"'"
_PACKAGE = f"{pb.DESCRIPTOR.package}."
LATER_FIELDS = {
    "ServerStatus": ("model_control_stats", "shm_control_stats", "repository_stats"),
    "ModelVersionStatus": ("ready_state_reason", "last_inference_timestamp_milliseconds"),
    "ModelConfig": ("model_warmup",),
    "ModelInstanceGroup": ("profile",),
    "ModelInput": ("is_shape_tensor", "allow_ragged_batch"),
    "ModelOutput": ("is_shape_tensor",),
    "ModelDynamicBatching": ("preserve_ordering",),
    "ModelSequenceBatching": ("direct", "oldest"),
    "ModelSequenceBatching.Control": ("data_type",),
}
"""Fields that the specification marks as younger than release 1.4, by message."""
LATER_KINDS = (
    pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_END,
    pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID,
)
_COUNTS = ("StatDuration", "RequestStats")
_START = pb.InferRequestHeader.Flag.FLAG_SEQUENCE_START
_END = pb.InferRequestHeader.Flag.FLAG_SEQUENCE_END
MOST_OUTPUTS = 32
"""Headers of more outputs are made anew for each answer."""


def one_line(message: Message) -> str:
    """The message as one line of ASCII, for a header."""
    return text_format.MessageToString(message, as_one_line=True, as_utf8=False)


def many_lines(message: Message) -> bytes:
    """The message as text, for a body; the entries of maps are sorted."""
    return text_format.MessageToString(message, as_utf8=False).encode("ascii")


def read_request_header(text: str | None) -> pb.InferRequestHeader:
    """The header of a request; treat it as read-only. Raises `InvalidInput` with the place of the mistake.

    A header above `CACHED_CHARACTERS` takes up to 50 ms: too long for the event loop.
    """
    if text is None:
        raise InvalidInput("header NV-InferRequest is missing")
    if len(text) <= CACHED_CHARACTERS:
        return _remembered(text)
    if sum(map(text.count, MARKS)) > MOST_MARKS:
        raise InvalidInput(f"header NV-InferRequest has more than {MOST_MARKS} of the marks {MARKS}")
    return _parse(text)


def _parse(text: str) -> pb.InferRequestHeader:
    try:
        # NOTE: field values reach us as Latin-1; clients send UTF-8.
        return text_format.Parse(text.encode("latin-1").decode("utf-8"), pb.InferRequestHeader())
    except UnicodeError as error:
        raise InvalidInput(f"header NV-InferRequest is no UTF-8: {error}") from error
    except (text_format.ParseError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"header NV-InferRequest cannot be read at {str(error)[:300]}") from error


_remembered = lru_cache(maxsize=512)(_parse)


def as_of_1_4(status: pb.ServerStatus) -> pb.ServerStatus:
    """A copy with the fields of release 1.4: a reader of text refuses a whole status for one unknown name.

    Fields and names of values that are younger than release 1.4 are left out; the wire format and JSON have all of
    them. Counts of zero are left out too: later releases lack some of the families of release 1.4 (`profile_stats`).
    """
    copy = pb.ServerStatus()
    copy.CopyFrom(status)
    _prune(copy)
    return copy


def _prune(message: Any) -> None:
    for name in LATER_FIELDS.get(message.DESCRIPTOR.full_name.removeprefix(_PACKAGE), ()):
        message.ClearField(name)
    if isinstance(message, pb.ModelSequenceBatching):
        known = [
            each for each in message.control_input if all(c.kind not in LATER_KINDS for c in each.control)
        ]
        del message.control_input[:]
        message.control_input.extend(known)
    if isinstance(message, pb.ModelInstanceGroup) and message.kind == pb.ModelInstanceGroup.KIND_MODEL:
        message.ClearField("kind")
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if isinstance(value, Message):
            _prune(value)
            if value.DESCRIPTOR.name.endswith(_COUNTS) and not value.ByteSize():
                message.ClearField(field.name)
        elif not field.message_type.GetOptions().map_entry:
            for each in value:
                _prune(each)
        elif field.message_type.fields_by_name["value"].message_type is not None:
            for key in value:
                _prune(value[key])


def version_of(number: int) -> int | None:
    """-1 is the latest version, every other number itself."""
    return None if number == -1 else number


def rows_of(model: TensorModel, header: pb.InferRequestHeader) -> int:
    """The batch size in the books: that of the request, 0 if the model does not take it."""
    return header.batch_size if 1 <= header.batch_size <= max(1, model.config.max_batch_size) else 0


def request_of(model: TensorModel, header: pb.InferRequestHeader) -> TensorRequest:
    """The neutral request, its inputs still without their bytes. Raises `InvalidInput` for far too many dims."""
    return TensorRequest(
        model.name,
        model.version,
        [_input(model, sent, header.batch_size) for sent in header.input],
        [
            WantedOutput(out.name, out.cls.count if out.HasField("cls") else None, _region(out))
            for out in header.output
        ],
        header.batch_size,
        sequence=SequencePlace(header.correlation_id, bool(header.flags & _START), bool(header.flags & _END)),
        priority=header.priority,
        timeout_us=header.timeout_microseconds,
    )


def _input(model: TensorModel, sent: pb.InferRequestHeader.Input, rows: int) -> InputTensor:
    """An input whose shape has the batch dimension; an unknown name is left to the check of all inputs.

    Missing dims are those of the model. Where they vary 0 stands for them until the shapes were checked: that they are
    missing is said by `sizes_of`.
    """
    tensor = model.config.input(sent.name)
    check_dimensions(len(sent.dims), f"input '{sent.name[:200]}' for model '{model.name}'")
    dims = list(sent.dims)
    if tensor is not None and (not dims or (dims == [1] and not tensor.dims)):
        # A tensor without dims is shown to clients as one element (`server_status`).
        dims = [max(dim, 0) for dim in tensor.dims]
    shape = [rows, *dims] if model.config.batches else dims
    datatype = tensor.datatype if tensor is not None else ""
    return InputTensor(sent.name, datatype, shape, None, _region(sent))


def _region(sent: pb.InferRequestHeader.Input | pb.InferRequestHeader.Output) -> RegionUse | None:
    if not sent.HasField("shared_memory"):
        return None
    return RegionUse(sent.shared_memory.name, sent.shared_memory.offset, sent.shared_memory.byte_size)


def sizes_of(model: TensorModel, header: pb.InferRequestHeader, request: TensorRequest) -> list[int]:
    """Bytes of each input, in order; 0 for those in shared memory.

    Raises `InvalidInput` when a shape or size is missing that only the request can tell, or a size contradicts shape
    and type.
    """
    sizes = []
    for sent, tensor in zip(header.input, request.inputs, strict=True):
        expected = model.config.input(tensor.name)
        if expected is not None and not sent.dims:
            default_dims(model.config, expected)
        if tensor.region is not None:
            sizes.append(0)
            continue
        where = f"input '{tensor.name}' for model '{model.name}'"
        nbytes = expected_nbytes(tensor.datatype, tensor.shape, where)
        given = sent.batch_byte_size
        if nbytes is None:
            if not given and 0 not in tensor.shape:
                raise InvalidInput(
                    f"batch-byte-size must be specified for {where}: its elements vary in size"
                )
            nbytes = given
        elif given not in (0, nbytes):
            raise InvalidInput(
                f"specified batch-byte-size for {where} does not match: expecting {nbytes}, got {given}"
            )
        sizes.append(nbytes)
    return sizes


def cut(model: TensorModel, request: TensorRequest, sizes: Sequence[int], body: memoryview) -> None:
    """Give each input its part of a body that holds all of them. Raises `InvalidInput` when it is too short or long."""
    at = 0
    for tensor, nbytes in zip(request.inputs, sizes, strict=True):
        if at + nbytes > len(body):
            missing = at + nbytes - len(body)
            raise InvalidInput(
                f"unexpected size for input '{tensor.name}', expecting {missing} bytes more for model '{model.name}'"
            )
        if tensor.region is None:
            tensor.data = body[at : at + nbytes]
        at += nbytes
    if at != len(body):
        raise InvalidInput(
            f"unexpected additional input data for model '{model.name}': {len(body) - at} bytes are left over"
        )


def attach(
    model: TensorModel, request: TensorRequest, sizes: Sequence[int], raw: Sequence[bytes | memoryview]
) -> None:
    """Give each input its own raw bytes. Raises `InvalidInput` for another number of them, or another size."""
    carried = [
        (tensor, size) for tensor, size in zip(request.inputs, sizes, strict=True) if tensor.region is None
    ]
    if len(raw) != len(carried):
        raise InvalidInput(
            f"expected tensor data for {len(carried)} inputs but got {len(raw)} for model '{model.name}'"
        )
    for (tensor, nbytes), data in zip(carried, raw, strict=True):
        if len(data) != nbytes:
            raise InvalidInput(
                f"unexpected size {len(data)} for input '{tensor.name}', expecting {nbytes} for model '{model.name}'"
            )
        tensor.data = data


def header_of(result: TensorResult, request_id: int) -> pb.InferResponseHeader:
    """The complete header, class results included; dims leave out the batch dimension, and are [1] where none is left.

    NOTE: the header may have no field that is younger than release 1.0. Clients parse the header as text by the schema
    that they were built with, and refuse the whole header for one unknown field.
    """
    header = pb.InferResponseHeader(
        model_name=result.model, model_version=result.version, batch_size=result.rows, id=request_id
    )
    for output in result.outputs:
        _add(header.output.add(name=output.name), output, result.batches)
    return header


class Forms(NamedTuple):
    """A header as a field of one line, as text of many lines, and in the wire format."""

    line: str
    lines: bytes
    wire: bytes


def forms_of(result: TensorResult, request_id: int) -> Forms | None:
    """The forms of a header that answers of the model have again and again; None for many outputs, or classes.

    PERF: making and printing a header takes as long as the rest of the protocol.
    """
    outputs = result.outputs
    if len(outputs) > MOST_OUTPUTS or any(output.classes is not None for output in outputs):
        return None
    raw = tuple([(output.name, *_extent(output, result.batches)) for output in outputs])
    return _remembered_forms(result.model, result.version, result.rows, request_id, raw)


@lru_cache(maxsize=512)
def _remembered_forms(
    model: str, version: int, rows: int, request_id: int, raw: tuple[tuple[str, tuple[int, ...], int], ...]
) -> Forms:
    header = pb.InferResponseHeader(model_name=model, model_version=version, batch_size=rows, id=request_id)
    for name, dims, nbytes in raw:
        output = header.output.add(name=name)
        output.raw.dims.extend(dims)
        output.raw.batch_byte_size = nbytes
    return Forms(one_line(header), many_lines(header), header.SerializeToString())


def _extent(output: OutputTensor, batches: bool) -> tuple[tuple[int, ...], int]:
    """Dims and bytes of an output as the header has them."""
    return tuple(output.shape[1:] if batches else output.shape) or (1,), output.nbytes


def typed_header_of(result: TensorResult, request_id: int) -> pb.InferResponseHeader:
    """`header_of` with the datatypes of the outputs, for the wire format alone."""
    header = header_of(result, request_id)
    for message, output in zip(header.output, result.outputs, strict=True):
        message.data_type = config_messages.datatype_of(pb, output.datatype)
    return header


def _add(message: pb.InferResponseHeader.Output, output: OutputTensor, batches: bool) -> None:
    if output.classes is None:
        dims, nbytes = _extent(output, batches)
        message.raw.dims.extend(dims)
        message.raw.batch_byte_size = nbytes
        return
    for row in output.classes:
        entries = [pb.InferResponseHeader.Output.Class(idx=i, value=v, label=label) for v, i, label in row]
        message.batch_classes.add(cls=entries)


def without_classes(header: pb.InferResponseHeader) -> pb.InferResponseHeader:
    """The header as `NV-InferResponse` has it: of an output with classes only the name."""
    if not any(output.batch_classes for output in header.output):
        return header
    short = pb.InferResponseHeader()
    short.CopyFrom(header)
    for output in short.output:
        output.ClearField("batch_classes")
    return short
