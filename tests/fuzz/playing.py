"""Plays sessions, many at a time, and reads what the server answers."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.fuzz.session import Session

QUIET_S = 0.25
"""A server that has said nothing for so long, and whose client asks no more, is left."""
LONGEST_S = 5.0
AT_ONCE = 16
_STATUS = re.compile(rb"HTTP/1\.1 ([1-5][0-9]{2}) [^\r\n]*\r\n")
_LENGTH = re.compile(rb"^content-length: ([0-9]+)\r?$", re.MULTILINE | re.IGNORECASE)
_CHUNKED = re.compile(rb"^transfer-encoding: chunked\r?$", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Played:
    """What came back, and whether the server ended the connection."""

    received: bytes
    ended: bool


def play(sessions: Sequence[Session], ports: Mapping[str, int], quiet_s: float = QUIET_S) -> list[Played]:
    """All sessions, their outcomes in the same order."""

    async def run() -> list[Played]:
        room = asyncio.Semaphore(AT_ONCE)

        async def one(session: Session) -> Played:
            async with room:
                return await _play(session, ports[session.door], quiet_s)

        return await asyncio.gather(*map(one, sessions))

    return asyncio.run(run())


async def _play(session: Session, port: int, quiet_s: float) -> Played:
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        heard = bytearray()
        hearing = loop.create_task(_hear(client, heard))
        try:
            stays = await _act(session, client, hearing, heard)
            if stays:
                await _until_quiet(hearing, heard, quiet_s)
        except (OSError, TimeoutError):
            pass
        ended = hearing.done()
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        return Played(bytes(heard), ended)


async def _act(
    session: Session, client: socket.socket, hearing: asyncio.Task[None], heard: bytearray
) -> bool:
    """Take all steps; whether the client stays for the answer."""
    loop = asyncio.get_running_loop()
    for verb, data in session.steps:
        if verb == "send":
            await asyncio.wait_for(loop.sock_sendall(client, data), LONGEST_S)
        elif verb == "wait":
            await _until_quiet(hearing, heard)
        elif verb == "half":
            client.shutdown(socket.SHUT_WR)
        else:
            if verb == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
    return True


async def _hear(client: socket.socket, heard: bytearray) -> None:
    loop = asyncio.get_running_loop()
    try:
        while piece := await loop.sock_recv(client, 1 << 16):
            heard += piece
    except ConnectionError:
        pass


async def _until_quiet(hearing: asyncio.Task[None], heard: bytearray, quiet_s: float = QUIET_S) -> None:
    limit = time.monotonic() + LONGEST_S
    while not hearing.done() and time.monotonic() < limit:
        before = len(heard)
        await asyncio.wait([hearing], timeout=quiet_s)
        if len(heard) == before:
            return


def statuses_of(received: bytes, *, bodies: bool = True) -> list[int]:
    """Statuses of a row of HTTP/1.1 responses, the last of which may be cut; without `bodies` only the first.

    Raises `ValueError` where what came is no such row.
    """
    found: list[int] = []
    at = 0
    while at < len(received):
        head, end = _STATUS.match(received, at), received.find(b"\r\n\r\n", at)
        if head is None and len(received) - at > 64:
            raise ValueError(f"no response after {found}: {received[at : at + 80]!r}")
        if head is None:
            break
        found.append(int(head[1]))
        if end < 0 or found[-1] == 101 or not bodies:
            break
        at = end + 4 + _body_nbytes(received, end + 4, received[at : end + 2], found[-1])
    return found


def _body_nbytes(received: bytes, at: int, head: bytes, status: int) -> int:
    if status < 200 or status in (204, 304):
        return 0
    length = _LENGTH.search(head)
    if length is not None:
        return int(length[1])
    if _CHUNKED.search(head) is None:
        return len(received) - at
    end = received.find(b"\r\n0\r\n\r\n", at - 2)
    return len(received) - at if end < 0 else end + 7 - at
