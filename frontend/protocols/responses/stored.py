"""Routes of stored responses: read, follow as a stream, delete, cancel, list the input. Each sees its own caller's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import Annotated, Any, Literal

import falcon
import msgspec
import orjson
from falcon.asgi import Request, Response
from msgspec import Meta

from frontend.generation.errors import InvalidField, status_of
from frontend.generation.parameters import MOST_NUMBER, ORDERS, number, owner_of, word
from frontend.generation.running import send_stream
from frontend.protocols.responses import output as resource
from frontend.protocols.responses import store as event_log
from frontend.protocols.responses.create import NamedEvents
from frontend.protocols.responses.output import Output
from frontend.protocols.responses.runs import PROTOCOL
from frontend.protocols.responses.store import ResponseNotFound, ResponseStore, Stored
from frontend.sending import answer_json
from frontend.services import Services
from ipc.errors import PenstockError

LEAST_PAUSE_S, MOST_PAUSE_S = 0.1, 1.0
"""Time between two looks at a response that is followed; looks that find nothing become rarer."""
MOST_LISTED, LISTED = 100, 20
"""Items of a page: the most, and those of a request that does not say."""
_TRUE = ("true", "1")
_BOOLEANS = (*_TRUE, "false", "0")


class DeletedResponse(msgspec.Struct):
    """A response that is not stored any more."""

    id: Annotated[str, Meta(description="Id of the response that was deleted.")]
    object: Annotated[Literal["response.deleted"], Meta(description="Names the form of this object.")]
    deleted: Annotated[Literal[True], Meta(description="Whether the response is gone.")]


class InputItems(msgspec.Struct):
    """A page of the input of a response."""

    object: Annotated[Literal["list"], Meta(description="Names the form of this object.")]
    data: Annotated[list[dict[str, Any]], Meta(description="The list.")]
    has_more: Annotated[bool, Meta(description="Whether there are more behind the last one.")]
    first_id: Annotated[str | None, Meta(description="Id of the first of these.")]
    last_id: Annotated[str | None, Meta(description="Id of the last of these.")]


class StoredResource:
    """GET and DELETE of one response; GET with `stream=true` tells its events behind `starting_after`."""

    def __init__(self, services: Services, store: ResponseStore) -> None:
        self._services, self._store = services, store

    async def on_get(self, req: Request, resp: Response, response_id: str) -> None:
        """The response as it is now, or as a stream."""
        streams = word(req, "stream", _BOOLEANS, "false") in _TRUE
        after = number(req, "starting_after", 0, MOST_NUMBER, -1)
        row = await self._store.get(response_id, owner_of(req))
        if not streams:
            answer_json(resp, row.body)
            return
        if not row.followable:
            raise InvalidField(
                "stream", "the events of this response are not kept, which takes a background run"
            )
        named = NamedEvents(after)
        events = _following(self._store, row, named)
        last = partial(_last_events, named)
        await send_stream(self._services, req, resp, events, PROTOCOL, last)

    async def on_delete(self, req: Request, resp: Response, response_id: str) -> None:
        """Delete the response; one that runs ends."""
        await self._store.delete(response_id, owner_of(req))
        answer_json(resp, DeletedResponse(response_id, "response.deleted", True))


class NotServed:
    """A route of OpenAI beside the stored responses that this server lacks."""

    async def on_post(self, req: Request, resp: Response) -> None:
        """404, where the name of a stored response would be 405."""
        raise falcon.HTTPRouteNotFound


class CancelResource:
    """POST: end a response in the background, at whichever frontend it runs."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def on_post(self, req: Request, resp: Response, response_id: str) -> None:
        """The cancelled response. Its run ends at the next beat of its frontend."""
        row = await self._store.get(response_id, owner_of(req))
        if row.is_finished or not await self._store.settle(row, resource.cancelled):
            raise ResponseNotFound(f"the response {response_id[:100]!a} has ended, nothing is left to cancel")
        answer_json(resp, (await self._store.get(response_id, owner_of(req))).body)


class InputItemsResource:
    """GET: the items that the request of a response brought, a page at a time."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def on_get(self, req: Request, resp: Response, response_id: str) -> None:
        """Items behind `after`, newest first unless `order` is `asc`."""
        order, limit = word(req, "order", ORDERS, "desc"), number(req, "limit", 1, MOST_LISTED, LISTED)
        row = await self._store.get(response_id, owner_of(req), with_items=True)
        items = orjson.loads(row.items)
        if order == "desc":
            items.reverse()
        if after := req.get_param("after"):
            ids = [item["id"] for item in items]
            if after not in ids:
                raise InvalidField("after", f"{after[:100]!a} is no input item of this response")
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        answer = InputItems("list", page, len(items) > limit, *ends)
        answer_json(resp, answer)


async def _following(store: ResponseStore, row: Stored, named: NamedEvents) -> AsyncGenerator[bytes, None]:
    """The events of a response from its first, and those to come until its end."""
    begun, known, pause_s = orjson.loads(row.begun), 0, LEAST_PAUSE_S
    output = Output(begun, named.tell)
    named.queue(begun)
    yield named.taken()
    while True:
        row, pieces = await store.follow(row.id, row.owner, known)
        if not row.followable:
            raise PenstockError("the response has too many events to keep: retrieve the response itself")
        if row.status != resource.QUEUED and not named.is_at_work:
            named.work(begun)
        for entries in pieces:
            output.take(event_log.decode(entries))
        known += len(pieces)
        if row.whole is not None:
            break
        if made := named.taken():
            yield made
        pause_s = LEAST_PAUSE_S if pieces else min(pause_s * 1.5, MOST_PAUSE_S)
        await asyncio.sleep(pause_s)
    output.close()
    yield named.end(orjson.loads(row.whole))


def _last_events(named: NamedEvents, error: PenstockError) -> tuple[int, bytes]:
    return status_of(error), named.fail(error)
