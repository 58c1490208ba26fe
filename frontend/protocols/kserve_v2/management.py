"""The management calls: they describe and change the server and its models. REST and gRPC only render.

1. A handler takes the services and plain arguments, calls the engine or the services of `frontend.tensors`, and returns
   a struct or a plain value.
2. `routes` renders the structs as JSON, `grpc.management` as protocol buffers. Fields have the names of the contract.
3. The description of the API takes the types of answers from here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.protocols.kserve_v2 import conversions
from frontend.records.statistics import Duration, ModelStatistics
from frontend.services import Services
from frontend.tensors.models import VersionState
from frontend.tensors.request import UnavailableModel
from ipc import version
from ipc.catalog.ids import model_of
from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.errors import InvalidInput
from ipc.memory.datatypes import BYTES
from ipc.store.regions import Kind

_EXTENSIONS_BEFORE_MEMORY = (
    "classification",
    "sequence",
    "sequence(string_id)",
    "model_repository",
    "schedule_policy",
    "model_configuration",
)
_EXTENSIONS_AFTER_MEMORY = ("binary_tensor_data", "parameters", "statistics", "trace", "logging")
_MODEL_SERVER_STATES = {
    "READY": "AVAILABLE",
    "LOADING": "LOADING",
    "UNLOADING": "UNLOADING",
    "UNAVAILABLE": "END",
}


class Live(msgspec.Struct):
    """The process lives."""

    live: Annotated[bool, Meta(description="Whether the server lives.")]


class Ready(msgspec.Struct):
    """The server or the model answers."""

    ready: Annotated[bool, Meta(description="Whether requests are answered.")]


class ServerMetadata(msgspec.Struct):
    """The server."""

    name: Annotated[str, Meta(description="The name.")]
    version: Annotated[str, Meta(description="The version.")]
    extensions: Annotated[list[str], Meta(description="Extensions of the protocol that are there.")]


class TensorMetadata(msgspec.Struct):
    """A tensor of a model; -1 stands for any size."""

    name: Annotated[str, Meta(description="The name.")]
    datatype: Annotated[str, Meta(description="Type of the elements.")]
    shape: Annotated[list[int], Meta(description="Sizes of the dimensions; -1: any.")]


class ModelMetadata(msgspec.Struct):
    """A model and its tensors."""

    name: Annotated[str, Meta(description="The name.")]
    versions: Annotated[list[str], Meta(description="Versions that are served.")]
    platform: Annotated[str, Meta(description="What runs the model.")]
    inputs: Annotated[list[TensorMetadata], Meta(description="The inputs.")]
    outputs: Annotated[list[TensorMetadata], Meta(description="The outputs.")]


class InferStatistics(msgspec.Struct):
    """Requests of one version by phase. The cache is that of embeddings."""

    success: Annotated[Duration, Meta(description="Requests that were answered.")]
    fail: Annotated[Duration, Meta(description="Requests that failed.")]
    queue: Annotated[Duration, Meta(description="Time in the queue.")]
    compute_input: Annotated[Duration, Meta(description="Time for the inputs.")]
    compute_infer: Annotated[Duration, Meta(description="Time of the model.")]
    compute_output: Annotated[Duration, Meta(description="Time for the outputs.")]
    cache_hit: Annotated[Duration, Meta(description="Requests answered from the cache; no time.")]
    cache_miss: Annotated[Duration, Meta(description="Always 0: not counted.")]


class BatchStatistics(msgspec.Struct):
    """Runs of one batch size."""

    batch_size: Annotated[int, Meta(description="Rows of a run.")]
    compute_input: Annotated[Duration, Meta(description="Time for the inputs.")]
    compute_infer: Annotated[Duration, Meta(description="Time of the model.")]
    compute_output: Annotated[Duration, Meta(description="Time for the outputs.")]


class VersionStatistics(msgspec.Struct):
    """Statistics of one version; the last inference in milliseconds since 1970."""

    name: Annotated[str, Meta(description="The name.")]
    version: Annotated[str, Meta(description="The version.")]
    last_inference: Annotated[int, Meta(description="Unix time in milliseconds of the last answer.")]
    inference_count: Annotated[int, Meta(description="Rows that were answered.")]
    execution_count: Annotated[int, Meta(description="Runs of the model.")]
    inference_stats: Annotated[InferStatistics, Meta(description="Times of requests by phase.")]
    response_stats: Annotated[dict[str, Any], Meta(description="Times of responses by their number.")]
    batch_stats: Annotated[list[BatchStatistics], Meta(description="Times of runs by batch size.")]
    memory_usage: Annotated[list[Any], Meta(description="Memory of the version.")]


class ModelsStatistics(msgspec.Struct):
    """Statistics of models, one entry per version."""

    model_stats: Annotated[list[VersionStatistics], Meta(description="Figures of each version.")]


class IndexEntry(msgspec.Struct):
    """One version of a model in the repository."""

    name: Annotated[str, Meta(description="The name.")]
    version: Annotated[str, Meta(description="The version.")]
    state: Annotated[Literal["READY", "UNAVAILABLE", "LOADING", "UNLOADING"], Meta(description="The state.")]
    reason: Annotated[str | UnsetType, Meta(description="Why that is so.")] = UNSET


class SystemRegion(msgspec.Struct):
    """A region of POSIX shared memory."""

    name: Annotated[str, Meta(description="The name.")]
    key: Annotated[str, Meta(description="Name of the shared memory object.")]
    offset: Annotated[int, Meta(description="First byte of the region in its object.")]
    byte_size: Annotated[int, Meta(description="Bytes of the region.")]


class CudaRegion(msgspec.Struct):
    """A region of device memory."""

    name: Annotated[str, Meta(description="The name.")]
    device_id: Annotated[int, Meta(description="Number of the device.")]
    byte_size: Annotated[int, Meta(description="Bytes of the region.")]


def server_metadata(services: Services) -> ServerMetadata:
    """Name, version, and the extensions that this server offers, in the order of the specification."""
    regions = services.extensions.regions
    memory = (("system_shared_memory", regions.offered), ("cuda_shared_memory", regions.cuda_offered))
    offered = [extension for extension, is_offered in memory if is_offered]
    return ServerMetadata(
        services.settings.kserve.server_name,
        version.VERSION,
        [*_EXTENSIONS_BEFORE_MEMORY, *offered, *_EXTENSIONS_AFTER_MEMORY],
    )


def require_ready_server(services: Services) -> None:
    """Raise `InvalidInput` with the reason unless requests are answered."""
    ready, why = services.engine.ready()
    if not ready:
        raise InvalidInput(f"the server is not ready: {why}")


def require_ready_model(services: Services, name: str, number: int | None) -> None:
    """Raise `InvalidInput` with the states unless a version (None: any) of a model is ready.

    Raises `UnavailableModel` for a model that the server does not know.
    """
    asked = [state for state in services.tensor_models.states(name) if number in (None, state.version)]
    if any(state.state == "READY" for state in asked):
        return
    why = "; ".join(_shown(state) for state in asked)
    raise InvalidInput(f"model '{name[:200]}' is not ready: {why or f'it has no version {number}'}")


def _shown(state: VersionState) -> str:
    if not state.is_version:
        return state.reason
    return f"version {state.version} is {state.state} {state.reason}".rstrip()


def model_metadata(services: Services, name: str, number: int | None) -> ModelMetadata:
    """Names, versions and tensors of a model. Raises as `TensorModels.find`."""
    config = services.tensor_models.find(name, number).config
    versions = [number] if number is not None else [state.version for state in _states_of(services, name)]
    return ModelMetadata(
        name,
        [str(each) for each in versions],
        config.platform,
        [_tensor(tensor, config) for tensor in config.inputs],
        [output_metadata(tensor, config) for tensor in config.outputs],
    )


def _tensor(tensor: TensorConfig, config: ModelConfig) -> TensorMetadata:
    shape = [-1, *tensor.dims] if config.batches else list(tensor.dims)
    return TensorMetadata(tensor.name, tensor.datatype, shape)


def output_metadata(tensor: TensorConfig, config: ModelConfig) -> TensorMetadata:
    """An output in the form of answers: BYTES for an output whose name marks text."""
    plain = _tensor(tensor, config)
    if conversions.is_marked(tensor.name, tensor.datatype, len(plain.shape)):
        return TensorMetadata(tensor.name, BYTES, plain.shape[:1])
    return plain


async def statistics(services: Services, name: str, number: int | None) -> ModelsStatistics:
    """Figures of one version of a model, of all its versions (None), or of all models (""), by name and version.

    Raises `InvalidInput` for an unknown model or version.
    """
    rows = [
        (model, state)
        for model in ([name] if name else services.tensor_models.names())
        for state in _states_of(services, model)
        if number in (None, state.version)
    ]
    if name and not rows:
        raise _not_available(name)
    counted = await services.extensions.statistics.read()
    return ModelsStatistics(
        [
            _version_statistics(model, state.version, counted.of_id(state.id, state.version))
            for model, state in rows
        ]
    )


def _states_of(services: Services, name: str) -> list[VersionState]:
    """The versions of a model. Raises `InvalidInput` for a name that nothing has."""
    try:
        return [state for state in services.tensor_models.states(name) if state.is_version]
    except UnavailableModel:
        raise _not_available(name) from None


def _not_available(name: str) -> InvalidInput:
    return InvalidInput(f"requested model '{name[:200]}' is not available")


def _version_statistics(name: str, number: int, counted: ModelStatistics) -> VersionStatistics:
    requests = counted.requests
    compute = (requests.compute_input, requests.compute_infer, requests.compute_output)
    return VersionStatistics(
        name,
        str(number),
        counted.last_inference_ms,
        counted.inference_count,
        counted.execution_count,
        InferStatistics(
            requests.success, requests.fail, requests.queue, *compute, requests.cached, Duration()
        ),
        {},
        [
            BatchStatistics(size, run.compute_input, run.compute_infer, run.compute_output)
            for size, run in sorted(counted.by_run_size.items())
        ],
        [],
    )


def repository_index(services: Services, ready_only: bool) -> list[IndexEntry]:
    """Every version of every model, or the versions that are ready; of a model without one an empty version."""
    return [
        IndexEntry(name, str(state.version) if state.is_version else "", state.state, state.reason or UNSET)
        for name, state in services.extensions.control.index(ready_only)
    ]


def regions(services: Services, kind: Kind, name: str) -> list[SystemRegion] | list[CudaRegion]:
    """All regions of a kind by name (""), or the named region. Raises as `ClientRegions.status` does."""
    entries = services.extensions.regions.status(kind, name)
    if kind == "cuda":
        return [CudaRegion(entry.name, entry.device, entry.nbytes) for entry in entries]
    return [SystemRegion(entry.name, entry.key, entry.offset, entry.nbytes) for entry in entries]


def traced_model(services: Services, name: str) -> str:
    """Full name of a model, under which its trace settings are kept. Raises `InvalidInput` for an unknown model."""
    try:
        return model_of(services.tensor_models.states(name)[0].id)
    except UnavailableModel:
        raise InvalidInput(f"unknown model '{name[:200]}'") from None


async def reload_catalog(services: Services, deadline_ns: int) -> bool:
    """Have the workers read the model files again; returns whether the files have changed.

    Raises `InvalidInput` for files with mistakes, while the models stay as they were, and as `Control.reread` and
    `Models.controlled` do.
    """
    return await services.directory.controlled().reread(deadline_ns)


def model_server_states(services: Services) -> dict[str, Any]:
    """All versions of all models by name, in the form of OpenVINO Model Server."""
    return {
        name: {"model_version_status": [_model_server_state(state) for state in _states_of(services, name)]}
        for name in services.tensor_models.names()
    }


def _model_server_state(state: VersionState) -> dict[str, Any]:
    failed = bool(state.status.error_class) and state.state != "READY"
    status = {"error_code": "UNKNOWN" if failed else "OK", "error_message": state.reason if failed else "OK"}
    return {"version": str(state.version), "state": _MODEL_SERVER_STATES[state.state], "status": status}
