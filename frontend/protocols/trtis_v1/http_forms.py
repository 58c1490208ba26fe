"""The forms of HTTP: targets in paths, `NV-Status`, and bodies as text, JSON or in the wire format."""

from __future__ import annotations

import falcon
from falcon.asgi import Request, Response
from google.protobuf import json_format
from google.protobuf.message import Message

from frontend.http import tracebacks
from frontend.protocols.trtis_v1.statuses import http_status_of, retry_after
from frontend.protocols.trtis_v1.text import as_of_1_4, many_lines, one_line
from frontend.services import Services
from ipc.errors import PenstockError
from ipc.protos import trtis_v1_pb2 as pb

STATUS_HEADER = "NV-Status"
_MOST_DIGITS = 20
"""A digit more than the largest int64 has: a number that is cut there is a version, or a size, that nothing has."""


def wants_binary(req: Request) -> bool:
    """Whether messages in the body are in the wire format: `format=binary`; any other value means text."""
    return req.get_param("format") == "binary"


def set_status(resp: Response, status: pb.RequestStatus) -> None:
    """The status as a header of one line of ASCII."""
    resp.set_header(STATUS_HEADER, one_line(status))


def set_failure(resp: Response, error: PenstockError, status: pb.RequestStatus) -> None:
    """An empty answer with the status of an error in its headers."""
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
    """A message as the body: text, which has no media type in this contract, or the form of the request.

    JSON and the wire format have the whole message; a ServerStatus in text has the fields of release 1.4.
    """
    if wants_json(req):
        resp.content_type, resp.data = "application/json", json_format.MessageToJson(message).encode()
    elif wants_binary(req):
        resp.content_type, resp.data = "application/octet-stream", message.SerializeToString()
    else:
        known = as_of_1_4(message) if isinstance(message, pb.ServerStatus) else message
        resp.data = many_lines(known)


def number_of(text: str) -> int | None:
    """The number that digits write, None for other text."""
    if not (text.isascii() and text.isdigit()):
        return None
    return int(text.lstrip("0")[:_MOST_DIGITS] or "0")


def target_of(services: Services, path: str) -> tuple[str, int]:
    """Model and version (-1: none) of `<model>[/<version>]`; only models of the catalog have names with slashes.

    Raises `HTTPRouteNotFound` for any other path.
    """
    name, slash, last = path.rpartition("/")
    if path and (not slash or services.models.known(path) is not None):
        return path, -1
    version = number_of(last)
    if version is not None and name and ("/" not in name or services.models.known(name) is not None):
        return name, version
    raise falcon.HTTPRouteNotFound
