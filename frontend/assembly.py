"""Makes the services of one frontend, each after the services that it needs.

The client begins to look for workers here; all other services wait for requests. No other module of the frontend knows
the engine over ZeroMQ.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from frontend.engine.answer import CopyBudget
from frontend.engine.caching import CachingEngine
from frontend.engine.local.client import Client
from frontend.engine.local.engine import LocalEngine
from frontend.http.bodies import BodyReader
from frontend.http_counting import HttpCounts
from frontend.records.finishing import Finisher, Recorder
from frontend.services import Services
from frontend.tensors import extensions
from frontend.tensors.inference import TensorInference
from frontend.tensors.models import TensorModels
from frontend.tensors.uploading import InputMemory
from ipc.metrics.registry import FrontendMetrics
from ipc.store.store import Store


def assemble(services: Services, families: FrontendMetrics) -> Callable[[], Awaitable[None]]:
    """Fill in the services, on the event loop; returns the function that says goodbye to the workers."""
    settings, name = services.settings, f"frontend-{services.slot}"
    services.recorder = Recorder(families, services.catalog, services.catalog.id_of)
    services.copies = CopyBudget(settings.arena.copy_out_bytes)
    services.store = Store(settings.paths)
    client = Client(
        settings.paths,
        settings,
        name,
        services.store,
        on_retry=services.recorder.retried,
        copies=services.copies,
    )
    engine = LocalEngine(settings, services.catalog, client, services.recorder, services.drain)
    services.engine, services.directory = engine, engine.directory
    if settings.cache.embeddings_bytes:
        services.engine = CachingEngine(engine, engine.directory, settings, services.recorder)
    services.finisher = Finisher.opened(settings, name, services.recorder)
    if settings.server.metrics:
        services.finisher.http = HttpCounts(families, services.catalog, settings.log)
    services.extensions = extensions.make(services, families, services.finisher.tracer)
    services.finisher.statistics = services.extensions.counters
    services.models = TensorModels(engine.directory, settings, services.extensions.control.mark)
    services.bodies = BodyReader(settings.limits)
    inputs = InputMemory(client.inputs, services.bodies, settings)
    services.inference = TensorInference(
        services.engine, services.models, inputs, services.extensions.regions, settings
    )
    client.start()
    services.started = True
    client.demand.replicas = engine.directory.replicas
    client.demand.known = services.models.version_states.may_be_loaded
    client.workers.follow = engine.directory.follow
    return client.close
