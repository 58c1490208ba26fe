"""POST /api/infer/<model>[/<version>]: the request in a header, raw tensors in and out of the bodies."""

from __future__ import annotations

from typing import Any

import falcon
from falcon.asgi import Request, Response

from frontend.http.rendering import off_loop_if
from frontend.protocols.trtis_v1 import requests, responses
from frontend.protocols.trtis_v1.http_forms import STATUS_HEADER, set_failure, target_of, wants_binary
from frontend.protocols.trtis_v1.statuses import Statuses
from frontend.protocols.trtis_v1.text import (
    CACHED_CHARACTERS,
    many_lines,
    one_line,
    read_request_header,
)
from frontend.resources.sending import InferenceRoute, send_parts
from frontend.scope import RequestScope
from frontend.services import Services
from frontend.tensors import checking
from frontend.tensors.receiving import receive
from frontend.tensors.result import TensorResult
from ipc.errors import Cancelled, PenstockError
from ipc.protos import trtis_v1_pb2 as pb

REQUEST_HEADER = "NV-InferRequest"
RESPONSE_HEADER = "NV-InferResponse"
OCTETS = "application/octet-stream"


class InferResource(InferenceRoute):
    """One inference over HTTP."""

    operation = "infer"

    def __init__(self, services: Services, statuses: Statuses) -> None:
        super().__init__(services)
        self._statuses = statuses

    async def on_post(self, req: Request, resp: Response, target: Any = "", model: str = "") -> None:
        """One request. Raises `HTTPRouteNotFound` for a path that names no model; nothing is counted then."""
        await super().on_post(req, resp, target_of(self.services, target))

    async def respond(
        self, req: Request, resp: Response, scope: RequestScope, target: tuple[str, int]
    ) -> None:
        """200 with raw outputs and the response header behind them, or 400 with the reason in NV-Status."""
        inference = self.services.inference
        scope.model, number = target
        name, version, scheduled, header = (
            scope.model,
            requests.version_of(number),
            False,
            pb.InferRequestHeader(),
        )
        record = inference.begin(scope, name, version)
        try:
            text = req.get_header(REQUEST_HEADER)
            header = await off_loop_if(len(text or "") > CACHED_CHARACTERS, read_request_header, text)
            model = await inference.find(scope, name, version)
            plan, small = model.plans.get(text or ""), self.services.bodies.at_hand(req)
            if plan is not None and small is not None and len(small) == plan.nbytes:
                scheduled = True
                with self.services.bodies.holding(len(small)):
                    result = await inference.run_plan(scope, model, plan, memoryview(small))
                    with result.answer:
                        await self._render(req, resp, result, header.id)
                return
            record.rows = requests.rows_of(model, header)
            request = requests.request_of(model, header)
            checking.check_shapes(model, request)
            sizes = requests.sizes_of(model, header, request)
            async with receive(inference.inputs, req, 0, scope.deadline_ns) as body:
                requests.cut(model, request, sizes, body.data)
                request.block = body.block
                scheduled = True
                result = await inference.run(scope, model, request)
                if text is not None:
                    inference.keep_plan(model, text, len(body.data), request, None)
                with result.answer:
                    await self._render(req, resp, result, header.id)
        except Cancelled:
            raise
        except PenstockError as error:
            self._fail(resp, error, scope, header.id, name, scheduled)

    async def _render(self, req: Request, resp: Response, result: TensorResult, request_id: int) -> None:
        long, binary = result.has_many_classes, wants_binary(req)
        short, tail = await off_loop_if(long, _rendered, result, request_id, binary)
        raw = [output.data for output in result.outputs if output.data is not None]
        resp.status, resp.content_type = falcon.HTTP_200, OCTETS
        resp.set_header(RESPONSE_HEADER, short)
        resp.set_header(STATUS_HEADER, self._statuses.success_line())
        send_parts(resp, [*raw, tail], result.answer, self.services)

    def _fail(
        self,
        resp: Response,
        error: PenstockError,
        scope: RequestScope,
        request_id: int,
        model: str,
        scheduled: bool,
    ) -> None:
        """An empty body; the header names the request so that it can be found again."""
        scope.failed(error, error.status)
        set_failure(resp, error, self._statuses.failure(error, model, numbered=scheduled))
        resp.content_type = OCTETS
        resp.set_header(RESPONSE_HEADER, one_line(pb.InferResponseHeader(id=request_id)))


def _rendered(result: TensorResult, request_id: int, binary: bool) -> tuple[str, bytes]:
    """The response header as a field of one line, and in full as the end of the body."""
    forms = responses.forms_of(result, request_id)
    if forms is not None:
        return forms.line, forms.wire if binary else forms.lines
    full = responses.header_of(result, request_id)
    short = responses.without_classes(full)
    return one_line(short), full.SerializeToString() if binary else many_lines(full)
