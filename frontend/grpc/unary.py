"""One request of a method, from the message to the answer or the error; the whole of an rpc that is no stream.

1. The request's context, its bytes counted among those that this frontend holds, access; then it is parsed.
2. The method's own answer. An error becomes the contract's own message where it has one, else a gRPC status.
3. Counted and remembered, however it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from google.protobuf.message import Message
from grpc import StatusCode, aio

from frontend.grpc import statuses
from frontend.grpc.call import Call
from frontend.grpc.received import Received
from frontend.grpc.service import Answer, GrpcService, Method
from frontend.services import Services
from ipc.errors import Forbidden, InvalidInput, PenstockError, Unauthenticated

log = logging.getLogger(__name__)

Rpc = aio.ServicerContext[Any, Any]


class Unary:
    """Runs requests of one method."""

    def __init__(self, services: Services, service: GrpcService, method: Method, path: str) -> None:
        self.services, self.service, self.method, self.path = services, service, method, path

    async def run(self, received: Received, rpc: Rpc) -> Answer:
        """The whole rpc."""
        call = self.begin(rpc)
        try:
            answer = await self.answer(call, received)
            rpc.set_trailing_metadata(call.trailers)
        except PenstockError as error:
            return await self.fail(call, received, error)
        return answer

    def begin(self, rpc: Rpc, number: int = 0) -> Call:
        """A request that has just arrived."""
        return Call.begin(self.services, rpc, self.service.protocol, self.path, self.method.operation, number)

    async def answer(self, call: Call, received: Received) -> Answer:
        """The answer to one request, counted. Raises a `PenstockError`, or is cancelled with its task."""
        failure: PenstockError | None = None
        try:
            with self.services.bodies.holding(received.nbytes):
                need = self.method.need
                call.admit(need if isinstance(need, str) else need(received.message()))
                message, call.raw = received.message(), received.raw
                return await self.method.answer(call, message)
        except PenstockError as error:
            failure = error
            raise
        except asyncio.CancelledError:
            failure = call.ended_early()
            raise
        except Exception as error:
            log.error("%s failed", self.path, exc_info=error)
            failure = PenstockError("internal error")
            raise failure from error
        finally:
            call.finish(failure)

    async def fail(self, call: Call, received: Received, error: PenstockError) -> Answer:
        """The contract's own form of an error; without one the rpc ends with a status."""
        told = self.told(call, received, error)
        if told is None:
            await self.abort(call, error)
            raise AssertionError("abort returned") from error
        call.rpc.set_trailing_metadata((*call.trailers, *statuses.trailers(error)))
        return told

    def told(self, call: Call, received: Received, error: PenstockError) -> Answer | None:
        """The message that says an error, where the contract has one for it."""
        failed = self.method.failed
        if failed is None:
            return None
        message: Message | None = None
        if not isinstance(error, Unauthenticated | Forbidden):
            # A request that failed before it was parsed is named by its id all the same.
            with contextlib.suppress(InvalidInput):
                message = received.message()
        return failed(call, message, error)

    async def abort(self, call: Call, error: PenstockError) -> None:
        """End the rpc with the status of an error."""
        status = statuses.status_of(error)
        if status is StatusCode.INTERNAL:
            log.warning("%s answered %s: %s", self.path, error.code, error.message)
        message = statuses.shortened(self.service.message_of(error))
        trailers = (*call.trailers, *statuses.trailers(error))
        await call.rpc.abort(status, message, trailers)
