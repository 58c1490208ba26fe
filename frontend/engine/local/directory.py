"""The directory of models over the workers of this host: their states as channels know them, and loads by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from frontend.engine.interface import STATE_ORDER, Directory, WorkerView
from frontend.engine.local import routing
from frontend.engine.local.channel import Channel
from frontend.engine.local.client import Client
from ipc.catalog.entries import Catalog, ModelEntry
from ipc.errors import PenstockError
from ipc.settings import Settings
from ipc.wire.messages import ModelStatus


class LocalDirectory(Directory):
    """Models and workers, as far as this frontend knows."""

    def __init__(self, settings: Settings, catalog: Catalog, client: Client) -> None:
        self.catalog, self._client, self._on_demand = catalog, client, settings.catalog.on_demand
        self._version, self._sources = 0, catalog.sources
        self._seen: list[tuple[str, object]] = []

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

    def find(self, model: str) -> ModelEntry:
        """Catalog entry of a model name. Raises `ModelNotFound`."""
        return self.catalog.find(model)

    def replicas(self, model: str) -> int:
        """Workers that should have a model once one of them has."""
        return (self.catalog[model].replicas or 1) if model in self.catalog else 1

    def status(self, model: str) -> ModelStatus:
        """State of a model over all workers. One that this frontend has asked for is loading at once."""
        found = self._told(model)
        if len(found) == 1 and found[0].state == "loaded":
            return found[0]
        best = min(found, key=lambda s: STATE_ORDER.index(s.state), default=ModelStatus(model, "available"))
        if best.state == "available" and found and self._client.demand.has_asked(model):
            return msgspec.structs.replace(best, state="loading")
        return best

    def _told(self, model: str) -> list[ModelStatus]:
        return [c.models[model] for c in self._client.channels if c.state == "ready" and model in c.models]

    def is_loaded(self, model: str, revision: str = "") -> bool:
        """Whether some worker has the model, with files of that revision (empty: any)."""
        told = self._told(model)
        return any(each.state == "loaded" and revision in ("", each.revision) for each in told)

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

    async def ensure_loaded(self, model: str, deadline_ns: int, others: Collection[str] = ()) -> ModelStatus:
        """Wait until some worker has the model, at most `limits.load_wait_s` and `limits.restart_wait_s`."""
        # PERF: most requests find their model loaded, without a wait being made ready.
        if not routing.having(self._client.channels, model):
            await self._client.ready(model, deadline_ns, others)
        return self.status(model)

    async def load(self, model: str, wait: bool, deadline_ns: int) -> str:
        """See `Demand.load`."""
        return await self._client.demand.load(model, wait, deadline_ns)

    async def renew(self, model: str, deadline_ns: int) -> None:
        """See `Demand.renew`."""
        await self._client.demand.renew(model, deadline_ns)

    async def unload(self, model: str, wait: bool, deadline_ns: int) -> str:
        """See `Demand.unload`."""
        return await self._client.demand.unload(model, wait, deadline_ns)


def _view(channel: Channel) -> WorkerView:
    return WorkerView(
        channel.slot,
        channel.state,
        channel.responsive,
        channel.preloaded,
        channel.device,
        channel.threads,
        channel.models,
        channel.credits,
        channel.stats,
    )
