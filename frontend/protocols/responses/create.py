"""POST /v1/responses."""

from __future__ import annotations

from http import HTTPStatus

import falcon
import orjson
from falcon.asgi import Request, Response

from frontend.engine.events import Generation
from frontend.generation.errors import status_of
from frontend.generation.running import named_model, running
from frontend.generation.sending import send_stream
from frontend.http.rendering import off_loop_if
from frontend.protocols.responses import resource
from frontend.protocols.responses.asking import asked_by
from frontend.protocols.responses.output import Output
from frontend.protocols.responses.runs import PROTOCOL, Runs
from frontend.protocols.responses.store import ResponseStore
from frontend.protocols.responses.streaming import ResponseStream
from frontend.resources.inference import InferenceRoute
from frontend.scope import RequestScope
from frontend.services import Services
from ipc.errors import PenstockError


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
            _answer(resp, orjson.dumps(begun))
            return
        entry = named_model(services, scope, asked.plan.model)
        work = running(services, req, scope, entry, asked.call)
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
        _answer(resp, await off_loop_if(asked.call.sampling.logprobs is not None, orjson.dumps, whole))


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


def _answer(resp: Response, body: bytes) -> None:
    resp.content_type = falcon.MEDIA_JSON
    resp.data = body
