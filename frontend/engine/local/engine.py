"""The engine over the workers of this host: runs planned work through the client and notes in the scope how it went.

Equal items of one request get equal results. Rows of a batch differ in their last bits by their place in the batch:
equal items would lose their order in a ranking, and the same text would have two vectors. So the first of equal items
is computed, and the others get its result.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection, Hashable, Sequence
from contextlib import asynccontextmanager

from frontend.engine.answer import Answer, AnswerStream
from frontend.engine.events import Generation
from frontend.engine.interface import NONE_LOADED, Engine, Payload
from frontend.engine.local.client import Client
from frontend.engine.local.delta_stream import Pace
from frontend.engine.local.directory import LocalDirectory
from frontend.engine.local.generating import LocalGeneration
from frontend.engine.planning import is_long
from frontend.http.rendering import off_loop_if
from frontend.records.finishing import Recorder
from frontend.scope import RequestScope
from frontend.server.drain import Drain
from ipc.catalog.entries import Catalog, preloaded_names
from ipc.settings import Settings
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


class LocalEngine(Engine):
    """Runs work of all protocols on the workers of this host."""

    def __init__(
        self, settings: Settings, catalog: Catalog, client: Client, recorder: Recorder, drain: Drain
    ) -> None:
        self.client, self.directory = client, LocalDirectory(settings, catalog, client)
        self._settings, self._catalog, self._recorder, self._drain = settings, catalog, recorder, drain

    async def run(self, scope: RequestScope, work: Work, payload: Payload = None) -> Answer:
        """Run planned work; see `Engine.run`. Equal items of one request get equal results."""
        with self._recorder.in_flight(work.model, work.lane):
            answer = await self.client.call(work, payload)
        scope.ran(answer.worker, answer.timing, answer.trace)
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
            parts = await self.client.stream(work, payload)
            with parts:
                yield parts
                if (end := parts.result) is not None:
                    scope.ran(end.worker, end.timing, end.trace)

    @asynccontextmanager
    async def generate(self, scope: RequestScope, work: Work) -> AsyncIterator[Generation]:
        """Run planned work with a `GenerateCall`; see `Engine.generate`."""
        began_ns = time.monotonic_ns() - int((time.perf_counter() - scope.started) * 1e9)
        route = scope.http.route if scope.http is not None else ""
        meter = self._recorder.text(work.model, scope.grant.name, route)
        pace = Pace(began_ns, work.waits_until_ns, self._settings.generation.idle_timeout_s, meter)
        with (
            self._recorder.in_flight(work.model, work.lane),
            await LocalGeneration(self.client, work, pace).begun() as generation,
        ):
            yield generation
            if (end := generation.result) is not None:
                scope.ran(end.worker, end.timing, end.trace)

    def ready(self) -> tuple[bool, str]:
        """Whether traffic is accepted, and the reason: a worker is up that has tried all models of the start.

        A failed load of the start is recorded and skipped, unless all loads failed.
        """
        if self._drain.draining:
            return False, "draining"
        up = [channel for channel in self.client.channels if channel.responsive]
        if not up:
            return False, "no worker is up"
        if not any(channel.preloaded for channel in up):
            return False, "models are loading"
        chosen = self._settings.catalog
        first = preloaded_names(self._catalog, chosen.preload, chosen.models, chosen.serve_all)
        # PERF: every probe asks this, so one look ends at the first model that has not failed.
        found = (self.directory.status(name) for name in first)
        if first and all(each.error_class and each.state != "loaded" for each in found):
            return False, NONE_LOADED
        return True, "ok"
