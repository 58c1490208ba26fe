"""A second engine: it runs models in this process, without workers, sockets or shared memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np

from frontend.engine.answer import Answer, AnswerStream
from frontend.engine.events import Generation, Pace
from frontend.engine.interface import (
    Control,
    Engine,
    Models,
    NoBlocks,
    Payload,
    Wanted,
    WorkerView,
    always,
    bytes_of,
)
from frontend.scope import ANY_BOX, Choice, RequestScope
from ipc import deadline
from ipc.catalog.entries import Catalog, ModelEntry
from ipc.catalog.repository import Wish
from ipc.errors import DeadlineExceeded, ModelNotLoaded, PenstockError, Unsupported
from ipc.memory import tensors
from ipc.memory.datatypes import DATATYPES
from ipc.wire.messages import Credits, InferCall, ModelStatus, Result, TensorInfo, Timing, Work
from tests.fakes.lease import FakeLease

Arrays = dict[str, Any]
"""Arrays by name, or the bytes of each item for results of any size."""
Model = Callable[[Work, Arrays], Arrays | Iterator[Arrays]]
"""Gives output arrays for a call and its input arrays, or one map of them per part."""
_DATATYPES = {np.dtype(one.array): name for name, one in DATATYPES.items() if name not in ("BYTES", "BF16")}


class InProcessDirectory(Models, Control):
    """Models with a state that loads and unloads change at once."""

    def __init__(self, catalog: Catalog, statuses: Iterable[ModelStatus]) -> None:
        self.catalog, self.control = catalog, self
        self._statuses = {status.name: status for status in statuses}
        self._changes = 0
        self.loaded: set[str] = set()
        self._removed: set[tuple[str, int]] = set()

    @property
    def is_told(self) -> bool:
        return True

    @property
    def is_learning(self) -> bool:
        return False

    @property
    def reaches_all(self) -> bool:
        return True

    @property
    def removed(self) -> set[tuple[str, int]]:
        return self._removed

    def chosen(self, model: str) -> tuple[int, ...]:
        return self.catalog.versions.get(model, ())

    async def reread(self, until_ns: int, model: str = "", draft: Wish | None = None) -> bool:
        return False

    async def spread(self, until_ns: int) -> None:
        """There are no other frontends."""

    @property
    def version(self) -> int:
        return self._changes

    def _set(self, model: str, *, loaded: bool) -> None:
        (self.loaded.add if loaded else self.loaded.discard)(model)
        self._changes += 1

    def find(self, model: str) -> ModelEntry:
        return self.catalog.find(model)

    def status(self, model: str) -> ModelStatus:
        if model in self.loaded:
            return self._statuses[model]
        return ModelStatus(model, "available")

    def is_loaded(self, model: str, revision: str = "") -> bool:
        return model in self.loaded

    def identity(self, model: str) -> str:
        return self._statuses[model].identity if model in self.loaded else ""

    def why_unavailable(self, model: str) -> PenstockError:
        return ModelNotLoaded(f"Model '{model}' is not loaded", retry_after_s=1)

    def workers(self) -> Sequence[WorkerView]:
        models = {name: self.status(name) for name in self._statuses}
        return [WorkerView("worker-0", 0, "ready", True, True, "cpu", 1, models, Credits(1, 0, 1.0), None)]

    def watch(self, on: bool) -> bool:
        return True

    async def wait(self, done: Callable[[], bool], deadline_ns: int) -> None:
        if not done():
            raise DeadlineExceeded("nothing changes by itself here")

    async def ensure_loaded(
        self, model: str, deadline_ns: int, others: Collection[str] = (), choice: Choice = ANY_BOX
    ) -> ModelStatus:
        await self.load(model, True, deadline_ns)
        return self.status(model)

    async def load(self, model: str, wait: bool, deadline_ns: int, is_wanted: Wanted = always) -> str:
        self._set(model, loaded=True)
        return "loaded"

    async def unload(self, model: str, wait: bool, deadline_ns: int) -> str:
        self._set(model, loaded=False)
        return "available"


class _Parts(AnswerStream):
    """The parts that a model gives, one when it is asked for."""

    def __init__(self, engine: InProcessEngine, work: Work, parts: Iterator[Arrays]) -> None:
        self._engine, self._work, self._parts = engine, work, parts
        self._held: Answer | None = None

    async def __anext__(self) -> Answer:
        self._let_go()
        for arrays in self._parts:
            self._held = self._engine.answer(self._work, arrays)
            return self._held
        self.result = self._engine.answer(self._work, {})
        raise StopAsyncIteration

    def when_answered(self, then: Callable[[], object]) -> None:
        then()

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None

    def close(self) -> None:
        self._let_go()
        if self.result is not None:
            self.result.release()


class InProcessEngine(Engine):
    """Runs `models` by name; a model is loaded when it is asked for. `leases` are those of all answers."""

    def __init__(self, directory: InProcessDirectory, models: dict[str, Model]) -> None:
        self.directory, self._models, self.blocks = directory, models, NoBlocks()
        self.leases: list[FakeLease] = []
        self.works: list[Work] = []

    async def run(self, scope: RequestScope, work: Work, payload: Payload = None) -> Answer:
        found = self._begin(scope, work, payload)
        assert isinstance(found, dict)
        answer = self.answer(work, found)
        scope.ran(answer.worker, answer.timing, answer.trace)
        return answer

    @asynccontextmanager
    async def stream(
        self, scope: RequestScope, work: Work, payload: Payload = None
    ) -> AsyncIterator[AnswerStream]:
        found = self._begin(scope, work, payload)
        assert isinstance(found, Iterator)
        with _Parts(self, work, found) as parts:
            yield parts

    def generate(
        self, scope: RequestScope, work: Work, pace: Pace
    ) -> AbstractAsyncContextManager[Generation]:
        raise Unsupported("no model here generates text")

    def ready(self) -> tuple[bool, str]:
        return True, "ok"

    def _begin(self, scope: RequestScope, work: Work, payload: Payload) -> Arrays | Iterator[Arrays]:
        deadline.check(scope.waits_until_ns, "before the model could begin")
        if not self.directory.is_loaded(work.model):
            raise self.directory.why_unavailable(work.model)
        self.works.append(work)
        return self._models[work.model](work, _inputs_of(work, bytes(bytes_of(payload))))

    def answer(self, work: Work, arrays: Arrays) -> Answer:
        """An answer over a buffer with a lease, whose bytes are others once the lease has ended."""
        as_bytes = isinstance(work.call, InferCall)
        rows = {name: list(map(len, array)) for name, array in arrays.items() if isinstance(array, list)}
        stored: dict[str, Any] = {
            name: _raw(array) if as_bytes or name in rows else array for name, array in arrays.items()
        }
        refs, nbytes = tensors.layout((n, a.dtype.name, a.shape) for n, a in stored.items())
        lease = FakeLease(bytes(nbytes))
        for ref in refs:
            tensors.view(memoryview(lease.block), ref)[...] = stored[ref.name]
        infos = [
            TensorInfo(name, _DATATYPES[array.dtype], list(array.shape), array.nbytes)
            for name, array in arrays.items()
            if as_bytes
        ]
        self.leases.append(lease)
        tokens = [1] * len(work.call.items)
        result = Result(
            1, None, refs, tokens, [], [], Timing(1000, 2000, 3000, 4000, 1), rows=rows, infos=infos
        )
        return Answer(result, lease.view, lease=lease)


def _raw(values: np.ndarray | list[bytes]) -> np.ndarray:
    data = b"".join(values) if isinstance(values, list) else values.tobytes()
    return np.frombuffer(data, np.uint8)


def _inputs_of(work: Work, payload: bytes) -> Arrays:
    if not isinstance(work.call, InferCall):
        return {}
    return {
        given.name: np.frombuffer(
            payload[given.start : given.start + given.nbytes], DATATYPES[given.datatype].array
        ).reshape(given.shape)
        for given in work.call.inputs
    }
