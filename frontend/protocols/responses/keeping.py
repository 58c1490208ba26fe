"""What one request keeps of its response when the response ends: the row with its conversation."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from frontend.background import Background
from frontend.protocols.responses.resource import Resource
from frontend.protocols.responses.store import Items, ResponseStore, ResponsesUnavailable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Keeper:
    """Stores the response of one request of `owner`, unless the request has said no (`stores`)."""

    store: ResponseStore
    background: Background
    owner: str
    history: Items
    items: Items
    stores: bool

    async def keep(self, begun: Resource, whole: Resource) -> None:
        """Store the response as it has ended. Its client gets the answer also if that is impossible."""
        if not self.stores:
            return
        try:
            await self.store.put(begun, self.owner, self.history, self.items, whole)
        except ResponsesUnavailable as error:
            log.error("a response cannot be stored: %s", error.message)

    def keep_soon(self, begun: Resource, whole: Resource) -> None:
        """`keep`, for a request that cannot wait."""
        self.background.start(self.keep(begun, whole))

    async def keep_queued(self, begun: Resource) -> None:
        """Store the response before it runs in the background. Raises `ResponsesUnavailable`."""
        await self.store.put(begun, self.owner, self.history, self.items)
