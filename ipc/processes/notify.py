"""The sd_notify datagram protocol, both sides: processes report, systemd or the embedded supervisor listens.

Fields used: READY=1, STOPPING=1, STATUS=text, WATCHDOG=1.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

_BEHIND = (errno.EAGAIN, errno.ENOBUFS)


class Notifier:
    """Sends fields to the socket in `address` (`$NOTIFY_SOCKET` unless given); silent when there is none."""

    def __init__(self, address: str | None = None) -> None:
        self.address = os.environ.get("NOTIFY_SOCKET", "") if address is None else address
        self._socket = (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) if self.address else None
        )
        if self._socket is not None:
            self._socket.setblocking(False)

    def send(self, **fields: str | int) -> bool:
        """Send upper-cased fields, for example `send(ready=1, status="2 models loaded")`. Never raises or waits.

        False when the listener is behind and the fields were lost: what must arrive is to be sent again. One that is
        gone loses nothing.
        """
        if self._socket is None:
            return True
        target = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            self._socket.sendto("\n".join(f"{k.upper()}={v}" for k, v in fields.items()).encode(), target)
        except OSError as error:
            return error.errno not in _BEHIND
        return True


class Listener:
    """Bound datagram socket of one child."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.bind(str(path))
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """Descriptor to poll."""
        return self._socket.fileno()

    def receive(self) -> dict[str, str]:
        """All fields that have arrived, later ones winning."""
        fields: dict[str, str] = {}
        while True:
            try:
                data = self._socket.recv(4096)
            except BlockingIOError:
                return fields
            for line in data.decode("utf-8", "replace").splitlines():
                name, _, value = line.partition("=")
                fields[name] = value

    def close(self) -> None:
        """Close and remove the socket."""
        self._socket.close()
        self.path.unlink(missing_ok=True)
