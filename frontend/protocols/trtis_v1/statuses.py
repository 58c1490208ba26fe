"""Request statuses: the code, the message, the name of the server and the number of the request.

1. Every error has one of the nine codes of this contract, and a message that begins as clients expect.
2. Over HTTP every failed request is a 400 but for keys (401, 403), a wrong verb (405) and faults below routing; the
   code alone tells the kind of failure.
3. Requests of all kinds are numbered from 1, over all frontends of a server.
"""

from __future__ import annotations

import ctypes
import logging
import os

from frontend.protocols.trtis_v1.requests import one_line
from frontend.tensors.request import UnavailableModel
from ipc.errors import InvalidInput, ModelError, PenstockError
from ipc.processes.paths import RunPaths
from ipc.protos import trtis_v1_pb2 as pb
from ipc.settings import Settings

log = logging.getLogger(__name__)

SUCCESS = pb.RequestStatusCode.SUCCESS
_CODES = {
    "INVALID_INPUT": pb.RequestStatusCode.INVALID_ARG,
    "INPUT_TOO_LONG": pb.RequestStatusCode.INVALID_ARG,
    "BODY_TOO_LARGE": pb.RequestStatusCode.INVALID_ARG,
    "TOO_SLOW": pb.RequestStatusCode.INVALID_ARG,
    "HEADERS_TOO_LARGE": pb.RequestStatusCode.INVALID_ARG,
    "SEQUENCE_UNKNOWN": pb.RequestStatusCode.INVALID_ARG,
    "UNAUTHENTICATED": pb.RequestStatusCode.INVALID_ARG,
    "FORBIDDEN": pb.RequestStatusCode.INVALID_ARG,
    "UNEXPECTED_OUTPUT": pb.RequestStatusCode.INVALID_ARG,
    "REGION_EXISTS": pb.RequestStatusCode.ALREADY_EXISTS,
    "REGION_NOT_FOUND": pb.RequestStatusCode.NOT_FOUND,
    "UNSUPPORTED": pb.RequestStatusCode.UNSUPPORTED,
    "CONTROL_DISABLED": pb.RequestStatusCode.UNSUPPORTED,
    "INTERNAL_ERROR": pb.RequestStatusCode.INTERNAL,
    "INFERENCE_ERROR": pb.RequestStatusCode.INTERNAL,
    "WORKER_CRASHED": pb.RequestStatusCode.INTERNAL,
}
_STATUSES = {
    "UNAUTHENTICATED": 401,
    "FORBIDDEN": 403,
    "RATE_LIMITED": 429,
    "TOO_SLOW": 408,
    "HEADERS_TOO_LARGE": 431,
}
_UNAVAILABLE = pb.RequestStatusCode.UNAVAILABLE
_WHY = {
    "model": "no model has this name",
    "version": "it has no such version",
    "unloaded": "it was unloaded",
    "failed": "its load failed",
}
FILE_NAME = "request-number"
KEPT_NBYTES = 1 << 20
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


class UnknownMode(InvalidInput):
    """A health check other than live and ready, the only failure with code UNKNOWN."""


def code_of(error: PenstockError) -> pb.RequestStatusCode:
    """The code of an error; UNAVAILABLE for errors that pass with time or by loading."""
    if isinstance(error, UnknownMode):
        return pb.RequestStatusCode.UNKNOWN
    return _CODES.get(error.code, _UNAVAILABLE)


def http_status_of(error: PenstockError) -> int:
    """400, or the status of a refused key, or of a fault below routing."""
    return _STATUSES.get(error.code, 400)


def message_of(error: PenstockError, model: str = "") -> str:
    """Text of an error. Errors of unavailable models begin with the words that clients know.

    `model` is the name in an inference request; errors of other calls name their model themselves.
    """
    if isinstance(error, UnavailableModel):
        why = _WHY[error.reason] + (f": {error.why}" if error.why else "")
        return f"Inference request for unknown model '{error.model[:200]}': {why}"
    if (
        model
        and isinstance(error, ModelError)
        and error.code
        in (
            "MODEL_LOADING",
            "MODEL_NOT_LOADED",
            "MODEL_LOAD_FAILED",
        )
    ):
        return f"Inference request for unknown model '{model[:200]}': {error.message}"
    if error.code == "UNEXPECTED_OUTPUT":
        return f"model '{model[:200]}': {error.message}"
    if error.code == "NO_REPLICA":
        return f"Server not ready: {error.message}"
    if error.code == "DRAINING":
        return f"Server exiting: {error.message}"
    if error.code == "DEADLINE_EXCEEDED":
        return f"request timeout: {error.message}"
    return error.message


def retry_after(error: PenstockError) -> dict[str, str]:
    """The Retry-After header, for errors that pass with time."""
    if not error.retryable:
        return {}
    return {"Retry-After": error.retry_after()}


class Statuses:
    """Makes the `RequestStatus` of every answer of one frontend."""

    def __init__(self, settings: Settings) -> None:
        self.numbers = RequestNumbers(settings.paths)
        self._server_id = settings.trtis.server_id
        self._success = one_line(pb.RequestStatus(code=SUCCESS, server_id=self._server_id))

    @property
    def server_id(self) -> str:
        """The name by which clients know this server."""
        return self._server_id

    def success(self) -> pb.RequestStatus:
        """The status of a success, with the next number."""
        return pb.RequestStatus(code=SUCCESS, server_id=self._server_id, request_id=self.numbers.next())

    def success_line(self) -> str:
        """`success` as one line of text. PERF: only the number, which is the last field, is new."""
        number = self.numbers.next()
        return f"{self._success} request_id: {number}" if number else self._success

    def failure(self, error: PenstockError, model: str = "", *, numbered: bool = True) -> pb.RequestStatus:
        """The status of an error; `numbered` is false for failures before the scheduling: their number is 0.

        The status is logged as well, since over HTTP every failure is a 400.
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


class RequestNumbers:
    """Gives numbers; the file is opened when the first number is asked for, after the fork.

    1. Every request appends one byte to a file of the run directory; the length of the file after that byte is the
       request's number. The kernel gives each append an end of its own, so no frontend locks or waits.
    2. The frontend that draws a multiple of `KEPT_NBYTES` frees the file's blocks: the length stays, the room is free.
    3. The file goes with the other ones of `RunPaths.control` when the server starts again (docs/adr/0031).
    """

    def __init__(self, paths: RunPaths) -> None:
        self._path = paths.control() / FILE_NAME
        self._fd = -1

    def next(self) -> int:
        """One more than the last number of any frontend; 0 when the file cannot be written, a full disk for example."""
        try:
            if self._fd < 0:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._fd = os.open(self._path, flags, 0o600)
            os.write(self._fd, b"\0")
            # NOTE: the position belongs to this process's own descriptor, and an append leaves it behind its byte.
            number = os.lseek(self._fd, 0, os.SEEK_CUR)
        except OSError:
            return 0
        if number % KEPT_NBYTES == 0:
            _give_back(self._fd, number)
        return number

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _give_back(fd: int, nbytes: int) -> None:
    """Free the blocks of the first `nbytes`; a file system that cannot do this keeps them."""
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
    if fallocate is not None:
        fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(nbytes))
