"""The head of a response that waits for the first piece of its body, over a real connection."""

from __future__ import annotations

import asyncio
from typing import Any

import uvloop

from frontend.server.protocol import HeadWithBody


async def outcome(leave: bool) -> tuple[bytes, list[dict[str, Any]]]:
    """What the client of a held head reads, and the errors of the loop; the client may leave in the same turn."""
    errors: list[dict[str, Any]] = []
    accepted: asyncio.Future[asyncio.Transport] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

    class Accepting(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            accepted.set_result(transport)

    server = await asyncio.get_running_loop().create_server(Accepting, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    transport = await accepted
    if leave:
        transport.abort()
    HeadWithBody(transport).write(b"head")
    asyncio.get_running_loop().call_soon(transport.close)
    read = await reader.read()
    writer.close()
    server.close()
    return read, errors


def test_the_head_leaves_in_the_next_turn() -> None:
    assert uvloop.run(outcome(leave=False)) == (b"head", [])


def test_the_head_of_a_connection_that_has_ended_is_dropped() -> None:
    assert uvloop.run(outcome(leave=True)) == (b"", [])
