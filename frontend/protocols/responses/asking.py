"""What a request asks for, complete: the plan of its body, the call with the stored conversation, what to keep."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

from falcon.asgi import Request

from frontend.generation import bodies
from frontend.generation.errors import InvalidField
from frontend.http.rendering import off_loop_if
from frontend.protocols.responses.requests import ResponsePlan, parse
from frontend.protocols.responses.resource import Resource
from frontend.protocols.responses.store import Items, ResponseStore, ResponsesUnavailable
from frontend.scope import RequestScope
from frontend.services import Background, Services
from ipc.wire.messages import GenerateCall

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


MANY_ITEMS = 64
"""Conversations of more items are put together by a thread."""
LONG_NBYTES = 64 << 10
"""Stored conversations of more bytes are decoded by a thread."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a response."""

    plan: ResponsePlan
    call: GenerateCall
    keeper: Keeper


async def asked_by(services: Services, store: ResponseStore, req: Request, scope: RequestScope) -> Asked:
    """Read a request. Raises what is wrong with its body, and `ResponseNotFound` for the response to go on with."""
    limits = services.settings.limits
    plan = await bodies.receive(services, req, partial(parse, limits=limits))
    history = await _history(store, plan.previous, scope.grant.caller)
    long = len(history) + len(plan.items) > MANY_ITEMS
    call = await off_loop_if(long, plan.call_after, history, limits)
    keeper = Keeper(store, services.background, scope.grant.caller, history, plan.items, plan.stores)
    return Asked(plan, call, keeper)


async def _history(store: ResponseStore, previous: str | None, owner: str) -> Items:
    """The items of the conversation that a request goes on with."""
    if previous is None:
        return []
    row = await store.get(previous, owner, with_items=True)
    if not row.is_finished:
        raise InvalidField("previous_response_id", f"the response {row.id!a} is {row.status}, not finished")
    return await off_loop_if(row.nbytes > LONG_NBYTES, row.conversation)
