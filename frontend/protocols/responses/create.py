"""POST /v1/responses: one response, answered whole, as a stream of named events, or run in the background.

1. `ResponsesResource` answers the request, and stores the response before the last of the answer leaves.
2. `ResponseStream` makes the stream of one response out of `NamedEvents`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Any

import orjson
from falcon.asgi import Request, Response

from frontend.agent.runner import running
from frontend.engine.events import Generation
from frontend.generation.errors import error_info, status_of
from frontend.generation.running import named_model, send_stream
from frontend.http.rendering import off_loop_if
from frontend.protocols.responses import output as resource
from frontend.protocols.responses.output import Output, Resource
from frontend.protocols.responses.runs import PROTOCOL, Keeper, Runs, asked_by
from frontend.protocols.responses.store import ResponseStore
from frontend.scope import RequestScope
from frontend.sending import DONE, InferenceRoute, answer_json, named
from frontend.services import Services
from ipc.errors import Cancelled, Draining, PenstockError

_LAST = {resource.COMPLETED: "response.completed", resource.FAILED: "response.failed"}


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
        made, self._made = self._made, []
        return b"".join(made)


class ResponseStream:
    """The stream of a response that has begun as `begun`.

    1. A stream begins once the worker has accepted the prompt, or when the request has waited for long. What fails
       before has a status of its own, and is not stored.
    2. The row is stored before the last event leaves, so that a client with the last event finds the response.
    3. A client that goes away ends the work. What was generated until then is stored as a cancelled response, or as a
       failed one where the end of this server ends the stream.
    """

    def __init__(self, begun: Resource, keeper: Keeper) -> None:
        self._begun, self._keeper = begun, keeper
        self._named = NamedEvents()
        self._output = Output(begun, self._named.tell)
        self._drained: Draining | None = None

    async def events(self, running: AbstractAsyncContextManager[Generation]) -> AsyncGenerator[bytes, None]:
        """The events of what `running` generates. Raises the error of a generation that fails."""
        async with running as generation:
            try:
                yield self.open()
                async for events in generation:
                    self._output.take(events)
                    if made := self._named.taken():
                        yield made
            except (asyncio.CancelledError, GeneratorExit, Cancelled):
                whole = resource.cancelled(self._begun, self._output)
                self._keeper.keep_soon(self._begun, self._failed(self._drained) if self._drained else whole)
                raise
            except Exception as error:
                await self._keeper.keep(self._begun, self._failed(error))
                raise
        whole = resource.ended(self._begun, self._output)
        await self._keeper.keep(self._begun, whole)
        yield self._named.end(whole)

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
            return status_of(error), self._named.end(self._failed(error))
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
        work = running(services, req, scope, entry, asked.call, asked.agent)
        if asked.plan.streams:
            stream = ResponseStream(begun, asked.keeper)
            await send_stream(
                services, req, resp, stream.events(work), PROTOCOL, stream.last_events, opening=stream.open
            )
            return
        async with work as generation:
            whole = await _gathered(generation, begun)
        await asked.keeper.keep(begun, whole)
        # Log probabilities make an answer long.
        answer_json(resp, await off_loop_if(asked.call.sampling.logprobs is not None, orjson.dumps, whole))


async def _gathered(generation: Generation, begun: resource.Resource) -> resource.Resource:
    """The response of all that is generated. The error of a model that fails has the response so far."""
    output = Output(begun)
    try:
        async for events in generation:
            output.take(events)
    except PenstockError as error:
        if status_of(error) == HTTPStatus.INTERNAL_SERVER_ERROR and output.items():
            error.detail["partial_response"] = resource.failed(begun, output, error)
        raise
    return resource.ended(begun, output)
