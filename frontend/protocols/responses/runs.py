"""Responses in the background of one frontend: each is a task that writes its events and its end to the store.

1. The row is stored before the client learns of the response. Then the task loads the model and generates.
2. Every `BEAT_S` one write keeps the new events of all runs, and tells which of the runs were cancelled
   or deleted meanwhile, at whichever frontend. The tasks of these runs end.
3. A drain waits for the runs (`frontend.services`). A run that goes on at the end of the drain ends as failed.
4. The request is counted when its run ends.
5. Every `LOOK_EVERY_S` a look finds runs whose frontend has died. One frontend adopts such a run, and goes on behind
   the events that are kept, at most `generation.continuations` times in the life of a response. A run with tools of
   this server is not adopted, or its calls would run twice.

What a request asks for, complete: the plan of its body, the call with the stored conversation, what to keep.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import msgspec
from falcon.asgi import Request

from frontend.access.gate import Grant
from frontend.agent.runner import offer_of, running
from frontend.engine.events import Ended, Event, Finished, Mark, Past, Started
from frontend.generation.errors import InvalidField, status_of
from frontend.generation.hosted import AgentPlan
from frontend.generation.pictures import revived
from frontend.generation.requests import LONG_NBYTES, find_generator, named_model, receive
from frontend.http.threads import off_loop_if
from frontend.protocols.responses import output as resource
from frontend.protocols.responses.output import Output, Resource
from frontend.protocols.responses.requests import ResponsePlan, parse
from frontend.protocols.responses.store import (
    Adopted,
    Items,
    Piece,
    ResponseStore,
    ResponsesUnavailable,
    Stored,
    together,
)
from frontend.records.finishing import Outcome
from frontend.scope import RequestScope, current_scope
from frontend.services import Background, Services
from ipc import deadline
from ipc.errors import Cancelled, Draining, PenstockError, QueueFull
from ipc.logs import Seldom
from ipc.wire.messages import GenerateCall

log = logging.getLogger(__name__)
MANY_ITEMS = 64
"""Conversations of more items are put together by a thread."""
PROTOCOL = OPERATION = "responses"
PATH = "/v1/responses"
BEAT_S = 0.1
LOOK_EVERY_S = 0.5
"""Time between two looks for runs of dead frontends."""
END_PAUSES_S = (0.2, 1.0, 5.0)
"""Times between two tries to store the end of a run."""


@dataclass(frozen=True, slots=True)
class Keeper:
    """Stores the response of one request of `owner`, unless the request has said no (`stores`)."""

    store: ResponseStore
    background: Background
    owner: str
    history: Items
    items: Items
    stores: bool

    async def keep(self, begun: Resource, whole: Resource) -> None:
        """Store the response as it has ended. Its client gets the answer also if that is impossible."""
        if not self.stores:
            return
        try:
            await self.store.put(begun, self.owner, self.history, self.items, whole)
        except ResponsesUnavailable as error:
            log.error("a response cannot be stored: %s", error.message)

    def keep_soon(self, begun: Resource, whole: Resource) -> None:
        """`keep`, for a request that cannot wait."""
        self.background.start(self.keep(begun, whole))

    async def keep_queued(self, begun: Resource, request: Callable[[], bytes]) -> None:
        """Store the response before it runs in the background, with its `Movable`. Raises `ResponsesUnavailable`."""
        await self.store.put(begun, self.owner, self.history, self.items, request=request)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a response."""

    plan: ResponsePlan
    call: GenerateCall
    agent: AgentPlan | None
    keeper: Keeper


async def asked_by(services: Services, store: ResponseStore, req: Request, scope: RequestScope) -> Asked:
    """Read a request. Raises what is wrong with its body, and `ResponseNotFound` for the response to go on with."""
    limits = services.settings.limits
    plan = await receive(services, req, partial(parse, limits=limits, offer=offer_of(services)))
    history, is_long = await _history(store, plan.previous, scope.grant.caller)
    # NOTE: a few items may take long, too: their pictures are decoded from base64.
    long = is_long or plan.is_long or len(history) + len(plan.items) > MANY_ITEMS
    call, agent = await off_loop_if(long, plan.call_after, history, limits)
    keeper = Keeper(store, services.background, scope.grant.caller, history, plan.items, plan.stores)
    return Asked(plan, call, agent, keeper)


