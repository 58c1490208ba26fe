"""The unmodified clients of SIE, in Pythons of their own: version 3.12 or later, and packages that are none of ours.

The old line waits for a 202 and for any 503, the new one reads codes. `pip install sie-sdk` gives the new line, in an
environment that `TEST_SIE_PYTHON` names, and `pip install 'sie-sdk<0.4'` the old one, in that of `TEST_SIE_OLD_PYTHON`.
`.ci/run` installs both.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest

from tests.conformance.required_tool import named_python
from tests.harness.server import Server

LINES = {"old": ("TEST_SIE_OLD_PYTHON", "sie-sdk<0.4"), "new": ("TEST_SIE_PYTHON", "sie-sdk")}
CLIENTS = (
    ("old", "sync"),
    pytest.param(("old", "async"), marks=pytest.mark.long),
    pytest.param(("new", "sync"), marks=pytest.mark.long),
    ("new", "async"),
)
"""Lines and kinds of clients: the default suite has each line and each kind once."""
FACADE = """
import asyncio, base64, inspect, json, sys
import httpx
import numpy as np
from sie_sdk import SIEAsyncClient, SIEClient
from sie_sdk.client import async_, sync

KIND = {"sync": SIEClient, "async": SIEAsyncClient}[sys.argv[1]]
# The client renews a lease each minute; the loop that renews is the client's own.
sync.DEFAULT_LEASE_RENEWAL_INTERVAL_S = async_.DEFAULT_LEASE_RENEWAL_INTERVAL_S = 0.2

async def got(value):
    return await value if inspect.isawaitable(value) else value

async def first(frames):
    async for frame in frames:
        return frame

async def frame_of(client, **options):
    frames = await got(client.watch(**options))
    return next(frames) if inspect.isgenerator(frames) else await first(frames)

async def until(look, wanted):
    async with asyncio.timeout(60):
        while not wanted(found := await got(look())):
            await asyncio.sleep(0.05)
    return found

async def tried(call):
    try:
        return await got(call())
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "code": getattr(error, "code", None)}
"""
"""What programs of a client begin with: the class `KIND`, and calls that are the same for both kinds."""

_ENCODE = """
async def main():
    client = KIND(sys.argv[2])
    model, text, options = sys.argv[3], sys.argv[4], json.loads(sys.argv[5])
    found = await tried(lambda: client.encode(model, {"text": text}, **options))
    print(json.dumps(found["dense"].tolist() if "dense" in found else found))
    await got(client.close())

asyncio.run(main())
"""


class Client(NamedTuple):
    """The interpreter that has a line of the client, and the kind of its calls: `sync` or `async`."""

    python: str
    kind: str

    def command(self, program: str, *arguments: str) -> list[str]:
        """The command of a program behind the facade."""
        return [self.python, "-c", FACADE + program, self.kind, *arguments]

    @contextlib.contextmanager
    def started(self, program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """A program that runs beside the test. A test that fails before the program has ended kills the program."""
        command = self.command(program, *arguments)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                yield process
            finally:
                process.kill()

    def encodes(
        self, server: Server, model: str, text: str, **options: Any
    ) -> AbstractContextManager[subprocess.Popen[str]]:
        """A client that encodes a text, waiting as long as it does by itself, and prints the vector or its error."""
        return self.started(_ENCODE, server.url, model, text, json.dumps(options))

    def printed(self, program: str, *arguments: str, sent: Any = None) -> Any:
        """The JSON that a program prints, which reads `sent` as JSON."""
        done = subprocess.run(
            self.command(program, *arguments),
            input=json.dumps(sent),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def printed_by(process: subprocess.Popen[str]) -> Any:
    """The JSON that a client has printed at its end."""
    printed, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    return json.loads(printed)


def refusals(server: Server) -> float:
    """Answers of a server with status 503, after which clients ask again."""
    return server.metric("http_requests_total", status="503")


@pytest.fixture(scope="module", params=CLIENTS, ids="-".join)
def each_client(request: pytest.FixtureRequest) -> Client:
    """A client of each line and kind; the test is skipped before anything starts where the line is not there."""
    line, kind = request.param
    return Client(named_python(*LINES[line]), kind)
