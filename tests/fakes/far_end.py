"""The other process of `tests.fakes.remote`: runs what arrives on a socket on an engine of its own.

python -m tests.fakes.far_end SOCKET            the workers of the server that the environment configures
python -m tests.fakes.far_end SOCKET MODEL      a model that says a recorded text, and one that never answers (`SLOW`)
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from frontend.engine.answer import Answer, shifted
from frontend.engine.events import Ended, Event, Finished, Generation, Pace, Past, Started, Text
from frontend.engine.interface import Engine, Models, Payload
from frontend.engine.local.client import Client
from frontend.engine.local.engine import LocalEngine
from frontend.engine.planning import pace_of
from frontend.records.finishing import Recorder
from frontend.scope import RequestScope, scope_of_ids
from frontend.server.drain import Drain
from ipc import deadline
from ipc.catalog.entries import Catalog, DirectorySource, ModelEntry, OutputSpec
from ipc.catalog.reading import read_served
from ipc.catalog.repository import VersionEntry
from ipc.errors import PenstockError
from ipc.metrics.registry import FrontendMetrics
from ipc.settings import Settings, load
from ipc.store.store import Store
from ipc.wire.catalogs import Entries
from ipc.wire.messages import ModelStatus, Work
from tests.fakes.engine import InProcessDirectory
from tests.fakes.generation import RecordedEngine, RecordedGeneration
from tests.fakes.remote import (
    Answered,
    Ask,
    Cancel,
    Done,
    Ensure,
    Failed,
    More,
    News,
    ToFar,
    Told,
    read,
    write,
)

LOOK_EVERY_S = 0.02
MODEL = "far/text"
SLOW = "far/slow"
"""A model whose requests never end, whatever their deadline."""
NAME = "frontend-90"
"""A session of the workers beside those of the frontends."""
SCRIPT: list[list[Event]] = [
    [Started(7)],
    [Text(0, "far ")],
    [Text(0, "away"), Finished(0, "stop", None, 3)],
    [Ended(7, 3)],
]


class FarEnd:
    """Serves the one connection of a near end."""

    def __init__(self, settings: Settings, engine: Engine, models: Models, recorder: Recorder) -> None:
        self._settings, self._engine, self._models, self._recorder = settings, engine, models, recorder
        self._wants: dict[int, asyncio.Semaphore] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the near end disconnects."""
        self._writer, decoder = writer, msgspec.msgpack.Decoder(ToFar)
        news = asyncio.ensure_future(self._tell_news())
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                message = await read(reader, decoder)
                if isinstance(message, More):
                    if message.id in self._wants:
                        self._wants[message.id].release()
                elif isinstance(message, Cancel):
                    if message.id in self._tasks:
                        self._tasks[message.id].cancel()
                else:
                    self._wants[message.id] = asyncio.Semaphore(0)
                    self._tasks[message.id] = task = asyncio.ensure_future(self._answer(message))
                    task.add_done_callback(lambda _, request=message.id: self._forget(request))
        news.cancel()

    def _forget(self, request: int) -> None:
        del self._tasks[request], self._wants[request]

    async def _tell_news(self) -> None:
        last: Any = None
        while True:
            now = self._models.version, self._engine.ready(), self._models.is_told
            if now != last:
                last = now
                await write(self._writer, self._news())
            await asyncio.sleep(LOOK_EVERY_S)

    def _news(self) -> News:
        catalog = self._models.catalog
        versions = [entry for entry in catalog.sources if isinstance(entry, VersionEntry)]
        models = [entry for entry in catalog.sources if not isinstance(entry, VersionEntry)]
        entries = Entries(catalog.read_ns, [], models, versions, sorted(catalog.names))
        workers = [replace(worker, stats=None) for worker in self._models.workers()]
        return News(0, self._models.version, workers, entries, self._models.is_told, *self._engine.ready())

    async def _answer(self, asked: Ask | Ensure) -> None:
        arrived_ns = time.monotonic_ns()
        try:
            if isinstance(asked, Ensure):
                await self._models.ensure_loaded(asked.model, deadline.after(asked.left_s), asked.others)
                await write(self._writer, self._news())
                await write(self._writer, Done(asked.id))
                return
            scope = scope_of_ids(asked.work.request_id, "", self._settings.limits)
            scope.deadline_ns = deadline.after(asked.left_s)
            scope.start_by_ns = deadline.after(asked.start_left_s)
            await getattr(self, f"_{asked.kind}")(asked, scope, arrived_ns)
        except PenstockError as error:
            failed = Failed(asked.id, error.code, error.message, error.retry_after_s, error.detail)
            await write(self._writer, failed)
        except Exception as error:
            print(f"far end: {error!r}", file=sys.stderr, flush=True)
            await write(self._writer, Failed(asked.id, PenstockError.code, "the far end failed", None, {}))

    async def _run(self, asked: Ask, scope: RequestScope, arrived_ns: int) -> None:
        with await self._engine.run(scope, asked.work, asked.payload) as answer:
            await self._send(asked.id, answer, arrived_ns, is_last=True)

    async def _stream(self, asked: Ask, scope: RequestScope, arrived_ns: int) -> None:
        async with self._engine.stream(scope, asked.work, asked.payload) as parts:
            async for part in parts:
                await self._send(asked.id, part, arrived_ns, is_last=False)
                await self._wants[asked.id].acquire()
            assert parts.result is not None
            await self._send(asked.id, parts.result, arrived_ns, is_last=True)

    async def _send(self, request: int, answer: Answer, arrived_ns: int, *, is_last: bool) -> None:
        """Send copies of what the answer holds."""
        result, data, loose = answer.parts()
        data, loose = bytes(data), bytes(loose)
        answer.check()
        trace = None if result.trace is None else shifted(result.trace, -arrived_ns)
        result = msgspec.structs.replace(result, block=None, trace=trace)
        await write(self._writer, Answered(request, result, data, loose, answer.worker, answer.uuid, is_last))

    async def _generate(self, asked: Ask, scope: RequestScope, arrived_ns: int) -> None:
        pace: Pace = pace_of(scope, self._settings, self._recorder, asked.work.model)
        async with AsyncExitStack() as stack:
            text = await stack.enter_async_context(self._engine.generate(scope, asked.work, pace))
            await write(self._writer, Told(asked.id, [], text.prompt_tokens, False))
            async for found in text:
                await self._wants[asked.id].acquire()
                named = [(type(event).__name__, msgspec.to_builtins(event)) for event in found]
                await write(self._writer, Told(asked.id, named, None, isinstance(found[-1], Ended)))