async def _history(store: ResponseStore, previous: str | None, owner: str) -> tuple[Items, bool]:
    """The items of the conversation that a request goes on with, and whether these are long."""
    if previous is None:
        return [], False
    row = await store.get(previous, owner, with_items=True)
    if not row.is_finished:
        raise InvalidField("previous_response_id", f"the response {row.id!a} is {row.status}, not finished")
    is_long = row.nbytes > LONG_NBYTES
    return await off_loop_if(is_long, row.conversation), is_long


class Movable(msgspec.Struct, frozen=True):
    """A request that another frontend can go on with. `deadline_ns` is the caller's deadline, 0 without any."""

    model: str
    call: GenerateCall
    request_id: str
    trace_id: str
    host: str
    grant: Grant
    deadline_ns: int

    def scope(self, timeout_s: float) -> RequestScope:
        """The scope of the request in the frontend that goes on. A bound of `timeout_s` that is ours begins anew."""
        return RequestScope(
            self.request_id,
            self.trace_id,
            "",
            time.perf_counter(),
            self.deadline_ns or deadline.after(timeout_s),
            operation=OPERATION,
            grant=self.grant,
            host=self.host,
            names_deadline=bool(self.deadline_ns),
        )

    def packed(self) -> bytes:
        """The bytes of the request; empty for one that no message can carry. Takes long for long conversations."""
        try:
            return _encoder.encode(self)
        except (OverflowError, RecursionError):
            return b""


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Movable)


def unpacked(request: bytes) -> Movable:
    """`packed` read again."""
    stored = _decoder.decode(request)
    messages = stored.call.messages
    if messages is None:
        return stored
    return msgspec.structs.replace(
        stored, call=msgspec.structs.replace(stored.call, messages=revived(messages))
    )


@dataclass(slots=True)
class _Run:
    """One response at work: its events that are not kept yet, which will be piece `number`, and their marks.

    `movable`: each list of events so far has had a mark.
    """

    begun: Resource
    output: Output
    scope: RequestScope
    task: asyncio.Task[None] | None = None
    pending: list[Event] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    movable: bool = True
    number: int = 0

    def take(self, events: list[Event], mark: Mark | None) -> None:
        """More events, and where the text stands behind them."""
        self.output.take(events)
        self.pending += events
        self.movable &= mark is not None
        if mark is not None:
            self.marks.append(mark)

    def piece(self) -> Piece:
        """What is not kept yet."""
        mark = together(self.marks) if self.movable else None
        if mark is not None:
            self.marks = [mark]
        return Piece(self.number, self.pending[:], mark)

    def kept(self, piece: Piece) -> None:
        """A piece is kept."""
        del self.pending[: len(piece.events)]
        if piece.events:
            self.number += 1
            if piece.mark is not None:
                # NOTE: marks that have come meanwhile follow the one of the piece.
                del self.marks[0]


