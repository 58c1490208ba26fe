"""From a result to the response header; both transports of this contract share it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from frontend.protocols.trtis_v1.text import many_lines, one_line
from frontend.tensors import config_messages
from frontend.tensors.result import OutputTensor, TensorResult
from ipc.protos import trtis_v1_pb2 as pb

MOST_OUTPUTS = 32
"""Headers of more outputs are made anew for each answer."""


def header_of(result: TensorResult, request_id: int) -> pb.InferResponseHeader:
    """The complete header, class results included; dims leave out the batch dimension, and are [1] where none is left.

    NOTE: nothing that is younger than release 1.0 may be in it. Clients parse it as text by the schema that they were
    built with, and refuse it whole for one field that they do not know.
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
