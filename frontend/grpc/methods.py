"""From the services of the protocols to gRPC's handlers: one for each method of a service's descriptor."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from frontend.grpc.received import Form
from frontend.grpc.service import Answer, GrpcService
from frontend.grpc.streaming import Streams
from frontend.grpc.unary import Unary
from frontend.services import Services


def handlers(
    services: Services, service: GrpcService, streams: Streams
) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """What gRPC calls for the methods of one service, by name."""
    found: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for name, method in service.methods.items():
        described = service.descriptor.methods_by_name[name]
        form = Form(GetMessageClass(described.input_type), method.raw_field, method.check)
        path = f"/{service.descriptor.full_name}/{name}"
        runner = Unary(services, service, method, path)
        if described.client_streaming:
            found[name] = grpc.stream_stream_rpc_method_handler(
                streams.of(runner).run, form.receive, _serialize
            )
        else:
            found[name] = grpc.unary_unary_rpc_method_handler(runner.run, form.receive, _serialize)
    return found


def _serialize(answer: Answer) -> bytes:
    return answer if isinstance(answer, bytes) else answer.SerializeToString()
