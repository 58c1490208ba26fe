"""The management calls, over HTTP as over gRPC: health, model control, list of models, regions, server status.

A handler returns messages of the contract. `routes` sends them as text, JSON or in the wire format, `grpc.service` in
its responses. `server_status` shows the server, its models with their configuration, and the times of their requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

from frontend.protocols.trtis_v1.statuses import UnknownMode
from frontend.records.statistics import Duration, ModelStatistics, RequestStatistics, ServerStatistics
from frontend.server.drain import SUCCESSION
from frontend.services import Services
from frontend.tensors import config_messages
from frontend.tensors.models import VersionState
from frontend.tensors.request import UnavailableModel
from ipc import version
from ipc.catalog.ids import is_repository, model_of
from ipc.catalog.model_config import ModelConfig
from ipc.catalog.repository import VersionEntry
from ipc.errors import Draining, InvalidInput, PenstockError, Unsupported
from ipc.metrics.families import UNVERSIONED
from ipc.processes.liveness import age_ns
from ipc.protos import trtis_v1_pb2 as pb

_CONFIGS: dict[str, tuple[ModelConfig, pb.ModelConfig]] = {}
MOST_CONFIGS = 4096
"""Configuration messages that are kept: models come and go, so the number of names has no bound."""
MODELS_AT_ONCE = 32
"""After this many models of a status, other requests get a turn of the event loop."""
_READY_STATES = {
    "READY": pb.ModelReadyState.MODEL_READY,
    "LOADING": pb.ModelReadyState.MODEL_LOADING,
    "UNLOADING": pb.ModelReadyState.MODEL_UNLOADING,
    "UNAVAILABLE": pb.ModelReadyState.MODEL_UNAVAILABLE,
}


MODES = ("live", "ready")


def is_healthy(services: Services, mode: str) -> bool:
    """Whether the server is `live` or `ready`. Raises `UnknownMode`, and `Draining` while the server stops."""
    if mode not in MODES:
        raise UnknownMode(f"unknown health mode {mode[:64]!a}; known are {' and '.join(MODES)}")
    refuse_while_exiting(services)
    return True if mode == "live" else is_ready(services)


def repository_index(services: Services) -> pb.ModelRepositoryIndex:
    """Names of all models, sorted."""
    names = sorted({name for name, _ in services.extensions.control.index()})
    return pb.ModelRepositoryIndex(models=[pb.ModelRepositoryIndex.ModelEntry(name=name) for name in names])


def regions(services: Services) -> list[pb.SharedMemoryRegion]:
    """All regions of shared memory."""
    regions_shown = []
    for entry in services.extensions.regions.status(None):
        region = pb.SharedMemoryRegion(name=entry.name, byte_size=entry.nbytes)
        if entry.kind == "cuda":
            region.cuda_shared_memory.device_id = entry.device
        else:
            region.system_shared_memory.shared_memory_key = entry.key
            region.system_shared_memory.offset = entry.offset
        regions_shown.append(region)
    return regions_shown


async def profile() -> None:
    """Raise `Unsupported`, for both commands."""
    raise Unsupported("profiling is not offered by this server; its metrics are at /metrics")


def is_ready(services: Services) -> bool:
    """Whether the server is ready, and with `trtis.strict_readiness` every version that was asked for as well.

    Not asked for: models of the catalog that are loaded on demand, and, if models are loaded by name, models of a
    repository without a load by name.
    """
    if not services.engine.ready()[0]:
        return False
    if not services.settings.trtis.strict_readiness:
        return True
    states = (
        state for name in services.tensor_models.names() for state in services.tensor_models.states(name)
    )
    return all(state.state == "READY" or not _is_asked_for(services, state) for state in states)


def _is_asked_for(services: Services, state: VersionState) -> bool:
    """Whether the settings or a load by name ask for a version."""
    if not is_repository(state.id):
        return state.status.state != "available" or not services.settings.catalog.on_demand
    if services.settings.repository.control == "none":
        return True
    wished = services.extensions.control.wished(model_of(state.id))
    return services.catalog[state.id].preload if wished is None else wished


def is_exiting(services: Services) -> bool:
    """Whether the server stops. A frontend that a reload replaces drains as well, while the server goes on."""
    return services.drain.draining and not SUCCESSION.is_replaced(services.since_ns)


def refuse_while_exiting(services: Services) -> None:
    """Raise `Draining` while the server stops."""
    if is_exiting(services):
        raise Draining("the server is stopping", retry_after_s=1)


def ready_state(services: Services) -> pb.ServerReadyState:
    """Initializing, ready or exiting."""
    if is_exiting(services):
        return pb.ServerReadyState.SERVER_EXITING
    ready, _ = services.engine.ready()
    return pb.ServerReadyState.SERVER_READY if ready else pb.ServerReadyState.SERVER_INITIALIZING


async def server_status(services: Services, server_id: str, model: str = "") -> pb.ServerStatus:
    """The status of all models, or of one. Raises `InvalidInput` for an unknown model, and `Draining`."""
    refuse_while_exiting(services)
    statistics = await services.extensions.statistics.read()
    former = _former(services, statistics)
    names = [model] if model else sorted({*services.tensor_models.names(), *former})
    status = pb.ServerStatus(
        id=server_id,
        version=version.VERSION,
        uptime_ns=age_ns(os.getppid()),
        ready_state=ready_state(services),
    )
    for number, name in enumerate(names):
        if number % MODELS_AT_ONCE == MODELS_AT_ONCE - 1:
            await asyncio.sleep(0)
        try:
            _add_model(status.model_status[name], services, name, statistics, former)
        except InvalidInput:
            if model:
                raise
            # The model was taken away since the names were listed.
            del status.model_status[name]
    _add_calls(status, statistics)
    return status


def _former(services: Services, statistics: ServerStatistics) -> dict[str, set[int]]:
    """Versions by full name that have answered, or were removed during the life of this frontend."""
    answered = {key for key, counted in statistics.models.items() if counted.requests.success.count}
    numbers: dict[str, set[int]] = {}
    for name, number in answered | services.directory.removed:
        numbers.setdefault(name, set()).add(number)
    return numbers


def _add_model(
    message: pb.ModelStatus,
    services: Services,
    name: str,
    statistics: ServerStatistics,
    former: dict[str, set[int]],
) -> None:
    full, _ = services.tensor_models.known(name) or (name, ())
    states = _states(services, name)
    gone = former.get(full, set()) - {state.version for state in states}
    if not gone:
        _refuse_unknown(services, name)
    for state in states:
        _add_version(message.version_status[state.version], state, statistics.of(full, state.version))
    for number in gone:
        status = message.version_status[number]
        status.ready_state = pb.ModelReadyState.MODEL_UNAVAILABLE
        status.ready_state_reason.message = "removed"
        _add_counts(status, statistics.of(full, number))
    unversioned = statistics.of(full, UNVERSIONED)
    if unversioned.by_request_size:
        _add_requests(message.version_status[UNVERSIONED], unversioned)
    config = _config_of(services, name)
    if config is not None:
        message.config.CopyFrom(_rendered(config, name))


def _refuse_unknown(services: Services, name: str) -> None:
    """Raise `InvalidInput` for a name that no model has, with the names that may be meant."""
    try:
        services.tensor_models.versions(name)
    except UnavailableModel as error:
        why = f": {error.why}" if error.why else ""
        raise InvalidInput(f"no status available for unknown model '{name[:200]}'{why}") from error


def _states(services: Services, name: str) -> list[VersionState]:
    """The versions of a model, without the state of a model that has none."""
    with contextlib.suppress(UnavailableModel):
        states = services.tensor_models.states(name)
        return [state for state in states if state.is_version]
    return []


def _config_of(services: Services, name: str) -> ModelConfig | None:
    """The configuration of the version that answers now; if none answers, of the newest version's file."""
    with contextlib.suppress(PenstockError):
        return services.tensor_models.find(name).config
    with contextlib.suppress(UnavailableModel):
        entry = services.catalog.get(services.tensor_models.states(name)[-1].id)
        return entry.config if isinstance(entry, VersionEntry) else None
    return None


