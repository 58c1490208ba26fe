"""One request of a method, from the message to the answer or the error; the whole of an rpc that is no stream.

1. The request's context, its bytes counted among those that this frontend holds, access; then it is parsed.
2. The method's own answer. An error becomes the contract's own message where it has one, else a gRPC status.
3. Counted and remembered, however it ended.

Several answers to one request are written as they come. A client that does not take one holds the request until its
deadline, and no longer: then the rpc ends. One answer may wait for its client as `UntakenAnswer` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial

from google.protobuf.message import Message
from grpc import StatusCode, aio

from frontend.grpc.call import Answer, Call, GrpcService, Method, Several, serialized
from frontend.grpc.received import SPLIT_NBYTES, Form, Received
from frontend.grpc.rpc import LAST_WORD_S, Reply, Rpc, shortened, status_of, trailers
from frontend.http import tracebacks
from frontend.services import Services
from ipc import deadline
from ipc.errors import DeadlineExceeded, Forbidden, InvalidInput, PenstockError, Unauthenticated

log = logging.getLogger(__name__)

WRITE_GRACE_NS = 2_000_000_000
"""Nanoseconds after the deadline of its request in which an answer may still be written."""


class Unwritten(Exception):
    """An answer to `call` was not taken: the client reads too slowly, or has `gone`."""

    def __init__(self, call: Call, error: PenstockError, gone: bool) -> None:
        super().__init__(error.message)
        self.call, self.error, self.gone = call, error, gone


class Unary:
    """Runs requests of one method, which are read as `form` says."""

    def __init__(
        self, services: Services, service: GrpcService, method: Method, path: str, form: Form
    ) -> None:
        self.services, self.service, self.method, self.path, self.form = services, service, method, path, form

    async def run(self, data: bytes, rpc: Rpc) -> Reply:
        """The reply to an rpc of one message."""
        call, received = self.begin(rpc), self.form.receive(data)
        try:
            answer = await self.answer(call, received)
            assert not isinstance(answer, Several)
            return Reply(serialized(answer), call.trailers)
        except PenstockError as error:
            return self._failed(call, received, error)
        finally:
            received.forget()

    def refused(self, error: PenstockError, rpc: Rpc) -> Reply:
        """The reply to an rpc that may not come in, of which nothing but its head was read."""
        call, nothing = self.begin(rpc), self.form.receive(b"")
        nothing.forget()
        call.refuse(error)
        return self._failed(call, nothing, error)

    def stream_refused(self, error: PenstockError, rpc: Rpc) -> Reply:
        """End a stream that may not come in, with the status of the refusal."""
        call = self.begin(rpc)
        call.refuse(error)
        return self._status(call, error)

    def untaken(self, nbytes: int, drop: Callable[[], None]) -> UntakenAnswer:
        """Count an answer that its client has not taken yet."""
        return UntakenAnswer(self.services, self.path, nbytes, drop)

    def begin(self, rpc: Rpc, number: int = 0) -> Call:
        """Begin a request that has just arrived: its context, ids and deadline."""
        return Call.begin(self.services, rpc, self.service.protocol, self.path, self.method.operation, number)

    async def answer(self, call: Call, received: Received) -> Answer | Several:
        """The answer to one request, counted. Raises a `PenstockError`, or is cancelled with its task.

        `Several` answers are for `write_each`, which counts the request then.
        """
        bodies, nbytes = self.services.bodies, received.nbytes
        # PERF: contexts made of generators cost several microseconds each.
        bodies.held_nbytes += nbytes
        try:
            bodies.check_room(nbytes)
            self._let_in(call, received)
            answer = await self._answer(call, received)
        except BaseException as error:
            self._count_failure(call, error)
            raise
        finally:
            bodies.held_nbytes -= nbytes
        if not isinstance(answer, Several):
            call.finish(None)
        return answer

    async def _answer(self, call: Call, received: Received) -> Answer | Several:
        method = self.method
        if method.planned is not None and (answering := method.planned(call, received.data)) is not None:
            return await answering
        call.data = received.data if received.nbytes <= SPLIT_NBYTES else b""
        message, call.raw = received.message(), received.raw
        return await method.answer(call, message)

    def _let_in(self, call: Call, received: Received) -> None:
        """Check what the head of the rpc could not tell, such as the model. Raises an `AccessRefused`."""
        need = self.method.need
        if not isinstance(need, str):
            # NOTE: nothing large is parsed for a caller that is not let in yet.
            call.admit(need(received.message()) if received.nbytes <= SPLIT_NBYTES else "admin")
        elif call.number:
            call.spend()

    async def write_each(
        self, call: Call, received: Received, several: Several, write: Callable[[Answer], Awaitable[None]]
    ) -> None:
        """Write all answers to one request as they come, then count it. Raises as `answer`, and `Unwritten`.

        The last answer is not written behind a failure: the caller writes what tells the failure before.
        """
        until_ns = call.context.deadline_ns + WRITE_GRACE_NS
        try:
            with self.services.bodies.holding(received.nbytes):
                async with aclosing(several.answers) as answers:
                    async for answer in answers:
                        await self.written(call, write(answer), until_ns)
                if several.last is not None:
                    await self.written(call, write(several.last), until_ns)
        except BaseException as error:
            self._count_failure(call, error)
            raise
        call.finish(None)

    def _count_failure(self, call: Call, error: BaseException) -> None:
        """Count a request that failed. Raises a `PenstockError` in place of an error that is none."""
        if isinstance(error, asyncio.CancelledError):
            call.finish(call.ended_early())
        elif isinstance(error, PenstockError):
            call.finish(error)
        elif isinstance(error, Unwritten):
            call.finish(error.error)
        elif isinstance(error, Exception):
            log.error("%s failed", self.path, exc_info=error)
            call.finish(PenstockError("internal error"))
            raise PenstockError("internal error") from error

    @staticmethod
    async def written(call: Call, writing: Awaitable[None], until_ns: int) -> None:
        """Wait for a write until `until_ns`. Raises `Unwritten`."""
        gone = False
        try:
            async with asyncio.timeout(deadline.remaining_s(until_ns)):
                await writing
            return
        except TimeoutError:
            error: PenstockError = DeadlineExceeded("the client did not take the answer before the deadline")
        except aio.BaseError:
            error, gone = call.ended_early(), True
        # NOTE: the error of a timeout refers to the task that it ended, whose own error may not refer to it.
        raise Unwritten(call, error, gone)

    async def give_up(self, unwritten: Unwritten) -> None:
        """End the rpc of a client that takes no more answers.

        gRPC sends a status behind the messages, so a client that reads none of them never sees it: then it is cut off.
        """
        if unwritten.gone:
            # NOTE: the way gRPC itself ends an rpc whose client has gone; a status could not be sent.
            raise asyncio.CancelledError from unwritten
        asyncio.get_running_loop().call_later(LAST_WORD_S, unwritten.call.rpc.cut_off)
        try:
            async with asyncio.timeout(LAST_WORD_S):
                await self.abort(unwritten.call, unwritten.error)
        except aio.AbortError:
            raise
        except (TimeoutError, aio.BaseError):
            # NOTE: gRPC takes no status beside a first message that has not left.
            return

    def _failed(self, call: Call, received: Received, error: PenstockError) -> Reply:
        """The contract's own form of an error; without one the rpc ends with a status."""
        answer = self.told(call, received, error)
        if answer is None:
            return self._status(call, error)
        return Reply(serialized(answer), (*call.trailers, *trailers(error)))

    def _status(self, call: Call, error: PenstockError) -> Reply:
        status = status_of(error)
        if status is StatusCode.INTERNAL:
            log.warning("%s answered %s: %s", self.path, error.code, error.message)
        message = shortened(self.service.message_of(error))
        return Reply(None, (*call.trailers, *trailers(error)), status, message)

    def told(self, call: Call, received: Received, error: PenstockError) -> Answer | None:
        """The response that says an error; None where the contract has no message for errors."""
        tracebacks.forget(error)
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
        """End a stream with the status of an error."""
        _, trailers, status, message = self._status(call, error)
        try:
            await call.rpc.context.abort(status, message, trailers)
        except aio.AbortError as aborted:
            # NOTE: gRPC keeps it as long as the rpc, which the frames of its traceback refer to.
            handling = asyncio.current_task()
            if handling is not None:
                handling.add_done_callback(partial(_forget, aborted))
            raise


