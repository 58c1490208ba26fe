"""One request of TRTIS v1 over HTTP, over gRPC, and as the only message of a stream, with one kind of outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import grpc
from google.protobuf import text_format

from ipc.protos import trtis_v1_pb2 as pb
from tests.conformance.trtis import infer
from tests.harness.server import PATIENCE_S, Server

SERVICE = "/nvidia.inferenceserver.GRPCService/"


class Stub:
    """The service by its wire names, over one channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def call(self, method: str, request: Any, response: Any, **options: Any) -> Any:
        """One unary rpc."""
        return self.rpc(method, request, response)(request, timeout=PATIENCE_S, **options)

    def rpc(self, method: str, request: Any, response: Any) -> Any:
        """The method itself."""
        serialize: Callable[[Any], bytes] = type(request).SerializeToString
        return self._channel.unary_unary(SERVICE + method, serialize, response.FromString)

    def infer(self, request: pb.InferRequest) -> pb.InferResponse:
        """Infer."""
        return self.call("Infer", request, pb.InferResponse)

    def stream(self, requests: Iterable[pb.InferRequest]) -> Iterator[pb.InferResponse]:
        """StreamInfer."""
        rpc = self._channel.stream_stream(
            SERVICE + "StreamInfer", pb.InferRequest.SerializeToString, pb.InferResponse.FromString
        )
        return rpc(iter(requests), timeout=60)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: `header` is a message or its text, `raw` the bytes of each input."""

    model: str
    header: str | pb.InferRequestHeader
    raw: tuple[bytes, ...] = ()
    version: int = -1

    @property
    def message(self) -> pb.InferRequestHeader:
        """The header as a message."""
        if isinstance(self.header, str):
            return text_format.Parse(self.header, pb.InferRequestHeader())
        return self.header


@dataclass(frozen=True, slots=True)
class Told:
    """An outcome; `raw` has the bytes of each output that has some, by its place."""

    status: pb.RequestStatus
    header: pb.InferResponseHeader
    raw: list[bytes]


def over_http(server: Server, stub: Stub, asked: Asked) -> Told:
    """POST /api/infer/..."""
    version = "" if asked.version == -1 else f"/{asked.version}"
    line = text_format.MessageToString(asked.message, as_one_line=True, as_utf8=False)
    found = infer(server, f"{quote(asked.model, safe='')}{version}", line, b"".join(asked.raw))
    good = found.status.code == pb.SUCCESS
    assert found.answer.status == (200 if good else 400) and (good or found.answer.body == b"")
    assert found.answer.headers["content-type"] == "application/octet-stream"
    raw = [found.raw.get(output.name, b"") for output in found.header.output]
    return Told(found.status, found.header, raw)


def over_grpc(server: Server, stub: Stub, asked: Asked) -> Told:
    """Infer."""
    return _told(stub.infer(_message(asked)))


def over_stream(server: Server, stub: Stub, asked: Asked) -> Told:
    """StreamInfer."""
    [found] = stub.stream([_message(asked)])
    return _told(found)


TRANSPORTS = {"http": over_http, "grpc": over_grpc, "stream": over_stream}


def _message(asked: Asked) -> pb.InferRequest:
    return pb.InferRequest(
        model_name=asked.model, model_version=asked.version, meta_data=asked.message, raw_input=asked.raw
    )


def _told(found: pb.InferResponse) -> Told:
    header = found.meta_data
    for output in header.output:
        assert output.data_type != pb.TYPE_INVALID
        # What the wire format says besides is no part of the comparison with HTTP.
        output.ClearField("data_type")
    return Told(found.request_status, header, list(found.raw_output))
