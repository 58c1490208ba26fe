"""ModelInferRequest to a `TensorRequest`: what only this wire format knows is checked here, all else when it is run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend.protocols.kserve_v2 import parameters as request_parameters
from frontend.protocols.kserve_v2.grpc.contents import raw_of
from frontend.protocols.kserve_v2.grpc.parameters import CLASSES, region_of, values_of, whole
from frontend.tensors.checking import check_dimensions
from frontend.tensors.request import InputTensor, RegionUse, TensorRequest, WantedOutput
from ipc.errors import InvalidInput
from ipc.protos import kserve_v2_pb2 as pb

EMPTY_FINAL = "triton_enable_empty_final_response"
_MAX_VERSION_DIGITS = 18


def version_of(text: str) -> int | None:
    """The version that a request names, None for the latest. Raises `InvalidInput` for what is no number."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_VERSION_DIGITS):
        raise InvalidInput(f"model version: expected a number, got {text[:64]!a}")
    return int(text)


def request_of(message: pb.ModelInferRequest, raw: Sequence[bytes | memoryview]) -> TensorRequest:
    """The request; `raw` are its `raw_input_contents`. Raises `InvalidInput`."""
    request = TensorRequest(
        message.model_name,
        version_of(message.model_version),
        _inputs_of(message, raw),
        [_wanted(output) for output in message.outputs] if message.outputs else None,
    )
    if message.parameters:
        given = values_of(message.parameters, "request")
        given.pop(EMPTY_FINAL, None)
        request_parameters.apply(request, given)
    return request


def _inputs_of(message: pb.ModelInferRequest, raw: Sequence[bytes | memoryview]) -> list[InputTensor]:
    for tensor in message.inputs:
        check_dimensions(len(tensor.shape), f"input {tensor.name[:200]!a}")
    regions = [_region_of(tensor) for tensor in message.inputs]
    if raw:
        _check_raw(message, len(raw), sum(region is None for region in regions))
    contents = iter(raw)
    return [
        InputTensor(
            tensor.name,
            tensor.datatype,
            list(tensor.shape),
            None if region is not None else next(contents) if raw else raw_of(tensor),
            region,
        )
        for tensor, region in zip(message.inputs, regions, strict=True)
    ]


def _region_of(tensor: pb.ModelInferRequest.InferInputTensor) -> RegionUse | None:
    if not tensor.parameters:
        return None
    where = f"input {tensor.name[:200]!a}"
    region = region_of(values_of(tensor.parameters, where), where)
    if region is not None and tensor.contents.ListFields():
        raise InvalidInput(f"{where}: contents and shared memory exclude each other")
    return region


def _check_raw(message: pb.ModelInferRequest, got: int, expected: int) -> None:
    for tensor in message.inputs:
        if tensor.HasField("contents") and tensor.contents.ListFields():
            raise InvalidInput(
                f"input {tensor.name[:200]!a}: contents and raw_input_contents exclude each other"
            )
    if got != expected:
        raise InvalidInput(
            f"raw_input_contents: expected {expected} entries, one for each input that is not in shared memory, "
            f"got {got}"
        )


def _wanted(output: Any) -> WantedOutput:
    if not output.parameters:
        return WantedOutput(output.name)
    where = f"output {output.name[:200]!a}"
    given = values_of(output.parameters, where)
    classes = whole(given.get(CLASSES, 0), CLASSES, where)
    return WantedOutput(output.name, classes or None, region_of(given, where))