def _forget(error: BaseException, _: object) -> None:
    tracebacks.forget(error)


class UntakenAnswer:
    """An answer that its client has not taken yet, until `end`: the bytes that this frontend holds, and for how long.

    gRPC takes an answer whole and does not tell how much of the answer has left, so the whole answer counts until
    the last byte has left.

    1. Nothing is counted for `arena.lease_copy_after_s`.
    2. Afterwards the answer takes its size of `arena.copy_out_bytes`, beside the slow readers of HTTP. Without room the
       answer is dropped at once, by `drop`, which ends the rpc.
    3. An answer that was not taken after `server.write_stall_s` is dropped.
    """

    __slots__ = ("_counted_nbytes", "_drop", "_nbytes", "_path", "_services", "_timer")

    def __init__(self, services: Services, path: str, nbytes: int, drop: Callable[[], None]) -> None:
        self._services, self._path, self._nbytes, self._drop = services, path, nbytes, drop
        self._counted_nbytes = 0
        after_s = services.settings.arena.lease_copy_after_s
        self._timer = asyncio.get_running_loop().call_later(after_s, self._count)

    def end(self, _: object = None) -> None:
        """The answer was taken, or its rpc has ended."""
        self._timer.cancel()
        self._services.copies.give(self._counted_nbytes)
        self._counted_nbytes = 0

    def _count(self) -> None:
        settings = self._services.settings
        if not self._services.copies.take(self._nbytes):
            self._end_rpc("no room for what slow clients have not taken yet")
            return
        self._counted_nbytes = self._nbytes
        left_s = settings.server.write_stall_s - settings.arena.lease_copy_after_s
        self._timer = asyncio.get_running_loop().call_later(
            max(left_s, 0.0), self._end_rpc, "its client does not read"
        )

    def _end_rpc(self, why: str) -> None:
        log.warning("%s: an answer of %d bytes is dropped: %s", self._path, self._nbytes, why)
        self._drop()
