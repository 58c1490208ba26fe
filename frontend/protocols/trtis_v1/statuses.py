"""Request statuses: the code, the message, the server's name and the request's number."""

from __future__ import annotations

import logging

from frontend.protocols.trtis_v1.codes import SUCCESS, code_of, message_of
from frontend.protocols.trtis_v1.numbers import RequestNumbers
from ipc.errors import PenstockError
from ipc.protos import trtis_v1_pb2 as pb
from ipc.settings import Settings

log = logging.getLogger(__name__)


class Statuses:
    """Makes the `RequestStatus` of every answer of one frontend."""

    def __init__(self, settings: Settings) -> None:
        self.numbers = RequestNumbers(settings.paths)
        self._server_id = settings.trtis.server_id

    @property
    def server_id(self) -> str:
        """What clients know this server by."""
        return self._server_id

    def success(self) -> pb.RequestStatus:
        """The next number, and all is well."""
        return pb.RequestStatus(code=SUCCESS, server_id=self._server_id, request_id=self.numbers.next())

    def failure(self, error: PenstockError, model: str = "", *, numbered: bool = True) -> pb.RequestStatus:
        """What went wrong; `numbered` is false for a request that failed before it was scheduled: its number is 0.

        It goes into the log too: over HTTP every failure is a 400.
        """
        code, message = code_of(error), message_of(error, model)
        level = logging.WARNING if code == pb.RequestStatusCode.INTERNAL else logging.INFO
        log.log(level, "answered %s: %s", pb.RequestStatusCode.Name(code), message)
        return pb.RequestStatus(
            code=code,
            msg=message,
            server_id=self._server_id,
            request_id=self.numbers.next() if numbered else 0,
        )
