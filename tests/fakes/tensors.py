"""A frontend's services with workers that are only states, and a client whose calls a test answers."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from frontend.access.gate import Gate
from frontend.engine.answer import CopyBudget
from frontend.engine.interface import bytes_of
from frontend.engine.local.engine import LocalEngine
from frontend.http.bodies import BodyReader
from frontend.http.threads import at_once
from frontend.records.finishing import Finisher
from frontend.records.statistics import RequestCounters
from frontend.scope import RequestScope
from frontend.services import Services
from frontend.tensors.inference import TensorInference
from frontend.tensors.models import TensorModels
from frontend.tensors.program_calls import nbytes_of
from frontend.tensors.request import InputTensor, RegionUse, TensorRequest
from frontend.tensors.result import TensorResult
from frontend.tensors.uploading import InputMemory
from ipc.catalog.entries import Catalog, DirectorySource, ModelEntry
from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.errors import PenstockError, RegionNotFound
from ipc.memory.input_arena import InputArena
from ipc.settings import load
from ipc.wire.messages import InferCall, ModelStatus, Region, TensorInfo, Timing, Work
from tests.fakes.channel import FakeChannel

Answer = Callable[[Work], Any]


def tensor(name: str, datatype: str, *dims: int, **more: Any) -> TensorConfig:
    """One configured tensor."""
    return TensorConfig(name=name, datatype=datatype, dims=dims, **more)


def elements(*texts: str | bytes) -> bytes:
    """The raw BYTES tensor of these elements."""
    raw = [text.encode() if isinstance(text, str) else text for text in texts]
    return b"".join(struct.pack("<I", len(element)) + element for element in raw)


def finish(given: InputTensor) -> bytes:
    """Make an input by its recipe, in a place that held something else; its bytes."""
    if given.recipe is not None:
        assert given.data is not None
        given.shape = at_once(given.recipe.plan(given.data)).shape
        place = bytearray(b"\xa5" * nbytes_of(given))
        if place:
            at_once(given.recipe.write(given.data, given.shape, memoryview(place)))
        given.data, given.recipe = bytes(place), None
    return bytes(given.data or b"")


def entry(name: str, **more: Any) -> ModelEntry:
    """A catalog entry whose files nobody reads."""
    return ModelEntry(id=name, source=DirectorySource("nowhere"), **more)


def loaded(name: str, config: ModelConfig | None = None, **more: Any) -> ModelStatus:
    """The status of a loaded model."""
    return ModelStatus(name, "loaded", config=config, attempts=1, **more)


@dataclass
class FakeChannelWithModels(FakeChannel):
    """A worker that has tried all models of the start."""

    preloaded: bool = True


class InferReply:
    """The reply of an infer call: raw bytes by output."""

    def __init__(self, infos: Sequence[TensorInfo], raw: dict[str, bytes]) -> None:
        self.infos, self._raw = list(infos), raw
        self.timing, self.trace, self.worker, self.uuid = Timing(1, 2, 3, 4, 1), None, "worker-0", "cpu"
        self.errors: list[Any] = []
        self.checks = self.releases = 0
        self._handed_over = False

    @classmethod
    def of(cls, **arrays: np.ndarray) -> InferReply:
        """FP32 or INT32 arrays as outputs."""
        names = {"float32": "FP32", "int32": "INT32"}
        infos = [
            TensorInfo(name, names[array.dtype.name], list(array.shape), array.nbytes)
            for name, array in arrays.items()
        ]
        return cls(infos, {name: array.tobytes() for name, array in arrays.items()})

    def raw(self, name: str) -> memoryview:
        """Bytes of one output."""
        return memoryview(self._raw[name])

    def check(self) -> None:
        """Never revoked."""
        self.checks += 1

    def release(self) -> None:
        """Count."""
        self.releases += 1

    def __enter__(self) -> InferReply:
        return self

    def hand_over(self) -> InferReply:
        """The writer of the body ends it."""
        self._handed_over = True
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._handed_over:
            return
        if kind is None:
            self.close()
        else:
            self.release()

    def close(self) -> None:
        """Check and release."""
        try:
            self.check()
        finally:
            self.release()


class ArrayReply(InferReply):
    """The reply of a catalog call: arrays by name, and rows per item."""

    def __init__(self, arrays: dict[str, np.ndarray], rows: dict[str, list[int]] | None = None) -> None:
        super().__init__([], {})
        self._arrays, self._rows = arrays, rows or {}

    def tensors(self) -> dict[str, np.ndarray]:
        """The arrays."""
        return self._arrays

    def spans(self, name: str) -> list[slice]:
        """Where the rows of each item lie."""
        return [slice(*span) for span in pairwise(accumulate(self._rows[name], initial=0))]


@dataclass
class FakeClient:
    """Answers calls by `answer`, and remembers them with the bytes of their payloads."""

    inputs: InputArena
    answer: Answer
    channels: list[FakeChannelWithModels] = field(default_factory=list)
    requests: list[Work] = field(default_factory=list)
    given: list[Any] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    waited: list[list[str]] = field(default_factory=list)
    on_wait: Callable[[str], None] = lambda model: None

    async def call(self, request: Work, payload: Any = None) -> Any:
        """One call."""
        self.requests.append(request)
        self.given.append(payload)
        self.payloads.append(bytes(bytes_of(payload)))
        found = self.answer(request)
        try:
            if isinstance(found, BaseException):
                raise found
            return found
        finally:
            # So that the error does not keep this frame, and the request with it.
            del found

    async def ready(self, model: str, deadline_ns: int, others: Collection[str] = ()) -> None:
        """The wait for a model."""
        self.waited.append([model, *others])
        self.on_wait(model)

    @property
    def last(self) -> InferCall:
        """The last call."""
        call = self.requests[-1].call
        assert isinstance(call, InferCall)
        return call


class FakeStatistics(RequestCounters):
    """Remembers what was booked."""

    def __init__(self, known: Callable[[str], Any] = lambda name: None) -> None:
        super().__init__(None, None, known)  # type: ignore[arg-type]
        self.booked: list[tuple[Any, ...]] = []

    def succeeded(
        self, model: str, version: int, rows: int, times: Any, uuid: str = "", cached: int = 0
    ) -> None:
        """An answered request."""
        self.booked.append((model, version, rows))

    def failed(self, model: str, version: int | None, rows: int, code: str, total_ns: int) -> None:
        """A failed one."""
        self.booked.append((model, version, rows, code))


class FakeRegions:
    """Knows the region `known`, and which regions requests use."""

    def __init__(self) -> None:
        self.held: list[str] = []

    @contextmanager
    def holding(self, names: Sequence[str]) -> Iterator[None]:
        """A request uses them."""
        self.held += names
        yield
        for name in names:
            self.held.remove(name)

    def resolve(self, use: RegionUse) -> Region:
        """Its bytes."""
        if use.name != "known":
            raise RegionNotFound(f"Unable to find shared memory region: '{use.name}'")
        return Region("system", "/known", use.offset, use.nbytes)


def services_of(
    root: Path,
    entries: Sequence[ModelEntry],
    statuses: Sequence[ModelStatus],
    answer: Answer = lambda request: InferReply([], {}),
    unloaded: Sequence[str] = (),
    **settings: str,
) -> Services:
    """Services of a frontend with one worker. `settings` as `section__field`."""
    named = {name.replace("__", ".", 1): value for name, value in settings.items()}
    chosen = load(None, {"run.dir": str(root), "run.shm_dir": str(root), **named}, {})
    services = Services(chosen, Catalog(entries), Gate())
    client: Any = FakeClient(InputArena(chosen.paths, "frontend-0", chosen.arena.input_bytes), answer)
    client.channels = [FakeChannelWithModels(0, {status.name: status for status in statuses})]
    recorder: Any = SimpleNamespace(
        carried_on=lambda outcome: None,
        in_flight=lambda model, lane: nullcontext(),
        text=lambda model, key, route: None,
    )
    client.demand = SimpleNamespace(has_asked=lambda model: False)
    services.recorder = recorder
    engine = LocalEngine(chosen, services.catalog, client, services.drain)
    services.engine, services.directory = engine, engine.directory
    services.bodies, services.copies = BodyReader(chosen.limits), CopyBudget(chosen.arena.copy_out_bytes)
    services.extensions = SimpleNamespace(  # type: ignore[assignment]
        counters=FakeStatistics(lambda name: services.tensor_models.known(name)),
        regions=FakeRegions(),
        control=SimpleNamespace(wished=lambda model: False if model in unloaded else None),
    )
    services.tensor_models = TensorModels(
        engine.directory, chosen, lambda model: services.extensions.control.wished(model)
    )
    inputs = InputMemory(client.inputs, services.bodies, chosen)
    services.finisher = Finisher(statistics=services.extensions.counters)
    regions: Any = services.extensions.regions
    services.tensor_inference = TensorInference(engine, services.tensor_models, inputs, regions, chosen)
    return services


@contextmanager
def ending(services: Services, scope: RequestScope) -> Iterator[None]:
    """The end of a request, as the middleware and the gRPC server bring it about."""
    try:
        yield
    except PenstockError as error:
        scope.error = error.code
        raise
    except asyncio.CancelledError:
        scope.error = scope.ended_early().code
        raise
    except Exception:
        scope.error = PenstockError.code
        raise
    finally:
        services.finisher.count_inference(scope)


async def run(services: Services, scope: RequestScope, request: TensorRequest) -> TensorResult:
    """One request to its result, and its end."""
    with ending(services, scope):
        asked = request.model, request.version, request.timeout_us
        model = await services.tensor_inference.find(scope, *asked)
        return await services.tensor_inference.run(scope, model, request)


async def results(
    services: Services, scope: RequestScope, request: TensorRequest
) -> AsyncGenerator[TensorResult, None]:
    """One request to the results of a decoupled model."""
    model = await services.tensor_inference.find(scope, request.model, request.version, request.timeout_us)
    async with aclosing(services.tensor_inference.stream(scope, model, request)) as found:
        async for result in found:
            yield result
