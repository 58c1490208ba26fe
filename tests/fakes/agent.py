"""What runs with tools need of a server, without processes and databases: a host, sessions, decisions."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from frontend.agent.host import ProducedFile
from frontend.agent.outside import Remote
from frontend.agent.parts import Parts
from frontend.agent.tools import MCP
from frontend.generation.hosted import CODE, SHELL, Offer
from frontend.state.approvals import Decision
from frontend.state.files import FileStore
from frontend.state.places import OnDisk
from frontend.state.sessions import Session
from frontend.state.skills import OpenSkill
from ipc.errors import InvalidInput, PenstockError
from ipc.settings import State
from ipc.wire.tools import (
    Call,
    Done,
    PythonCall,
    PythonResult,
    RemoteCall,
    RemoteResult,
    Remotes,
    RemoteTool,
    ResetCall,
    ResetResult,
    Result,
    ShellCall,
    ShellResult,
    SurfaceResult,
)

OFFER = Offer(frozenset((CODE, SHELL)), takes_files=True)
Files = dict[str, bytes | None]
"""Bytes of produced files by their path; None for a file that is not there."""


def memory_file(data: bytes) -> int:
    """A descriptor of a file with these bytes."""
    fd = os.memfd_create("produced", os.MFD_CLOEXEC)
    os.pwrite(fd, data, 0)
    return fd


@dataclass
class FakeHost:
    """Answers calls with `results` in turn, then as tools that say what they were given."""

    results: list[Result | PenstockError | None] = field(default_factory=list)
    files: list[Files] = field(default_factory=list)
    calls: list[tuple[str, Call]] = field(default_factory=list)
    mounted: list[tuple[str, bytes]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    cancelled: int = 0
    waits: asyncio.Event = field(default_factory=asyncio.Event)
    remote_tools: dict[str, RemoteTool] = field(default_factory=dict)
    remotes: Remotes | None = None

    async def run(self, sandbox: str, call: Call, *, lasting: bool) -> tuple[Done, list[ProducedFile]]:
        """A result of the test; None of `results` never comes."""
        self.calls.append((sandbox, call))
        result = self.results.pop(0) if self.results else said_by(call)
        if result is None:
            self.waits.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        if isinstance(result, PenstockError):
            raise result
        made = self.files.pop(0) if self.files else {}
        produced = [
            ProducedFile(path, 0, None, "not_produced")
            if data is None
            else ProducedFile(path, len(data), memory_file(data), "")
            for path, data in made.items()
        ]
        assert result is not None
        return Done(len(self.calls), result), produced

    async def mount(self, sandbox: str, path: str, fd: int, *, lasting: bool) -> None:
        """Note the file."""
        self.mounted.append((path, os.pread(fd, 1 << 20, 0)))

    async def end(self, sandbox: str) -> None:
        """Note the end."""
        self.ended.append(sandbox)


def said_by(call: Call) -> Result:
    """The result of a tool that repeats its call."""
    if isinstance(call, PythonCall):
        return PythonResult("success", 3, "/work", stdout=f"ran {call.code}\n")
    if isinstance(call, ShellCall):
        return ShellResult("success", "/work", stdout=f"ran {' '.join(call.commands)}\n", exit_code=0)
    if isinstance(call, RemoteCall):
        return RemoteResult("success", f"ran {call.name} with {call.arguments}")
    return ResetResult("success") if isinstance(call, ResetCall) else SurfaceResult("success")


@dataclass
class FakeSessions:
    """Sessions in memory, with all that was saved."""

    kept: dict[tuple[str, str], Session] = field(default_factory=dict)
    saved: list[Session] = field(default_factory=list)

    async def get(self, owner: str, id: str) -> Session | None:
        """A session."""
        return self.kept.get((owner, id))

    async def save(self, owner: str, id: str, messages: list[dict[str, Any]], files: list[str]) -> None:
        """Replace a session."""
        session = self.kept[owner, id] = Session([*messages], [*files])
        self.saved.append(session)

    async def match(self, owner: str, messages: list[dict[str, Any]]) -> str | None:
        """No conversation is known by its messages here."""
        return None


@dataclass
class FakeApprovals:
    """Decisions that a test has made before; without one nobody decides."""

    decisions: list[Decision] = field(default_factory=list)
    announced: list[tuple[str, str, str]] = field(default_factory=list)
    remembered: set[tuple[str, str]] = field(default_factory=set)
    waited_s: list[float] = field(default_factory=list)
    left: int = 0

    async def announce(self, owner: str, session: str, id: str) -> None:
        """Note the wait."""
        self.announced.append((owner, session, id))

    async def wait(self, id: str, timeout_s: float) -> Decision:
        """The next decision."""
        self.waited_s.append(timeout_s)
        if not self.decisions:
            try:
                await asyncio.Event().wait()
            finally:
                self.left += 1
        return self.decisions.pop(0)

    async def is_remembered(self, owner: str, session: str) -> bool:
        """Whether the test says so."""
        return (owner, session) in self.remembered


@dataclass
class FakeCounts:
    """What runs have counted: models and ends of runs, models of rounds, calls by tool and outcome, ends of waits.

    `doing` has what each run did, in turn, and `in_flight` how many runs do each now.
    """

    runs: list[tuple[str, str]] = field(default_factory=list)
    doing: list[str | None] = field(default_factory=list)
    in_flight: Counter[str] = field(default_factory=Counter)
    rounds: list[str] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)

    def agent_doing(self, before: str | None, now: str | None) -> None:
        """Note what a run does."""
        self.doing.append(now)
        self.in_flight.subtract([before] if before else ())
        self.in_flight.update([now] if now else ())

    def agent_run(self, model: str, outcome: str) -> None:
        """Note the end of a run."""
        self.runs.append((model, outcome))

    def agent_round(self, model: str) -> None:
        """Note a round."""
        self.rounds.append(model)

    def agent_call(self, tool: str, outcome: str, seconds: float | None) -> None:
        """Note a call; only a call that was denied has no time."""
        assert (seconds is None) == (outcome == "denied")
        self.calls.append((tool, outcome))

    def agent_wait(self, outcome: str, seconds: float) -> None:
        """Note a wait."""
        assert seconds >= 0
        self.waits.append(outcome)

    def join(self, recorder: Any) -> None:
        """Count what a recorder of the server would."""
        for name in ("agent_doing", "agent_run", "agent_round", "agent_call", "agent_wait"):
            setattr(recorder, name, getattr(self, name))


@dataclass
class FakeParts:
    """The parts of a server; `files` is the real store."""

    root: Path
    offer: Offer = OFFER
    host: FakeHost = field(default_factory=FakeHost)
    sessions: FakeSessions = field(default_factory=FakeSessions)
    approvals: FakeApprovals = field(default_factory=FakeApprovals)
    skills: dict[str, dict[str, bytes]] = field(default_factory=dict)
    counts: FakeCounts = field(default_factory=FakeCounts)

    def __post_init__(self) -> None:
        self.files = FileStore(OnDisk(self.root), State())

    async def open_skill(self, owner: str, skill_id: str, version: int | None) -> OpenSkill:
        """A skill of the test."""
        if skill_id not in self.skills:
            raise InvalidInput(f"no skill with the id {skill_id!a} is stored")
        files = [(path, memory_file(data)) for path, data in self.skills[skill_id].items()]
        return OpenSkill(skill_id, f"Does {skill_id}.", files)

    @property
    def parts(self) -> Parts:
        """What `Services.agent` holds."""
        made: Any = (
            self.host,
            self.files,
            SimpleNamespace(open=self.open_skill),
            self.sessions,
            self.approvals,
        )
        host: Any = self.host
        return Parts(self.offer, *made, {MCP: Remote(host)})
