"""Load from one event loop with raw sockets: closed loop for a capacity, open loop for an overload. Light on CPU."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Reply:
    """One answer: when it was asked and answered (monotonic seconds), and what was said."""

    began: float
    ended: float
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def took_s(self) -> float:
        """Latency."""
        return self.ended - self.began

    @property
    def code(self) -> str:
        """Error code of the SIE form."""
        return str(json.loads(self.body)["detail"]["code"])


@dataclass
class Replies:
    """All answers of a load, and what got none."""

    replies: list[Reply] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def of(self, status: int) -> list[Reply]:
        """Answers with this status."""
        return [reply for reply in self.replies if reply.status == status]

    def rate(self, began: float, ended: float) -> float:
        """Successful answers per second that ended in this span."""
        return sum(1 for reply in self.of(200) if began <= reply.ended < ended) / (ended - began)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of all lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


class OpenLoad:
    """Encode requests for one model, one text each, over kept connections."""

    def __init__(self, port: int, model: str, text: str, headers: Mapping[str, str] | None = None) -> None:
        self._port, self._model, self._text = port, model, text
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._number = 0

    async def close(self) -> None:
        """End all connections."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    def _request(self) -> bytes:
        self._number += 1
        body = json.dumps({"items": [{"text": f"{self._number:08d} {self._text}"}]}).encode()
        head = f"POST /v1/encode/{self._model} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        return f"{head}{self._headers}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def ask(self, found: Replies) -> int | None:
        """One request on an idle connection or a new one. Returns the status, None where no answer came."""
        began = time.monotonic()
        try:
            pair = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
            pair[1].write(self._request())
            status, headers, body = await _response(pair[0])
        except (OSError, EOFError) as error:
            found.broken.append(repr(error))
            return None
        found.replies.append(Reply(began, time.monotonic(), status, headers, body))
        if headers.get("connection") == "close":
            pair[1].close()
        else:
            self._idle.append(pair)
        return status

    async def closed(self, clients: int, seconds: float) -> Replies:
        """`clients` that each wait for an answer before they ask again."""
        found, until = Replies(), time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < until:
                await self.ask(found)

        await asyncio.gather(*(client() for _ in range(clients)))
        return found

    async def press(self, clients: int, found: Replies, refused: asyncio.Event, ended: asyncio.Event) -> None:
        """`clients` that ask again after each answer until `ended` is set.

        A client without a result sets `refused` and pauses for 0.2 s.
        """

        async def client() -> None:
            while not ended.is_set():
                if await self.ask(found) != 200:
                    refused.set()
                    await asyncio.sleep(0.2)

        await asyncio.gather(*(client() for _ in range(clients)))

    async def open(self, per_second: float, seconds: float) -> Replies:
        """Requests at fixed instants, whatever becomes of those before."""
        found, start = Replies(), time.monotonic()
        tasks: list[asyncio.Task[Any]] = []
        for number in range(int(per_second * seconds)):
            await asyncio.sleep(max(0.0, start + number / per_second - time.monotonic()))
            tasks.append(asyncio.create_task(self.ask(found)))
        await asyncio.gather(*tasks)
        return found


async def _response(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return int(status.split()[1]), headers, body
