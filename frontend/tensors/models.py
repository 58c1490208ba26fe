"""Models that can be asked for tensors (`TensorModel`), by name and version (`TensorModels`); states of versions.

1. A repository model `<name>` with version `<v>` is the catalog entry `<name>@<v>`; `catalog.versions` lists them.
2. Every other entry of the catalog (encode, score, extract, chat) is a tensor model of version 1, under its id and,
   where no other model has it, under the last part of its id.
3. `TensorModels.find` answers from a cache that lives until a worker reports other states or the catalog changes. A
   request looks its model up once, and `ready` waits for a load if need be.
4. `VersionStates` tells the state of a version over all workers, and whether a wait alone will bring the version.

`config_of` makes a tensor model of a catalog model: the inputs and outputs of an encode, score or extract model. All
inputs are BYTES: texts in UTF-8, or images as encoded files.

- encode: `text` or `image` [n], or both, one element per item of the batch. `dense` FP32 [n, width]; `multivector` FP32
  [1, tokens, width], for a request of one item; `sparse` BYTES [n], each the JSON text `{"indices": [], "values": []}`.
- score: `query` [1], and `documents` or `images` [n]. `score` FP32 [n], in the order of the documents.
- extract: `text` or `image` [n], and `labels` [k] for all items. `extraction` BYTES [n], each the JSON text of what
  `ipc.wire.extraction` describes.
- chat: no tensors. Such a model is listed with its state, and a request of tensors is refused (`inference`).

Score and extract models do not batch: their inputs have lengths of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from frontend.engine.interface import Models
from frontend.tensors.request import UnavailableModel
from ipc import deadline
from ipc.catalog.entries import TEXT, Catalog, ModelEntry
from ipc.catalog.ids import NO_VERSION, id_of, is_repository, model_of
from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.errors import (
    DeadlineExceeded,
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
from ipc.memory.datatypes import DATATYPES
from ipc.settings import Limits, Settings
from ipc.wire.messages import ModelStatus, TensorOutput

State = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
_STATES: dict[str, State] = {"loaded": "READY", "loading": "LOADING", "unloading": "UNLOADING"}
Kind = Literal["infer", "encode", "score", "extract", "chat"]
VERSION = 1
"""The version of every catalog model."""
_MOST_ROWS = (1 << 31) - 1
_PASSING = (ModelLoading, ModelNotLoaded, NoReplica)
"""Errors of a model that may be there after a wait."""


class VersionState(NamedTuple):
    """One version of a model as the server sees it; `reason` is for clients.

    A READY version has a reason if its files have changed since and the changed files cannot be loaded.
    """

    version: int
    id: str
    state: State
    reason: str
    status: ModelStatus

    @property
    def is_version(self) -> bool:
        """Whether there is such a version; else the state tells why the model has none."""
        return self.version != NO_VERSION


class VersionStates:
    """States by catalog id.

    `control` is `repository.control`. `wished` tells what was done last by name: a load (true) or an unload (false).
    """

    def __init__(self, directory: Models, control: str, wished: Callable[[str], bool | None]) -> None:
        self.directory, self._control, self.wished = directory, control, wished

    def of(self, version: int, entry: str) -> VersionState:
        """The state of one version."""
        status = self.directory.status(entry)
        state = _STATES.get(status.state, "UNAVAILABLE")
        if state != "UNAVAILABLE":
            stale = state == "READY" and status.error_message
            reason = f"served as it was before its files changed: {stale}" if stale else ""
            return VersionState(version, entry, state, reason, status)
        if status.state == "failed":
            return VersionState(version, entry, state, status.error_message, status)
        if is_repository(entry) and self.is_coming(entry, status):
            return VersionState(version, entry, "LOADING", "", status)
        reason = "unloaded" if status.attempts or self.is_unloaded(entry) else "not loaded"
        return VersionState(version, entry, state, reason, status)

    def is_coming(self, entry: str, status: ModelStatus) -> bool:
        """Whether a version that is not loaded will be loaded without an operator's doing.

        A version that was unloaded by name stays unloaded, also while a worker still gives up its load. An eviction for
        want of memory is no such unload. Where models are loaded by name, a version that no present worker has tried is
        coming in two cases: workers that are gone had loaded it, by name or at the start; or the server is starting.
        """
        if status.state == "loading":
            return self.may_be_loaded(entry)
        wished = self.wished(model_of(entry))
        if status.state not in ("available", "unloading") or wished is False:
            return False
        if wished or status.attempts or not self._is_by_name(entry):
            return True
        if self.directory.catalog[entry].preload:
            return True
        up = [worker for worker in self.directory.workers() if worker.state == "ready"]
        return not up or not all(worker.preloaded for worker in up)

    def _is_by_name(self, entry: str) -> bool:
        """Whether a version is loaded by name alone."""
        found = self.directory.is_by_name(entry)
        return self._control != "none" if found is None else found

    def may_be_loaded(self, entry: str) -> bool:
        """Whether a request may have a model loaded: not a repository model that an operator has unloaded."""
        return entry in self.directory.catalog and not (is_repository(entry) and self.is_unloaded(entry))

    def is_unloaded(self, entry: str) -> bool:
        """Whether an operator unloaded the model of a catalog id."""
        return self.wished(model_of(entry)) is False


class ExpectedInput(NamedTuple):
    """The form of one input: `dims` without a batch dimension, `nbytes` of an element (0: varies)."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    variable: bool
    nbytes: int
    optional: bool

    @classmethod
    def of(cls, tensor: TensorConfig) -> ExpectedInput:
        """From one configured input."""
        nbytes = DATATYPES[tensor.datatype].nbytes
        return cls(tensor.name, tensor.datatype, tensor.dims, -1 in tensor.dims, nbytes, tensor.optional)

    def fits(self, dims: list[int]) -> bool:
        """Whether these dims, without the batch dimension, are among those that the model takes."""
        if not self.variable:
            return tuple(dims) == self.dims
        return len(dims) == len(self.dims) and all(
            allowed in (-1, given) for allowed, given in zip(self.dims, dims, strict=True)
        )


