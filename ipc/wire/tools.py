"""Messages between frontends and the tool host, and their frames over a Unix stream socket.

1. The host listens on `RunPaths.tools_socket`. Each frontend has one connection, and the host says `Ready` first.
2. A frame is 4 bytes with the length of the message (little-endian), 1 byte with the number of descriptors, and the
   message: a tagged struct as msgpack. Descriptors travel by SCM_RIGHTS with the first byte of their frame.
3. The end of a connection is the death of the other side. The host cancels the calls of a dead frontend and ends its
   throw-away sandboxes. A frontend fails the calls under way when the host dies, and never sends them again.
4. The order of messages is kept: a `Mount` is done before a `Run` behind it begins.

`Link` is one end of a connection in an event loop. A message that breaks the schema, a limit or the number of
descriptors ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from ipc.errors import ProtocolError
from ipc.wire.messages import Wire

MAX_NBYTES = 64 << 20
"""Largest message."""
MAX_DESCRIPTORS = 128
"""Most descriptors of one message; the kernel allows 253."""
MAX_PRODUCED = 64
"""Files that one call produces; the rest stay in the work directory."""
MAX_FILE_NBYTES = 256 << 20
"""Largest produced file."""
NOT_PRODUCED = "not_produced"
"""Error of a wanted file that is not there."""
_HEAD = struct.Struct("<IB")
_READ_NBYTES = 256 << 10
_ANCILLARY_NBYTES = socket.CMSG_SPACE(253 * array("i").itemsize)
_UNDECODABLE = (msgspec.DecodeError, ValueError, RecursionError)


class Wanted(Wire, frozen=True):
    """A file that a call is to leave: its path below the work directory, and the format that the model named."""

    name: str
    format: str | None = None


class PythonCall(Wire, frozen=True, tag="python"):
    """Run `code` in the interpreter of the sandbox, which keeps its state between calls."""

    code: str
    outputs: list[Wanted] = msgspec.field(default_factory=list)
    timeout_s: float = 60.0


class ResetCall(Wire, frozen=True, tag="reset"):
    """End the interpreter of the sandbox; the next `PythonCall` starts another. Files stay."""


class ShellCall(Wire, frozen=True, tag="shell"):
    """Run `commands`, joined by line breaks, in one shell. Each output stream keeps `max_chars` characters."""

    commands: list[str]
    outputs: list[Wanted] = msgspec.field(default_factory=list)
    timeout_s: float = 600.0
    max_chars: int = 4096


class SurfaceCall(Wire, frozen=True, tag="surface"):
    """Give files of the work directory, also those of earlier calls."""

    outputs: list[Wanted]


class RemoteCall(Wire, frozen=True, tag="remote"):
    """Run a tool of an MCP server; `name` is that of a `RemoteTool`, `arguments` the JSON text of an object.

    The call needs no sandbox.
    """

    name: str
    arguments: str


SandboxCall = PythonCall | ResetCall | ShellCall | SurfaceCall
Call = SandboxCall | RemoteCall


class Run(Wire, frozen=True, tag="run"):
    """Run a call; `Done` or `Failed` with the same `id` follows, unless the call is cancelled.

    `sandbox` is a name that the frontend derives from owner and session. A `lasting` sandbox is kept until `End` or
    until it was idle for long. Any other ends with `End` or with the connection. Calls of one sandbox take turns.
    """

    id: int
    sandbox: str
    lasting: bool
    call: Call


class Mount(Wire, frozen=True, tag="mount"):
    """Put a file into the work directory of a sandbox, at a relative `path`. One descriptor of a regular file follows.

    The host copies the file. If the copy fails, the next call of the sandbox fails and names the file.
    """

    sandbox: str
    lasting: bool
    path: str


class Cancel(Wire, frozen=True, tag="cancel"):
    """Nobody waits for call `id` any more: stop the call and send nothing."""

    id: int


class End(Wire, frozen=True, tag="end"):
    """End a sandbox, its processes and its work directory."""

    sandbox: str


class Ready(Wire, frozen=True, tag="ready"):
    """What the host offers. Each layer of the sandbox is "active", or the text says why the layer is missing."""

    layers: dict[str, str]
    python: bool
    shell: bool


class RemoteTool(Wire, frozen=True):
    """A tool of an MCP server as models see the tool.

    `server` is the name of the server. With `strict` the schema is one that grammars can follow.
    """

    name: str
    server: str
    description: str
    schema: dict[str, Any]
    strict: bool = False


class Remotes(Wire, frozen=True, tag="remotes"):
    """The MCP servers of the host: how many are connected, and all of their tools. Sent after `Ready`, and on changes.

    Without MCP servers the message does not come.
    """

    connected: int
    tools: list[RemoteTool]


class PythonResult(Wire, frozen=True, tag="python"):
    """End of a `PythonCall`. `result` is the repr of a last expression, `images_png` are the figures of matplotlib.

    After a timeout `interrupted` says whether the code was interrupted, `killed` whether the interpreter is gone.
    """

    status: Literal["success", "error", "timeout"]
    execution_time_ms: int
    working_directory: str
    stdout: str = ""
    stderr: str = ""
    exception: str = ""
    result: str = ""
    result_type: str = ""
    images_png: list[bytes] = msgspec.field(default_factory=list)
    interrupted: bool = False
    killed: bool = False


class ShellResult(Wire, frozen=True, tag="shell"):
    """End of a `ShellCall`. After a timeout there is no `exit_code`, and the output so far is kept."""

    status: Literal["success", "error", "timeout"]
    working_directory: str
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    timed_out: bool = False


class SurfaceResult(Wire, frozen=True, tag="surface"):
    """End of a `SurfaceCall`."""

    status: Literal["success", "error"]


class ResetResult(Wire, frozen=True, tag="reset"):
    """End of a `ResetCall`."""

    status: Literal["success", "error"]


class RemoteResult(Wire, frozen=True, tag="remote"):
    """End of a `RemoteCall`: what the server answered, as a text."""

    status: Literal["success", "error"]
    text: str


Result = PythonResult | ShellResult | SurfaceResult | ResetResult | RemoteResult


class Produced(Wire, frozen=True):
    """A file that a call left: its relative path and size. With `error` no descriptor comes.

    Errors: `not_produced`, `too_large`, `refused` (no regular file of its own name), `unreadable`.
    """

    path: str
    nbytes: int
    error: str = ""


class Done(Wire, frozen=True, tag="done"):
    """The end of a call. A descriptor follows for each of `produced` without error, in order, at offset 0.

    `left` further files were produced and stay in the work directory.
    """

    id: int
    result: Result
    produced: list[Produced] = msgspec.field(default_factory=list)
    left: int = 0


class Failed(Wire, frozen=True, tag="failed"):
    """The sandbox could not run the call; a failure of the tool's own is a `Done`."""

    id: int
    message: str


