"""What runs need of this server, as they see it: the tool host, stores, decisions; and what the server offers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from frontend.agent.host import ProducedFile
from frontend.generation.hosted import CODE, SHELL, Offer
from frontend.state.files import FileStore
from frontend.state.state import State
from ipc.settings import Agent
from ipc.wire.tools import Call, Done

Message = dict[str, Any]


class Host(Protocol):
    """The tool host, as `frontend.agent.host.ToolHost` reaches it."""

    async def run(self, sandbox: str, call: Call, *, lasting: bool) -> tuple[Done, list[ProducedFile]]:
        """Run a call."""

    async def mount(self, sandbox: str, path: str, fd: int, *, lasting: bool) -> None:
        """Put a file into the work directory."""


class OpenSkill(Protocol):
    """A version of a skill, whose files stay readable; `files` are relative paths and open descriptors."""

    @property
    def name(self) -> str:
        """The name."""

    @property
    def description(self) -> str:
        """What the skill is for."""

    @property
    def files(self) -> Sequence[tuple[str, int]]:
        """The files. Whoever opens the skill closes the descriptors."""


OpenSkills = Callable[[str, str, int | None], Awaitable[OpenSkill]]
"""Opens a version of a skill of an owner; None: the default one."""


class Decision(Protocol):
    """What somebody has decided about a call; `message` is for the model."""

    @property
    def approve(self) -> bool:
        """Whether the call may run."""

    @property
    def message(self) -> str | None:
        """Why not."""

    @property
    def timed_out(self) -> bool:
        """Whether nobody has decided."""


class Approvals(Protocol):
    """Decisions that may come to another frontend."""

    async def announce(self, owner: str, session: str, id: str) -> None:
        """A decision will be waited for."""

    def wait(self, id: str, timeout_s: float) -> Coroutine[Any, Any, Decision]:
        """The decision. A wait that is cancelled leaves nothing that could be decided about."""

    async def is_remembered(self, owner: str, session: str) -> bool:
        """Whether an earlier decision holds for the whole session."""


class Kept(Protocol):
    """A session: messages in the form of templates, and ids of files."""

    @property
    def messages(self) -> list[Message]:
        """The messages."""

    @property
    def files(self) -> list[str]:
        """The files, the oldest first."""


class Sessions(Protocol):
    """Sessions by owner and id."""

    async def get(self, owner: str, id: str) -> Kept | None:
        """A session; None for an unknown one."""

    async def save(self, owner: str, id: str, messages: list[Message], files: list[str]) -> None:
        """Replace a session."""

    async def match(self, owner: str, messages: list[Message]) -> str | None:
        """The id of the session that a conversation goes on with."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What runs need of this server, and what the server offers."""

    offer: Offer
    host: Host
    files: FileStore
    open_skill: OpenSkills
    sessions: Sessions
    approvals: Approvals


def parts_of(agent: Agent, state: State, host: Host) -> Parts:
    """The parts of a frontend. Files of messages can be read always; skills need a shell."""
    features = ((CODE, agent.code_execution), (SHELL, agent.shell))
    offer = Offer(
        frozenset(feature for feature, is_on in features if is_on),
        True,
        agent.permission,
        agent.max_tool_rounds,
        agent.code_exec_timeout_s,
        agent.shell_timeout_s,
        has_network=agent.sandbox == "off" or agent.sandbox_network == "full",
    )
    return Parts(offer, host, state.files, state.skills.open, state.sessions, state.approvals)
