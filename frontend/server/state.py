"""What all connections of one frontend process share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uvicorn.server import ServerState

from frontend.server.drain import Drain
from frontend.server.limits import ServerLimits
from frontend.server.refusal import Render, plain

if TYPE_CHECKING:
    from frontend.server.protocol import PenstockProtocol


class FrontendState(ServerState):
    """uvicorn's shared state with the limits, the drain, and the connections that only wait for a hang-up."""

    def __init__(self, limits: ServerLimits, drain: Drain, render: Render = plain) -> None:
        """`render` is the form of the answers that the server gives itself."""
        super().__init__()
        self.render = render
        self.limits = limits
        self.drain = drain
        self.lingering: set[PenstockProtocol] = set()
