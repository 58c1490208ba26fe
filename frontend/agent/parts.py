"""What runs need of this server, and what the server offers: the tool host, stores, decisions."""

from __future__ import annotations

from dataclasses import dataclass

from frontend.agent.host import ToolHost
from frontend.generation.hosted import CODE, SHELL, Offer
from frontend.state.approvals import ApprovalStore
from frontend.state.files import FileStore
from frontend.state.sessions import SessionStore
from frontend.state.skills import SkillStore
from frontend.state.state import State
from ipc.settings import Agent


@dataclass(frozen=True, slots=True)
class Parts:
    """What runs need of this server, and what the server offers."""

    offer: Offer
    host: ToolHost
    files: FileStore
    skills: SkillStore
    sessions: SessionStore
    approvals: ApprovalStore


def parts_of(agent: Agent, state: State, host: ToolHost, max_file_nbytes: int) -> Parts:
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
        max_file_nbytes=max_file_nbytes,
    )
    return Parts(offer, host, state.files, state.skills, state.sessions, state.approvals)
