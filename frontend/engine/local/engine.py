"""The engine over the workers of this host: runs planned work through the client and notes in the scope how it went.

Workers share the clock of this frontend. So the scope's deadlines go into the work as they are, and instants of a trace
become offsets here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from frontend.engine.answer import Answer, AnswerStream
from frontend.engine.events import Generation, Pace
from frontend.engine.interface import NONE_LOADED, Engine, Payload
from frontend.engine.local.client import Client
from frontend.engine.local.delta_stream import LocalGeneration
from frontend.engine.local.directory import LocalDirectory
from frontend.scope import RequestScope
from frontend.server.drain import Drain
from ipc.catalog.entries import Catalog
from ipc.catalog.reading import preloaded_names
from ipc.processes.liveness import is_held
from ipc.settings import Settings
from ipc.wire.messages import Trace, Work


class LocalEngine(Engine):
    """Runs work of all protocols on the workers of this host."""

    reads_regions = True

    def __init__(self, settings: Settings, catalog: Catalog, client: Client, drain: Drain) -> None:
        self.client, self.directory = client, LocalDirectory(settings, catalog, client)
        self.blocks = client.inputs
        self._settings, self._catalog, self._drain = settings, catalog, drain

    async def run(self, scope: RequestScope, work: Work, payload: Payload = None) -> Answer:
        """Run planned work; see `Engine.run`."""
        answer = await self.client.call(_timed(work, scope), payload)
        _note(scope, answer)
        return answer

    @asynccontextmanager
    async def stream(
        self, scope: RequestScope, work: Work, payload: Payload = None
    ) -> AsyncIterator[AnswerStream]:
        """Run planned work that is answered in parts; see `Engine.stream`."""
        with await self.client.stream(_timed(work, scope), payload) as parts:
            yield parts
            if (end := parts.result) is not None:
                _note(scope, end)

    @asynccontextmanager
    async def generate(self, scope: RequestScope, work: Work, pace: Pace) -> AsyncIterator[Generation]:
        """Run planned work with a `GenerateCall`; see `Engine.generate`."""
        with await LocalGeneration(self.client, _timed(work, scope), pace).begun() as generation:
            yield generation
            if (end := generation.result) is not None:
                _note(scope, end)

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

    async def is_kept_alive(self) -> bool:
        """Whether the supervisor lives."""
        return await asyncio.to_thread(is_held, self._settings.paths.lock("supervisor"))


def _timed(work: Work, scope: RequestScope) -> Work:
    """The work with the deadlines of its request."""
    return msgspec.structs.replace(work, deadline_ns=scope.deadline_ns, start_by_ns=scope.start_by_ns)


def _note(scope: RequestScope, answer: Answer) -> None:
    """Note in the scope where the work ran, for how long, and when each phase began."""
    trace = answer.trace
    if trace is not None and scope.span is not None:
        trace = _offsets(trace, scope.span.began_ns)
    scope.ran(answer.worker, answer.timing, trace)


def _offsets(trace: Trace, began_ns: int) -> Trace:
    """The trace with nanoseconds after `began_ns` in place of instants; a phase that did not happen stays 0."""

    def after(instant_ns: int) -> int:
        return instant_ns and instant_ns - began_ns

    batches = [
        msgspec.structs.replace(
            batch,
            began_ns=after(batch.began_ns),
            computed_ns=after(batch.computed_ns),
            copied_ns=after(batch.copied_ns),
        )
        for batch in trace.batches
    ]
    times = (after(trace.prepare_began_ns), after(trace.prepare_ended_ns), after(trace.queued_ns))
    return Trace(*times, batches)