def of_workers(settings: Settings) -> tuple[Engine, Models, Recorder]:
    """The engine over the workers of a running server; call on the loop."""
    catalog = read_served(settings.catalog, settings.repository)
    recorder = Recorder(FrontendMetrics(), catalog)
    client = Client(settings.paths, settings, NAME, Store(settings.paths))
    engine = LocalEngine(settings, catalog, client, Drain())
    client.start()
    client.demand.replicas = engine.directory.replicas
    client.workers.follow = engine.directory.follow
    return engine, engine.directory, recorder


class ScriptedEngine(RecordedEngine):
    """Tells `SCRIPT` for every model but `SLOW`, which begins its texts and gives no answer."""

    @asynccontextmanager
    async def generate(
        self, scope: RequestScope, work: Work, pace: Pace, past: Past | None = None
    ) -> AsyncIterator[Generation]:
        yield RecordedGeneration([[Started(7)], None] if work.model == SLOW else SCRIPT)

    async def run(self, scope: RequestScope, work: Work, payload: Payload = None) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets that event")


def of_script(model: str) -> tuple[Engine, Models, Recorder]:
    """A model that says `SCRIPT` whatever it is asked, and `SLOW`."""
    outputs = {model: {"chat": OutputSpec()}, SLOW: {"chat": OutputSpec(), "dense": OutputSpec(dims=4)}}
    catalog = Catalog(
        [ModelEntry(name, DirectorySource("nowhere"), outputs=outputs[name]) for name in outputs]
    )
    models = InProcessDirectory(
        catalog, [ModelStatus(name, "loaded", max_sequence_length=64) for name in outputs]
    )
    models.loaded.update(outputs)
    return ScriptedEngine([SCRIPT]), models, Recorder(FrontendMetrics(), catalog)


async def main(address: Path, *model: str) -> None:
    """Serve for ever."""
    settings = load(None, {})
    far = FarEnd(settings, *(of_script(*model) if model else of_workers(settings)))
    server = await asyncio.start_unix_server(far.serve, address)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
