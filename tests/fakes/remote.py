"""A second engine behind the border: all that it has of another process are bytes on a Unix socket.

1. Messages are msgpack, each behind its length in four bytes. The near end asks (`Ask`, `More`, `Cancel`, `Ensure`),
   the far end (`tests.fakes.far_end`) tells (`News`, `Answered`, `Told`, `Failed`).
2. A deadline crosses as seconds that are left, a trace as nanoseconds since the far end had the work. The near end
   waits little longer than the deadline, whatever became of the far end.
3. Parts come one by one, each when the reader wants more. Text is read `AHEAD` of its reader, so that its pace knows
   what has arrived.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import msgspec

from frontend.engine import events
from frontend.engine.answer import Answer, AnswerStream, shifted
from frontend.engine.events import Event, Generation, Pace, Past
from frontend.engine.interface import (
    STATE_ORDER,
    Engine,
    Models,
    NoBlocks,
    Payload,
    WorkerView,
    bytes_of,
)
from frontend.scope import ANY_BOX, Choice, RequestScope
from ipc import deadline
from ipc.catalog.entries import Catalog, ModelEntry
from ipc.errors import DeadlineExceeded, ModelNotLoaded, NoReplica, PenstockError, from_code
from ipc.wire.catalogs import Entries
from ipc.wire.messages import ModelStatus, Result, Work
from ipc.wire.streams import Finish, Start

AHEAD = 8
"""Lists of events that wait for their reader."""
GRACE_S = 0.2
"""The far end tells of a passed deadline before the near end gives up."""
LOOK_EVERY_S = 0.02
SEND_S = 5.0
"""A far end that takes nothing for so long is lost."""


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages; `id` names the request."""

    id: int


class Ask(Message):
    """Run work: `kind` is run, stream or generate. Deadlines are seconds that are left."""

    kind: str
    work: Work
    left_s: float
    start_left_s: float
    payload: bytes


class More(Message):
    """The reader wants the next part or text."""


class Cancel(Message):
    """Nobody waits for the request any more."""


class Ensure(Message):
    """Have a model or one of the others loaded."""

    model: str
    others: list[str]
    left_s: float


class News(Message):
    """The models and workers of the far end as they are now."""

    version: int
    workers: list[WorkerView]
    entries: Entries
    is_told: bool
    ready: bool
    why: str


class Answered(Message):
    """An answer, or the next part; `is_last` for the end of a stream. Times of `trace` began with the request."""

    result: Result
    data: bytes
    loose: bytes
    worker: str
    uuid: str
    is_last: bool


class Told(Message):
    """Events of text by the names of their classes, the tokens of the prompt, and whether these were the last."""

    events: list[tuple[str, Any]]
    prompt_tokens: int | None
    is_last: bool


class Failed(Message):
    """The request has failed."""

    code: str
    message: str
    retry_after_s: float | None
    detail: dict[str, Any]


class Done(Message):
    """A model is loaded."""


ToFar = Ask | More | Cancel | Ensure
ToNear = News | Answered | Told | Failed | Done


async def write(writer: asyncio.StreamWriter, message: ToFar | ToNear) -> None:
    """Send one message."""
    data = msgspec.msgpack.encode(message)
    writer.write(len(data).to_bytes(4, "big") + data)
    await writer.drain()


