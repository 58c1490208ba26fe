"""What all connections of one frontend process share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uvicorn.server import ServerState

from frontend.server.drain import Drain
from frontend.server.limits import ServerLimits

if TYPE_CHECKING:
    from frontend.server.protocol import PenstockProtocol


class FrontendState(ServerState):
    """uvicorn's shared state with the limits, the drain, and the connections that only wait for a hang-up."""

    def __init__(self, limits: ServerLimits, drain: Drain) -> None:
        super().__init__()
        self.limits = limits
        self.drain = drain
        self.lingering: set[PenstockProtocol] = set()