ToHost = Run | Mount | Cancel | End
ToFrontend = Ready | Remotes | Done | Failed
"""The messages that each side may send."""

_encoder = msgspec.msgpack.Encoder()
to_host: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(ToHost)
to_frontend: msgspec.msgpack.Decoder[ToFrontend] = msgspec.msgpack.Decoder(ToFrontend)


def descriptors_of(message: ToHost | ToFrontend) -> int:
    """How many descriptors belong to a message."""
    if isinstance(message, Done):
        return sum(not each.error for each in message.produced)
    return int(isinstance(message, Mount))


class _Frame:
    """A message on its way out; owns its descriptors."""

    __slots__ = ("data", "fds")

    def __init__(self, message: ToHost | ToFrontend, fds: Sequence[int]) -> None:
        text = _encoder.encode(message)
        if len(text) > MAX_NBYTES:
            raise ProtocolError(f"message of {len(text)} bytes is over {MAX_NBYTES}")
        if len(fds) > MAX_DESCRIPTORS or len(fds) != descriptors_of(message):
            raise ProtocolError(f"{len(fds)} descriptors do not fit the message")
        self.data = memoryview(_HEAD.pack(len(text), len(fds)) + text)
        self.fds = list(fds)

    def close(self) -> None:
        """Close the descriptors that have not left."""
        close_all(self.fds)
        self.fds = []


