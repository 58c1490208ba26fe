"""How runs with tools end before their time: clients that leave, models that fail, bounds of each round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from frontend.agent import progress
from frontend.agent.runner import running
from frontend.agent.workplace import sandbox_of
from frontend.engine.events import Asked, Calling, Completed, Event, Generation
from frontend.generation.hosted import CODE, AgentPlan
from frontend.records.recent import LiveRuns, RunReader
from frontend.scope import RequestScope, plain_scope
from frontend.state.approvals import Decision
from ipc import deadline
from ipc.errors import DeadlineExceeded, InferenceFailed
from ipc.processes.paths import prepare_run_dir
from ipc.wire.messages import GenerateCall, ToolUse
from tests.fakes.agent import OFFER
from tests.fakes.generation_server import CHAT
from tests.unit.frontend.agent.test_agent_chat import ASKED, EXECUTE, FINAL, AgentServer, calls

CALL = GenerateCall(messages=ASKED, tools=ToolUse([{"type": "function", "function": {"name": EXECUTE}}]))


@pytest.fixture
def server(tmp_path: Path) -> AgentServer:
    """A model that makes two calls in a turn, then answers."""
    return AgentServer(tmp_path, calls((EXECUTE, '{"code":"1"}'), (EXECUTE, '{"code":"2"}')), FINAL)


def _scope() -> RequestScope:
    scope = plain_scope()
    scope.deadline_ns = deadline.after(60)
    return scope


@asynccontextmanager
async def _run(
    server: AgentServer, scope: RequestScope, permission: str = "auto"
) -> AsyncIterator[Generation]:
    plan = AgentPlan(OFFER, frozenset((CODE,)), permission, 8, "s")
    entry = server.services.catalog.find(CHAT)
    async with running(server.services, scope, entry, CALL, plan) as run:
        yield run


async def _until(run: Generation, kind: type[Event]) -> None:
    """Read up to the first event of a kind."""
    async for events in run:
        if any(isinstance(event, kind) for event in events):
            return
    raise AssertionError("the run ended before")


async def _leave(waits: asyncio.Task[Any]) -> None:
    """What happens to a request whose client goes away."""
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits


def test_a_client_that_leaves_cancels_the_tool_and_nothing_runs_after_it(server: AgentServer) -> None:
    async def leave() -> None:
        server.parts.host.results.append(None)
        async with _run(server, _scope()) as run:
            await _until(run, Calling)
            waits = asyncio.ensure_future(anext(run))
            await server.parts.host.waits.wait()
            await _leave(waits)
        assert server.parts.host.cancelled == 1 and len(server.parts.host.calls) == 1
        assert server.engine.ended == 1 and server.parts.sessions.saved == []
        assert server.parts.counts.calls == [(EXECUTE, "cancelled")] and len(server.parts.counts.rounds) == 1

    asyncio.run(leave())


@pytest.mark.parametrize("waits_already", [True, False])
def test_a_client_that_leaves_leaves_no_wait_behind(server: AgentServer, waits_already: bool) -> None:
    async def leave() -> None:
        async with _run(server, _scope(), "ask") as run:
            await _until(run, Asked)
            if waits_already:
                waits = asyncio.ensure_future(anext(run))
                await asyncio.sleep(0)
                await _leave(waits)
            else:
                await asyncio.sleep(0)
        assert server.parts.approvals.left == 1 and server.parts.host.calls == []
        assert server.parts.counts.waits == ["cancelled"] and server.parts.counts.calls == []
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(leave())


@pytest.mark.parametrize(("permission", "event"), [("auto", Calling), ("ask", Asked)])
def test_tools_and_decisions_end_at_the_deadline_that_the_caller_named(
    server: AgentServer, permission: str, event: type[Event]
) -> None:
    async def wait() -> None:
        server.parts.host.results.append(None)
        scope = _scope()
        scope.names_deadline = True
        async with _run(server, scope, permission) as run:
            await _until(run, event)
            scope.deadline_ns = deadline.after(0)
            with pytest.raises(DeadlineExceeded):
                await anext(run)
        assert server.parts.host.cancelled + server.parts.approvals.left == 1
        assert server.parts.sessions.saved == [] and len(asyncio.all_tasks()) == 1

    asyncio.run(wait())


def test_a_caller_without_a_deadline_waits_for_tools(server: AgentServer) -> None:
    async def wait() -> None:
        scope = _scope()
        async with _run(server, scope) as run:
            await _until(run, Calling)
            scope.deadline_ns = deadline.after(0)
            await _until(run, Completed)

    asyncio.run(wait())


@pytest.fixture
def board(server: AgentServer) -> Iterator[RunReader]:
    """What the live page reads of the runs."""
    paths = server.services.settings.paths
    prepare_run_dir(paths)
    server.services.finisher.runs = LiveRuns(paths, "frontend-0")
    yield RunReader(paths)
    server.services.finisher.runs.close()


def test_a_run_is_shown_with_what_it_does_until_it_ends(server: AgentServer, board: RunReader) -> None:
    async def look() -> None:
        server.parts.approvals.decisions.append(Decision(True))
        server.parts.host.results.append(None)
        scope = _scope()
        async with _run(server, scope, "ask") as run:
            [begun] = board.read()
            assert (begun.request_id, begun.model, begun.doing, begun.tool) == (
                scope.request_id, CHAT, "model", "",
            )  # fmt: skip
            await _until(run, Asked)
            [asks] = board.read()
            assert (asks.doing, asks.tool, asks.arguments, asks.round) == ("approval", "Python code", "1", 0)
            assert asks.approval_id == server.parts.approvals.announced[0][2]
            works = asyncio.ensure_future(anext(run))
            await server.parts.host.waits.wait()
            [calls_] = board.read()
            assert (calls_.doing, calls_.arguments, calls_.approval_id) == ("tool", "1", "")
            assert +server.parts.counts.in_flight == {"tool": 1}
            await _leave(works)
        assert board.read() == [] and not +server.parts.counts.in_flight

    asyncio.run(look())


def test_ends_of_runs_are_counted_by_outcome(server: AgentServer) -> None:
    async def finish() -> None:
        async with _run(server, _scope()) as run:
            async for _ in run:
                pass

    async def leave() -> None:
        async with _run(server, _scope()) as run:
            await _until(run, Calling)
            raise GeneratorExit

    async def fail() -> None:
        async with _run(server, _scope()) as run:
            await _until(run, Calling)
            raise InferenceFailed("the model failed")

    asks = calls((EXECUTE, '{"code":"1"}'))
    server.script(asks, FINAL, asks)
    asyncio.run(finish())
    for end, error in ((leave, GeneratorExit), (fail, InferenceFailed)):
        with pytest.raises(error):
            asyncio.run(end())
    assert server.parts.counts.runs == [(CHAT, "finished"), (CHAT, "cancelled"), (CHAT, "failed")]
    assert not +server.parts.counts.in_flight


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"tool_type": "code_execution", "code": "6*7"}, "6*7"),
        ({"tool_type": "shell", "commands": ["ls", "pwd"]}, "ls\npwd"),
        ({"tool_type": "custom", "arguments": {"file_id": "f"}}, '{\n  "file_id": "f"\n}'),
        ({"tool_type": "shell", "commands": ["ls", 5]}, '[\n  "ls",\n  5\n]'),
        ({"tool_type": "code_execution"}, ""),
        ({"tool_type": "web_search", "query": "a", "url": "b"}, '{\n  "query": "a",\n  "url": "b"\n}'),
    ],
)
def test_arguments_are_shown_as_people_read_them(data: dict[str, Any], text: str) -> None:
    assert progress._text_of(data) == text


def test_bounds_on_times_begin_anew_with_each_round(server: AgentServer) -> None:
    async def look() -> None:
        scope = _scope()
        async with _run(server, scope) as run:
            first_by_ns = scope.start_by_ns
            async for _ in run:
                pass
        assert server.engine.paces[0].first_by_ns == first_by_ns < server.engine.paces[1].first_by_ns
        assert scope.session_id == "s" and scope.start_by_ns == first_by_ns

    asyncio.run(look())


def test_of_two_runs_of_a_session_at_once_the_later_save_replaces_the_earlier_as_a_whole(
    server: AgentServer,
) -> None:
    async def run() -> None:
        script = calls((EXECUTE, '{"code":"1"}'))
        server.script(script, script, FINAL)
        async with _run(server, _scope()) as first:
            await _until(first, Calling)
            async with _run(server, _scope()) as second:
                async for _ in second:
                    pass
            kept = server.parts.sessions.kept["", "s"]
            async for _ in first:
                pass
        assert len(server.parts.sessions.saved) == 4
        assert server.parts.sessions.kept["", "s"] == kept
        assert {sandbox for sandbox, _ in server.parts.host.calls} == {sandbox_of("", "s")}

    asyncio.run(run())


def test_a_request_without_a_plan_is_the_models_own_generation(server: AgentServer) -> None:
    async def look() -> None:
        entry = server.services.catalog.find(CHAT)
        async with running(server.services, _scope(), entry, CALL, None) as run:
            assert type(run).__name__ == "RecordedGeneration"

    asyncio.run(look())
