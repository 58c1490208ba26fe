"""R24: the Nth operation of the layer between frontends and workers fails, for every N.

Endpoint and client run in this process, over a real socket and a real arena. After each failure the table of blocks
must be whole, all bytes must come back once the sessions have ended, and the same endpoint must still serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from frontend.engine.local import channel, client, dealer
from frontend.engine.local.client import Client
from ipc import deadline
from ipc.errors import PenstockError
from ipc.memory.arena import Arena, LeaseTable
from ipc.processes.paths import RunPaths, prepare_run_dir
from ipc.settings import Arena as ArenaSettings
from ipc.settings import Limits, Settings
from ipc.store.store import Store
from ipc.wire.messages import EncodeCall, InferCall, InputItem, TensorInput, TensorOutput, Work
from tests.fakes.handler import MODEL, NBYTES, AnsweringHandler, answer_of
from workers.endpoint import endpoint as router
from workers.endpoint.endpoint import Endpoint

WATCHED = ("ipc.", "frontend.engine.local.", "workers.endpoint.")
EPOCH = "0123456789abcdef"
SETTINGS = Settings(
    limits=Limits(restart_wait_s=10.0, request_timeout_s=15.0), arena=ArenaSettings(input_bytes=1 << 20)
)

OPERATIONS: list[tuple[Any, str, Callable[[], Exception]]] = [
    (zmq.Context, "socket", lambda: zmq.ZMQError(errno.EMFILE)),
    (zmq.Socket, "bind", lambda: zmq.ZMQError(errno.EADDRINUSE)),
    (zmq.Socket, "connect", lambda: zmq.ZMQError(errno.EMFILE)),
    (dealer, "send", zmq.Again),
    (router, "send", lambda: zmq.ZMQError(errno.EHOSTUNREACH)),
    (dealer, "receive", zmq.Again),
    (router, "receive", zmq.Again),
    (os, "open", lambda: OSError(errno.EMFILE, "too many open files")),
    (os, "fstat", lambda: OSError(errno.EIO, "input/output error")),
    (os, "eventfd", lambda: OSError(errno.EMFILE, "too many open files")),
    (os, "pidfd_open", lambda: OSError(errno.EMFILE, "too many open files")),
    (os, "posix_fallocate", lambda: OSError(errno.ENOSPC, "no space left")),
    (mmap, "mmap", lambda: OSError(errno.ENOMEM, "cannot allocate memory")),
    (Path, "iterdir", lambda: OSError(errno.EMFILE, "too many open files")),
    (Path, "read_bytes", lambda: OSError(errno.EMFILE, "too many open files")),
]


class Faults:
    """Counts the operations of `ipc` and of both ends of the socket, and lets one of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self._left = 0
        self._only = self.failed = ""
        for owner, name, error in OPERATIONS:
            monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name), name, error))

    def _wrapped(self, operation: Callable[..., Any], name: str, error: Callable[[], Exception]) -> Any:
        @functools.wraps(operation, updated=())
        def counted(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if frame.f_globals.get("__name__", "").startswith(WATCHED) and self._only in ("", name):
                with self._lock:
                    self._left -= 1
                    due = self._left == 0
                if due:
                    self.failed = f"{name} in {frame.f_globals['__name__']}.{frame.f_code.co_name}"
                    raise error()
            return operation(*args, **kwargs)

        return counted

    @contextlib.contextmanager
    def on(self, number: int, only: str = "") -> Iterator[None]:
        """Operation `number` (from 1) fails inside this block; of those called `only`, if it is given."""
        self.failed, self._only, self._left = "", only, number
        yield
        self._left = 0


class Peer:
    """The worker side, in a thread of its own; `error` is what escaped its loop."""

    def __init__(self, paths: RunPaths) -> None:
        self.error: BaseException | None = None
        self.arena = Arena(paths.arena(0, EPOCH), 1 << 20, EPOCH)
        try:
            self.leases = LeaseTable(self.arena)
            self.handler = AnsweringHandler(self.arena.path, EPOCH, self.leases)
            self.endpoint = Endpoint(paths, 0, self.leases, self.handler, tick_s=0.05)
        except BaseException:
            self.arena.close()
            raise
        self.handler.endpoint = self.endpoint
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.endpoint.run()
        except BaseException as error:
            self.error = error

    def call(self, work: Callable[[], None]) -> None:
        """Run `work` in the endpoint's thread and wait for it."""
        done = threading.Event()
        self.endpoint.post(work)
        self.endpoint.post(done.set)
        assert done.wait(60), f"the endpoint's loop has ended: {self.error!r}"

    def drop_all(self) -> None:
        """End every session, as the death of its process would."""
        for session in self.endpoint.sessions:
            self.endpoint.drop(session, "the test ended it")

    def close(self) -> None:
        """Stop the loop and remove the arena."""
        self.endpoint.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.endpoint.close()
        self.arena.close()


def open_descriptors() -> int:
    """Descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def work_of(text: str) -> Work:
    """A call that is answered with `answer_of(text)`."""
    call = EncodeCall([InputItem(text)], ["dense"])
    return Work(MODEL, call, deadline.after(SETTINGS.limits.request_timeout_s), 1, "req")


async def ask(frontend: Client, text: str) -> None:
    """One call; its answer must be its own, or a Penstock error."""
    with contextlib.suppress(PenstockError), await frontend.call(work_of(text)) as reply:
        raw = bytes(reply.tensors()["dense"])
        reply.check()
        assert raw == answer_of(text)[:NBYTES]


async def ask_with_block(frontend: Client, number: int) -> None:
    """One call whose input lies in a block, or in a frame when there is none; its answer is its input."""
    raw = bytes([number]) * NBYTES
    call = InferCall([TensorInput("x", "UINT8", [NBYTES], 0, NBYTES)], [TensorOutput("dense")])
    block = await frontend.inputs.reserve(NBYTES)
    with block or contextlib.nullcontext(), contextlib.suppress(PenstockError):
        if block is not None:
            block.buffer[:] = raw
        until_ns = deadline.after(SETTINGS.limits.request_timeout_s)
        asked = Work(MODEL, call, until_ns, 1, "req")
        with await frontend.call(asked, raw if block is None else block) as reply:
            found = bytes(reply.raw("dense"))
            reply.check()
            assert found == raw


async def use(paths: RunPaths, peer: Peer) -> None:
    """A frontend's life: answers by memory and inline, several at once, a cancelled call, a lease never given back."""
    frontend = Client(paths, SETTINGS, "frontend-0", Store(paths))
    frontend.start()
    try:
        await ask(frontend, "one")
        await asyncio.gather(
            *(ask(frontend, f"{kind} {n}") for n in range(2) for kind in ("leased", "inline"))
        )
        await asyncio.gather(*(ask_with_block(frontend, number) for number in range(2)))
        peer.handler.ignored.add("never")
        with contextlib.suppress(TimeoutError, PenstockError):
            async with asyncio.timeout(0.02):
                await frontend.call(work_of("never"))
        with contextlib.suppress(PenstockError):
            await frontend.call(work_of("kept"))
    finally:
        await frontend.close()
        frontend.inputs.verify()
        assert frontend.inputs.used_nbytes == 0 and not paths.arenas("f0")


async def must_answer(paths: RunPaths) -> None:
    """A fresh frontend gets its answer."""
    frontend = Client(paths, SETTINGS, "frontend-1", Store(paths))
    frontend.start()
    try:
        with await frontend.call(work_of("afterwards")) as reply:
            assert bytes(reply.tensors()["dense"]) == answer_of("afterwards")[:NBYTES]
    finally:
        await frontend.close()


def run_with_fault(faults: Faults, paths: RunPaths, number: int, only: str = "") -> bool:
    """One life with operation `number`, as in `Faults.on`, failing; False when there were fewer operations."""
    with faults.on(number, only):
        try:
            peer = Peer(paths)
        except (PenstockError, OSError, zmq.ZMQError):
            assert faults.failed and not paths.arenas(), faults.failed
            return True
        asyncio.run(use(paths, peer))
    try:
        asyncio.run(must_answer(paths))
        peer.call(peer.leases.verify)
        peer.call(peer.drop_all)
        peer.call(peer.leases.verify)
        assert peer.leases.used_nbytes == 0 and peer.leases.leases == 0
    except BaseException as error:
        error.add_note(f"operation {number} failed: {faults.failed}; endpoint: {peer.error!r}")
        raise
    finally:
        peer.close()
    assert peer.error is None, faults.failed
    return bool(faults.failed)


def test_after_the_failure_of_any_operation_everything_is_whole_and_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Records that pytest keeps hold errors, whose frames hold arenas.
    for name in ("ipc", "frontend", "workers"):
        caplog.set_level(logging.CRITICAL + 1, logger=name)
    monkeypatch.setattr(client, "TICK_S", 0.005)
    monkeypatch.setattr(channel, "PING_EVERY_S", 0.02)
    (tmp_path / "shm").mkdir()
    paths = RunPaths(tmp_path / "run", "test", tmp_path / "shm")
    prepare_run_dir(paths)
    descriptors = open_descriptors()
    faults = Faults(monkeypatch)
    failed = set()
    number = 1
    while run_with_fault(faults, paths, number):
        failed.add(faults.failed.split()[0])
        number += 1
    # Two lives differ in the order of their operations, so one may have a different number every time.
    for name in {name for _, name, _ in OPERATIONS} - {"fstat"} - failed:
        assert run_with_fault(faults, paths, 1, name), f"{name} is never called"
    gc.collect()
    assert open_descriptors() <= descriptors
