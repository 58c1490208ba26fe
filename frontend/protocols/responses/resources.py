"""Routes of responses: one is made, and stored ones are read, followed, deleted, cancelled.

1. `ResponsesResource` (POST /v1/responses) answers whole, as a stream of named events, or starts a run in the
   background. The response is stored before the last of the answer leaves.
2. `ResponseStream` makes the stream of one response out of `NamedEvents`.
3. `StoredResource`, `CancelResource` and `InputItemsResource` serve stored responses, to each caller its own. A
   response that is followed is told by `NamedEvents`, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Literal

import falcon
import msgspec
import orjson
from falcon.asgi import Request, Response
from msgspec import Meta

from frontend.agent.runner import running
from frontend.engine.events import Generation
from frontend.generation.errors import InvalidField, error_info, status_of
from frontend.generation.requests import MOST_NUMBER, ORDERS, named_model, number, owner_of, word
from frontend.generation.running import send_stream
from frontend.http.threads import off_loop_if
from frontend.protocols.responses import event_bytes
from frontend.protocols.responses import output as resource
from frontend.protocols.responses.items import CODE_CALL, DamagedEvents
from frontend.protocols.responses.output import Output, Resource
from frontend.protocols.responses.requests import LOGS
from frontend.protocols.responses.runs import PROTOCOL, Keeper, Runs, asked_by
from frontend.protocols.responses.store import ResponseNotFound, ResponseStore, Stored
from frontend.scope import RequestScope
from frontend.sending import DONE, InferenceRoute, answer_json, named
from frontend.services import Services
from ipc.errors import Cancelled, Draining, PenstockError

log = logging.getLogger(__name__)

_LAST = {resource.COMPLETED: "response.completed", resource.FAILED: "response.failed"}
LEAST_PAUSE_S, MOST_PAUSE_S = 0.1, 1.0
"""Time between two looks at a response that is followed; looks that find nothing become rarer."""
MOST_LISTED, LISTED = 100, 20
"""Items of a page: the most, and those of a request that does not say."""
_TRUE = ("true", "1")
_BOOLEANS = (*_TRUE, "false", "0")


class NamedEvents:
    """The events of one response behind event number `after`: numbered from 0, framed, collected until they are taken.

    1. `response.created` tells a queued response, `response.in_progress` the same response at work.
    2. `Output` tells what happens to items.
    3. One event ends the stream, by the status of the response; `data: [DONE]` follows. What is wrong with a request,
       or with this server, is an event `error` instead.
    """

    def __init__(self, after: int = -1) -> None:
        self._after, self._number = after, 0
        self._made: list[bytes] = []

    def tell(self, name: str, /, **fields: Any) -> None:
        """Add one event."""
        number = self._number
        self._number += 1
        if number > self._after:
            event = {"type": name, "sequence_number": number, **fields}
            self._made.append(named(name, orjson.dumps(event)))

    @property
    def is_at_work(self) -> bool:
        """Whether the stream has told that the response is at work."""
        return self._number > 1

    def queue(self, begun: Resource) -> None:
        """The response is known."""
        self.tell("response.created", response=begun)

    def work(self, begun: Resource) -> None:
        """The response is at work."""
        self.tell("response.in_progress", response=resource.at(begun, resource.IN_PROGRESS))

    def end(self, whole: Resource) -> bytes:
        """The rest of the stream of a response that has ended."""
        self.tell(_LAST.get(whole["status"], "response.incomplete"), response=whole)
        return self.taken() + DONE

    def fail(self, error: PenstockError) -> bytes:
        """The rest of a stream that ends before its response, or whose request was wrong."""
        info, inner = error_info(error), {"type": resource.kind_of(error), "message": error.message}
        self.tell("error", error=inner, message=error.message, code=info.code, param=info.param)
        return self.taken() + DONE

    def taken(self) -> bytes:
        """All events since the last call."""
        events, self._made = self._made, []
        return b"".join(events)


class ResponseStream:
    """The stream of a response that has begun as `begun`.

    1. A stream begins once the worker has accepted the prompt, or when the request has waited for long. What fails
       before has a status of its own, and is not stored.
    2. The row is stored before the last event leaves, so that a client with the last event finds the response.
    3. A client that goes away ends the work. What was generated until then is stored as a cancelled response, or as a
       failed one where the end of this server ends the stream.
    """

    def __init__(self, begun: Resource, keeper: Keeper, *, tells_logs: bool) -> None:
        """`tells_logs`: the client asks for the output of code."""
        self._begun, self._keeper, self._tells_logs = begun, keeper, tells_logs
        self._named = NamedEvents()
        self._output = Output(begun, self._named.tell, tells_logs=tells_logs)
        self._drained: Draining | None = None

    async def events(self, running: AbstractAsyncContextManager[Generation]) -> AsyncGenerator[bytes, None]:
        """The events of what `running` generates. Raises the error of a generation that fails."""
        async with running as generation:
            try:
                yield self.open()
                async for events in generation:
                    self._output.take(events)
                    if lines := self._named.taken():
                        yield lines
            except (asyncio.CancelledError, GeneratorExit, Cancelled):
                whole = resource.cancelled(self._begun, self._output)
                self._keeper.keep_soon(self._begun, self._failed(self._drained) if self._drained else whole)
                raise
            except Exception as error:
                await self._keeper.keep(self._begun, self._failed(error))
                raise
        whole = resource.ended(self._begun, self._output)
        await self._keeper.keep(self._begun, whole)
        yield self._named.end(resource.shown(whole, tells_logs=self._tells_logs))

    def open(self) -> bytes:
        """The events that begin the stream, once."""
        if not self._named.is_at_work:
            self._named.queue(self._begun)
            self._named.work(self._begun)
        return self._named.taken()

    def last_events(self, error: PenstockError) -> tuple[int, bytes]:
        """(status to count, events) of an error that ends the stream."""
        self._drained = error if isinstance(error, Draining) else None
        self._output.close()
        if resource.kind_of(error) == "model_error":
            whole = resource.shown(self._failed(error), tells_logs=self._tells_logs)
            return status_of(error), self._named.end(whole)
        return status_of(error), self._named.fail(error)

    def _failed(self, error: Exception) -> Resource:
        known = error if isinstance(error, PenstockError) else PenstockError("internal error")
        return resource.failed(self._begun, self._output, known)


class ResponsesResource(InferenceRoute):
    """One response: answered whole, as a stream of named events, or run in the background."""

    operation = "responses"

    def __init__(self, services: Services, store: ResponseStore, runs: Runs) -> None:
        super().__init__(services)
        self._store, self._runs = store, runs

    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: str) -> None:
        """One request."""
        services = self.services
        asked = await asked_by(services, self._store, req, scope)
        begun = resource.beginning(asked.plan)
        if asked.plan.background:
            await self._runs.start(req, asked, begun)
            answer_json(resp, begun)
            return
        entry = named_model(services, scope, asked.plan.model)
        work = running(services, scope, entry, asked.call, asked.agent)
        if asked.plan.streams:
            stream = ResponseStream(begun, asked.keeper, tells_logs=asked.plan.tells_logs)
            await send_stream(
                services, req, resp, stream.events(work), PROTOCOL, stream.last_events, opening=stream.open
            )
            return
        async with work as generation:
            whole = await _gathered(generation, begun, tells_logs=asked.plan.tells_logs)
        await asked.keeper.keep(begun, whole)
        whole = resource.shown(whole, tells_logs=asked.plan.tells_logs)
        # Log probabilities make an answer long.
        answer_json(resp, await off_loop_if(asked.call.sampling.logprobs is not None, orjson.dumps, whole))


async def _gathered(generation: Generation, begun: Resource, *, tells_logs: bool) -> Resource:
    """The response of all that is generated. The error of a model that fails has the response so far."""
    output = Output(begun)
    try:
        async for events in generation:
            output.take(events)
    except PenstockError as error:
        if status_of(error) == HTTPStatus.INTERNAL_SERVER_ERROR and output.items():
            whole = resource.failed(begun, output, error)
            error.detail["partial_response"] = resource.shown(whole, tells_logs=tells_logs)
        raise
    return resource.ended(begun, output)


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
        tells_logs = _tells_logs(req)
        row = await self._store.get(response_id, owner_of(req))
        if not streams:
            answer_json(resp, _body(row, tells_logs=tells_logs))
            return
        if not row.followable:
            raise InvalidField(
                "stream", "the events of this response are not kept, which takes a background run"
            )
        named = NamedEvents(after)
        events = _following(self._store, row, named, tells_logs=tells_logs)
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
        row = await self._store.get(response_id, owner_of(req))
        answer_json(resp, _body(row, tells_logs=False))


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


def _tells_logs(req: Request) -> bool:
    """Whether a client that reads a response asks for the output of code; other values of `include` are ignored."""
    return any(LOGS in (req.get_param_as_list(name) or ()) for name in ("include", "include[]"))


def _body(row: Stored, *, tells_logs: bool) -> bytes:
    """The response as it is now, as JSON."""
    # PERF: few responses have run code, and no other response is read here.
    if tells_logs or CODE_CALL.encode() not in row.body:
        return row.body
    return orjson.dumps(resource.shown(orjson.loads(row.body), tells_logs=False))


async def _following(
    store: ResponseStore, row: Stored, named: NamedEvents, *, tells_logs: bool
) -> AsyncGenerator[bytes, None]:
    """The events of a response from its first, and those to come until its end."""
    begun, known, pause_s = orjson.loads(row.begun), 0, LEAST_PAUSE_S
    output = Output(begun, named.tell, tells_logs=tells_logs)
    named.queue(begun)
    yield named.taken()
    while True:
        row, pieces = await store.follow(row.id, row.owner, known)
        if not row.followable:
            raise PenstockError("the response has too many events to keep: retrieve the response itself")
        if row.status != resource.QUEUED and not named.is_at_work:
            named.work(begun)
        try:
            for entries in pieces:
                output.take(event_bytes.decode(entries))
        except DamagedEvents as error:
            log.error("kept events of the response %s cannot be read: %s", row.id, error)
            raise PenstockError(
                "the kept events of the response cannot be read: retrieve the response itself"
            ) from error
        known += len(pieces)
        if row.whole is not None:
            break
        if events := named.taken():
            yield events
        pause_s = LEAST_PAUSE_S if pieces else min(pause_s * 1.5, MOST_PAUSE_S)
        await asyncio.sleep(pause_s)
    output.close()
    yield named.end(resource.shown(orjson.loads(row.whole), tells_logs=tells_logs))


def _last_events(named: NamedEvents, error: PenstockError) -> tuple[int, bytes]:
    return status_of(error), named.fail(error)