def _rendered(config: ModelConfig, name: str) -> pb.ModelConfig:
    """PERF: many short-lived clients ask for the status; the message is made once for each configuration."""
    known = _CONFIGS.get(name)
    if known is None or known[0] is not config:
        _CONFIGS.pop(name, None)
        while len(_CONFIGS) >= MOST_CONFIGS:
            del _CONFIGS[next(iter(_CONFIGS))]
        known = _CONFIGS[name] = (config, _config_message(config, name))
    return known[1]


def _config_message(config: ModelConfig, name: str) -> pb.ModelConfig:
    """The configuration under the `name` that clients ask for.

    This contract has no tensor without dims. The message shows such a tensor as one element, with an empty reshape.
    """
    message: pb.ModelConfig = config_messages.message_of(pb, config, name)
    shown: list[pb.ModelInput | pb.ModelOutput] = [*message.input, *message.output]
    for tensor in shown:
        if not tensor.dims:
            tensor.dims.append(1)
            tensor.reshape.SetInParent()
    return message


def _add_version(message: pb.ModelVersionStatus, state: VersionState, counted: ModelStatistics) -> None:
    message.ready_state = _READY_STATES[state.state]
    if state.reason:
        message.ready_state_reason.message = state.reason
    _add_counts(message, counted)


def _add_counts(message: pb.ModelVersionStatus, counted: ModelStatistics) -> None:
    message.model_execution_count = counted.execution_count
    message.model_inference_count = counted.inference_count
    message.last_inference_timestamp_milliseconds = counted.last_inference_ms
    _add_requests(message, counted)


def _add_requests(message: pb.ModelVersionStatus, counted: ModelStatistics) -> None:
    for rows, requests in counted.by_request_size.items():
        message.infer_stats[rows].CopyFrom(_infer_stats(requests))


def _infer_stats(requests: RequestStatistics) -> pb.InferRequestStats:
    phases = (requests.compute_input, requests.compute_infer, requests.compute_output)
    compute = Duration(requests.compute_infer.count, sum(phase.ns for phase in phases))
    return pb.InferRequestStats(
        success=_duration(requests.success),
        failed=_duration(requests.fail),
        compute=_duration(compute),
        queue=_duration(requests.queue),
    )


def _duration(duration: Duration) -> pb.StatDuration:
    return pb.StatDuration(count=duration.count, total_time_ns=duration.ns)


def _add_calls(status: pb.ServerStatus, statistics: ServerStatistics) -> None:
    for kind, message in (
        ("status", status.status_stats),
        ("profile", status.profile_stats),
        ("health", status.health_stats),
        ("control", status.model_control_stats),
        ("regions", status.shm_control_stats),
        ("index", status.repository_stats),
    ):
        message.success.CopyFrom(_duration(statistics.calls.get(kind, Duration())))
