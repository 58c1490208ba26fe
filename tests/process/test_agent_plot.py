"""A plot by code of a scripted model, from a real tool host: told, cited, in its container, and gone with its time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import falcon.testing
import orjson
import pytest

from frontend.state.file_objects import INLINE_NBYTES
from frontend.state.files import Origin
from tests.harness.tool_host import HostProcess, client, tool_host
from tests.unit.frontend.agent.test_agent_chat import EXECUTE, FINAL, AgentServer, calls

PLOT = """
import struct, zlib
def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
rows = b"".join(b"\\0" + bytes(255 * (x == y) for x in range(8)) for y in range(8))
head = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0))
picture = b"\\x89PNG\\r\\n\\x1a\\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
open("plot.png", "wb").write(picture)
open("long.txt", "w").write("x" * LONG)
len(picture)
"""
TOOL = {"type": "code_interpreter", "container": {"type": "auto"}}
MOST = 4096


@asynccontextmanager
async def _asking(root: Path, host: HostProcess) -> AsyncIterator[tuple[AgentServer, Any]]:
    """Routes over a scripted model and a real host, and a client of the routes on the same loop."""
    server = AgentServer(root)
    async with client(host) as tools, falcon.testing.ASGIConductor(server.client.app) as asking:
        server.services.agent = replace(server.parts.parts, host=tools, files=server.services.state.files)
        yield server, asking


async def _run(server: AgentServer, asking: Any, **wanted: Any) -> Any:
    """The response of a run that plots."""
    code = PLOT.replace("LONG", str(INLINE_NBYTES + 1))
    server.script(calls((EXECUTE, orjson.dumps({"code": code, **wanted}).decode())), FINAL)
    return (await asking.simulate_post("/v1/responses", json={"input": "Plot.", "tools": [TOOL]})).json


def test_a_plot_is_cited_lies_in_its_container_and_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(host: HostProcess) -> None:
        async with _asking(tmp_path, host) as (server, asking):
            response = await _run(server, asking, outputs=[{"name": "missing.csv"}])
            [part] = response["output"][-1]["content"]
            assert {each["filename"] for each in part["annotations"]} == {"plot.png", "long.txt"}
            [cited] = [each for each in part["annotations"] if each["filename"] == "plot.png"]
            container, id_ = cited["container_id"], cited["file_id"]
            assert container == "cntr_" + response["id"]
            listed = (await asking.simulate_get(f"/v1/containers/{container}/files")).json["data"]
            places = {file["path"]: file["id"] for file in listed}
            assert set(places) == {f"/mnt/data/{name}" for name in ("plot.png", "long.txt", "missing.csv")}
            assert places["/mnt/data/plot.png"] == id_

            async def status(id_: str, place: str = "files") -> int:
                found = await asking.simulate_get(f"/v1/{place}/{id_}/content")
                return int(found.status_code)

            alias = await asking.simulate_get(f"/v1/containers/{container}/files/{id_}/content")
            content = await asking.simulate_get(f"/v1/files/{id_}/content")
            assert alias.content == content.content and content.content.startswith(b"\x89PNG")
            assert content.headers["content-type"] == "image/png"
            assert await status(places["/mnt/data/missing.csv"]) == 422
            elided = await server.services.state.files.add(
                "", None, name="a", purpose="agent_output", origin=Origin("shell"), nbytes=9
            )
            assert await status(elided.id) == 410 and await status("file-0") == 404
            file = await server.services.state.files.get("", id_)
            assert file.expires == file.created + 1800
            monkeypatch.setattr(time, "time", lambda: file.expires - 0.001)
            assert await status(id_) == await status(id_, f"containers/{container}/files") == 200
            monkeypatch.setattr(time, "time", lambda: file.expires + 60)
            assert await status(id_) == await status(id_, f"containers/{container}/files") == 404
            listed = (await asking.simulate_get(f"/v1/containers/{container}/files")).json["data"]
            assert listed == []

    with tool_host(tmp_path) as host:
        asyncio.run(act(host))


def test_a_body_above_the_inline_bound_is_fetched_and_not_told(tmp_path: Path) -> None:
    async def act(host: HostProcess) -> None:
        async with _asking(tmp_path, host) as (server, asking):
            code = (
                PLOT.replace("LONG", str(INLINE_NBYTES + 1))
                + f"\nopen('all.txt', 'w').write('y' * {INLINE_NBYTES})"
            )
            server.script(calls((EXECUTE, orjson.dumps({"code": code}).decode())), FINAL)
            asked = {"messages": [{"role": "user", "content": "Plot."}], "tools": [TOOL]}
            answer = (await asking.simulate_post("/v1/chat/completions", json=asked)).json
            files = {file["name"]: file for file in answer["files"]}
            assert files["plot.png"]["data_base64"].startswith("iVBORw0KGgo")
            assert len(files["all.txt"]["text"]) == INLINE_NBYTES
            assert not files["long.txt"].keys() & {"text", "data_base64"}
            assert (
                files["long.txt"]["preview"] == "x" * 1024 and files["long.txt"]["bytes"] == INLINE_NBYTES + 1
            )
            content = await asking.simulate_get(f"/v1/files/{files['long.txt']['id']}/content")
            assert content.content == b"x" * (INLINE_NBYTES + 1)

    with tool_host(tmp_path) as host:
        asyncio.run(act(host))


def test_the_oldest_of_more_files_than_a_key_may_have_is_gone(tmp_path: Path) -> None:
    async def act(host: HostProcess) -> None:
        async with _asking(tmp_path, host) as (server, asking):
            first = await _run(server, asking)
            oldest, kept = (each["file_id"] for each in first["output"][-1]["content"][0]["annotations"])
            store, origin = server.services.state.files, Origin("shell")
            for number in range(MOST - 1):
                await store.add("", None, name=f"{number}", purpose="agent_output", origin=origin, nbytes=1)
            statuses = [
                (await asking.simulate_get(f"/v1/files/{id_}/content")).status_code for id_ in (oldest, kept)
            ]
            assert statuses == [404, 200]
            page, has_more = await store.page("")
            assert (len(page), has_more) == (MOST, False)

    with tool_host(tmp_path) as host:
        asyncio.run(act(host))
