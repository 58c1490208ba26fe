"""What runs need of this server, and what the server offers: the tool host, stores, decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from frontend.agent.host import ToolHost
from frontend.agent.outside import Backend, Dispatch, Remote
from frontend.agent.tools import EXTERNAL, MCP
from frontend.generation.hosted import CODE, SEARCH, SHELL, Offer
from frontend.scope import RequestScope
from frontend.services import Services
from frontend.state.approvals import ApprovalStore
from frontend.state.files import FileStore
from frontend.state.sessions import SessionStore
from frontend.state.skills import SkillStore

if TYPE_CHECKING:
    from frontend.agent.ranking import Rank, Ranking
    from frontend.agent.web import Web
    from frontend.web.fetching import Fetcher


@dataclass(frozen=True, slots=True)
class Parts:
    """What runs need of this server, and what the server offers.

    `backends` run the tools of other programs, by the source of a tool.
    """

    offer: Offer
    host: ToolHost
    files: FileStore
    skills: SkillStore
    sessions: SessionStore
    approvals: ApprovalStore
    backends: Mapping[str, Backend] = field(default_factory=dict)
    fetcher: Fetcher | None = None
    web: Web | None = None
    ranking: Ranking | None = None

    @property
    def offer_now(self) -> Offer:
        """The offer with the tools of MCP servers that are connected now."""
        remote = self.host.remote_tools
        return replace(self.offer, remote=remote) if remote else self.offer

    def rank_for(self, scope: RequestScope) -> Rank | None:
        """What puts texts of the web in order for the run of a request, where a model does."""
        return None if self.ranking is None else partial(self.ranking.best, scope)

    async def close(self) -> None:
        """Close what is held open."""
        for backend in self.backends.values():
            await backend.close()
        if self.web is not None:
            await self.web.close()


def parts_of(services: Services, host: ToolHost) -> Parts:
    """The parts of a frontend. Files of messages can be read always; skills need a shell."""
    agent, fetch, state = services.settings.agent, services.settings.fetch, services.state
    features = ((CODE, agent.code_execution), (SHELL, agent.shell), (SEARCH, agent.search))
    offer = Offer(
        frozenset(feature for feature, is_on in features if is_on),
        True,
        agent.permission,
        agent.max_tool_rounds,
        agent.code_exec_timeout_s,
        agent.shell_timeout_s,
        fetches_files=fetch.file_urls,
        has_network=agent.sandbox == "off" or agent.sandbox_network == "full",
        max_file_nbytes=services.settings.state.max_file_bytes,
        dispatches=bool(agent.tool_dispatch_url),
    )
    backends: dict[str, Backend] = {MCP: Remote(host)}
    if agent.tool_dispatch_url:
        backends[EXTERNAL] = Dispatch(agent.tool_dispatch_url, agent.tool_dispatch_timeout_s)
    stores = state.files, state.skills, state.sessions, state.approvals
    if not (fetch.file_urls or agent.search):
        return Parts(offer, host, *stores, backends)
    ranking = None
    if agent.search and agent.search_embedding_model:
        from frontend.agent.ranking import Ranking

        ranking = Ranking(services, agent.search_embedding_model, agent.search_timeout_s)
    # PERF: the client library costs 7 MB of memory, which servers that fetch nothing keep.
    from frontend.agent.web import web_of

    fetcher = services.fetcher()
    web = web_of(agent, fetch, fetcher) if agent.search else None
    return Parts(offer, host, *stores, backends, fetcher, web, ranking)
