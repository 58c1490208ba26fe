"""From a request header and its raw bytes to the neutral request; both transports of this contract share it."""

from __future__ import annotations

from collections.abc import Sequence

from frontend.tensors.checking import check_dimensions, default_dims, expected_nbytes
from frontend.tensors.models import TensorModel
from frontend.tensors.request import InputTensor, RegionUse, TensorRequest, WantedOutput
from frontend.tensors.request import Sequence as SequencePlace
from ipc.errors import InvalidInput
from ipc.protos import trtis_v1_pb2 as pb

_START = pb.InferRequestHeader.Flag.FLAG_SEQUENCE_START
_END = pb.InferRequestHeader.Flag.FLAG_SEQUENCE_END


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
