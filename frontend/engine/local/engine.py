"""The engine over the workers of this host: runs planned work through the client and notes in the scope how it went.

Workers share the clock of this frontend. So the scope's deadlines go into the work as they are, and instants of a trace
become offsets here.

`LocalDirectory` knows the models of these workers: their states as channels know them, and loads by name.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType

import msgspec

from frontend.engine.answer import Answer, AnswerStream, shifted
from frontend.engine.events import Generation, Pace, Past
from frontend.engine.interface import (
    LOADING,
    NONE_LOADED,
    STATE_ORDER,
    Control,
    Engine,
    Models,
    Payload,
    Wanted,
    WorkerView,
    always,
)
from frontend.engine.local import routing
from frontend.engine.local.catalog_following import CatalogFollower
from frontend.engine.local.channel import Channel
from frontend.engine.local.client import Client, LocalGeneration
from frontend.scope import ANY_BOX, Choice, RequestScope
from frontend.server.drain import Drain
from ipc import deadline
from ipc.catalog.entries import Catalog, ModelEntry
from ipc.catalog.reading import preloaded_names
from ipc.catalog.repository import Wish
from ipc.errors import DeadlineExceeded, NoReplica, PenstockError, from_code
from ipc.processes.liveness import is_held
from ipc.settings import Settings
from ipc.wire.catalogs import Replied, Reread, Spread
from ipc.wire.messages import ModelStatus, Work


class LocalDirectory(Models, Control):
    """Models and workers, as far as this frontend knows, and the loads and unloads of the models."""

    def __init__(self, settings: Settings, catalog: Catalog, client: Client) -> None:
        self.control = self
        self._worker_count = settings.worker_count
        self.catalog, self._client, self._on_demand = catalog, client, settings.catalog.on_demand
        self._version, self._sources = 0, catalog.sources
        self._seen: list[tuple[str, object]] = []
        self._has_repositories = bool(settings.repository.dirs) or settings.repository.control == "explicit"
        self._restart_wait_s = settings.limits.restart_wait_s
        self._follower = CatalogFollower(
            catalog, lambda: [channel.catalog for channel in client.channels], self.is_loaded
        )
        self.follow = self._follower.follow

    @property
    def version(self) -> int:
        """Rises with every change of a model's state, of the workers or of the catalog."""
        if not self._is_as_seen():
            self._version += 1
            self._sources = self.catalog.sources
            self._seen = [(channel.state, channel.models) for channel in self._client.channels]
        return self._version

    def _is_as_seen(self) -> bool:
        channels = self._client.channels
        if self.catalog.sources is not self._sources or len(channels) != len(self._seen):
            return False
        # PERF: every request asks, so nothing is made. A channel replaces its map of models, and never changes it.
        for channel, (state, models) in zip(channels, self._seen, strict=True):
            if channel.models is not models or channel.state != state:
                return False
        return True

    @property
    def is_told(self) -> bool:
        """Whether the models of repositories are known: some worker has told them, or there are no repositories."""
        return not self._has_repositories or self._follower.read_ns > 0 or bool(self.catalog.versions)

    @property
    def is_learning(self) -> bool:
        """Whether a worker of a configured slot lives and no worker has told the models of repositories."""
        return not self.is_told and any(map(self._client.workers.is_open, range(self._worker_count)))

    @property
    def reaches_all(self) -> bool:
        """Whether this frontend knows a worker, and joins no worker that lives."""
        channels = self._client.channels
        joining = (channel.slot for channel in channels if channel.state == "connecting")
        return bool(channels) and not any(map(self._client.workers.lives, joining))

    @property
    def removed(self) -> set[tuple[str, int]]:
        """(model, version) of what was in a repository while this frontend ran; some may be there again."""
        return self._follower.removed

    def chosen(self, model: str) -> tuple[int, ...]:
        """The versions of a repository model that its files choose; more are served until one of them is loaded."""
        return self._follower.chosen(model)

    async def reread(self, until_ns: int, model: str = "", draft: Wish | None = None) -> bool:
        """Have all workers look at the files now, or one of them at the draft of a load; see `Control`."""
        with contextlib.suppress(DeadlineExceeded):
            joined_ns = min(until_ns, deadline.after(self._restart_wait_s))
            await self.wait(lambda: any(c.responsive for c in self._client.channels), joined_ns)
        up = [channel for channel in self._client.channels if channel.responsive]
        asked = [
            (channel, channel.ask(lambda number: Reread(number, model, draft)))
            for channel in (up[:1] if draft else up)
        ]
        answers = await self._answers(asked, until_ns)
        if not answers:
            raise NoReplica("no worker is up", retry_after_s=2)
        error = next((answer for answer in answers if answer.code), None)
        if error is not None:
            raise from_code(error.code, error.message)
        return any(answer.changed for answer in answers)

    async def spread(self, until_ns: int) -> None:
        """Wait until all frontends know what the workers have told; see `Control`."""
        up = [channel for channel in self._client.channels if channel.responsive]
        await self._answers([(channel, channel.ask(Spread)) for channel in up], until_ns)

    async def _answers(
        self, asked: Sequence[tuple[Channel, asyncio.Future[Replied]]], until_ns: int
    ) -> list[Replied]:
        """The answers of these workers, without those that die or fall silent. Raises `DeadlineExceeded`."""
        try:
            await self.wait(lambda: all(a.done() or not channel.responsive for channel, a in asked), until_ns)
            return [a.result() for _, a in asked if a.done() and a.exception() is None]
        finally:
            for _, answer in asked:
                answer.cancel()

    def find(self, model: str) -> ModelEntry:
        """Catalog entry of a model name. Raises `ModelNotFound`."""
        return self.catalog.find(model)

    def replicas(self, model: str) -> int:
        """Workers that should have a model once one of them has."""
        return (self.catalog[model].replicas or 1) if model in self.catalog else 1

    def status(self, model: str) -> ModelStatus:
        """State of a model over all workers. A model that this frontend has asked for counts as loading at once."""
        statuses = self._statuses(model)
        if len(statuses) == 1 and statuses[0].state == "loaded":
            return statuses[0]
        best = min(
            statuses, key=lambda s: STATE_ORDER.index(s.state), default=ModelStatus(model, "available")
        )
        if best.state == "available" and statuses and self._client.demand.has_asked(model):
            return msgspec.structs.replace(best, state="loading")
        return best

    def _statuses(self, model: str) -> list[ModelStatus]:
        return [c.models[model] for c in self._client.channels if c.state == "ready" and model in c.models]

    def is_loaded(self, model: str, revision: str = "") -> bool:
        """Whether some worker has the model, with files of that revision (empty: any)."""
        statuses = self._statuses(model)
        return any(each.state == "loaded" and revision in ("", each.revision) for each in statuses)

    def identity(self, model: str) -> str:
        """Stands for all that decides the numbers of a loaded model; see `Models`."""
        identity = ""
        # PERF: requests for kept embeddings ask, and do little else.
        for channel in self._client.channels:
            status = channel.models.get(model) if channel.state == "ready" else None
            if status is not None and status.state == "loaded":
                if not status.identity or status.identity != (identity or status.identity):
                    return ""
                identity = status.identity
        return identity

    def why_unavailable(self, model: str) -> PenstockError:
        """Why no worker can run a model now."""
        return routing.explain(self._client.channels, model, on_demand=self._on_demand)

    def workers(self) -> Sequence[WorkerView]:
        """All workers by slot."""
        return [_view(channel) for channel in self._client.channels]

    def watch(self, on: bool) -> bool:
        """Ask all workers to send `stats`, or to stop; returns whether all serving workers have answered since."""
        return self._client.workers.watch(on)

    async def wait(self, done: Callable[[], bool], deadline_ns: int) -> None:
        """Wait until `done()`, looked at after every change. Raises `DeadlineExceeded`."""
        await self._client.wait(done, deadline_ns)

    async def ensure_loaded(
        self, model: str, deadline_ns: int, others: Collection[str] = (), choice: Choice = ANY_BOX
    ) -> ModelStatus:
        """Wait until some worker has the model, at most `limits.load_wait_s` and `limits.restart_wait_s`."""
        # PERF: most requests find their model loaded, without a wait being made ready.
        if not routing.having(self._client.channels, model):
            await self._client.ready(model, deadline_ns, others)
        return self.status(model)

    async def load(self, model: str, wait: bool, deadline_ns: int, is_wanted: Wanted = always) -> str:
        """See `Demand.load`."""
        return await self._client.demand.load(model, wait, deadline_ns, is_wanted)

    async def unload(self, model: str, wait: bool, deadline_ns: int) -> str:
        """See `Demand.unload`."""
        return await self._client.demand.unload(model, wait, deadline_ns)