class Runs:
    """The responses in the background of this process."""

    def __init__(self, services: Services, store: ResponseStore) -> None:
        self._services, self._store = services, store
        self._runs: dict[str, _Run] = {}
        self._starting = 0
        """Runs that are being stored, and so not among `_runs` yet."""
        self._beating = False
        self._writing, self._seldom = asyncio.Lock(), Seldom(log)

    @property
    def _most(self) -> int:
        return self._services.settings.responses.max_background

    @property
    def _has_room(self) -> bool:
        """Whether a further run may start."""
        return len(self._runs) + self._starting < self._most

    @property
    def _adopts(self) -> bool:
        """Whether this frontend may go on with runs of others."""
        # NOTE: a frontend that begins does not know the models of repositories yet.
        return self._has_room and not self._services.drain.draining and self._services.directory.is_told

    async def start(self, req: Request, asked: Asked, begun: Resource) -> None:
        """Store a response and run it, also if the client leaves meanwhile.

        Raises `ModelNotFound`, `ResponsesUnavailable`, and `QueueFull` if no further run may start.
        """
        services = self._services
        entry = find_generator(asked.plan.model, services.directory, services.settings)
        req.context.penstock.names(entry.id)
        if not self._has_room:
            text = f"{self._most} responses in the background are running (responses.max_background)"
            raise QueueFull(text, retry_after_s=5)
        self._starting += 1
        await asyncio.shield(services.background.start(self._start(req, asked, begun, entry.id)))

    async def _start(self, req: Request, asked: Asked, begun: Resource, model: str) -> None:
        scope: RequestScope = req.context.penstock
        try:
            await asked.keeper.keep_queued(begun, self._request_of(asked, scope, model))
        finally:
            self._starting -= 1
        run_scope = msgspec.structs.replace(
            scope, span=None, phases={}, http=None, started=time.perf_counter()
        )
        # The request is counted when its run ends.
        scope.operation = ""
        self._begin(_Run(begun, Output(begun), run_scope), asked.call, asked.agent, model)

    def _request_of(self, asked: Asked, scope: RequestScope, model: str) -> Callable[[], bytes]:
        """What packs the request for other frontends; nothing where these must not go on."""
        if asked.agent is not None or not self._services.settings.generation.continuations:
            return bytes
        own_ns = scope.deadline_ns if scope.names_deadline else 0
        ids = scope.request_id, scope.trace_id, scope.host, scope.grant
        return Movable(model, asked.call, *ids, own_ns).packed

    def _begin(
        self,
        run: _Run,
        call: GenerateCall,
        agent: AgentPlan | None,
        model: str,
        past: Past | None = None,
    ) -> None:
        self._runs[run.begun["id"]] = run
        run.task = self._services.background.start(self._run(run, call, agent, model, past))
        if not self._beating:
            self._beating = True
            self._services.background.start(self._beat())

    async def watch(self) -> None:
        """Adopt runs of frontends that have died, until the task is cancelled."""
        while True:
            try:
                await self._look_for_orphans()
            except ResponsesUnavailable as error:
                self._seldom.warning("responses of dead frontends cannot be looked for now", error.message)
            except Exception as bug:
                # NOTE: the watch serves all responses to come.
                log.error("the look for responses of dead frontends failed", exc_info=bug)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look_for_orphans(self) -> None:
        if not self._adopts:
            return
        for orphan in await self._store.orphans():
            if not self._adopts:
                return
            await self._adopt(orphan)

    async def _adopt(self, orphan: Stored) -> None:
        """Go on with the response of a dead frontend, or end a response that cannot be read."""
        self._starting += 1
        try:
            adopted = await self._store.adopt(orphan)
            if adopted is not None:
                self._go_on(adopted)
        except ResponsesUnavailable:
            raise
        except Exception as bug:
            log.error("a response of a dead frontend could not be adopted", exc_info=bug)
            lost = PenstockError("the server process that ran this response has ended, and no other goes on")
            await self._store.settle(orphan, lambda begun, output: resource.failed(begun, output, lost))
        finally:
            self._starting -= 1

    def _go_on(self, adopted: Adopted) -> None:
        """Go on with a run of a frontend that has died."""
        asked, begun = unpacked(adopted.request), adopted.begun
        output = Output(begun)
        output.take(adopted.events)
        timeout_s = self._services.settings.limits.request_timeout_s
        run = _Run(begun, output, asked.scope(timeout_s), number=adopted.number)
        run.scope.names(asked.model)
        most, deaths = self._services.settings.generation.continuations, adopted.moves
        if adopted.past is not None:
            deaths += adopted.past.mark.deaths
        error: PenstockError | None = None
        if adopted.events and adopted.past is None:
            error = PenstockError(
                "the server process that ran this response has ended, and its tokens were not kept"
            )
        elif deaths > most:
            text = (
                f"the processes that ran this response have ended {deaths} times, and it goes on {most} times"
            )
            error = PenstockError(f"{text} at most (generation.continuations)")
        self._services.recorder.carried_on("refused" if error is not None else "adopted")
        log.warning(
            "the frontend of a response has died: %s", "the response goes on here" if error is None else error
        )
        if error is not None or _is_whole(asked.call, adopted.events):
            if error is None and not any(isinstance(event, Ended) for event in adopted.events):
                run.take([_sums_of(adopted.events)], None)
            self._runs[begun["id"]] = run
            self._services.background.start(self._finish(run, error))
            return
        self._begin(run, asked.call, None, asked.model, adopted.past)

    async def _run(
        self, run: _Run, call: GenerateCall, agent: AgentPlan | None, model: str, past: Past | None
    ) -> None:
        """The life of a run. Its errors end here."""
        current_scope.set(run.scope)
        self._services.finisher.begin(run.scope, PATH)
        error: PenstockError | None = None
        try:
            await self._generate(run, call, agent, model, past)
        except asyncio.CancelledError:
            error = self._why_cancelled(run.scope.session_id)
        except PenstockError as raised:
            error = raised
        except Exception as bug:
            log.error("a response in the background failed", exc_info=bug)
            error = PenstockError("internal error")
        await self._finish(run, error)

    async def _finish(self, run: _Run, error: PenstockError | None) -> None:
        await self._end(run, error)
        self._services.finisher.finish(run.scope, PROTOCOL, Outcome("POST", PATH, PATH, 200))

    def _why_cancelled(self, session: str) -> PenstockError:
        if self._services.drain.is_over:
            text = "the server stopped before the response was finished"
            return Draining(f"{text}: continue session {session}" if session else text)
        return Cancelled("the response was cancelled")

    async def _generate(
        self, run: _Run, call: GenerateCall, agent: AgentPlan | None, model: str, past: Past | None
    ) -> None:
        entry = named_model(self._services, run.scope, model)
        async with running(self._services, run.scope, entry, call, agent, past) as generation:
            async for events in generation:
                run.take(events, generation.mark())

    async def _end(self, run: _Run, error: PenstockError | None) -> None:
        """Store how a run has ended."""
        if error is None:
            whole = resource.ended(run.begun, run.output)
        else:
            run.scope.failed(error, status_of(error))
            whole = resource.failed(run.begun, run.output, error)
        del self._runs[run.begun["id"]]
        for pause_s in (*END_PAUSES_S, None):
            try:
                async with self._writing:
                    await self._store.finish(whole, run.piece())
                return
            except ResponsesUnavailable as refused:
                log.error("the end of a response cannot be stored: %s", refused.message)
                await asyncio.sleep(pause_s or 0)

    async def _beat(self) -> None:
        """Keep new events and end what was cancelled, until no run is left."""
        while self._runs:
            await asyncio.sleep(BEAT_S)
            try:
                async with self._writing:
                    await self._look()
            except ResponsesUnavailable as error:
                self._seldom.warning(
                    "events of responses in the background cannot be stored now", error.message
                )
        self._beating = False

    async def _look(self) -> None:
        runs = dict(self._runs)
        taken = {id_: run.piece() for id_, run in runs.items()}
        going_on = await self._store.grow(taken)
        for id_, run in runs.items():
            run.kept(taken[id_])
            if id_ not in going_on and id_ in self._runs and run.task is not None:
                run.task.cancel()


def _is_whole(call: GenerateCall, events: Iterable[Event]) -> bool:
    """Whether all choices of a call have ended."""
    return len({event.choice for event in events if isinstance(event, Finished)}) == call.n


def _sums_of(events: Iterable[Event]) -> Ended:
    """The end of a text whose frontend has died behind the ends of all choices; nobody knows its times."""
    started = next((event for event in events if isinstance(event, Started)), Started(0))
    ends = [event for event in events if isinstance(event, Finished)]
    return Ended(
        started.prompt_tokens,
        sum(end.tokens for end in ends),
        sum(end.reasoning_tokens for end in ends),
        started.cached_tokens,
    )
