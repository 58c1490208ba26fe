"""Responses in the background of one frontend: each is a task that writes its events and its end to the store.

1. The row is stored before the client learns of the response. Then the task loads the model and generates.
2. Every `BEAT_S` one write keeps the new events of all runs, and tells which of the runs were cancelled
   or deleted meanwhile, at whichever frontend. Those are ended.
3. A drain waits for the runs (`frontend.services`). What is not done by the end of the drain ends as failed.
4. The request is counted when its run ends.

What a request asks for, complete: the plan of its body, the call with the stored conversation, what to keep.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from functools import partial

import msgspec
from falcon.asgi import Request

from frontend.agent.runner import offer_of, running
from frontend.engine.events import Event
from frontend.generation.errors import InvalidField, status_of
from frontend.generation.hosted import AgentPlan
from frontend.generation.requests import LONG_NBYTES, find_generator, named_model, receive
from frontend.http.rendering import off_loop_if
from frontend.protocols.responses import output as resource
from frontend.protocols.responses.output import Output, Resource
from frontend.protocols.responses.requests import ResponsePlan, parse
from frontend.protocols.responses.store import Items, ResponseStore, ResponsesUnavailable
from frontend.records.finishing import Outcome
from frontend.scope import RequestScope, current_scope
from frontend.services import Background, Services
from ipc.errors import Cancelled, Draining, PenstockError, QueueFull
from ipc.wire.messages import GenerateCall

log = logging.getLogger(__name__)
MANY_ITEMS = 64
"""Conversations of more items are put together by a thread."""
PROTOCOL = "responses"
BEAT_S = 0.1
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

    async def keep_queued(self, begun: Resource) -> None:
        """Store the response before it runs in the background. Raises `ResponsesUnavailable`."""
        await self.store.put(begun, self.owner, self.history, self.items)


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
    # NOTE: few items may be long: pictures of theirs are decoded from base64.
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


@dataclass(slots=True)
class _Run:
    """One response at work: its events that are not kept yet, which will be piece `number`."""

    begun: Resource
    output: Output
    scope: RequestScope
    task: asyncio.Task[None] | None = None
    pending: list[Event] = field(default_factory=list)
    number: int = 0


class Runs:
    """The responses in the background of this process."""

    def __init__(self, services: Services, store: ResponseStore) -> None:
        self._services, self._store = services, store
        self._runs: dict[str, _Run] = {}
        self._starting = 0
        """Runs that are being stored, and so not among `_runs` yet."""
        self._beating = False
        self._writing = asyncio.Lock()

    async def start(self, req: Request, asked: Asked, begun: Resource) -> None:
        """Store a response and run it, also if the client leaves meanwhile.

        Raises `ModelNotFound`, `ResponsesUnavailable`, and `QueueFull` if no further run may start.
        """
        services, most = self._services, self._services.settings.responses.max_background
        entry = find_generator(asked.plan.model, services.catalog, services.settings)
        req.context.penstock.names(entry.id)
        if len(self._runs) + self._starting >= most:
            text = f"{most} responses in the background are running (responses.max_background)"
            raise QueueFull(text, retry_after_s=5)
        self._starting += 1
        await asyncio.shield(services.background.start(self._start(req, asked, begun, entry.id)))

    async def _start(self, req: Request, asked: Asked, begun: Resource, model: str) -> None:
        try:
            await asked.keeper.keep_queued(begun)
        finally:
            self._starting -= 1
        scope: RequestScope = req.context.penstock
        run_scope = msgspec.structs.replace(
            scope, span=None, phases={}, http=None, started=time.perf_counter()
        )
        # The request is counted when its run ends.
        scope.operation = ""
        run = self._runs[begun["id"]] = _Run(begun, Output(begun), run_scope)
        run.task = self._services.background.start(self._run(run, req, asked, model))
        if not self._beating:
            self._beating = True
            self._services.background.start(self._beat())

    async def _run(self, run: _Run, req: Request, asked: Asked, model: str) -> None:
        """The life of a run. Its errors end here."""
        current_scope.set(run.scope)
        self._services.finisher.begin(run.scope, req.path)
        error: PenstockError | None = None
        try:
            await self._generate(run, req, asked, model)
        except asyncio.CancelledError:
            error = self._why_cancelled(run.scope.session_id)
        except PenstockError as raised:
            error = raised
        except Exception as bug:
            log.error("a response in the background failed", exc_info=bug)
            error = PenstockError("internal error")
        await self._end(run, error)
        outcome = Outcome(req.method, req.path, req.uri_template or "", 200)
        self._services.finisher.finish(run.scope, PROTOCOL, outcome)

    def _why_cancelled(self, session: str) -> PenstockError:
        if self._services.drain.is_over:
            text = "the server stopped before the response was finished"
            return Draining(f"{text}: continue session {session}" if session else text)
        return Cancelled("the response was cancelled")

    async def _generate(self, run: _Run, req: Request, asked: Asked, model: str) -> None:
        entry = named_model(self._services, run.scope, model)
        async with running(self._services, req, run.scope, entry, asked.call, asked.agent) as generation:
            async for events in generation:
                run.output.take(events)
                run.pending += events

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
                    await self._store.finish(whole, run.number, run.pending)
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
                log.error("events of responses in the background cannot be stored now: %s", error.message)
        self._beating = False

    async def _look(self) -> None:
        runs = dict(self._runs)
        taken = {id_: (run.number, run.pending[:]) for id_, run in runs.items()}
        going_on = await self._store.grow(taken)
        for id_, run in runs.items():
            _, events = taken[id_]
            del run.pending[: len(events)]
            run.number += bool(events)
            if id_ not in going_on and id_ in self._runs and run.task is not None:
                run.task.cancel()
