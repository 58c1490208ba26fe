"""Streams of requests: each message is a request of its own, and the stream goes on when one fails.

1. Messages are read while fewer than `grpc.max_stream_requests` are in work; the rest waits at the client.
2. Each runs as a task. Its answer is written in the order of the requests, or of the answers (`Method.ordered`).
3. When the client has said all, or this frontend drains, no more is read; what is in work is answered, then it ends.
"""

from __future__ import annotations

import asyncio
from typing import Any

from grpc import aio

from frontend.grpc.call import Call
from frontend.grpc.received import Received
from frontend.grpc.service import Answer
from frontend.grpc.unary import Rpc, Unary
from ipc.errors import Draining, PenstockError

END_AT_ERROR = "triton_grpc_error"
"""Metadata of a client that wants the stream to end with a gRPC error at the first failure."""


class Streams:
    """All open streams of a frontend."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.draining = False
        self._open: set[_Stream] = set()

    def of(self, runner: Unary) -> StreamMethod:
        """The streams of one method."""
        return StreamMethod(self, runner)

    async def serve(self, runner: Unary, rpc: Rpc) -> None:
        """One stream from its first message to its last."""
        stream = _Stream(runner, rpc, self.limit)
        self._open.add(stream)
        if self.draining:
            stream.drain()
        try:
            await stream.run()
        finally:
            self._open.discard(stream)

    def drain(self) -> None:
        """Read no more from any stream."""
        self.draining = True
        for stream in self._open:
            stream.drain()


class StreamMethod:
    """gRPC's handler of one method."""

    def __init__(self, streams: Streams, runner: Unary) -> None:
        self._streams, self._runner = streams, runner

    async def run(self, requests: object, rpc: Rpc) -> None:
        """One stream; gRPC's iterator of requests is left alone, since reading must be able to end with a drain."""
        await self._streams.serve(self._runner, rpc)


class _Failure(Exception):
    """A request of the stream failed in a way that ends the stream."""

    def __init__(self, call: Call, error: PenstockError) -> None:
        super().__init__(error.message)
        self.call, self.error = call, error


class _Stream:
    def __init__(self, runner: Unary, rpc: Rpc, limit: int) -> None:
        self._runner, self._rpc = runner, rpc
        self._room = asyncio.Semaphore(limit)
        self._ready: asyncio.Queue[asyncio.Task[Answer] | None] = asyncio.Queue()
        self._running: set[asyncio.Task[Answer]] = set()
        self._reader: asyncio.Task[None] | None = None
        self._drained = False

    def drain(self) -> None:
        """Read no more."""
        self._drained = True
        if self._reader is not None:
            self._reader.cancel()

    async def run(self) -> None:
        """Read and write until both are done; whatever ends the rpc ends the requests that are in work."""
        opened = self._runner.begin(self._rpc)
        self._reader = asyncio.get_running_loop().create_task(self._read_all())
        try:
            opened.admit("infer", spend=False)
            await self._write_all()
            if self._drained:
                raise Draining("this server is shutting down; open a new stream", retry_after_s=1)
            self._rpc.set_trailing_metadata(opened.trailers)
        except _Failure as failure:
            await self._runner.abort(failure.call, failure.error)
        except PenstockError as error:
            await self._runner.abort(opened, error)
        finally:
            self._reader.cancel()
            for task in self._running:
                task.cancel()

    async def _read_all(self) -> None:
        number = 0
        try:
            while not self._drained:
                await self._room.acquire()
                received: Any = await self._rpc.read()
                if received is aio.EOF:
                    break
                number += 1
                self._begin(received, number)
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

    async def _one(self, received: Received, number: int) -> Answer:
        call = self._runner.begin(self._rpc, number)
        try:
            return await self._runner.answer(call, received)
        except PenstockError as error:
            told = self._runner.told(call, received, error)
            if told is None or call.metadata.get(END_AT_ERROR) == "true":
                raise _Failure(call, error) from error
            return told

    async def _write_all(self) -> None:
        while (task := await self._ready.get()) is not None:
            try:
                answer = await task
            finally:
                self._running.discard(task)
            await self._rpc.write(answer)
            self._room.release()
