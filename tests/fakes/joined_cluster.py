"""A gateway and boxes in one process: real ends of the protocol, brokers that are a list, engines that a test plays.

Messages arrive in order, one turn of the event loop after they were sent, unless `lose` says otherwise. `Joined` beats
for nobody: a test ends a box by `die`, or moves the clocks of the ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from frontend.bridge.bridge import Bridge
from frontend.bridge.meter import Meter
from frontend.cluster.broker import Broker
from frontend.cluster.engine import ClusterEngine
from frontend.cluster.gateway import Gateway
from frontend.cluster.runs import Runs
from frontend.engine.answer import Answer, AnswerStream
from frontend.engine.events import Event, Finished, Generation, Mark, Pace, Past
from frontend.engine.interface import NoBlocks, Payload, WorkerView
from frontend.engine.poison import PoisonList
from frontend.scope import RequestScope, scope_of_ids
from frontend.server.drain import Drain
from ipc.catalog.entries import Catalog, HubSource, ModelEntry
from ipc.errors import PenstockError
from ipc.memory.tensors import layout
from ipc.metrics.cluster import BridgeMetrics
from ipc.settings import Cluster, Settings
from ipc.settings import Generation as GenerationSettings
from ipc.wire.cluster import VERSION, BoxBeat
from ipc.wire.cluster_rows import ModelRow
from ipc.wire.messages import Credits, GenerateCall, ModelStatus, Result, Timing, Work
from tests.fakes.generation import TextOnly
from tests.harness.server import PATIENCE_S

MODEL = "m"
IDENTITY = "identity"
CLUSTER = Cluster(urls=("nats://127.0.0.1:1",))


class PlayedText(Generation):
    """A text whose events a test brings."""

    def __init__(self, past: Past | None, pace: Pace, keeps: bool) -> None:
        self.past, self.pace, self._keeps = past, pace, keeps
        self.prompt_tokens = 5
        self._steps: asyncio.Queue[tuple[list[Event], list[bytes]] | PenstockError | None] = asyncio.Queue()
        self._ids: list[bytes] = []
        self.has_ended = False
        self.read = 0
        """Lists that the reader has had."""

    @property
    def result(self) -> Answer | None:
        timing = Timing(1, 2, 3, 4)
        return Answer(Result(1, None, [], [], [], [], timing), memoryview(b""), worker="worker-0", uuid="cpu")

    def mark(self) -> Mark | None:
        ids, self._ids = self._ids, []
        seed = 7 if self.past is None else self.past.mark.seed
        return Mark(seed, ids, "weights", IDENTITY) if self._keeps else None

    async def __anext__(self) -> list[Event]:
        step = await self._steps.get()
        if isinstance(step, PenstockError):
            raise step
        if step is None:
            raise StopAsyncIteration
        self.read += 1
        self._ids = step[1]
        return step[0]

    def say(self, *events: Event, ids: Sequence[bytes] = ()) -> None:
        """Events come together, with the ids of each choice; the pace hears of their tokens as an engine's would."""
        for event in events:
            tokens = getattr(event, "tokens", 0)
            if isinstance(tokens, int) and not isinstance(event, Finished):
                self.pace.step(getattr(event, "choice", 0), tokens, 1)
        self._steps.put_nowait((list(events), list(ids)))

    def end(self, error: PenstockError | None = None) -> None:
        """The text ends."""
        self._steps.put_nowait(error)


class PlayedRun:
    """Work with one answer, which a test gives."""

    def __init__(self, work: Work) -> None:
        self.work, self.was_cancelled = work, False
        self._answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    async def answer(self) -> Answer:
        """What the test says. Raises the error that the test says."""
        try:
            return await self._answer
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise

    def say(self, number: int, count: int = 1) -> None:
        """The answer is a tensor OUTPUT with one number, `count` times."""
        refs, nbytes = layout([("OUTPUT", "int32", [1, count])])
        data = memoryview(np.full(count, number, np.int32).tobytes().ljust(nbytes, b"\0"))
        result = Result(1, None, refs, [], [], [], Timing(1, 2, 3, 4))
        self._answer.set_result(Answer(result, data, worker="worker-0", uuid="cpu"))

    def fail(self, error: PenstockError) -> None:
        """The work ends with an error."""
        self._answer.set_exception(error)


