"""A network between two hosts: connections to a relay go on to an address, late, or not at all for a while.

A direction that is held takes no bytes, as a network whose packets are lost: TCP brings them once the network is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

SLICE_NBYTES = 64 << 10
MOST_UNDER_WAY = 256
"""Slices that a delayed direction holds."""


class Relay:
    """Connections to `port` of 127.0.0.1, joined to the first of `targets` there that listens, as by a balancer.

    `delay_s` is added each way. `there` carries bytes to the target, `back` carries bytes from the target.
    """

    def __init__(self, *targets: int) -> None:
        self._targets, self.port, self.delay_s = targets, 0, 0.0
        self._loop = asyncio.new_event_loop()
        self._there, self._back = asyncio.Event(), asyncio.Event()
        self._pumps: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        """Where clients of a broker connect."""
        return f"nats://127.0.0.1:{self.port}"

    def set(self, *, there: bool = True, back: bool = True) -> None:
        """Which directions carry bytes from now on."""
        for event, carries in ((self._there, there), (self._back, back)):
            self._loop.call_soon_threadsafe(event.set if carries else event.clear)

    def start(self) -> None:
        """Listen, and carry both ways."""
        self._thread.start()
        assert self._ready.wait(20)

    def stop(self) -> None:
        """End all connections."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._loop.close()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        self._there.set()
        self._back.set()
        server = await asyncio.start_server(self._joined, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._end.wait()
        server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for target in self._targets:
            with contextlib.suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
                break
        else:
            writer.transport.abort()
            return
        for source, sink, carries in (
            (reader, far_writer, self._there),
            (far_reader, writer, self._back),
        ):
            pump = self._loop.create_task(self._pump(source, sink, carries))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, carries: asyncio.Event
    ) -> None:
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MOST_UNDER_WAY)
        writing = self._loop.create_task(self._write(under_way, sink, carries))
        try:
            with contextlib.suppress(OSError):
                while True:
                    await carries.wait()
                    data = await source.read(SLICE_NBYTES)
                    await under_way.put((self._loop.time() + self.delay_s, data))
                    if not data:
                        break
                await writing
        finally:
            writing.cancel()
            sink.transport.abort()

    async def _write(
        self,
        under_way: asyncio.Queue[tuple[float, bytes]],
        sink: asyncio.StreamWriter,
        carries: asyncio.Event,
    ) -> None:
        while True:
            due_s, data = await under_way.get()
            await asyncio.sleep(max(0.0, due_s - self._loop.time()))
            await carries.wait()
            if not data:
                return
            sink.write(data)
            await sink.drain()


@contextlib.contextmanager
def relay(*targets: int) -> Iterator[Relay]:
    """A relay that carries; afterwards its thread has ended."""
    one = Relay(*targets)
    one.start()
    try:
        yield one
    finally:
        one.stop()
