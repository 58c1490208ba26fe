"""From a result to the response header; both transports of this contract share it."""

from __future__ import annotations

from frontend.tensors import config_messages
from frontend.tensors.result import OutputTensor, TensorResult
from ipc.protos import trtis_v1_pb2 as pb


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


def typed_header_of(result: TensorResult, request_id: int) -> pb.InferResponseHeader:
    """`header_of` with the datatypes of the outputs, for the wire format alone."""
    header = header_of(result, request_id)
    for message, output in zip(header.output, result.outputs, strict=True):
        message.data_type = config_messages.datatype_of(pb, output.datatype)
    return header


def _add(message: pb.InferResponseHeader.Output, output: OutputTensor, batches: bool) -> None:
    if output.classes is None:
        message.raw.dims.extend((output.shape[1:] if batches else output.shape) or [1])
        message.raw.batch_byte_size = output.nbytes
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