class PlayedParts(AnswerStream):
    """An answer in parts, which a test brings."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self._steps: asyncio.Queue[bytes | PenstockError | None] = asyncio.Queue()
        self.has_ended = False
        self.read = 0
        """Parts that the reader has had."""

    async def __anext__(self) -> Answer:
        step = await self._steps.get()
        if isinstance(step, PenstockError):
            raise step
        if step is None:
            self.result = Answer(
                Result(1, None, [], [], [], [], Timing(1, 2, 3, 4)), memoryview(b""), worker="worker-0"
            )
            raise StopAsyncIteration
        self.read += 1
        refs, _ = layout([("OUTPUT", "uint8", [len(step)])])
        loose, _ = layout([("LOOSE", "uint8", [1])])
        result = Result(1, None, refs, [], [], [], Timing(), loose=loose)
        return Answer(result, memoryview(step), memoryview(step[:1]), worker="worker-0")

    def when_answered(self, then: Callable[[], object]) -> None:
        """Nobody asks a bridge."""

    def close(self) -> None:
        self.has_ended = True

    def say(self, *parts: bytes) -> None:
        """Parts are there."""
        for part in parts:
            self._steps.put_nowait(part)

    def end(self, error: PenstockError | None = None) -> None:
        """The answer ends."""
        self._steps.put_nowait(error)


class PlayedEngine(TextOnly):
    """The engine of a box. `texts` are those that have begun; `refusals` are raised first, one by one."""

    def __init__(self) -> None:
        self.texts: list[PlayedText] = []
        self.runs: list[PlayedRun] = []
        self.parts: list[PlayedParts] = []
        self.refusals: list[PenstockError] = []
        self.keeps = True
        self.scopes: list[RequestScope] = []
        self.blocks = NoBlocks()

    async def run(self, scope: RequestScope, work: Work, payload: Payload = None) -> Answer:
        self.scopes.append(scope)
        if self.refusals:
            raise self.refusals.pop(0)
        self.runs.append(PlayedRun(work))
        return await self.runs[-1].answer()

    @asynccontextmanager
    async def stream(
        self, scope: RequestScope, work: Work, payload: Payload = None
    ) -> AsyncIterator[AnswerStream]:
        self.scopes.append(scope)
        if self.refusals:
            raise self.refusals.pop(0)
        self.parts.append(PlayedParts(work))
        with self.parts[-1] as parts:
            yield parts

    @asynccontextmanager
    async def generate(
        self, scope: RequestScope, work: Work, pace: Pace, past: Past | None = None
    ) -> AsyncIterator[Generation]:
        self.scopes.append(scope)
        if self.refusals:
            raise self.refusals.pop(0)
        text = PlayedText(past, pace, self.keeps)
        self.texts.append(text)
        try:
            yield text
        finally:
            text.has_ended = True


class Joined:
    """One gateway and some boxes."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *boxes: str, generation: GenerationSettings | None = None
    ) -> None:
        self._listeners: list[tuple[Broker, str, Any]] = []
        self.sent: list[tuple[str, bytes]] = []
        """All messages, also lost ones."""
        self.lose: Callable[[str, bytes], bool] = lambda subject, data: False
        monkeypatch.setattr(
            Broker,
            "listen",
            lambda broker, subject, handler: self._listeners.append((broker, subject, handler)),
        )
        monkeypatch.setattr(Broker, "send", lambda broker, subject, data, *more: self._send(subject, data))
        monkeypatch.setattr(Broker, "say", lambda broker, subject, data: self._send(subject, data))
        settings = Settings(cluster=CLUSTER, generation=generation or GenerationSettings())
        self.outcomes: list[str] = []
        self.kept_nbytes = 0
        self.gateway = Gateway(settings, Catalog(()), on_carried=self.outcomes.append, on_kept=self._kept)
        self.gateway.broker.up = self.gateway.transfers.broker.up = True
        self.engine = ClusterEngine(self.gateway, Drain())
        self.engines = {name: PlayedEngine() for name in boxes}
        self.bridges: dict[str, Bridge] = {}
        self._number = 0
        for name in boxes:
            self.begin(name)

    def _kept(self, change: int) -> None:
        self.kept_nbytes += change

    def _send(self, subject: str, data: bytes) -> bool:
        self.sent.append((subject, data))
        if not self.lose(subject, data):
            asyncio.get_running_loop().call_soon(self.bring, subject, data)
        return True

    def bring(self, subject: str, data: bytes) -> None:
        """A message arrives at all that listen and have a broker."""
        for broker, listens_on, handler in self._listeners:
            if broker.up and _matches(listens_on, subject):
                handler(SimpleNamespace(subject=subject, data=data, reply="", headers=None))

    def add(self, name: str) -> None:
        """One box more, which begins."""
        self.engines[name] = PlayedEngine()
        self.begin(name)

    def leave(self, name: str) -> None:
        """The brokers have forgotten the rows of a box."""
        for key in self.bridges[name]._rows():
            self.gateway.models.take(key, None)

    def join(self, name: str) -> None:
        """The brokers have the rows of a box again."""
        for key, row in self.bridges[name]._rows().items():
            self.gateway.models.take(key, row)
        self.beat(name)

    def begin(self, name: str) -> None:
        """A life of a box begins, with the model loaded."""
        catalog = Catalog((ModelEntry(MODEL, HubSource(MODEL)),))
        models = {MODEL: ModelStatus(MODEL, "loaded", identity=IDENTITY)}
        worker = WorkerView("worker-0", 0, "ready", True, True, "cpu", 1, models, Credits(1, 0, 1.0), None)
        directory = SimpleNamespace(
            workers=lambda: [worker],
            catalog=catalog,
            version=1,
            is_told=True,
            is_loaded=lambda model: True,
            status=models.__getitem__,
        )
        settings = Settings(cluster=Cluster(urls=CLUSTER.urls, box=name))
        bridge = Bridge(
            settings, self.engines[name], directory, Meter(BridgeMetrics(), ()), PoisonList(None, 600.0)
        )  # type: ignore[arg-type]
        bridge.broker.up = bridge.transfers.broker.up = bridge._namesakes.is_alone = True
        self.bridges[name] = bridge
        self.gateway.models._is_read = True
        self.join(name)

    def tell_models(self, name: str, identity: str) -> None:
        """The gateway hears that a box has another model under the same name from now on."""
        rows = self.bridges[name]._rows()
        for key, row in rows.items():
            if isinstance(row, ModelRow):
                states = {"worker-0": [ModelStatus(MODEL, "loaded", identity=identity)]}
                self.gateway.models.take(key, msgspec.structs.replace(row, states=states))

    def tell_kinds(self, name: str, kinds: tuple[str, ...]) -> None:
        """The gateway hears that a box takes items of these kinds alone from now on."""
        row = self.bridges[name]._rows()[name]
        self.gateway.models.take(name, msgspec.structs.replace(row, kinds=kinds))

    def beat(self, name: str, *, draining: bool = False) -> None:
        """A sign of life of a box arrives."""
        self._number += 1
        life = self.bridges[name].life
        self.gateway.boxes.take(BoxBeat(VERSION, name, life, "default", self._number, draining, 1.0, 0.0))

    def beat_gateway(self) -> None:
        """A sign of life of the gateway arrives at all boxes."""
        for bridge in self.bridges.values():
            bridge.intake.heard(self.gateway.router)

    def cut_off(self, name: str) -> None:
        """Nothing comes from a box, or to a box, any more."""
        self.bridges[name].broker.up = self.bridges[name].transfers.broker.up = False

    def die(self, name: str) -> None:
        """A box is silent for too long."""
        self.cut_off(name)
        self.gateway.boxes._end(self.gateway.boxes.by_name[name])
        self.gateway.boxes.on_change()

    def tick(self, seconds: float = 0.0) -> None:
        """The gateway looks at its items, so much later."""
        dispatch = self.gateway.dispatch
        for held in dispatch.items.values():
            held.heard_ns -= int(seconds * 1e9)
        dispatch.tick()

    def messages(self, kind: str) -> list[bytes]:
        """What boxes have sent to the inbox of the gateway: claims (`words`), `results`, `texts`."""
        return [data for subject, data in self.sent if subject.endswith(f".{kind}")]

    def work(self, prompt: str = "hello", n: int = 1) -> Work:
        """A request for text."""
        return Work(MODEL, GenerateCall(text=prompt, n=n), 0, 3, "req_1")

    def scope(self) -> RequestScope:
        """The scope of a request."""
        return scope_of_ids("req_1", "", Settings().limits)


