"""From the services of the protocols to gRPC's handlers: one for each method of a service's descriptor."""

from __future__ import annotations

from functools import partial
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from frontend.grpc.accepting import Server
from frontend.grpc.received import Form
from frontend.grpc.service import GrpcService, serialized
from frontend.grpc.streaming import Streams
from frontend.grpc.unary import Unary
from frontend.services import Services


def mount(server: Server, services: Services, service: GrpcService, streams: Streams) -> None:
    """Serve the methods of one service."""
    found: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for name, method in service.methods.items():
        described = service.descriptor.methods_by_name[name]
        form = Form(GetMessageClass(described.input_type), method.raw_field, method.check)
        path = f"/{service.descriptor.full_name}/{name}"
        runner = Unary(services, service, method, path)
        server.door.needs[path] = method.need if isinstance(method.need, str) else None
        if described.client_streaming:
            server.refuse_by({path: runner.refuse_stream})
            found[name] = grpc.stream_stream_rpc_method_handler(
                streams.of(runner).run, form.receive, serialized
            )
        else:
            server.refuse_by({path: partial(runner.refuse, form)})
            found[name] = grpc.unary_unary_rpc_method_handler(runner.run, form.receive, serialized)
    server.add_registered_method_handlers(service.descriptor.full_name, found)
