"""Who may open the status stream, and what a slow viewer of it gets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.access.gate import Gate
from frontend.engine.interface import WorkerView
from frontend.server.drain import Drain
from frontend.server.websocket import is_handshake
from frontend.services import Services
from frontend.status.stream import Feed, origin_allowed
from ipc.catalog.entries import Catalog
from ipc.errors import QueueFull
from ipc.settings import load

KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
SOUND = ((b"host", b"x"), (b"sec-websocket-key", KEY), (b"sec-websocket-version", b"13"))


@pytest.mark.parametrize(
    ("origin", "host", "allowed", "expected"),
    [
        (None, "a:8080", "", True),
        ("http://a:8080", "a:8080", "", True),
        ("https://a", "a", "", True),
        ("https://a:443", "a", "", True),
        ("http://A.example", "a.EXAMPLE", "", True),
        ("http://[::1]:8080", "[::1]:8080", "", True),
        ("http://a:3000", "a:8080", "", False),
        ("http://evil.example", "a:8080", "", False),
        ("http://a.evil.example:8080", "a:8080", "", False),
        ("null", "a:8080", "", False),
        ("", "a:8080", "", False),
        ("http://a:99999", "a:8080", "", False),
        ("http://[", "a", "", False),
        ("http://tool.example", "a:8080", "https://other, http://Tool.example/", True),
        ("http://anywhere", "a:8080", "*", True),
    ],
)
def test_pages_of_another_origin_are_refused(
    origin: str | None, host: str, allowed: str, expected: bool
) -> None:
    assert origin_allowed(origin, host, allowed) is expected


@pytest.mark.parametrize(
    ("method", "version", "fields", "expected"),
    [
        (b"GET", "1.1", SOUND, True),
        (b"GET", "1.1", (*SOUND, (b"content-length", b"0")), True),
        (b"POST", "1.1", SOUND, False),
        (b"GET", "1.0", SOUND, False),
        (b"GET", "1.1", SOUND[1:2], False),
        (b"GET", "1.1", (*SOUND[:2], (b"sec-websocket-version", b"8")), False),
        (b"GET", "1.1", (SOUND[2],), False),
        (b"GET", "1.1", ((b"sec-websocket-key", b"c2hvcnQ="), SOUND[2]), False),
        (b"GET", "1.1", ((b"sec-websocket-key", b"\xff\xfe!"), SOUND[2]), False),
        (b"GET", "1.1", (*SOUND, SOUND[1]), False),
        (b"GET", "1.1", (*SOUND, (b"content-length", b"5")), False),
        (b"GET", "1.1", (*SOUND, (b"transfer-encoding", b"chunked")), False),
    ],
)
def test_only_a_sound_handshake_is_taken(
    method: bytes, version: str, fields: tuple[tuple[bytes, bytes], ...], expected: bool
) -> None:
    assert is_handshake(method, version, fields) is expected


class CountingFeed(Feed):
    """A feed whose frames are their numbers."""

    async def _publish(self) -> None:
        self._number += 1
        self._frame = str(self._number)
        self._wake()


class WatchedDirectory:
    """Notes whether the workers are watched."""

    def __init__(self) -> None:
        self.on = False

    def watch(self, on: bool) -> bool:
        self.on = on
        return True

    def workers(self) -> list[WorkerView]:
        return []


def feed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> tuple[CountingFeed, Services]:
    monkeypatch.setattr("frontend.status.stream.EVERY_S", 0.004)
    flags = {"run.dir": str(tmp_path), **{f"limits.{name}": str(value) for name, value in limits.items()}}
    services = Services(load(None, flags), Catalog([]), Gate(), drain=Drain())
    services.directory = WatchedDirectory()  # type: ignore[assignment]
    return CountingFeed(services), services


def test_a_slow_viewer_gets_the_newest_frame_and_not_those_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        made, _ = feed(tmp_path, monkeypatch)
        with made.viewer():
            frames = made.frames()
            assert await anext(frames) == "1"
            async for other in made.frames():
                if int(other) >= 10:
                    break
            assert int(await anext(frames)) >= 10

    asyncio.run(scenario())


def test_what_was_counted_is_written_before_a_frame_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    _, services = feed(tmp_path, monkeypatch)
    services.engine = SimpleNamespace(ready=lambda: (True, ""))  # type: ignore[assignment]
    services.recorder = SimpleNamespace(flush=lambda: order.append("written"))  # type: ignore[assignment]
    made = Feed(services)
    monkeypatch.setattr(made, "_encode", lambda view: order.append("read") or ("", None))
    asyncio.run(made._publish())
    assert order == ["written", "read"]


def test_the_workers_are_watched_only_while_somebody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        made, services = feed(tmp_path, monkeypatch)
        watched: WatchedDirectory = services.directory  # type: ignore[assignment]
        for _ in range(2):
            assert not watched.on
            with made.viewer():
                assert await anext(made.frames()) == "1"
                assert watched.on
            assert made._task is not None
            await made._task

    asyncio.run(scenario())


def test_one_viewer_more_than_allowed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        made, _ = feed(tmp_path, monkeypatch, max_status_streams=1)
        made.require_place()
        with made.viewer(), pytest.raises(QueueFull, match="max_status_streams"):
            made.require_place()
        made.require_place()

    asyncio.run(scenario())


def test_a_drain_ends_the_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        made, services = feed(tmp_path, monkeypatch)
        with made.viewer():
            async for _ in made.frames():
                services.drain.begin()

    asyncio.run(asyncio.wait_for(scenario(), 60))
