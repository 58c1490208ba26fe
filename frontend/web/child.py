"""Runs libraries that search the web and read hostile pages, each time in a process of its own.

1. `ask` starts `python -m frontend.web.child JOB`, gives the input to its standard input, and reads the answer.
2. The child has few variables of the environment, and limits of processor time, memory and open files that it sets
   itself before it imports a library, and writes no files. A page that crashes or occupies a parser costs one call.
   A child of `extract` also leaves the network, where the kernel grants namespaces.
3. The parent ends a child that is late or says too much, and a child whose caller has gone. The kernel ends children
   whose parent dies.

Jobs: `search` takes a `SearchJob` and gives a list of `Found`; `extract` takes the bytes of a page and gives an
`Extracted`. Both ways are JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from ipc import extras
from ipc.errors import InvalidInput
from ipc.processes import starting as processes

T = TypeVar("T")
EXTRA = "search"
"""The extra with the libraries."""
MAX_ANSWER_NBYTES = 4 << 20
MAX_NBYTES = 2 << 30
MAX_FILES = 128
MAX_AT_ONCE = 4
"""Children of one frontend at a time; further calls wait within their time."""
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PASSED = ("LANG", "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables that children get: neither keys nor proxies."""


class SearchJob(msgspec.Struct):
    """A query, the most results, and the seconds of one request."""

    query: str
    most: int
    timeout_s: int


class Found(msgspec.Struct):
    """A result of a search engine, as the engine gives it."""

    url: str
    title: str = ""
    text: str = ""


class Extracted(msgspec.Struct):
    """The text of a page; both are empty where nothing was found."""

    text: str = ""
    title: str = ""


class ChildFailed(InvalidInput):
    """A search or an extraction gave nothing. The message is for the model."""


class Children:
    """The children of one frontend."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(MAX_AT_ONCE)

    async def ask(self, job: str, given: bytes, kind: type[T], timeout_s: float) -> T:
        """What a job gives for an input. Raises `ChildFailed`."""
        try:
            async with asyncio.timeout(timeout_s), self._free:
                answer, code = await self._run(job, given, timeout_s)
        except TimeoutError:
            raise ChildFailed(f"the {job} took more than {timeout_s:g} s") from None
        if code:
            raise ChildFailed(f"the {job} failed" if code != _EMPTY else f"the {job} gave nothing")
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError):
            raise ChildFailed(f"the {job} failed") from None

    async def _run(self, job: str, given: bytes, timeout_s: float) -> tuple[bytes, int]:
        """The answer of a child and its exit code."""
        variables = {name: os.environ[name] for name in _PASSED if name in os.environ}
        child = await asyncio.create_subprocess_exec(
            *processes.command("frontend.web.child", job, str(int(timeout_s) + 1)),
            env=processes.environment(variables),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(given)
            child.stdin.write_eof()
            answer = await _bounded(child.stdout)
            return answer, await child.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await asyncio.shield(_ended(child, child.stdout))


async def _ended(child: asyncio.subprocess.Process, stream: asyncio.StreamReader) -> None:
    """Wait for the end of a child that was killed.

    NOTE: the loop tells no end before the pipe is read to its end, and a full stream is read by its reader only.
    """
    while await stream.read(1 << 16):
        pass
    await child.wait()


async def _bounded(stream: asyncio.StreamReader) -> bytes:
    """All that a child says. Raises `ChildFailed` beyond the bound."""
    said = bytearray()
    while piece := await stream.read(1 << 16):
        said += piece
        if len(said) > MAX_ANSWER_NBYTES:
            raise ChildFailed(f"the answer has more than {MAX_ANSWER_NBYTES} bytes")
    return bytes(said)


def missing(needs_engine: bool) -> str:
    """Why web search cannot start: the package that is missing, and its extra. Empty if nothing is.

    `needs_engine`: results come from `ddgs`, not from a URL of the operator.
    """
    for name in ("trafilatura", *(("ddgs",) if needs_engine else ())):
        if importlib.util.find_spec(name) is None:
            return f"the package {name} is missing: {extras.needed(EXTRA)}"
    return ""


_EMPTY = 3
"""Exit code of a job that gave nothing."""


def search(given: bytes) -> list[Found]:
    """Ask a search engine by `ddgs`."""
    job = msgspec.json.decode(given, type=SearchJob)
    ddgs: Any = importlib.import_module("ddgs")
    entries = ddgs.DDGS(timeout=job.timeout_s).text(job.query, max_results=job.most)
    return [Found(_text(each, "href"), _text(each, "title"), _text(each, "body")) for each in entries]


def extract(given: bytes) -> Extracted:
    """The main text of a page, by `trafilatura`, which finds the encoding of the bytes."""
    trafilatura: Any = importlib.import_module("trafilatura")
    page = trafilatura.bare_extraction(
        given, output_format="python", include_comments=False, with_metadata=True
    )
    if page is None:
        return Extracted()
    found = page if isinstance(page, dict) else page.as_dict()
    return Extracted(_text(found, "text"), _text(found, "title"))


def _text(entry: Mapping[str, Any], name: str) -> str:
    value = entry.get(name)
    return value if isinstance(value, str) else ""


JOBS: dict[str, Callable[[bytes], Any]] = {"search": search, "extract": extract}


def main(arguments: list[str]) -> int:
    """Run one job; returns the exit code."""
    job, seconds = arguments
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # NOTE: a unit or a container may forbid both, and the child then keeps its other limits.
    if job == "extract" and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        libc.unshare(_CLONE_NEWNET)
    # The kernel forgets this signal where credentials change.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for bound, most in (
        (resource.RLIMIT_CPU, int(seconds)),
        (resource.RLIMIT_AS, MAX_NBYTES),
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(bound, (most, most))
    sys.dont_write_bytecode = True
    given = sys.stdin.buffer.read()
    # NOTE: libraries print; the descriptor of the answer is ours alone.
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        try:
            result = JOBS[job](given)
        except Exception:
            # NOTE: whatever a library raises, the call gave nothing; the parent tells the model so.
            return _EMPTY
        answer.write(msgspec.json.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
