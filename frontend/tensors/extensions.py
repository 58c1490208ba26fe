"""Services of both tensor protocols besides inference, made once per frontend (`Services.extensions`)."""

from __future__ import annotations

from dataclasses import dataclass

from frontend.engine.interface import Engine
from frontend.records.statistics import RequestCounters, StatisticsReader
from frontend.tensors.control import ControlServices, RepositoryControl
from frontend.tensors.live_settings import LogSettings, TraceSettings
from frontend.tensors.regions import ClientRegions
from frontend.tracing.tracer import Tracer
from ipc.metrics.registry import FrontendMetrics


@dataclass(slots=True, frozen=True)
class Extensions:
    """Statistics, client memory, repository control, log and trace settings."""

    counters: RequestCounters
    statistics: StatisticsReader
    regions: ClientRegions
    control: RepositoryControl
    log_settings: LogSettings
    trace_settings: TraceSettings

    def apply(self) -> None:
        """Follow changes of other frontends; called twice a second."""
        self.log_settings.apply()
        self.trace_settings.apply()


def make(
    services: ControlServices, engine: Engine, metrics: FrontendMetrics, tracer: Tracer | None
) -> Extensions:
    """Make the extensions of a frontend."""
    settings = services.settings
    return Extensions(
        RequestCounters(metrics, services.catalog, lambda name: services.tensor_models.known(name)),
        StatisticsReader(settings.paths),
        ClientRegions(settings, services.store, are_read=engine.reads_regions),
        RepositoryControl(services),
        LogSettings(settings, services.store),
        TraceSettings(settings, services.store, tracer),
    )
