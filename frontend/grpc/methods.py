"""From the services of the protocols to gRPC's handlers: one for each method of a service's descriptor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from frontend.grpc import wire
from frontend.grpc.service import Answer, GrpcService, Method
from frontend.grpc.streaming import Streams
from frontend.grpc.unary import Unary
from frontend.services import Services

SPLIT_NBYTES = 16 << 10
"""PERF: below this size the library's own parser is faster than `wire.split`."""


class Received(NamedTuple):
    """A message as it came: None when it does not parse; `raw` are the values of the method's large field."""

    message: Message | None
    nbytes: int
    raw: list[Any]


def handlers(services: Services, service: GrpcService, streams: Streams) -> grpc.GenericRpcHandler:
    """What gRPC calls for the methods of one service."""
    found = {}
    for name, method in service.methods.items():
        described = service.descriptor.methods_by_name[name]
        request = GetMessageClass(described.input_type)
        path = f"/{service.descriptor.full_name}/{name}"
        runner = Unary(services, service, method, path)
        if described.client_streaming:
            found[name] = grpc.stream_stream_rpc_method_handler(
                streams.of(runner).run, _deserializer(request, method), _serialize
            )
        else:
            found[name] = grpc.unary_unary_rpc_method_handler(
                runner.run, _deserializer(request, method), _serialize
            )
    return grpc.method_handlers_generic_handler(service.descriptor.full_name, found)


def _serialize(answer: Answer) -> bytes:
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


def _deserializer(request: type[Message], method: Method) -> Callable[[bytes], Received]:
    field = method.raw_field
    name = request.DESCRIPTOR.fields_by_number[field].name if field else ""

    def parse(data: bytes) -> Received:
        try:
            if field and len(data) > SPLIT_NBYTES:
                rest, raw = wire.split(data, field)
                return Received(request.FromString(rest), len(data), list(raw))
            message = request.FromString(data)
        except (DecodeError, ValueError):
            return Received(None, len(data), [])
        return Received(message, len(data), list(getattr(message, name)) if field else [])

    return parse
