"""Ten thousand streams of generated text at once, and a thousand one after another: each ends once, nothing is left."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.harness.chat import MODEL, chat_catalogs, held_blocks, sequences
from tests.harness.server import Server, serving, wait_until

pytestmark = pytest.mark.long

MANY = 10_000
TOKENS = 16
AT_A_TIME = 500
"""Connections that are opened together; a listener's accept queue takes no more than 2,048."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Clients:
    """Streams of one event loop. `answers` counts their status; those with 200 are whole."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.answers: Counter[str] = Counter()

    async def _opened(self, head: str, body: str = "") -> Connection:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"{head} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        return reader, writer

    async def _asked(self, number: int) -> Connection:
        fields = {"max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        messages = [{"role": "user", "content": f"question {number}"}]
        return await self._opened(
            "POST /v1/chat/completions", json.dumps({"model": MODEL, "messages": messages, **fields})
        )

    async def _ended(self, connection: Connection) -> None:
        reader, writer = connection
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        status = head.split(b" ", 2)[1].decode()
        if status == "200":
            assert rest.count(b"data: [DONE]") == 1 and rest.count(b'"finish_reason":"length"') == 1, rest[
                -500:
            ]
            assert b'"error"' not in rest
        else:
            assert b"retry-after:" in head.lower() and b'"message"' in rest, (head, rest)
        self.answers[status] += 1

    async def _know_all_accepted(self) -> None:
        """The accept queue is in order: with an answer, all connections before have left the queue."""
        reader, writer = await self._opened("GET /livez")
        # NOTE: `writer` lives until the answer is here; a writer that nobody holds closes its connection.
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 "), answer

    async def ask_all(self, count: int) -> None:
        """So many streams at once, read to their ends."""
        connections: list[Connection] = []
        for first in range(0, count, AT_A_TIME):
            numbers = range(first, min(first + AT_A_TIME, count))
            connections += await asyncio.gather(*map(self._asked, numbers))
            await self._know_all_accepted()
        await asyncio.gather(*map(self._ended, connections))


def is_idle(server: Server) -> bool:
    """Whether no request is left, and no block is held."""
    return not (
        server.metric("penstock_requests_in_flight", model=MODEL)
        or sequences(server, "running")
        or sequences(server, "waiting")
        or held_blocks(server)
    )


@pytest.mark.parametrize(("waiting", "least"), [(256, 1), (MANY, MANY)])
def test_ten_thousand_streams_are_answered_or_refused(tmp_path: Path, waiting: int, least: int) -> None:
    settings = {
        "server.frontends": 2,
        "catalog.dirs": chat_catalogs(tmp_path),
        "generation.max_waiting": waiting,
        "queue.min_tokens": 100 * MANY * TOKENS,
        "generation.first_token_timeout_s": 1200,
        "limits.request_timeout_s": 1200,
    }
    with serving(
        tmp_path, models=(MODEL, "fake/echo", "fake/slow"), settings=settings, supervised=False
    ) as server:
        frontends = [psutil.Process(pid) for pid in server.frontend_pids()]
        before = [process.num_fds() for process in frontends]
        clients = Clients(server.port)
        asyncio.run(clients.ask_all(MANY))
        assert clients.answers.total() == MANY and set(clients.answers) <= {"200", "429", "503"}
        assert clients.answers["200"] >= least
        print(clients.answers, [process.memory_info().rss >> 20 for process in frontends], "MiB")
        wait_until(lambda: is_idle(server), what="the end of all sequences")
        wait_until(
            lambda: [process.num_fds() for process in frontends] <= [count + 8 for count in before],
            what="the end of all connections",
        )
        assert server.encode("fake/echo", ["still here"]).status == 200


def test_a_thousand_streams_after_another_leave_no_memory(tmp_path: Path) -> None:
    settings = {"catalog.dirs": chat_catalogs(tmp_path)}
    with serving(
        tmp_path, models=(MODEL, "fake/echo", "fake/slow"), settings=settings, supervised=False
    ) as server:
        worker = server.worker_pid()
        assert worker is not None
        processes = [psutil.Process(pid) for pid in (worker, *server.frontend_pids())]
        sizes = []
        for _ in range(10):
            clients = Clients(server.port)
            for _ in range(10):
                asyncio.run(clients.ask_all(20))
            assert clients.answers == {"200": 200}
            wait_until(lambda: is_idle(server), what="the end of all sequences")
            sizes.append([process.memory_info().rss for process in processes])
        print([[size >> 20 for size in row] for row in sizes], "MiB")
        for early, late in zip(sizes[4], sizes[-1], strict=True):
            assert late - early < 8 << 20, "a thousand streams more, and memory has grown"
