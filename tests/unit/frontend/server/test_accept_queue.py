"""A long accept queue: a frontend takes in many connections per turn of the loop, few of a short one."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvloop
from uvicorn.config import Config

from frontend.server.drain import Drain
from frontend.server.protocol import PenstockProtocol
from frontend.server.serving import DrainingServer
from frontend.server.state import ServerLimits, waiting_count


async def no_application(scope: Any, receive: Any, send: Any) -> None:
    """No client of these tests sends a request."""
    raise AssertionError(scope)


async def turns_until_accepted(count: int) -> int:
    """Turns of the loop that a frontend needs to accept `count` connections, which wait when the frontend starts."""
    config = Config(no_application, http=PenstockProtocol, lifespan="off", log_config=None)
    config.load()
    server = DrainingServer(config, ServerLimits(), Drain(), heartbeat=lambda: None)
    server.lifespan = config.lifespan_class(config)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        listener.setblocking(False)
        clients = [socket.create_connection(listener.getsockname()) for _ in range(count)]
        assert waiting_count(listener) == count
        await server.startup(sockets=[listener])
        turns = 0
        while len(server.server_state.connections) < count:
            await asyncio.sleep(0)
            turns += 1
        assert waiting_count(listener) == 0
        server.force_exit = True
        await server.shutdown()
        assert waiting_count(listener) == 0
        for client in clients:
            client.close()
    return turns


def test_a_long_queue_is_shortened_by_many_per_turn() -> None:
    turns = uvloop.run(turns_until_accepted(600))
    assert turns < 250, "the loop's own pace is one per turn"


def test_frontends_share_a_short_queue_one_by_one() -> None:
    assert uvloop.run(turns_until_accepted(100)) >= 100


def test_what_is_no_open_listener_has_no_queue() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.close()
    assert waiting_count(listener) == 0
    with socket.socket(socket.AF_UNIX) as unix:
        assert waiting_count(unix) == 0
