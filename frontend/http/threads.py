"""Threads for large bodies and answers, apart from the threads of metrics and of joining workers.

1. Work is taken in pieces (`in_steps`), or is short enough to be one piece (`off_loop`).
2. Each caller has a line of pieces, and the threads take from each line in turn: a caller with much work waits behind
   its own work. A request has one piece in line at a time.
3. A piece begins only while its request lives: not after its deadline, and not after its client has left.
4. A request that is cancelled while a piece runs waits for the piece, so that no thread reads freed memory.

Encoded pictures and strings become tensors in `MAKING`, so that large bodies and answers do not wait behind them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, ParamSpec, TypeVar

from frontend.scope import current_scope
from ipc.deadline import remaining_s
from ipc.errors import DeadlineExceeded

THREADS = 2
PIECE_S = 0.02
"""Steps are taken for so long before others have their turn; a step may take longer."""

P = ParamSpec("P")
T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that yields where it may be interrupted, and returns its result."""


class _Piece(NamedTuple):
    """Work for a thread, and the future of its result."""

    caller: str
    deadline_ns: int
    work: Callable[[], Any]
    done: Future[Any]


class Line:
    """A few threads, and the pieces that wait for them, by caller."""

    def __init__(self, name: str, threads: int = THREADS) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[_Piece]] = OrderedDict()

    async def run(self, work: Callable[[], T]) -> T:
        """`work()` in a thread, in its turn. Raises `DeadlineExceeded` if the request's deadline passes before."""
        asking, loop = current_scope.get(), asyncio.get_running_loop()
        caller, deadline_ns = ("", 0) if asking is None else (asking.caller, asking.deadline_ns)
        piece = _Piece(caller, deadline_ns, work, Future())
        with self._lock:
            self._waiting.setdefault(caller, deque()).append(piece)
        self._threads.submit(self._take)
        done = asyncio.wrap_future(piece.done)
        expiry = (
            loop.call_later(max(remaining_s(deadline_ns), 0), self._expire, piece) if deadline_ns else None
        )
        try:
            result: T = await asyncio.shield(done)
            return result
        except asyncio.CancelledError:
            if not self._leave(piece):
                await _ended(done)
            raise
        finally:
            if expiry is not None:
                expiry.cancel()
            # NOTE: an error refers to this frame, so this frame must not refer to the holder of the error.
            del piece, done, expiry

    def _take(self) -> None:
        """Run the next piece; for a thread."""
        with self._lock:
            if not self._waiting:
                return
            caller, pieces = self._waiting.popitem(last=False)
            piece = pieces.popleft()
            if pieces:
                # The others of this caller go behind all other callers.
                self._waiting[caller] = pieces
        try:
            piece.done.set_result(piece.work())
        except BaseException as error:
            piece.done.set_exception(error)
        # NOTE: as in `run`; and an idle thread keeps nothing of the last piece.
        del piece, pieces

    def _leave(self, piece: _Piece) -> bool:
        """Take a piece out of the line; False when it has begun."""
        with self._lock:
            pieces = self._waiting.get(piece.caller)
            if pieces is None or piece not in pieces:
                return False
            pieces.remove(piece)
            if not pieces:
                del self._waiting[piece.caller]
            return True

    def _expire(self, piece: _Piece) -> None:
        if self._leave(piece):
            error = DeadlineExceeded(
                "the deadline passed before a thread was free for the request", retry_after_s=1
            )
            piece.done.set_exception(error)


RENDERING = Line("render")
MAKING = Line("make")


async def _ended(done: asyncio.Future[Any]) -> None:
    """Wait for the end of a piece that has begun, however often the waiting task is cancelled."""
    while not done.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([done])
    if not done.cancelled():
        # NOTE: the error of a cancelled request has no reader.
        done.exception()


async def off_loop(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(...)` in one of the rendering threads."""
    return await RENDERING.run(lambda: work(*args, **kwargs))


async def off_loop_if(long: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(...)`, in one of the rendering threads when it is `long`."""
    if long:
        return await off_loop(work, *args, **kwargs)
    return work(*args, **kwargs)


async def in_steps(steps: Steps[T], line: Line = RENDERING) -> T:
    """The result of `steps`. A thread runs some of the steps, then some of the next request's, in turn."""

    def advance() -> tuple[T] | None:
        until = time.monotonic() + PIECE_S
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return (end.value,)
            if time.monotonic() >= until:
                return None

    try:
        while (result := await line.run(advance)) is None:
            pass
    finally:
        steps.close()
    return result[0]


def at_once(steps: Steps[T]) -> T:
    """The result of all `steps`, for work that is short."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
