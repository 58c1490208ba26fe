"""The comparison for large responses: a process that only writes the same bytes to a loopback socket."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
from collections.abc import Iterator

from benchmarks.load import Address

_SLICE_NBYTES = 512 << 10


def serve(listener: socket.socket, largest_nbytes: int) -> None:
    """Answer `GET /<nbytes>` on one connection at a time with that many bytes from warm memory, until killed."""
    content = memoryview(bytearray(b"x" * largest_nbytes))
    while True:
        connection, _ = listener.accept()
        with connection:
            while request := connection.recv(65536):
                nbytes = int(request.split()[1][1:])
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % nbytes)
                for start in range(0, nbytes, _SLICE_NBYTES):
                    connection.sendall(content[start : min(start + _SLICE_NBYTES, nbytes)])


@contextlib.contextmanager
def loopback(largest_nbytes: int) -> Iterator[Address]:
    """Run such a process for bodies up to `largest_nbytes`, and give its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address: Address = ("127.0.0.1", listener.getsockname()[1])
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=serve, args=(listener, largest_nbytes), daemon=True)
        process.start()
        try:
            yield address
        finally:
            process.kill()
            process.join()


def request(nbytes: int) -> bytes:
    """A request for `nbytes` bytes."""
    return b"GET /%d HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % nbytes