class Link:
    """One end of a connection. All methods belong to the event loop's thread."""

    def __init__(
        self,
        connection: socket.socket,
        decoder: msgspec.msgpack.Decoder[Any],
        receive: Callable[[Any, list[int]], None],
        ended: Callable[[str], None],
    ) -> None:
        """`receive` gets each message with its descriptors, which it owns. `ended` is called once, with the reason."""
        connection.setblocking(False)
        self._socket, self._decoder = connection, decoder
        self._receive, self._ended = receive, ended
        self._loop = asyncio.get_running_loop()
        self._out: deque[_Frame] = deque()
        self._in = bytearray()
        self._fds: deque[int] = deque()
        self.closed = False
        self._loop.add_reader(connection, self._readable)

    def send(self, message: ToHost | ToFrontend, fds: Sequence[int] = ()) -> None:
        """Send soon; the link owns `fds` and closes them. Nothing is sent after the end.

        Raises `ProtocolError` for a message over a limit, without sending any of it.
        """
        if self.closed:
            close_all(fds)
            return
        try:
            frame = _Frame(message, fds)
        except ProtocolError:
            close_all(fds)
            raise
        self._out.append(frame)
        if len(self._out) == 1:
            self._writable()

    def close(self) -> None:
        """Close the connection without a call of `ended`."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        close_all(self._fds)
        for frame in self._out:
            frame.close()
        self._out.clear()

    def _end(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._ended(reason)

    def _writable(self) -> None:
        try:
            while self._out:
                frame = self._out[0]
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", frame.fds))] if frame.fds else []
                sent = self._socket.sendmsg([frame.data], rights)
                frame.close()
                frame.data = frame.data[sent:]
                if not frame.data:
                    self._out.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._writable)
            return
        except OSError as error:
            # The reader sees the end as well; a caller of `send` must not.
            self._loop.call_soon(self._end, f"sending failed: {error.strerror}")
            return
        self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                _READ_NBYTES, _ANCILLARY_NBYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError as error:
            self._end(f"reading failed: {error.strerror}")
            return
        for level, kind, rights in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array("i")
                fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
                self._fds.extend(fds)
        if not data:
            self._end("the connection has ended")
            return
        self._in += data
        try:
            if flags & socket.MSG_CTRUNC:
                raise ProtocolError("descriptors were lost")
            self._take()
        except ProtocolError as error:
            self._end(error.message)

    def _take(self) -> None:
        """Hand out all whole messages. Raises `ProtocolError`."""
        while not self.closed and len(self._in) >= _HEAD.size:
            nbytes, count = _HEAD.unpack_from(self._in)
            if nbytes > MAX_NBYTES or count > MAX_DESCRIPTORS:
                raise ProtocolError(f"a message of {nbytes} bytes with {count} descriptors is over the limit")
            if len(self._in) < _HEAD.size + nbytes:
                break
            text = bytes(memoryview(self._in)[_HEAD.size : _HEAD.size + nbytes])
            del self._in[: _HEAD.size + nbytes]
            try:
                message = self._decoder.decode(text)
            except _UNDECODABLE as error:
                raise ProtocolError(f"undecodable message: {error}") from error
            if count != descriptors_of(message) or len(self._fds) < count:
                raise ProtocolError(f"{count} descriptors do not fit the message")
            self._receive(message, [self._fds.popleft() for _ in range(count)])
        if len(self._fds) > MAX_DESCRIPTORS:
            raise ProtocolError("descriptors without a message")


def close_all(fds: Sequence[int] | deque[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
