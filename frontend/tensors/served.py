"""Which models can be asked for tensors, by name and version, and in which state their versions are.

1. A repository model `<name>` with version `<v>` is the catalog entry `<name>@<v>`; `catalog.versions` lists them.
2. Every other entry of the catalog (encode, score, extract) is a tensor model of version 1, under its id and, where no
   other model has it, under the last part of its id.
3. `find` answers from a cache that lives until a worker reports other states or the catalog changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from frontend.engine.local import routing
from frontend.tensors import catalog_models
from frontend.tensors.refusals import UnavailableModel
from frontend.tensors.rules import InputRule
from frontend.tensors.states import VersionState, is_coming, is_repository, is_unloaded, model_of, state_of
from ipc.catalog.entries import Catalog, ModelEntry
from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.errors import (
    DependencyConflict,
    InferenceFailed,
    ModelError,
    ModelLoadFailed,
    ModelLoading,
    ModelNotFound,
    ModelNotLoaded,
    NoReplica,
    PenstockError,
)
from ipc.wire.messages import ModelStatus, TensorOutput

if TYPE_CHECKING:
    from frontend.engine.local.client import Client
    from frontend.services import Services

_PASSING = (ModelLoading, ModelNotLoaded, NoReplica)
"""Errors of a model that may be there if one waits."""


@dataclass(slots=True, frozen=True)
class Served:
    """One version of a model that can be asked.

    `name` is what it was asked for by, `model` its full name, `id` its catalog entry. `kind` says what a request
    becomes: the call of a program of named tensors (`infer`), or one of the catalog's own operations.
    """

    name: str
    model: str
    version: int
    id: str
    kind: catalog_models.Kind
    config: ModelConfig
    entry: ModelEntry
    status: ModelStatus
    inputs: dict[str, InputRule]
    outputs: dict[str, TensorConfig]
    input_names: list[str]
    every_output: list[TensorOutput]
    required: int
    """How many inputs every request has to have."""


@dataclass(slots=True)
class _Seen:
    """What the cache was made from."""

    sources: object = None
    workers: list[tuple[str, object]] = field(default_factory=list)


class ServedModels:
    """The names of one frontend's catalog, and the versions found so far."""

    def __init__(self) -> None:
        self._seen = _Seen()
        self._names: dict[str, tuple[tuple[int, str], ...]] = {}
        self._canonical: list[str] = []
        self._found: dict[tuple[str, int | None], Served] = {}

    def find(self, services: Services, name: str, version: int | None) -> Served:
        """See `find` of this module."""
        self._refresh(services)
        served = self._found.get((name, version))
        if served is None:
            served = _look_up(services, name, version, self.versions(services, name))
            if served.status.state == "loaded":
                self._found[name, version] = served
        return served

    def known(self, services: Services, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Full name and versions of a model, None when there is none."""
        self._refresh(services)
        found = self._names.get(name)
        if found is None:
            return None
        return model_of(found[0][1]), tuple(version for version, _ in found)

    def names(self, services: Services) -> list[str]:
        """See `names` of this module."""
        self._refresh(services)
        return self._canonical

    def versions(self, services: Services, name: str) -> tuple[tuple[int, str], ...]:
        """(version, catalog id) of each version of a model, ascending. Raises `UnavailableModel`."""
        self._refresh(services)
        try:
            return self._names[name]
        except KeyError:
            raise UnavailableModel(name, None, "model", services.catalog.absence(name)) from None

    def _refresh(self, services: Services) -> None:
        catalog, client, seen = services.catalog, services.client, self._seen
        if seen.sources is not catalog.sources:
            self._names, self._canonical = _names_of(catalog)
        elif _same(seen.workers, client):
            return
        seen.sources, seen.workers = catalog.sources, [(c.state, c.models) for c in client.channels]
        self._found.clear()


def _same(seen: list[tuple[str, object]], client: Client) -> bool:
    channels = client.channels
    if len(channels) != len(seen):
        return False
    # PERF: this is asked for every request, so it makes nothing.
    for channel, (state, models) in zip(channels, seen, strict=True):
        if channel.models is not models or channel.state != state:
            return False
    return True


def _names_of(catalog: Catalog) -> tuple[dict[str, tuple[tuple[int, str], ...]], list[str]]:
    """Versions by every name that can be asked for, and the names without the short ones."""
    known = {
        name: tuple((version, f"{name}@{version}") for version in sorted(versions))
        for name, versions in catalog.versions.items()
    }
    ids = [name for name in catalog if "@" not in name]
    known |= {name: ((catalog_models.VERSION, name),) for name in ids}
    canonical = sorted(known)
    shorts: dict[str, list[str]] = {}
    for name in ids:
        shorts.setdefault(name.rpartition("/")[2], []).append(name)
    for short, owners in shorts.items():
        if len(owners) == 1:
            known.setdefault(short, known[owners[0]])
    return known, canonical


def find(services: Services, name: str, version: int | None = None) -> Served:
    """The version of a model that answers now; `version` None is the latest one that is loaded.

    A catalog model that is not loaded is found too: `run` has it loaded. Its widths may be -1 until then.

    Raises:
        UnavailableModel: no such model or version, or it was unloaded or failed to load; `reason` says which.
        ModelLoading: it will be there soon; with Retry-After.
        NoReplica: no worker is up that could say.
    """
    return services.served.find(services, name, version)


async def ready(services: Services, name: str, version: int | None, deadline_ns: int) -> Served:
    """`find`, after waiting for a load that runs or that this request starts, at most `limits.load_wait_s`.

    Of several versions that may come, the first to be there answers. What it returns is loaded. Raises as `find` does,
    and `DeadlineExceeded`.
    """
    tried = set[str]()
    while True:
        try:
            served = find(services, name, version)
            if served.status.state == "loaded":
                return served
            coming = [served.id]
        except _PASSING:
            coming = _coming(services, name, version, tried)
        entry, *others = coming
        try:
            await services.engine.ensure_loaded(entry, deadline_ns, others)
        except ModelLoading as error:
            raise _with_progress(error, name, services.engine.status(entry)) from error
        except (ModelLoadFailed, DependencyConflict, ModelNotFound) as error:
            if entry in tried:
                raise _refusal(error, name, version) from error
            # Another version may serve, or come.
            tried.add(entry)
        else:
            return find(services, name, version)


def gone(services: Services, name: str, version: int | None) -> UnavailableModel:
    """Why a model that was found does not answer any more: it was taken away meanwhile, and may be coming back."""
    try:
        find(services, name, version)
    except UnavailableModel as error:
        return error
    except _PASSING:
        pass
    return UnavailableModel(name, version, "unloaded")


def _refusal(error: ModelError, name: str, version: int | None) -> UnavailableModel:
    """The failure of a load, or the end of a model, in the words of this module."""
    if isinstance(error, ModelNotFound):
        return UnavailableModel(name, version, "unloaded")
    return UnavailableModel(name, version, "failed", error.message)


def states(services: Services, name: str) -> list[VersionState]:
    """All versions of a model, ascending. Raises `UnavailableModel` for a name that nothing has."""
    return [state_of(services, version, entry) for version, entry in services.served.versions(services, name)]


def names(services: Services) -> list[str]:
    """Names of all models, sorted; short names are left out."""
    return services.served.names(services)


def _look_up(
    services: Services, name: str, version: int | None, known: tuple[tuple[int, str], ...]
) -> Served:
    chosen = [found for found in known if version in (None, found[0])]
    if not chosen:
        raise UnavailableModel(name, version, "version")
    for number, entry in reversed(chosen):
        status = services.engine.status(entry)
        if status.state == "loaded" or (not is_repository(entry) and not is_unloaded(services, entry)):
            return _served(services, name, number, entry, status)
    raise _missing(services, name, version, chosen)


def _served(services: Services, name: str, version: int, entry_id: str, status: ModelStatus) -> Served:
    entry = services.engine.find(entry_id)
    if is_repository(entry_id):
        kind: catalog_models.Kind = "infer"
        if status.config is None:
            raise InferenceFailed(f"model {name!a} version {version}: its worker gives no configuration")
        config = status.config
    else:
        kind = catalog_models.kind_of(entry)
        config = catalog_models.config_of(name, entry, status.dims, services.settings.limits)
    rules = {tensor.name: InputRule.of(tensor) for tensor in config.inputs}
    return Served(
        name=name,
        model=model_of(entry_id),
        version=version,
        id=entry_id,
        kind=kind,
        config=config,
        entry=entry,
        status=status,
        inputs=rules,
        outputs={tensor.name: tensor for tensor in config.outputs},
        input_names=list(rules),
        every_output=[TensorOutput(tensor.name) for tensor in config.outputs],
        required=sum(not rule.optional for rule in rules.values()),
    )


def _missing(
    services: Services, name: str, version: int | None, chosen: list[tuple[int, str]]
) -> PenstockError:
    """Why none of these versions of a repository model answers."""
    found = [state_of(services, number, entry) for number, entry in reversed(chosen)]
    refusal: PenstockError | None = None
    for state in found:
        if is_coming(services, state.id, state.status):
            on_demand = services.settings.catalog.on_demand
            error = routing.explain(services.client.channels, state.id, on_demand=on_demand)
            if not isinstance(error, ModelLoadFailed | DependencyConflict):
                return _with_progress(error, name, state.status) if isinstance(error, ModelLoading) else error
            refusal = refusal or _refusal(error, name, version)
    if refusal is not None:
        return refusal
    for state in found:
        if state.status.state == "failed":
            return UnavailableModel(name, version, "failed", state.reason)
    return UnavailableModel(name, version, "unloaded")


def _with_progress(error: ModelLoading, name: str, status: ModelStatus) -> ModelLoading:
    """The same under the name that was asked for, with how far the load has come."""
    text = f"model {name[:200]!a} is loading, {status.progress:.0%} of it is done"
    return ModelLoading(text, retry_after_s=error.retry_after_s)


def _coming(services: Services, name: str, version: int | None, tried: set[str]) -> list[str]:
    """Catalog ids of the versions of a model that a wait may bring, the greatest first and those `tried` last."""
    known = services.served.versions(services, name)
    chosen = [entry for number, entry in reversed(known) if version in (None, number)]
    coming = [entry for entry in chosen if is_coming(services, entry, services.engine.status(entry))]
    return sorted(coming, key=tried.__contains__) or chosen[:1]
