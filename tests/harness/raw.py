"""A client on a bare socket: it sends whole requests, reads as slowly as a test wants, and vanishes when told to."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any


class RawClient:
    """One connection; `receive_nbytes` bounds the kernel's receive buffer, so that the server feels it."""

    def __init__(self, port: int, receive_nbytes: int = 0, timeout_s: float = 30.0) -> None:
        self.socket = socket.socket()
        if receive_nbytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_nbytes)
        self.socket.settimeout(timeout_s)
        self.socket.connect(("127.0.0.1", port))
        self._held = b""
        self.expected_nbytes = 0
        """Content-Length of the last head that was read."""

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Vanish; the server sees the end of the connection, or a reset when bytes were unread."""
        self.socket.close()

    def encode(
        self,
        model: str,
        texts: Sequence[str],
        accept: str = "application/msgpack",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send POST /v1/encode of texts and read nothing."""
        body = json.dumps({"items": [{"text": text} for text in texts]}).encode()
        fields = {
            "Host": "test",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Accept": accept,
            **(headers or {}),
        }
        head = f"POST /v1/encode/{model} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fields.items())
        self.socket.sendall(head.encode() + b"\r\n" + body)

    def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers (lower-case names) of the next response; the body is left unread."""
        while b"\r\n\r\n" not in self._held:
            self._held += self._receive(4096)
        raw, _, self._held = self._held.partition(b"\r\n\r\n")
        status, *lines = raw.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        self.expected_nbytes = int(headers.get("content-length", "0"))
        return int(status.split()[1]), headers

    def read(self, nbytes: int) -> bytes:
        """Exactly `nbytes` of a body; raises `ConnectionError` when the connection ends before."""
        parts, missing = [self._held[:nbytes]], nbytes - len(self._held)
        self._held = self._held[nbytes:]
        while missing > 0:
            part = self._receive(min(missing, 1 << 20))
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """One whole response."""
        status, headers = self.head()
        return status, headers, self.read(self.expected_nbytes)

    def json(self) -> tuple[int, Any]:
        """Status and JSON body of one whole response."""
        status, _, body = self.answer()
        return status, json.loads(body)

    def _receive(self, nbytes: int) -> bytes:
        part = self.socket.recv(nbytes)
        if not part:
            raise ConnectionError("the connection ended within a response")
        return part


def accepts(port: int) -> bool:
    """Whether a server takes connections. A listener that closes resets who waits there to be accepted."""
    try:
        RawClient(port).close()
    except ConnectionError:
        return False
    return True
