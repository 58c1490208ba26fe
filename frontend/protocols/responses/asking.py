"""What a request asks for, complete: the plan of its body, the call with the stored conversation, what to keep."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from falcon.asgi import Request

from frontend.generation import bodies
from frontend.generation.errors import InvalidField
from frontend.http.rendering import off_loop_if
from frontend.protocols.responses.keeping import Keeper
from frontend.protocols.responses.requests import ResponsePlan, parse
from frontend.protocols.responses.store import Items, ResponseStore
from frontend.scope import RequestScope
from frontend.services import Services
from ipc.wire.messages import GenerateCall

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
