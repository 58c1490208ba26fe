"""What this protocol says of the server and its models: readiness, metadata, statistics; over HTTP as over gRPC."""

from __future__ import annotations

from typing import Any

from frontend.protocols.kserve_v2 import strings
from frontend.services import Services
from frontend.tensors import served
from frontend.tensors.refusals import UnavailableModel
from frontend.tensors.states import VersionState, model_of
from frontend.tensors.statistics import ModelStatistics
from ipc import version
from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.errors import InvalidInput
from ipc.memory.datatypes import BYTES

_ALWAYS = ("classification", "sequence", "sequence(string_id)", "model_repository")
_BETWEEN = ("schedule_policy", "model_configuration")
_LAST = ("binary_tensor_data", "parameters", "statistics", "trace", "logging")


def model_ready(services: Services, name: str, number: int | None) -> bool:
    """Whether a version (None: any) of a model is ready; an unknown model is not."""
    try:
        states = served.states(services, name)
    except UnavailableModel:
        return False
    return any(state.state == "READY" for state in states if number in (None, state.version))


def server_metadata(services: Services) -> dict[str, Any]:
    """Name, version, and the extensions that are really offered, in the order of the specification."""
    regions = services.extensions.regions
    memory = [
        extension
        for extension, offered in (
            ("system_shared_memory", regions.offered),
            ("cuda_shared_memory", regions.cuda_offered),
        )
        if offered
    ]
    return {
        "name": services.settings.kserve.server_name,
        "version": version.VERSION,
        "extensions": [*_ALWAYS, *_BETWEEN, *memory, *_LAST],
    }


def model_metadata(services: Services, name: str, number: int | None) -> dict[str, Any]:
    """Names, versions and tensors of a model. Raises as `served.find`."""
    found = served.find(services, name, number)
    config = found.config
    versions = [number] if number is not None else [state.version for state in served.states(services, name)]
    return {
        "name": name,
        "versions": [str(one) for one in versions],
        "platform": config.platform,
        "inputs": [_tensor(tensor, config) for tensor in config.inputs],
        "outputs": [_output(tensor, config) for tensor in config.outputs],
    }


def _tensor(tensor: TensorConfig, config: ModelConfig) -> dict[str, Any]:
    shape = [-1, *tensor.dims] if config.batches else list(tensor.dims)
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": shape}


def _output(tensor: TensorConfig, config: ModelConfig) -> dict[str, Any]:
    """An output as answers have it: one that is text by its name is BYTES."""
    found = _tensor(tensor, config)
    if strings.is_marked(tensor.name, tensor.datatype, len(found["shape"])):
        return {**found, "datatype": BYTES, "shape": found["shape"][:1]}
    return found


def traced_model(services: Services, name: str) -> str:
    """Full name of a model, which its trace settings are kept under. Raises `InvalidInput` for an unknown one."""
    try:
        return model_of(served.states(services, name)[0].id)
    except UnavailableModel:
        raise InvalidInput(f"unknown model '{name[:200]}'") from None


async def statistics(
    services: Services, name: str, number: int | None
) -> list[tuple[str, VersionState, ModelStatistics]]:
    """Figures of one version of a model, of all its versions (None), or of all models (""), by name and version.

    Raises `InvalidInput` for a model or version that nothing has.
    """
    rows = [
        (one, state)
        for one in ([name] if name else served.names(services))
        for state in _states(services, one)
        if number in (None, state.version)
    ]
    if name and not rows:
        raise _unavailable(name)
    counted = await services.extensions.statistics.read()
    return [(one, state, counted.of_state(state)) for one, state in rows]


def _states(services: Services, name: str) -> list[VersionState]:
    try:
        return served.states(services, name)
    except UnavailableModel:
        raise _unavailable(name) from None


def _unavailable(name: str) -> InvalidInput:
    return InvalidInput(f"requested model '{name[:200]}' is not available")
