"""Responses in the background whose tools run on the server: told again from the store, cancelled, ended by a drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson

from tests.harness.server import eventually
from tests.unit.frontend.agent.test_agent_chat import CODE_TOOL, EXECUTE, FINAL, AgentServer, calls

CODE = calls((EXECUTE, '{"code":"6*7"}'))
ASK = {"input": "6 times 7?", "tools": [CODE_TOOL], "background": True, "session_id": "s"}
LOGS = {"include[]": "code_interpreter_call.outputs"}


class Asking:
    """One response in the background, and those who look at it."""

    def __init__(self, server: AgentServer, client: httpx.AsyncClient, id_: str) -> None:
        self.server, self._client, self._path = server, client, f"/v1/responses/{id_}"

    async def told(self, **params: str) -> Any:
        """The response as it is now."""
        return (await self._client.get(self._path, params=params)).json()

    async def until(self, status: str) -> Any:
        """The response, once it has this status."""

        async def has_status() -> bool:
            return bool((await self.told())["status"] == status)

        await eventually(has_status, status)
        return await self.told()

    async def events(self, **params: str) -> list[Any]:
        """The events of the response, from its first to its last."""
        answer = await self._client.get(self._path, params={"stream": "true", **params})
        return [orjson.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]

    async def cancel(self) -> Any:
        """The answer of a cancellation."""
        return (await self._client.post(f"{self._path}/cancel")).json()


@asynccontextmanager
async def _running(root: Path, *, waits: bool = False) -> AsyncIterator[Asking]:
    """A response whose model calls code, then answers; with `waits` the code never ends."""
    server = AgentServer(root, CODE, FINAL)
    server.services.drain = type(server.services.drain)()
    if waits:
        server.parts.host.results.append(None)
    transport = httpx.ASGITransport(app=server.application)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        asked = await client.post("/v1/responses", json=ASK)
        if waits:
            await server.parts.host.waits.wait()
        yield Asking(server, client, asked.json()["id"])


def test_a_run_is_told_again_with_its_named_events_and_the_output_of_code_for_those_who_ask(
    tmp_path: Path,
) -> None:
    async def act() -> None:
        async with _running(tmp_path) as asking:
            whole = await asking.until("completed")
            assert [item["type"] for item in whole["output"]] == ["code_interpreter_call", "message"]
            for params, outputs in (({}, None), (LOGS, [{"type": "logs", "logs": "ran 6*7\n"}])):
                assert (await asking.told(**params))["output"][0]["outputs"] == outputs
                events = await asking.events(**params)
                names = [event["type"] for event in events]
                assert names.count("agentic_tool_call_progress") == 2 and names[-1] == "response.completed"
                done = next(event for event in events if event["type"] == "response.output_item.done")
                assert done["item"]["outputs"] == events[-1]["response"]["output"][0]["outputs"] == outputs
            assert len(asking.server.parts.host.calls) == 1

    asyncio.run(act())


def test_a_drain_ends_a_run_whose_tool_is_at_work_as_failed_and_the_tool_is_cancelled_once(
    tmp_path: Path,
) -> None:
    async def act() -> None:
        async with _running(tmp_path, waits=True) as asking:
            services, host = asking.server.services, asking.server.parts.host
            services.drain.begin()
            ending = asyncio.ensure_future(services.background.end(services.drain))
            await asyncio.sleep(0)
            assert not ending.done() and host.cancelled == 0
            services.drain.end()
            await ending
            answer = await asking.told()
            assert (answer["status"], answer["error"]["type"]) == ("failed", "internal_error")
            assert "stopped" in answer["error"]["message"]
            assert answer["output"][0]["status"] == "incomplete"
            assert (len(host.calls), host.cancelled, len(asking.server.engine.works)) == (1, 1, 1)

    asyncio.run(act())


def test_a_run_that_is_cancelled_stops_its_tool_and_asks_the_model_no_more(tmp_path: Path) -> None:
    async def act() -> None:
        async with _running(tmp_path, waits=True) as asking:
            host = asking.server.parts.host
            assert (await asking.cancel())["status"] == "cancelled"

            async def is_stopped() -> bool:
                return host.cancelled == 1

            await eventually(is_stopped, "the end of the tool")
            assert (await asking.told())["status"] == "cancelled"
            assert (len(host.calls), len(asking.server.engine.works)) == (1, 1)

    asyncio.run(act())
