"""Runs a request with tools of this server: rounds of a model, and the calls between the rounds, as one generation.

1. `running` is the entry of all routes of chat. A request without tools of the server goes straight to the model.
2. `begin` finds the session, puts back its turns of tools, prepares files and skills, and asks the model. What fails
   until then has a status of its own.
3. The events of each round go to the client as they come. Between rounds each call is told, approved where somebody
   has to approve, run, and told again. The bounds on times begin anew with each round.
4. The session is saved after each round whose calls have run, and at the end.
5. Whoever leaves the context ends the run: the round or the tool at work is cancelled, and nothing runs after it. No
   call is ever run again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar
from uuid import uuid4

import msgspec

from frontend.agent import results, tools
from frontend.agent.loop import Loop, Message, spliced
from frontend.agent.parts import Parts
from frontend.agent.progress import Progress
from frontend.agent.results import Answer
from frontend.agent.tools import BuiltIn, Tool
from frontend.agent.workplace import Workplace, sandbox_of
from frontend.engine.events import (
    Asked,
    Called,
    Calling,
    Completed,
    Event,
    Generation,
    Past,
    Produced,
    Session,
)
from frontend.generation import running as generation
from frontend.generation.errors import InvalidField
from frontend.generation.hosted import NOTHING, AgentPlan, Offer
from frontend.generation.pictures import from_rows, in_rows, looked_at, pictures_of
from frontend.generation.running import new_id
from frontend.scope import RequestScope
from frontend.services import Services
from frontend.state.approvals import Decision
from frontend.state.files import File
from frontend.state.sessions import Session as KeptSession
from ipc import deadline
from ipc.catalog.entries import ModelEntry
from ipc.errors import DeadlineExceeded, FileNotFound
from ipc.wire.messages import GenerateCall

T = TypeVar("T")


def offer_of(services: Services) -> Offer:
    """What this server runs for requests."""
    parts: Parts | None = services.agent
    return NOTHING if parts is None else parts.offer_now


def running(
    services: Services,
    scope: RequestScope,
    entry: ModelEntry,
    call: GenerateCall,
    plan: AgentPlan | None,
    past: Past | None = None,
) -> AbstractAsyncContextManager[Generation]:
    """The generation of a call; with a `plan` tools of this server run within.

    A text with a `past` has no plan. Leaving the context ends the work.

    Raises as `frontend.generation.running.running`, and `InvalidField` for files and skills that cannot be had.
    """
    if plan is None:
        return generation.running(services, scope, entry, call, past)
    return _agent(AgentRun(services, scope, entry, plan), call)


@asynccontextmanager
async def _agent(run: AgentRun, call: GenerateCall) -> AsyncIterator[Generation]:
    async with run.ending:
        await run.begin(call)
        yield run


class AgentRun(Generation):
    """One request. `begin` comes first; the exit of `ending` ends whatever is at work."""

    def __init__(self, services: Services, scope: RequestScope, entry: ModelEntry, plan: AgentPlan) -> None:
        self._services, self._scope, self._entry, self._plan = services, scope, entry, plan
        self._parts: Parts = services.agent
        self._owner = scope.grant.caller
        self.ending, self._opened = AsyncExitStack(), AsyncExitStack()
        self._progress = Progress(services, scope, entry.id)
        self._session = ""
        self._tools: dict[str, Tool] = {}
        self._loop: Loop
        self._place: Workplace
        self._first: Generation | None = None
        self._events: AsyncGenerator[list[Event], None] | None = None

    async def begin(self, call: GenerateCall) -> None:
        """Find what the request needs, and ask the model. Raises as `running`."""
        _check(call)
        incoming = await self._looked_at(call.messages or [])
        session = await self._find_session(incoming)
        messages = incoming if session is None else await self._looked_at(spliced(session.messages, incoming))
        turn = max(0, sum(message["role"] == "user" for message in messages) - 1)
        sandbox = sandbox_of(self._owner, self._session)
        parts, plan = self._parts, self._plan
        own = parts.host, parts.files, parts.skills, self._owner, plan, sandbox, turn
        self._place = Workplace(*own, parts.fetcher, parts.web, parts.rank_for(self._scope))
        self.ending.callback(self._place.close)
        self._place.files = await self._files_of(session)
        note = await self._place.prepare()
        self._tools = tools.tools_of(plan)
        self._loop = Loop(call, messages, note, self._tools, plan.max_rounds)
        self.ending.enter_context(self._progress)
        self._events = self._run()
        self.ending.push_async_callback(self._events.aclose)
        self.ending.push_async_callback(self._opened.aclose)
        if not self._loop.unanswered():
            self._first = await self._opened.enter_async_context(self._round())
            self.prompt_tokens = self._first.prompt_tokens

    async def _looked_at(self, messages: list[Message]) -> list[Message]:
        """`messages` whose pictures have their bytes, which count until the run ends. Loads the model for pictures."""
        if next(pictures_of(messages), None) is None:
            return messages
        services, scope = self._services, self._scope
        held = self.ending.enter_context(services.bodies.holding(0))
        status = await services.directory.ensure_loaded(self._entry.id, scope.waits_until_ns)
        return await looked_at(services, scope, self._entry, status, messages, held)

    async def __anext__(self) -> list[Event]:
        assert self._events is not None
        return await anext(self._events)

    async def _find_session(self, messages: list[Message]) -> KeptSession | None:
        """The session of the request, which has an id from now on."""
        sessions, id_ = self._parts.sessions, self._plan.session_id
        known = id_ or await sessions.match(self._owner, await in_rows(messages))
        self._session = self._scope.session_id = known or str(uuid4())
        # PERF: nothing is kept under a new id, and to ask for it took half of the time of the loop.
        session = await sessions.get(self._owner, known) if known else None
        return None if session is None else replace(session, messages=await from_rows(session.messages))

    async def _files_of(self, kept: KeptSession | None) -> list[File]:
        """The files of the session that are still there."""
        files = []
        for id_ in kept.files if kept is not None else ():
            with suppress(FileNotFound):
                files.append(await self._parts.files.get(self._owner, id_))
        return files

    def _round(self) -> AbstractAsyncContextManager[Generation]:
        """The model's turn, with bounds on its times that begin now."""
        scope = self._scope
        self._services.recorder.agent_round(self._entry.id)
        self._progress.asks_model(self._loop.round)
        if self._loop.round:
            # NOTE: the record of the request keeps its own beginning; a deadline that the caller named holds on.
            request_s = self._services.settings.limits.request_timeout_s
            by_ns = scope.deadline_ns if self._scope.names_deadline else deadline.after(request_s)
            scope = msgspec.structs.replace(
                scope, started=time.perf_counter(), start_by_ns=0, deadline_ns=by_ns
            )
        return generation.running(self._services, scope, self._entry, self._loop.call)

    async def _run(self) -> AsyncGenerator[list[Event], None]:
        loop = self._loop
        if pending := loop.unanswered():
            async with aclosing(self._calls(pending)) as lists:
                async for events in lists:
                    yield events
            loop.resume()
            await self._save()
        while True:
            async with aclosing(self._asked()) as lists:
                async for events in lists:
                    yield events
            if calls := loop.turn():
                async with aclosing(self._calls(calls)) as lists:
                    async for events in lists:
                        yield events
                await self._save()
            if not loop.advance():
                break
        missing = await self._produced(await self._place.missing(loop.round))
        end = loop.end()
        await self._save()
        yield [*missing, Session(self._session), *end]

    async def _asked(self) -> AsyncGenerator[list[Event], None]:
        """What the model tells in a round."""
        first, self._first = self._first, None
        if first is not None:
            async for events in first:
                if shown := self._loop.take(events):
                    yield shown
            await self._opened.aclose()
            return
        async with self._round() as asked:
            async for events in asked:
                if shown := self._loop.take(events):
                    yield shown

    async def _calls(self, calls: Sequence[Called]) -> AsyncGenerator[list[Event], None]:
        """The calls of a round, one after another."""
        for call in calls:
            tool, round_ = self._tools[call.name], self._loop.round
            data = tools.calling(tool, call.arguments)
            yield [Calling(round_, call.id, call.name, call.arguments, data, tool.server)]
            denied, status = self._plan.permission == "deny", results.DENIED
            reason = f"{tool.label} was denied by policy." if denied else ""
            if not call.is_whole:
                reason, status = "the arguments are no JSON: they break off", results.ERROR
            elif self._plan.permission == "ask" and not await self._is_remembered():
                asked = Asked(
                    new_id("appr_"), self._session, round_, tool.approval, tools.values_of(call.arguments)
                )
                await self._parts.approvals.announce(self._owner, self._session, asked.approval_id)
                self._progress.waits(tool.label, data, asked.approval_id)
                async with _at_work(self._decision(asked.approval_id)) as decision:
                    yield [asked]
                    async with self._in_time():
                        reason = _why_not(tool, await decision)
            if reason:
                answer, files = results.refused(tool, status, reason, call.arguments), list[File]()
                self._services.recorder.agent_call(tool.metric, answer.status, None)
            else:
                self._progress.calls(tool.label, data)
                async with self._in_time():
                    answer, files = await self._result(tool, call, round_)
            self._loop.answer(call, answer.text)
            arguments, ids = tools.recorded(tool, call.arguments), [file.id for file in files]
            record = results.record(round_, call.name, arguments, answer, ids)
            sources = answer.sources if self._plan.tells_sources else []
            completed = Completed(round_, call.id, call.name, answer.data, record, answer.status, sources)
            yield [*await self._produced(files), completed]

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """A wait for a tool or a decision. Raises `DeadlineExceeded` at the deadline that the caller named."""
        left_s = (
            max(deadline.remaining_s(self._scope.deadline_ns), 0.0) if self._scope.names_deadline else None
        )
        bound = asyncio.timeout(left_s)
        try:
            async with bound:
                yield
        except TimeoutError:
            if not bound.expired():
                raise
            raise DeadlineExceeded("the deadline passed between two turns of the model") from None

    async def _decision(self, id_: str) -> Decision:
        """The decision about a call; the wait is counted."""
        began, outcome = time.perf_counter(), "cancelled"
        try:
            wait_s = self._services.settings.state.approval_wait_s
            decision = await self._parts.approvals.wait(id_, wait_s)
            outcome = "approved" if decision.approve else "timed_out" if decision.timed_out else "denied"
        finally:
            self._services.recorder.agent_wait(outcome, time.perf_counter() - began)
        return decision

    async def _result(self, tool: Tool, call: Called, round_: int) -> tuple[Answer, list[File]]:
        """What a call gives; the call is counted."""
        began, outcome, files = time.perf_counter(), "failed", list[File]()
        try:
            if isinstance(tool, BuiltIn):
                answer, files = await self._place.run(tool, call.arguments, round_)
            else:
                answer = await self._parts.backends[tool.source].run(tool, call.arguments)
            outcome = answer.status
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._services.recorder.agent_call(tool.metric, outcome, time.perf_counter() - began)
        return answer, files

    async def _is_remembered(self) -> bool:
        return await self._parts.approvals.is_remembered(self._owner, self._session)

    async def _produced(self, files: Sequence[File]) -> list[Event]:
        self._progress.made(len(files))
        return [Produced(file) for file in await self._place.shown(files)]

    async def _save(self) -> None:
        files = [file.id for file in self._place.files]
        messages = await in_rows(self._loop.messages)
        await self._parts.sessions.save(self._owner, self._session, messages, files)


@asynccontextmanager
async def _at_work(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """A task that is over when the context is left: a client that goes away leaves no wait behind."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _why_not(tool: Tool, decision: Decision) -> str:
    """Why a call may not run, empty if it may."""
    if decision.approve:
        return ""
    if decision.timed_out:
        return f"{tool.label} was denied: the request for approval timed out."
    return decision.message or f"{tool.label} was denied by the user."


def _check(call: GenerateCall) -> None:
    """Raise `InvalidField` for what cannot run in rounds."""
    if call.n > 1:
        raise InvalidField("n", f"{call.n} choices are not offered while tools run on the server")
    if call.variables.get("continue_final_message"):
        text = "a message cannot be continued while tools run on the server"
        raise InvalidField("continue_final_message", text)
