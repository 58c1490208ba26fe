"""What every HTTP answer of this contract has in common: `NV-Status`, the codes, the counts.

A resource does its work and sets the body; errors of the tree become 400 (or what a refused key gets) with an empty
body. All of it is counted by kind for the server's status.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine
from typing import Any, ClassVar

import falcon
from falcon.asgi import Request, Response
from google.protobuf import json_format
from google.protobuf.message import Message

from frontend.http import tracebacks
from frontend.protocols.trtis_v1.codes import http_status_of, retry_after
from frontend.protocols.trtis_v1.statuses import Statuses
from frontend.protocols.trtis_v1.text import many_lines, one_line
from frontend.services import Services
from ipc.errors import Cancelled, PenstockError
from ipc.protos import trtis_v1_pb2 as pb

STATUS_HEADER = "NV-Status"


def wants_binary(req: Request) -> bool:
    """Whether messages in the body are in the wire format: `format=binary`; any other value means text."""
    return req.get_param("format") == "binary"


def set_status(resp: Response, status: pb.RequestStatus) -> None:
    """The status as a header of one line of ASCII."""
    resp.set_header(STATUS_HEADER, one_line(status))


def set_failure(resp: Response, error: PenstockError, status: pb.RequestStatus) -> None:
    """An empty answer that speaks through its headers."""
    tracebacks.forget(error)
    resp.status = http_status_of(error)
    resp.data = b""
    resp.stream = None
    resp.set_headers(retry_after(error))
    set_status(resp, status)


def wants_json(req: Request) -> bool:
    """Whether messages in the body are JSON: `format=json`, or a format of no name and `Accept: application/json`."""
    if req.get_param("format") == "json":
        return True
    return not wants_binary(req) and "application/json" in (req.get_header("Accept") or "")


def set_message(req: Request, resp: Response, message: Message) -> None:
    """A message as the body: text, which has no type in this contract, or the form that is asked for."""
    if wants_json(req):
        resp.content_type, resp.data = "application/json", json_format.MessageToJson(message).encode()
    elif wants_binary(req):
        resp.content_type, resp.data = "application/octet-stream", message.SerializeToString()
    else:
        resp.data = many_lines(message)


class Resource:
    """Base of the routes that are about the server and its models."""

    kind: ClassVar[str]

    def __init__(self, services: Services, statuses: Statuses) -> None:
        self.services, self.statuses = services, statuses

    async def answer(self, req: Request, resp: Response, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which sets the body, and say how it went."""
        began, context = time.perf_counter_ns(), req.context.penstock
        context.operation = self.kind
        resp.status, resp.data = falcon.HTTP_200, b""
        try:
            await work
            set_status(resp, self.statuses.success())
        except Cancelled:
            raise
        except PenstockError as error:
            context.error, context.counted_status = error.code, error.status
            set_failure(resp, error, self.statuses.failure(error))
        self.services.extensions.recorder.called(self.kind, time.perf_counter_ns() - began)