def _view(channel: Channel) -> WorkerView:
    return WorkerView(
        channel.worker,
        channel.slot,
        channel.state,
        channel.responsive,
        channel.preloaded,
        channel.device,
        channel.threads,
        channel.models,
        channel.credits,
        channel.stats,
        channel.since,
    )


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

    def generate(
        self, scope: RequestScope, work: Work, pace: Pace, past: Past | None = None
    ) -> AbstractAsyncContextManager[Generation]:
        """Run planned work with a `GenerateCall`; see `Engine.generate`."""
        return _RunningText(self.client, scope, work, pace, past)

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
            return False, LOADING
        chosen = self._settings.catalog
        first = preloaded_names(self._catalog, chosen.preload, chosen.models, chosen.serve_all)
        # PERF: every probe asks this, so one look ends at the first model that has not failed.
        statuses = (self.directory.status(name) for name in first)
        if first and all(each.error_class and each.state != "loaded" for each in statuses):
            return False, NONE_LOADED
        return True, "ok"

    async def is_kept_alive(self) -> bool:
        """Whether the supervisor lives."""
        return await asyncio.to_thread(is_held, self._settings.paths.lock("supervisor"))


class _RunningText(AbstractAsyncContextManager[Generation]):
    """One text, from its first run to its end.

    PERF: each text has one, and a generator as a context costs three times as much.
    """

    def __init__(
        self, client: Client, scope: RequestScope, work: Work, pace: Pace, past: Past | None
    ) -> None:
        self._client, self._scope, self._work, self._pace, self._past = client, scope, work, pace, past

    async def __aenter__(self) -> Generation:
        work = _timed(self._work, self._scope)
        self._generation = LocalGeneration(self._client, work, self._pace, self._past)
        return await self._generation.begun()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._generation:
            if kind is None and (end := self._generation.result) is not None:
                _note(self._scope, end)


def _timed(work: Work, scope: RequestScope) -> Work:
    """The work with the deadlines of its request."""
    return msgspec.structs.replace(work, deadline_ns=scope.deadline_ns, start_by_ns=scope.start_by_ns)


def _note(scope: RequestScope, answer: Answer) -> None:
    """Note in the scope where the work ran, for how long, and when each phase began."""
    trace = answer.trace
    if trace is not None and scope.span is not None:
        trace = shifted(trace, -scope.span.began_ns)
    scope.ran(answer.worker, answer.timing, trace)
