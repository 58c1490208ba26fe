"""The services that all responders of one frontend share, filled in after the fork (`frontend.assembly`).

`Background` keeps work that goes on when the request that began the work is over: a drain waits for such work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from frontend.access.gate import Gate, Restrictions
from frontend.engine.answer import CopyBudget
from frontend.engine.boxes import GatewayMeter
from frontend.engine.interface import Configs, Engine, Models
from frontend.engine.pools import Pools
from frontend.http.bodies import BodyReader
from frontend.records.finishing import Finisher, Recorder
from frontend.server.drain import DRAIN, Drain
from frontend.state.state import State
from frontend.tensors.inference import TensorInference
from frontend.tensors.live_settings import Extensions
from frontend.tensors.models import TensorModels
from ipc.catalog.entries import Catalog
from ipc.settings import Settings
from ipc.store.store import Store

if TYPE_CHECKING:
    from frontend.web.fetching import Fetcher

LOOK_EVERY_S = 0.1
LAST_S = 0.2
"""Time for what streams leave behind that have just ended, such as the row of a response."""


class Background:
    """The tasks of this process that no request waits for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work`, which ends its errors itself."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def end(self, drain: Drain) -> None:
        """Wait for all of the work until the drain is over, then cancel the rest, and wait for its end."""
        while self._tasks and not drain.is_over:
            await asyncio.wait(self._tasks, timeout=LOOK_EVERY_S)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_S)
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)


@dataclass(slots=True)
class Services:
    """Engine, readers, recorder and settings of this process; fields without a value exist once `started` is true."""

    settings: Settings
    catalog: Catalog
    access: Gate
    restrictions: Restrictions = field(default_factory=Restrictions)
    drain: Drain = DRAIN
    background: Background = field(default_factory=Background)
    lasting: list[Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=list)
    """What protocols run as long as this frontend lives."""
    started: bool = False
    started_at: float = field(default_factory=time.time)
    since_ns: int = field(default_factory=time.monotonic_ns)
    """When this frontend began, in CLOCK_MONOTONIC."""
    slot: int = -1
    store: Store = None  # type: ignore[assignment]
    engine: Engine = None  # type: ignore[assignment]
    directory: Models = None  # type: ignore[assignment]
    meter: GatewayMeter | None = None
    """Counts of a gateway; None elsewhere."""
    pools: Pools | None = None
    """Pools of a cluster, at a gateway alone."""
    configs: Configs | None = None
    """Configurations of a cluster, at a gateway alone."""
    recorder: Recorder = None  # type: ignore[assignment]
    finisher: Finisher = field(default_factory=Finisher)
    bodies: BodyReader = None  # type: ignore[assignment]
    copies: CopyBudget = None  # type: ignore[assignment]
    extensions: Extensions = None  # type: ignore[assignment]
    tensor_models: TensorModels = None  # type: ignore[assignment]
    tensor_inference: TensorInference = None  # type: ignore[assignment]
    state: State = None  # type: ignore[assignment]
    agent: Any = None
    """What tools of the server need (`frontend.agent.parts.Parts`, a room above this one); None: no tool runs here."""
    _fetcher: Fetcher | None = None

    def fetcher(self) -> Fetcher:
        """What fetches URLs of requests, by the rules of `fetch`.

        PERF: the client library costs 7 MB of memory, which servers that fetch nothing keep.
        """
        if self._fetcher is None:
            from frontend.web.fetching import Fetcher

            self._fetcher = Fetcher(self.settings.fetch)
        return self._fetcher

    async def close_fetcher(self) -> None:
        """End connections and threads of fetches, if there were any."""
        if self._fetcher is not None:
            await self._fetcher.close()
