"""The Python of a sandbox, as the host sees it: start, calls, interrupt, end.

Code of a model may write to the channel, flood or close it, and answer in the place of our program. So frames are
bounded and checked, an answer that nobody has asked for ends the interpreter, and the answer's fields are only text and
bytes that the code could have printed as well.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import time
from pathlib import Path

from ipc.wire.tools import PythonResult
from workers.tools.cgroups import Group
from workers.tools.inner import MAX_FIELD_NBYTES, MAX_FIGURE_NBYTES, MAX_FIGURES
from workers.tools.layers import Layers
from workers.tools.processes import Broken, Process, unbroken

START_S = 30.0
"""Longest time from the start of the process to its readiness."""
GRACE_S = 3.0
"""Time for code that is interrupted; afterwards the interpreter is killed."""
MAX_OUTPUT_CHARS = MAX_FIELD_NBYTES
_MAX_ANSWER_NBYTES = 16 + 4 * (MAX_FIELD_NBYTES + 4) + MAX_FIGURES * (MAX_FIGURE_NBYTES + 4)
_PNG = b"\x89PNG\r\n\x1a\n"
_CREDENTIALS = struct.Struct("=iII")


class _Lost(Exception):
    """The interpreter has ended, or broke the protocol."""


class Interpreter:
    """One interpreter; calls do not overlap."""

    def __init__(self, process: Process, pidfd: int, working_directory: str) -> None:
        """`start` makes one. `pidfd` is of the interpreter itself, which is a grandchild with bubblewrap."""
        self._process, self._pidfd = process, pidfd
        self._channel, self._seen = process.channel, working_directory
        self._loop = asyncio.get_running_loop()
        self._last_output = "", ""

    @classmethod
    async def start(
        cls, layers: Layers, directory: Path, timeout_s: float, group: Group | None = None
    ) -> Interpreter:
        """Start an interpreter and wait until it is ready. Raises `Broken`."""
        process = Process(layers, directory, "python", timeout_s, (), 4 * MAX_OUTPUT_CHARS, group)
        try:
            async with asyncio.timeout(START_S):
                body, pid = await _first_frame(process.channel)
            if body[:1] != b"R":
                raise Broken(f"the sandbox cannot be closed: {body[5:300].decode('utf-8', 'replace')}")
            return cls(process, os.pidfd_open(pid), layers.seen(directory))
        except (_Lost, TimeoutError, OSError) as error:
            reason = process.stderr.take(300).strip() or "it ended before it was ready"
            await process.end()
            raise Broken(f"the interpreter cannot be started: {reason}") from error
        except BaseException:
            await process.end()
            raise

    @property
    def process(self) -> Process:
        """The process that the host has started."""
        return self._process

    async def end(self) -> None:
        """Kill the interpreter with all of its sandbox. Safe to call twice."""
        await unbroken(self._end())

    async def _end(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
            self._process.kill()
            await asyncio.wait([self._process.ended])
            self._last_output = self._output()
        await self._process.end()

    def _output(self) -> tuple[str, str]:
        process = self._process
        return process.stdout.take(MAX_OUTPUT_CHARS), process.stderr.take(MAX_OUTPUT_CHARS)

    @property
    def alive(self) -> bool:
        """Whether the interpreter can take a call: it lives, and has said nothing that nobody has asked for."""
        if self._pidfd < 0 or self._process.ended.done():
            return False
        try:
            self._channel.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    async def run(self, code: str, timeout_s: float) -> PythonResult:
        """Run code. An interpreter that is lost has been ended, and `alive` is false.

        A cancelled call interrupts its code as a timeout does.
        """
        began = time.monotonic()
        data = code.encode("utf-8", "replace")
        answer: list[bytes] | None = None
        interrupted = killed = False
        reading = self._loop.create_task(self._ask(len(data).to_bytes(4, "little") + data))
        try:
            await asyncio.wait([reading], timeout=timeout_s)
            if not reading.done():
                interrupted, killed = True, await self._stop(reading)
            if not killed:
                answer = reading.result()
        except _Lost:
            killed = True
            await self.end()
        except asyncio.CancelledError:
            await self._stop(reading)
            raise
        elapsed_ms = round((time.monotonic() - began) * 1000)
        return self._result(answer, elapsed_ms, interrupted, killed)

    async def _stop(self, reading: asyncio.Task[list[bytes]]) -> bool:
        """Interrupt the code; kill the interpreter if there is no answer within the grace. Returns whether killed."""
        self._interrupt()
        await asyncio.wait([reading], timeout=GRACE_S)
        if reading.done() and not reading.cancelled() and reading.exception() is None:
            return False
        reading.cancel()
        await self.end()
        return True

    def _interrupt(self) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGINT)
        except ProcessLookupError:
            pass

    async def _ask(self, request: bytes) -> list[bytes]:
        """Send a call and read the fields of its answer. Raises `_Lost`."""
        try:
            await self._loop.sock_sendall(self._channel, request)
            body = await _frame(self._channel)
        except OSError as error:
            raise _Lost from error
        if body[:1] != b"A":
            raise _Lost
        return _fields(body)

    def _result(
        self, answer: list[bytes] | None, elapsed_ms: int, interrupted: bool, killed: bool
    ) -> PythonResult:
        stdout, stderr = self._last_output if self._pidfd < 0 else self._output()
        if answer is None:
            return PythonResult(
                "timeout" if interrupted else "error",
                elapsed_ms,
                self._seen,
                stdout,
                stderr,
                "" if interrupted else "the interpreter ended in this call; its state is lost",
                interrupted=interrupted,
                killed=True,
            )
        _, exception, result, kind = (field.decode("utf-8", "replace") for field in answer[:4])
        return PythonResult(
            "timeout" if interrupted else ("error" if exception else "success"),
            elapsed_ms,
            self._seen,
            stdout,
            stderr,
            exception,
            result,
            kind,
            [figure for figure in answer[4:] if figure.startswith(_PNG)],
            interrupted,
            killed,
        )


async def _first_frame(channel: socket.socket) -> tuple[bytes, int]:
    """The first frame, which our own program sends before any other code runs, and the pid of its sender."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(channel, readable)
    try:
        await ready
    finally:
        loop.remove_reader(channel)
    data, ancillary, _, _ = channel.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
    pids = [
        _CREDENTIALS.unpack(credentials)[0]
        for _, kind, credentials in ancillary
        if kind == socket.SCM_CREDENTIALS
    ]
    if len(data) < 5 or not pids:
        raise _Lost
    return data[4:], pids[0]


async def _frame(channel: socket.socket) -> bytes:
    nbytes = int.from_bytes(await _exactly(channel, 4), "little")
    if nbytes > _MAX_ANSWER_NBYTES:
        raise _Lost
    return await _exactly(channel, nbytes)


async def _exactly(channel: socket.socket, nbytes: int) -> bytes:
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < nbytes:
        more = await loop.sock_recv(channel, nbytes - len(data))
        if not more:
            raise _Lost
        data += more
    return bytes(data)


def _fields(body: bytes) -> list[bytes]:
    """The fields of an answer. Raises `_Lost` for a frame that our program does not write."""
    fields, at = [], 1
    while at < len(body):
        nbytes = int.from_bytes(body[at : at + 4], "little")
        at += 4
        if at + nbytes > len(body):
            raise _Lost
        fields.append(body[at : at + nbytes])
        at += nbytes
    limits = [MAX_FIELD_NBYTES] * 4 + [MAX_FIGURE_NBYTES] * MAX_FIGURES
    if not 4 <= len(fields) <= len(limits) or any(len(f) > n for f, n in zip(fields, limits, strict=False)):
        raise _Lost
    return fields
