"""Generated text without a model: an engine that tells recorded events, and fails where a test wants that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from frontend.engine.answer import Answer, AnswerStream
from frontend.engine.events import Event, Generation, Mark, Pace, Past
from frontend.engine.interface import Engine, NoBlocks, Payload
from frontend.scope import RequestScope
from ipc.errors import PenstockError
from ipc.wire.messages import GenerateCall, Work

Step = list[Event] | PenstockError | threading.Event | None
"""Events that arrive together, an error that ends the stream, a gate that a test opens, or None for no more events."""


class RecordedGeneration(Generation):
    """Tells `steps`, one each time it is asked; with a `seed` each step has a mark, with one token of each choice."""

    def __init__(self, steps: Sequence[Step], seed: int | None = None) -> None:
        self._steps, self._seed = iter(steps), seed

    def mark(self) -> Mark | None:
        return None if self._seed is None else Mark(self._seed, [b"\1\0\0\0"], "weights", "identity")

    async def __anext__(self) -> list[Event]:
        step = next(self._steps, [])
        while isinstance(step, threading.Event):
            if step.is_set():
                step = next(self._steps, [])
            else:
                await asyncio.sleep(0.005)
        if step is None:
            await asyncio.Event().wait()
        if isinstance(step, PenstockError):
            raise step
        if not step:
            raise StopAsyncIteration
        return step


class TextOnly(Engine):
    """An engine that is ready, and runs nothing but texts."""

    async def run(self, scope: RequestScope, work: Work, payload: Payload = None) -> Answer:
        raise AssertionError("only text is generated here")

    @asynccontextmanager
    async def stream(
        self, scope: RequestScope, work: Work, payload: Payload = None
    ) -> AsyncIterator[AnswerStream]:
        raise AssertionError("only text is generated here")
        yield

    def ready(self) -> tuple[bool, str]:
        return True, "ok"


class RecordedEngine(TextOnly):
    """Answers each request with the next script of `scripts`, the last one for ever; notes works and ended contexts.

    With a `seed` the texts have marks. Requests stand in the queue while `queue` is closed.
    """

    def __init__(self, scripts: Sequence[Sequence[Step] | PenstockError]) -> None:
        self.scripts = list(scripts)
        self.works: list[Work] = []
        self.paces: list[Pace] = []
        self.pasts: list[Past | None] = []
        self.seed: int | None = None
        self.blocks = NoBlocks()
        self.ended = 0
        self.queue = threading.Event()
        self.queue.set()

    @property
    def calls(self) -> list[GenerateCall]:
        """What was asked."""
        return [work.call for work in self.works if isinstance(work.call, GenerateCall)]

    @asynccontextmanager
    async def generate(
        self, scope: RequestScope, work: Work, pace: Pace, past: Past | None = None
    ) -> AsyncIterator[Generation]:
        self.works.append(work)
        self.paces.append(pace)
        self.pasts.append(past)
        if not self.queue.is_set():
            await asyncio.to_thread(self.queue.wait)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        if isinstance(script, PenstockError):
            raise script
        try:
            yield RecordedGeneration(script, self.seed)
        finally:
            self.ended += 1