async def read(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    """The next message. Raises `IncompleteReadError` at the end."""
    return decoder.decode(await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big")))


class Link:
    """The connection to the far end. Replies wait in a queue for each request."""

    def __init__(self, address: str) -> None:
        self._address, self._ids = address, itertools.count(1)
        self._replies: dict[int, asyncio.Queue[ToNear]] = {}
        self.news: News | None = None
        self.changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.on_news: Callable[[News], None] = lambda news: None

    def start(self) -> None:
        """Connect, and read for ever."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Disconnect."""
        if self._task is not None:
            self._task.cancel()
        if self._writer is not None:
            self._writer.close()

    async def _run(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(self._address)
        decoder = msgspec.msgpack.Decoder(ToNear)
        while True:
            message = await read(reader, decoder)
            if isinstance(message, News):
                self.news = message
                self.on_news(message)
                self.changed.set()
                self.changed = asyncio.Event()
            elif (replies := self._replies.get(message.id)) is not None:
                replies.put_nowait(message)

    async def send(self, message: ToFar) -> None:
        """Send one message. Raises `NoReplica` without a far end that takes the message."""
        if self._writer is None:
            raise NoReplica("the far end is not connected", retry_after_s=1)
        try:
            async with asyncio.timeout(SEND_S):
                await write(self._writer, message)
        except OSError as error:
            raise NoReplica("the far end takes no messages", retry_after_s=1) from error

    @asynccontextmanager
    async def asking(
        self, make: Callable[[int], Ask | Ensure]
    ) -> AsyncIterator[tuple[int, asyncio.Queue[ToNear]]]:
        """Send a request; leaving the context before the end cancels the request at the far end."""
        request = next(self._ids)
        replies = self._replies[request] = asyncio.Queue()
        try:
            await self.send(make(request))
            yield request, replies
        finally:
            del self._replies[request]
            with suppress(PenstockError):
                await self.send(Cancel(request))


async def reply(replies: asyncio.Queue[ToNear], deadline_ns: int) -> Any:
    """The next reply. Raises the error in its place, and `DeadlineExceeded` without a reply soon after the deadline."""
    try:
        async with asyncio.timeout(deadline.remaining_s(deadline_ns) + GRACE_S):
            message = await replies.get()
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed before the far end answered", retry_after_s=1) from None
    if isinstance(message, Failed):
        raise from_code(
            message.code, message.message, retry_after_s=message.retry_after_s, detail=message.detail
        )
    return message


def _answer(message: Answered) -> Answer:
    return Answer(
        message.result,
        memoryview(message.data),
        memoryview(message.loose),
        worker=message.worker,
        uuid=message.uuid,
    )


class RemoteParts(AnswerStream):
    """The parts of one answer."""

    def __init__(
        self, link: Link, request: int, replies: asyncio.Queue[ToNear], deadline_ns: int, first: Answered
    ) -> None:
        self._link, self._request, self._replies, self._first = link, request, replies, first
        self._deadline_ns = deadline_ns
        self._then: list[Callable[[], object]] = []

    async def __anext__(self) -> Answer:
        message, self._first = self._first, None  # type: ignore[assignment]
        if message is None:
            await self._link.send(More(self._request))
            message = await reply(self._replies, self._deadline_ns)
        if message.is_last:
            self.result = _answer(message)
            for then in self._then:
                then()
            raise StopAsyncIteration
        return _answer(message)

    def when_answered(self, then: Callable[[], object]) -> None:
        self._then.append(then)

    def close(self) -> None:
        """The context of the request ends the work."""


class RemoteText(Generation):
    """The text of one request."""

    def __init__(
        self, link: Link, request: int, replies: asyncio.Queue[ToNear], deadline_ns: int, pace: Pace
    ) -> None:
        self._link, self._request, self._replies, self._pace = link, request, replies, pace
        self._deadline_ns = deadline_ns
        self._arrived: asyncio.Queue[list[Event] | PenstockError] = asyncio.Queue(AHEAD)
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        """Take all that the far end tells; an empty list follows the last events."""
        is_last = False
        try:
            while not is_last:
                await self._link.send(More(self._request))
                told = await reply(self._replies, self._deadline_ns)
                is_last = told.is_last
                found = [msgspec.convert(fields, getattr(events, name)) for name, fields in told.events]
                await self._arrived.put([self._noted(event) for event in found])
            await self._arrived.put([])
        except PenstockError as error:
            await self._arrived.put(error)

    async def __anext__(self) -> list[Event]:
        since_ns = time.monotonic_ns()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    found = await self._arrived.get()
                break
            late = self._pace.lateness(time.monotonic_ns(), since_ns)
            if late is not None:
                raise late
        if isinstance(found, PenstockError):
            raise found
        if not found:
            raise StopAsyncIteration
        return found

    def _noted(self, event: Event) -> Event:
        """The event, of which the pace knows now; the end has the times and sums of the pace."""
        now_ns = time.monotonic_ns()
        if isinstance(event, events.Started):
            self._pace.started(Start(event.prompt_tokens, event.cached_tokens))
        elif isinstance(event, events.Prompted):
            self._pace.heard(now_ns)
        elif isinstance(event, events.Text | events.Reasoning):
            self._pace.step(event.choice, event.tokens, now_ns)
        elif isinstance(event, events.CallEvent):
            self._pace.step(event.choice, len(event.logprobs or ()), now_ns)
        elif isinstance(event, events.Finished):
            finish = Finish(event.reason, event.stop, event.tokens, event.reasoning_tokens)
            self._pace.finished(event.choice, finish, now_ns)
        else:
            return self._pace.ended()
        return event

    def close(self) -> None:
        """Read no further. The context of the request ends the work."""
        self._reading.cancel()


class RemoteEngine(Engine):
    """Runs work at the far end."""

    def __init__(self, link: Link) -> None:
        self._link, self.blocks = link, NoBlocks()

    def _asking(self, kind: str, scope: RequestScope, work: Work, payload: Payload = None) -> Any:
        left_s, start_left_s = scope.left_s()
        data = bytes(bytes_of(payload))
        return self._link.asking(lambda request: Ask(request, kind, work, left_s, start_left_s, data))

    async def run(self, scope: RequestScope, work: Work, payload: Payload = None) -> Answer:
        sent_ns = time.monotonic_ns()
        async with self._asking("run", scope, work, payload) as (_, replies):
            answer = _answer(await reply(replies, scope.deadline_ns))
        _note(scope, answer, sent_ns)
        return answer

    @asynccontextmanager
    async def stream(
        self, scope: RequestScope, work: Work, payload: Payload = None
    ) -> AsyncIterator[AnswerStream]:
        sent_ns = time.monotonic_ns()
        async with self._asking("stream", scope, work, payload) as (request, replies):
            first = await reply(replies, scope.deadline_ns)
            with RemoteParts(self._link, request, replies, scope.deadline_ns, first) as parts:
                yield parts
                if parts.result is not None:
                    _note(scope, parts.result, sent_ns)

    @asynccontextmanager
    async def generate(
        self, scope: RequestScope, work: Work, pace: Pace, past: Past | None = None
    ) -> AsyncIterator[Generation]:
        async with self._asking("generate", scope, work) as (request, replies):
            begun = await reply(replies, min(scope.waits_until_ns, scope.deadline_ns))
            text = RemoteText(self._link, request, replies, scope.deadline_ns, pace)
            text.prompt_tokens = begun.prompt_tokens
            with closing(text):
                yield text

    def ready(self) -> tuple[bool, str]:
        news = self._link.news
        return (False, "the far end has not told anything") if news is None else (news.ready, news.why)


def _note(scope: RequestScope, answer: Answer, sent_ns: int) -> None:
    trace = answer.trace
    if trace is not None and scope.span is not None:
        trace = shifted(trace, sent_ns - scope.span.began_ns)
    scope.ran(answer.worker, answer.timing, trace)


class RemoteModels(Models):
    """The models as the far end has told last."""

    def __init__(self, link: Link, catalog: Catalog) -> None:
        self._link, self.catalog = link, catalog
        link.on_news = self._take

    def _take(self, news: News) -> None:
        told = news.entries
        catalog = Catalog([*told.models, *told.versions], read_ns=told.read_ns, names=frozenset(told.names))
        if catalog.sources != self.catalog.sources:
            self.catalog.replace(catalog)

    @property
    def version(self) -> int:
        return self._link.news.version if self._link.news else 0

    @property
    def is_told(self) -> bool:
        return bool(self._link.news and self._link.news.is_told)

    @property
    def is_learning(self) -> bool:
        return not self.is_told

    @property
    def removed(self) -> set[tuple[str, int]]:
        return set()

    def chosen(self, model: str) -> tuple[int, ...]:
        return self.catalog.versions.get(model, ())

    def find(self, model: str) -> ModelEntry:
        return self.catalog.find(model)

    def _states(self, model: str) -> list[ModelStatus]:
        up = [worker.models for worker in self.workers() if worker.state == "ready"]
        return [models[model] for models in up if model in models]

    def status(self, model: str) -> ModelStatus:
        states = self._states(model)
        return min(states, key=lambda s: STATE_ORDER.index(s.state), default=ModelStatus(model, "available"))

    def is_loaded(self, model: str, revision: str = "") -> bool:
        states = self._states(model)
        return any(s.state == "loaded" and revision in ("", s.revision) for s in states)

    def identity(self, model: str) -> str:
        found = {state.identity for state in self._states(model) if state.state == "loaded"}
        return found.pop() if len(found) == 1 else ""

    def why_unavailable(self, model: str) -> PenstockError:
        return ModelNotLoaded(f"Model '{model}' is not loaded", retry_after_s=1)

    def workers(self) -> Sequence[WorkerView]:
        return self._link.news.workers if self._link.news else []

    def watch(self, on: bool) -> bool:
        return True

    async def wait(self, done: Callable[[], bool], deadline_ns: int) -> None:
        while not done():
            deadline.check(deadline_ns, "before the far end was done")
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline.remaining_s(deadline_ns)):
                    await self._link.changed.wait()

    async def ensure_loaded(
        self, model: str, deadline_ns: int, others: Collection[str] = (), choice: Choice = ANY_BOX
    ) -> ModelStatus:
        if not self.is_loaded(model):
            left_s = deadline.remaining_s(deadline_ns)
            async with self._link.asking(lambda it: Ensure(it, model, list(others), left_s)) as (_, replies):
                await reply(replies, deadline_ns)
        return self.status(model)
