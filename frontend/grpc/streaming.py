"""Streams of requests: each message is a request of its own, and the stream goes on after a request that fails.

1. The server reads messages while fewer than `grpc.max_stream_requests` are in work; further messages wait at the
   client.
2. Each request runs as a task. Answers are written in the order of the requests, or as they come (`Method.ordered`).
   A task of their own writes `Several` answers to one message as they come, with the error that ends them.
3. When the client has sent its last message, or the server stops, reading ends. The stream ends after the answers to
   the requests in work. At the end of a drain the stream ends at once.
4. After a drain connections stay for a moment: gRPC closes them with the server, and a client that is still writing
   into a closed one never reads how its stream ended.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from grpc import aio

from frontend.grpc.call import Answer, Call, Several
from frontend.grpc.received import Received
from frontend.grpc.rpc import Rpc
from frontend.grpc.unary import Unary, Unwritten
from ipc import deadline
from ipc.errors import Draining, PenstockError

LINGER_S = 0.25
"""Seconds in which clients can read how their streams ended."""
END_AT_ERROR = "triton_grpc_error"
"""Metadata of a client that wants the stream to end with a gRPC error at the first failure."""


class Streams:
    """All open streams of a frontend."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.draining = False
        self._open: set[_Stream] = set()
        self._changed = asyncio.Event()

    async def serve(self, runner: Unary, rpc: Rpc) -> None:
        """Serve one stream from its first message to its last answer."""
        stream = _Stream(runner, rpc, self.limit)
        self._open.add(stream)
        if self.draining:
            stream.drain()
        try:
            await stream.run()
        finally:
            self._open.discard(stream)
            self._changed.set()

    def drain(self) -> None:
        """Read no more from any stream."""
        self.draining = True
        for stream in self._open:
            stream.drain()

    def end(self) -> None:
        """End all streams now, with an error."""
        for stream in self._open:
            stream.end()

    async def ended(self) -> None:
        """Wait until all streams have ended and their clients could read it."""
        while self._open:
            self._changed.clear()
            await self._changed.wait()
            if not self._open:
                await asyncio.sleep(LINGER_S)


class _Failure(Exception):
    """A request of the stream failed in a way that ends the stream."""

    def __init__(self, call: Call, error: PenstockError) -> None:
        super().__init__(error.message)
        self.call, self.error = call, error


def _drained() -> Draining:
    return Draining("this server is shutting down; open a new stream", retry_after_s=1)


class _Stream:
    def __init__(self, runner: Unary, rpc: Rpc, limit: int) -> None:
        self._runner, self._rpc = runner, rpc
        self._room = asyncio.Semaphore(limit)
        self._ready: asyncio.Queue[asyncio.Task[Answer | None] | None] = asyncio.Queue()
        self._running: set[asyncio.Task[Answer | None]] = set()
        self._aside: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writing = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self._drained = False

    def drain(self) -> None:
        """Read no further message."""
        self._drained = True
        if self._reader is not None:
            self._reader.cancel()

    def end(self) -> None:
        """Write no further answer, and end the requests in work."""
        self.drain()
        if not self._broken.done():
            self._broken.set_exception(_drained())

    async def run(self) -> None:
        """Read and write until both are done; whatever ends the rpc ends the requests that are in work."""
        opened = self._runner.begin(self._rpc)
        loop = asyncio.get_running_loop()
        self._reader = loop.create_task(self._read_all())
        writer: asyncio.Task[None] | None = None
        try:
            writer = loop.create_task(self._write_all(opened))
            await asyncio.wait((writer, self._broken), return_when=asyncio.FIRST_COMPLETED)
            (self._broken if self._broken.done() else writer).result()
            if self._drained:
                raise _drained()
            self._rpc.context.set_trailing_metadata(opened.trailers)
        except _Failure as failure:
            # NOTE: a read that meets the end of the rpc would add its frames to the error that gRPC keeps.
            self._reader.cancel()
            await self._runner.abort(failure.call, failure.error)
        except Unwritten as unwritten:
            await self._runner.give_up(unwritten)
        except PenstockError as error:
            await self._runner.abort(opened, error)
        finally:
            self._broken.cancel()
            for task in (self._reader, writer, *self._running, *self._aside):
                if task is not None:
                    task.cancel()
            # NOTE: a task refers to its error, and the error to the frames that it came through, which refer to self.
            self._reader = None
            del task, writer

    async def _read_all(self) -> None:
        number = 0
        try:
            while not self._drained:
                await self._room.acquire()
                received: Any = await self._rpc.context.read()
                if received is aio.EOF:
                    break
                number += 1
                self._begin(received, number)
                del received
        except asyncio.CancelledError:
            if not self._drained:
                raise
        if not self._runner.method.ordered and self._running:
            await asyncio.wait(self._running)
        self._ready.put_nowait(None)

    def _begin(self, received: Received, number: int) -> None:
        task = asyncio.get_running_loop().create_task(self._one(received, number))
        self._running.add(task)
        if self._runner.method.ordered:
            self._ready.put_nowait(task)
        else:
            task.add_done_callback(self._ready.put_nowait)

    async def _one(self, received: Received, number: int) -> Answer | None:
        """The answer to one message, None for one whose answers are written aside."""
        call = self._runner.begin(self._rpc, number)
        try:
            answer = await self._runner.answer(call, received)
        except PenstockError as error:
            return self._told(call, received, error)
        if not isinstance(answer, Several):
            return answer
        task = asyncio.get_running_loop().create_task(self._write_several(call, received, answer))
        self._aside.add(task)
        task.add_done_callback(partial(self._end_aside, call))
        return None

    async def _write_several(self, call: Call, received: Received, several: Several) -> None:
        """Write the answers to one message, and the error that they end with, if any."""
        try:
            await self._runner.write_each(call, received, several, self._write)
        except PenstockError as error:
            await self._write_last(call, self._told(call, received, error))
            if several.last is not None:
                await self._write_last(call, several.last)

    def _end_aside(self, call: Call, task: asyncio.Task[None]) -> None:
        """Note the answer to one message. An error ends the stream at once, even while other messages wait."""
        if not call.ended:
            # NOTE: a task that was cancelled before its first step has run nothing of its coroutine.
            call.finish(call.ended_early())
        self._aside.discard(task)
        self._room.release()
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._broken.done():
            self._broken.set_exception(error)

    def _told(self, call: Call, received: Received, error: PenstockError) -> Answer:
        answer = self._runner.told(call, received, error)
        if answer is None or call.metadata.get(END_AT_ERROR) == "true":
            raise _Failure(call, error) from error
        return answer

    async def _write(self, answer: Answer) -> None:
        async with self._writing:
            await self._rpc.context.write(answer)

    async def _write_last(self, call: Call, answer: Answer) -> None:
        """Write what is the end of an answer, for as long as a request may take. Raises `Unwritten`."""
        timeout_s = self._runner.services.settings.limits.request_timeout_s
        await self._runner.written(call, self._write(answer), deadline.after(timeout_s))

    async def _write_all(self, opened: Call) -> None:
        """Write the answers of tasks that have one, until all is read and answered."""
        while (task := await self._ready.get()) is not None:
            try:
                answer = await task
            finally:
                self._running.discard(task)
                del task
            if answer is not None:
                await self._write_last(opened, answer)
                self._room.release()
            del answer
        while self._aside:
            await asyncio.wait(self._aside)