Scene = Callable[[Joined], Awaitable[None]]


def play(monkeypatch: pytest.MonkeyPatch, scene: Scene, *boxes: str, **generation: Any) -> None:
    """Run a scene; afterwards nothing of it is left in the gateway and in boxes that live."""

    async def whole() -> None:
        joined = Joined(monkeypatch, *boxes, generation=GenerationSettings(**generation))
        async with asyncio.timeout(PATIENCE_S):
            await scene(joined)
        await turn()
        gateway = joined.gateway
        assert (
            not gateway.dispatch.items
            and not len(gateway.texts)
            and not len(gateway.parts)
            and not joined.kept_nbytes
        )
        await asyncio.sleep(2 * Runs.tell_after_s)
        await turn()
        for bridge in joined.bridges.values():
            if bridge.broker.up:
                intake = bridge.intake
                assert not len(intake) and not intake.kept and not len(intake._texts)
                assert not len(intake._parts) and not bridge.transfers.offered
                assert not len(intake._sequences), "items that nobody has confirmed"
        gateway.queues.close()

    asyncio.run(whole())


def _matches(listens_on: str, subject: str) -> bool:
    """Whether a subject is one of those of a subscription, as brokers compare them."""
    parts, tokens = listens_on.split("."), subject.split(".")
    if parts[-1] == ">":
        parts, tokens = parts[:-1], tokens[: len(parts) - 1]
    return len(parts) == len(tokens) and all(
        part in ("*", token) for part, token in zip(parts, tokens, strict=True)
    )


async def turn(count: int = 25) -> None:
    """Let messages arrive and tasks run."""
    for _ in range(count):
        await asyncio.sleep(0)
