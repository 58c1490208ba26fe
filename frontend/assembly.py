"""Makes the services of one frontend, each after the services that it needs, over one engine.

1. A `Backend` holds an engine and its models (`frontend.engine.interface`). `local` makes the backend of this host; no
   other module of the frontend but the bridge knows the engine over ZeroMQ. `cluster` makes that of a gateway.
2. `assemble` puts the parts that are the same for every engine in front: equal items, kept embeddings, tensors.
3. The engine begins last: its first news need every other service.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from frontend.access_log import HttpCounts
from frontend.engine.answer import CopyBudget
from frontend.engine.boxes import GatewayMeter
from frontend.engine.caching import CachingEngine, Front
from frontend.engine.interface import Configs, Counts, Engine, Models, Times, no_times
from frontend.engine.local.client import Client
from frontend.engine.local.engine import LocalEngine
from frontend.engine.pools import Pools
from frontend.http.bodies import BodyReader
from frontend.records.finishing import Finisher, Recorder
from frontend.services import Services
from frontend.state.state import State
from frontend.tensors import live_settings
from frontend.tensors.inference import TensorInference
from frontend.tensors.models import TensorModels
from frontend.tensors.uploading import InputMemory
from ipc.metrics.registry import FrontendMetrics
from ipc.store.store import Store


@dataclass(frozen=True, slots=True)
class Backend:
    """An engine and the directory of its models. `begin` starts the engine, `leave` ends the engine."""

    engine: Engine
    models: Models
    begin: Callable[[], None]
    leave: Callable[[], Awaitable[None]]
    counts: Counts = dict
    """Of a gateway: how often things have happened so far, by what and a label."""
    pools: Pools | None = None
    times: Times = no_times
    configs: Configs | None = None
    state: Callable[..., State] = State
    """Makes the stores, by default those in the state directory of this host."""


def local(services: Services) -> Backend:
    """The workers of this host. Of the services there are recorder, copies and store."""
    settings = services.settings
    client = Client(
        settings.paths,
        settings,
        f"frontend-{services.slot}",
        services.store,
        on_retry=services.recorder.retried,
        copies=services.copies,
        on_carried=services.recorder.carried_on,
        on_kept=services.recorder.kept_ids,
    )
    engine = LocalEngine(settings, services.catalog, client, services.drain)

    def begin() -> None:
        client.start()
        client.demand.replicas = engine.directory.replicas
        client.demand.known = services.tensor_models.version_states.may_be_loaded
        client.workers.follow = engine.directory.follow

    return Backend(engine, engine.directory, begin, client.close)


def cluster(services: Services) -> Backend:
    """The boxes of a cluster. A process without a cluster does not import the client of the brokers."""
    from frontend.cluster.engine import engine_of
    from frontend.cluster.gateway import Gateway

    recorder = services.recorder
    gateway = Gateway(
        services.settings, services.catalog, recorder.carried_on, recorder.kept_ids, services.slot
    )
    return Backend(
        engine_of(gateway, services.settings, services.drain),
        gateway.models,
        gateway.begin,
        gateway.leave,
        gateway.counts,
        gateway.pools,
        gateway.times,
        gateway.configs,
        partial(State, place=gateway.place),
    )


def chosen(services: Services) -> Backend:
    """What the settings name: the boxes of a cluster, or the workers of this host."""
    return cluster(services) if services.settings.is_gateway else local(services)


def assemble(
    services: Services, families: FrontendMetrics, behind: Callable[[Services], Backend]
) -> Callable[[], Awaitable[None]]:
    """Fill in the services, on the event loop; returns the function that says goodbye to what is `behind`."""
    settings, name = services.settings, f"frontend-{services.slot}"
    services.recorder = Recorder(families, services.catalog, services.catalog.id_of)
    services.copies = CopyBudget(settings.arena.copy_out_bytes)
    services.store = Store(settings.paths)
    backend = behind(services)
    services.directory, services.pools, services.configs = backend.models, backend.pools, backend.configs
    if settings.cache.embeddings_bytes:
        services.engine = CachingEngine(backend.engine, backend.models, settings, services.recorder)
    else:
        services.engine = Front(backend.engine, services.recorder)
    services.finisher = Finisher.opened(settings, name, services.recorder)
    if settings.is_gateway:
        services.meter = GatewayMeter.made(
            backend.models, backend.counts, settings.cluster.profiles, backend.times, families.tally
        )
        services.finisher.gateway = services.meter.finished
    if settings.server.metrics or settings.log.access:
        services.finisher.http = HttpCounts(
            families, services.catalog, settings.log, counting=settings.server.metrics
        )
    services.extensions = live_settings.make(services, backend.engine, families, services.finisher.tracer)
    services.finisher.statistics = services.extensions.counters
    wished = backend.models.wished if settings.is_gateway else services.extensions.control.wished
    services.tensor_models = TensorModels(backend.models, settings, wished)
    services.bodies = BodyReader(settings.limits)
    inputs = InputMemory(backend.engine.blocks, services.bodies, settings)
    services.tensor_inference = TensorInference(
        services.engine, services.tensor_models, inputs, services.extensions.regions, settings
    )
    services.state = backend.state(settings)
    services.state.begin()
    backend.begin()
    services.started = True
    return backend.leave
