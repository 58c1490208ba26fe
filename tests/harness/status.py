"""Viewers of a server's status stream."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.harness.server import PATIENCE_S, Server, stopped, wait_until

Frame = dict[str, Any]


@contextlib.contextmanager
def watching(server: Server, **options: Any) -> Iterator[ClientConnection]:
    """An open status stream."""
    address = f"ws://127.0.0.1:{server.port}/ws/status"
    with connect(
        address,
        open_timeout=PATIENCE_S,
        ping_interval=None,
        compression=None,
        proxy=None,
        max_size=16 << 20,
        **options,
    ) as socket:
        yield socket


def next_frame(socket: ClientConnection) -> Frame:
    """The next frame."""
    text = socket.recv(PATIENCE_S)
    assert isinstance(text, str), "frames are text messages"
    return dict(json.loads(text))


def frame_when(
    socket: ClientConnection,
    condition: Callable[[Frame], Any],
    timeout_s: float = PATIENCE_S,
    what: str = "a frame",
) -> Frame:
    """The first frame for which `condition` holds."""
    found: list[Frame] = []

    def look() -> bool:
        found[:] = [next_frame(socket)]
        return bool(condition(found[0]))

    wait_until(look, timeout_s, what)
    return found[0]


@contextlib.contextmanager
def only_frontend(server: Server, pid: int) -> Iterator[None]:
    """Every other frontend is stopped meanwhile, so that `pid` answers."""
    with stopped(*(other for other in server.frontend_pids() if other != pid)):
        yield


def wait_joined(server: Server) -> None:
    """Wait until every frontend is ready and knows every worker; the server itself is ready with the first one."""
    count, workers = (
        int(server.environment[f"PENSTOCK_{name}"]) for name in ("SERVER__FRONTENDS", "WORKER__COUNT")
    )

    def joined(frame: Frame) -> bool:
        # NOTE: a frame lists the workers that its frontend has met; the second one may come before the first.
        states = [device["state"] for device in frame["devices"]]
        return frame["ready"] and states == ["ready"] * workers

    wait_until(lambda: len(server.frontend_pids()) == count, what="all frontends")
    for pid in server.frontend_pids():
        with only_frontend(server, pid), watching(server) as viewer:
            frame_when(viewer, joined, what="all workers at all frontends")