@dataclass(slots=True, frozen=True)
class TensorModel:
    """One version of a model that can be asked.

    `name` is the name in the request, `model` the full name, `id` the catalog entry. `kind` says what a request
    becomes: the call of a program of named tensors (`infer`), or one of the catalog's own operations. `required` is the
    number of inputs that every request must have. `plans` are kept by the head of a request
    (`frontend.tensors.program_calls`).
    """

    name: str
    model: str
    version: int
    id: str
    kind: Kind
    config: ModelConfig
    entry: ModelEntry
    status: ModelStatus
    inputs: dict[str, ExpectedInput]
    outputs: dict[str, TensorConfig]
    input_names: list[str]
    every_output: list[TensorOutput]
    required: int
    plans: dict[bytes | str, Any] = field(default_factory=dict, compare=False)

    @property
    def is_loaded(self) -> bool:
        """Whether a worker has the version."""
        return self.status.state == "loaded"


@dataclass(slots=True)
class _Seen:
    """What the cache was made from."""

    sources: object = None
    version: int = -1


class TensorModels:
    """The names of one frontend's catalog, and the versions found so far.

    `wished` tells whether a model was loaded (true) or unloaded (false) by name last.
    """

    def __init__(self, directory: Models, settings: Settings, wished: Callable[[str], bool | None]) -> None:
        self.directory, self._limits = directory, settings.limits
        self.version_states = VersionStates(directory, settings.repository.control, wished)
        self._seen = _Seen()
        self._names: dict[str, tuple[tuple[int, str], ...]] = {}
        self._canonical: list[str] = []
        self._found: dict[tuple[str, int | None], TensorModel] = {}

    def find(self, name: str, version: int | None = None) -> TensorModel:
        """The version of a model that answers now; `version` None is the latest loaded version.

        A catalog model that is not loaded is found too: a request loads it. Its widths may be -1 until then.

        Raises:
            UnavailableModel: no such model or version, or it was unloaded or failed to load; `reason` says which.
            ModelLoading: it will be there soon; with Retry-After.
            NoReplica: no worker is up that could say.
        """
        self._refresh()
        model = self._found.get((name, version))
        if model is None:
            model = self._look_up(name, version)
            if model.is_loaded:
                self._found[name, version] = model
        return model

    async def ready(self, name: str, version: int | None, deadline_ns: int) -> TensorModel:
        """`find`, after waiting for a load that runs or that this request starts, at most `limits.load_wait_s`.

        Of several versions that may come, the first to be there answers. The model that is returned is loaded. Raises
        as `find` does, and `DeadlineExceeded`.
        """
        tried = set[str]()
        while True:
            try:
                model = self.find(name, version)
                if model.is_loaded:
                    return model
                coming = [model.id]
            except _PASSING:
                if not self.directory.is_told:
                    await self.told_versions(name, deadline_ns)
                    continue
                coming = self._coming(name, version, tried)
            entry, *others = coming
            try:
                await self.directory.ensure_loaded(entry, deadline_ns, others)
            except ModelLoading as error:
                raise _with_progress(error, name, self.directory.status(entry)) from error
            except (ModelLoadFailed, DependencyConflict, ModelNotFound) as error:
                if entry in tried:
                    raise _refusal(error, name, version) from error
                # Another version may answer, or may be loading.
                tried.add(entry)
            else:
                return self.find(name, version)

    def gone(self, name: str, version: int | None) -> UnavailableModel:
        """Why a found model no longer answers: the model was unloaded since, and may be loading again."""
        try:
            self.find(name, version)
        except UnavailableModel as error:
            return error
        except _PASSING:
            pass
        return UnavailableModel(name, version, "unloaded")

    def known(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Full name and versions of a model, None when there is none."""
        self._refresh()
        versions = self._names.get(name)
        if versions is None:
            return None
        return model_of(versions[0][1]), tuple(version for version, _ in versions)

    def names(self) -> list[str]:
        """Names of all models, sorted; short names are left out."""
        self._refresh()
        return self._canonical

    def versions(self, name: str) -> tuple[tuple[int, str], ...]:
        """(version, catalog id) of each version of a model, ascending.

        Raises `UnavailableModel`, and `NoReplica` while no worker has said which models repositories have.
        """
        self._refresh()
        try:
            return self._names[name]
        except KeyError:
            if not self.directory.is_told:
                raise NoReplica("no worker is up", retry_after_s=2) from None
            raise UnavailableModel(name, None, "model", self.directory.catalog.absence(name)) from None

    async def told_versions(self, name: str, deadline_ns: int) -> tuple[tuple[int, str], ...]:
        """`versions`, after waiting at most `limits.restart_wait_s` for a worker to tell of the repositories."""
        until_ns = min(deadline_ns, deadline.after(self._limits.restart_wait_s))
        with contextlib.suppress(DeadlineExceeded):
            await self.directory.wait(lambda: self.directory.is_told, until_ns)
        return self.versions(name)

    def states(self, name: str) -> list[VersionState]:
        """All versions of a model, ascending. Raises `UnavailableModel` for a name that nothing has."""
        return [self.version_states.of(version, entry) for version, entry in self.versions(name)]

    def _refresh(self) -> None:
        version, seen = self.directory.version, self._seen
        if version == seen.version:
            return
        catalog = self.directory.catalog
        if seen.sources is not catalog.sources:
            self._names, self._canonical = _names_of(catalog)
        seen.sources, seen.version = catalog.sources, version
        self._found.clear()

    def _look_up(self, name: str, version: int | None) -> TensorModel:
        chosen = [found for found in self.versions(name) if version in (None, found[0])]
        if not chosen:
            raise UnavailableModel(name, version, "version")
        for number, entry in reversed(chosen):
            status = self.directory.status(entry)
            on_demand = not is_repository(entry) and not self.version_states.is_unloaded(entry)
            if status.state == "loaded" or on_demand:
                return self._model(name, number, entry, status)
        raise self._missing(name, version, chosen)

    def _model(self, name: str, version: int, entry_id: str, status: ModelStatus) -> TensorModel:
        entry = self.directory.find(entry_id)
        if is_repository(entry_id):
            kind: Kind = "infer"
            if status.config is None:
                raise InferenceFailed(f"model {name!a} version {version}: its worker gives no configuration")
            config = status.config
        else:
            kind = kind_of(entry)
            config = config_of(name, entry, status.dims, self._limits)
        inputs = {tensor.name: ExpectedInput.of(tensor) for tensor in config.inputs}
        return TensorModel(
            name=name,
            model=model_of(entry_id),
            version=version,
            id=entry_id,
            kind=kind,
            config=config,
            entry=entry,
            status=status,
            inputs=inputs,
            outputs={tensor.name: tensor for tensor in config.outputs},
            input_names=list(inputs),
            every_output=[TensorOutput(tensor.name) for tensor in config.outputs],
            required=sum(not expected.optional for expected in inputs.values()),
        )

    def _missing(self, name: str, version: int | None, chosen: list[tuple[int, str]]) -> PenstockError:
        """Why none of these versions of a repository model answers."""
        states = [self.version_states.of(number, entry) for number, entry in reversed(chosen)]
        refusal: PenstockError | None = None
        for state in states:
            if self.version_states.is_coming(state.id, state.status):
                error = self.directory.why_unavailable(state.id)
                if not isinstance(error, ModelLoadFailed | DependencyConflict):
                    if isinstance(error, ModelLoading):
                        return _with_progress(error, name, state.status)
                    return error
                refusal = refusal or _refusal(error, name, version)
        if refusal is not None:
            return refusal
        for state in states:
            if state.status.state == "failed":
                return UnavailableModel(name, version, "failed", state.reason)
        return UnavailableModel(name, version, "unloaded")

    def _coming(self, name: str, version: int | None, tried: set[str]) -> list[str]:
        """Catalog ids of versions that may still be loaded, the greatest first and the `tried` ones last."""
        chosen = [entry for number, entry in reversed(self.versions(name)) if version in (None, number)]
        coming = [e for e in chosen if self.version_states.is_coming(e, self.directory.status(e))]
        return sorted(coming, key=tried.__contains__) or chosen[:1]


def _names_of(catalog: Catalog) -> tuple[dict[str, tuple[tuple[int, str], ...]], list[str]]:
    """Versions by every name that can be asked for, and the names without the short ones."""
    known = {
        name: tuple((version, id_of(name, version)) for version in sorted(versions))
        for name, versions in catalog.versions.items()
    }
    ids = [name for name in catalog if "@" not in name]
    known |= {name: ((VERSION, name),) for name in ids}
    canonical = sorted(known)
    known |= {name: ((VERSION, model),) for name, model in catalog.aliases.items()}
    shorts: dict[str, list[str]] = {}
    for name in ids:
        shorts.setdefault(name.rpartition("/")[2], []).append(name)
    for short, owners in shorts.items():
        if len(owners) == 1:
            known.setdefault(short, known[owners[0]])
    return known, canonical


def _refusal(error: ModelError, name: str, version: int | None) -> UnavailableModel:
    """The failure of a load, or the end of a model, in the words of this module."""
    if isinstance(error, ModelNotFound):
        return UnavailableModel(name, version, "unloaded")
    return UnavailableModel(name, version, "failed", error.message)


def _with_progress(error: ModelLoading, name: str, status: ModelStatus) -> ModelLoading:
    """The same under the name that was asked for, with how far the load has come."""
    text = f"model {name[:200]!a} is loading, {status.progress:.0%} of it is done"
    return ModelLoading(text, retry_after_s=error.retry_after_s)


def kind_of(entry: ModelEntry) -> Kind:
    """The operation of a request to a catalog model; a model that encodes and scores encodes."""
    if entry.encode_outputs:
        return "encode"
    if "score" in entry.outputs:
        return "score"
    return "chat" if TEXT in entry.outputs else "extract"


def config_of(name: str, entry: ModelEntry, dims: Mapping[str, int], limits: Limits) -> ModelConfig:
    """The configuration of a catalog model; `dims` are the widths of its outputs where a worker knows them."""
    kind = kind_of(entry)
    inputs, outputs = _TENSORS[kind](entry, dims)
    return ModelConfig(
        name=name,
        platform=f"penstock_{kind}",
        backend=entry.adapter if entry.adapter.isidentifier() else "",
        max_batch_size=min(limits.max_items, _MOST_ROWS) if kind == "encode" else 0,
        inputs=inputs,
        outputs=outputs,
    )


_Tensors = tuple[tuple[TensorConfig, ...], tuple[TensorConfig, ...]]


def _text(name: str, dims: tuple[int, ...], optional: bool = False) -> TensorConfig:
    return TensorConfig(name=name, datatype="BYTES", dims=dims, optional=optional)


def _items(entry: ModelEntry, dims: tuple[int, ...], image: str = "image") -> tuple[TensorConfig, ...]:
    """Inputs of one element per item; each may be left out where there are two."""
    kinds = {"text": "text", "image": image}
    named = [name for kind, name in kinds.items() if kind in entry.inputs] or ["text"]
    return tuple(_text(name, dims, optional=len(named) > 1) for name in named)


def _encode(entry: ModelEntry, dims: Mapping[str, int]) -> _Tensors:
    def width(output: str) -> int:
        return entry.outputs[output].dims or dims.get(output) or -1

    makers = {
        "dense": lambda: TensorConfig(name="dense", datatype="FP32", dims=(width("dense"),)),
        "sparse": lambda: TensorConfig(name="sparse", datatype="BYTES", dims=()),
        "multivector": lambda: TensorConfig(
            name="multivector", datatype="FP32", dims=(-1, width("multivector"))
        ),
    }
    return _items(entry, ()), tuple(makers[output]() for output in entry.encode_outputs)


def _score(entry: ModelEntry, dims: Mapping[str, int]) -> _Tensors:
    documents = [
        TensorConfig(name="documents", datatype="BYTES", dims=(-1,), optional=tensor.optional)
        if tensor.name == "text"
        else tensor
        for tensor in _items(entry, (-1,), image="images")
    ]
    return (_text("query", (1,)), *documents), (TensorConfig(name="score", datatype="FP32", dims=(-1,)),)


def _extract(entry: ModelEntry, dims: Mapping[str, int]) -> _Tensors:
    inputs = (*_items(entry, (-1,)), _text("labels", (-1,), optional=True))
    return inputs, (TensorConfig(name="extraction", datatype="BYTES", dims=(-1,)),)


def _chat(entry: ModelEntry, dims: Mapping[str, int]) -> _Tensors:
    return (), ()


_TENSORS = {"encode": _encode, "score": _score, "extract": _extract, "chat": _chat}
