"""Stands in front of every engine, before an engine cuts a request into pieces or chooses where the pieces run.

1. Requests on the way are counted by model and lane.
2. Equal items of one request get equal results. Rows of a batch differ in their last bits by their place in the batch:
   equal items would lose their order in a ranking, and the same text would have two vectors. So the first of equal
   items gives its result to the others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Hashable, Sequence
from contextlib import asynccontextmanager

from frontend.engine.answer import Answer, AnswerStream
from frontend.engine.events import Generation, Pace
from frontend.engine.interface import Engine, Payload
from frontend.engine.planning import is_long
from frontend.http.rendering import off_loop_if
from frontend.records.finishing import Recorder
from frontend.scope import RequestScope
from ipc.wire.messages import InputItem, Work

PREFIX_CHARACTERS = 64


def may_repeat(items: Sequence[InputItem]) -> bool:
    """Whether some items may be equal: False at once where all begin differently, however long they are."""
    # PERF: every request asks. Only the beginning of a long text is hashed.
    return len({None if item.text is None else item.text[:PREFIX_CHARACTERS] for item in items}) < len(items)


async def unify(answer: Answer, items: Sequence[InputItem], *, large: bool) -> None:
    """Give equal items equal results, in private copies that end the lease; in a thread for a `large` request."""
    try:
        firsts = await off_loop_if(large, firsts_of, items, {error.index for error in answer.errors})
        if firsts is not None:
            await off_loop_if(large, answer.repeat, firsts)
            answer.release()
    except BaseException:
        answer.release()
        raise


def firsts_of(items: Sequence[InputItem], failed: Collection[int]) -> list[int] | None:
    """For each item the place of the first equal item; None if all items differ.

    `failed` are the places of items without a result. Items with metadata count as different.
    """
    seen: dict[Hashable, int] = {}
    firsts = [
        at if at in failed or item.metadata else seen.setdefault(_key(item), at)
        for at, item in enumerate(items)
    ]
    return None if firsts == list(range(len(items))) else firsts


def _key(item: InputItem) -> Hashable:
    return item.first, item.text, tuple(item.ids or ()), tuple(item.images), tuple(item.spans)


class Front(Engine):
    """An engine in front of `engine`."""

    def __init__(self, engine: Engine, recorder: Recorder) -> None:
        self._engine, self._recorder = engine, recorder
        self.blocks, self.reads_regions = engine.blocks, engine.reads_regions

    async def run(self, scope: RequestScope, work: Work, payload: Payload = None) -> Answer:
        """Run planned work; see `Engine.run`. Equal items of one request get equal results."""
        with self._recorder.in_flight(work.model, work.lane):
            answer = await self._engine.run(scope, work, payload)
        items = work.call.items
        if len(items) > 1 and may_repeat(items):
            await unify(answer, items, large=is_long(work))
        return answer

    @asynccontextmanager
    async def stream(
        self, scope: RequestScope, work: Work, payload: Payload = None
    ) -> AsyncIterator[AnswerStream]:
        """Run planned work that is answered in parts; see `Engine.stream`."""
        with self._recorder.in_flight(work.model, work.lane):
            async with self._engine.stream(scope, work, payload) as parts:
                yield parts

    @asynccontextmanager
    async def generate(self, scope: RequestScope, work: Work, pace: Pace) -> AsyncIterator[Generation]:
        """Run planned work with a `GenerateCall`; see `Engine.generate`."""
        with self._recorder.in_flight(work.model, work.lane):
            async with self._engine.generate(scope, work, pace) as generation:
                yield generation

    def ready(self) -> tuple[bool, str]:
        """Whether traffic is accepted, and the reason."""
        return self._engine.ready()

    async def is_kept_alive(self) -> bool:
        """Whether a dead worker would be started again."""
        return await self._engine.is_kept_alive()
