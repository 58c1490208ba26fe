"""POST /api/infer/<model>[/<version>]: the request in a header, raw tensors in and out of the bodies."""

from __future__ import annotations

from collections.abc import Sequence

import falcon
from falcon.asgi import Request, Response

from frontend.engine.scope import RequestScope
from frontend.http.disconnect import until_disconnect
from frontend.http.rendering import off_loop_if
from frontend.http.responding import send_parts
from frontend.http.sending import Part
from frontend.protocols.trtis_v1 import requests, responses
from frontend.protocols.trtis_v1.http_messages import set_failure, set_status, wants_binary
from frontend.protocols.trtis_v1.statuses import Statuses
from frontend.protocols.trtis_v1.text import CACHED_CHARACTERS, many_lines, one_line, read_request_header
from frontend.services import Services
from frontend.tensors import checking
from frontend.tensors.receiving import receive
from frontend.tensors.result import TensorResult
from frontend.tensors.running import book_failure, run
from ipc.errors import Cancelled, PenstockError
from ipc.protos import trtis_v1_pb2 as pb

REQUEST_HEADER = "NV-InferRequest"
RESPONSE_HEADER = "NV-InferResponse"
OCTETS = "application/octet-stream"


class InferResource:
    """One inference over HTTP."""

    def __init__(self, services: Services, statuses: Statuses) -> None:
        self._services, self._statuses = services, statuses

    async def on_post(self, req: Request, resp: Response, target: str) -> None:
        """200 with raw outputs and the response header behind them, or 400 with the reason in NV-Status."""
        model, version = requests.target_of(self._services, target)
        context, header = req.context.penstock, pb.InferRequestHeader()
        context.model, context.operation = model, "infer"
        scheduled, rows, wanted = False, 0, requests.version_of(version)
        try:
            text = req.get_header(REQUEST_HEADER)
            long = len(text or "") > CACHED_CHARACTERS
            header = await off_loop_if(long, read_request_header, text)
            ready = self._services.models.ready(model, wanted, context.deadline_ns)
            found = await until_disconnect(ready, req.scope, body_read=False)
            wanted, rows = found.version, requests.rows_of(found, header)
            request = requests.request_of(found, header)
            checking.check_shapes(found, request)
            sizes = requests.sizes_of(found, header, request)
            async with receive(self._services, req, 0, context.deadline_ns) as body:
                requests.cut(found, request, sizes, body.data)
                request.block = body.block
                scheduled = True
                result = await run(self._services, context, request, req.scope)
                await self._answer(req, resp, result, header.id)
        except PenstockError as error:
            if not scheduled:
                book_failure(self._services, context, model, wanted, error, rows)
            if isinstance(error, Cancelled):
                raise
            self._fail(resp, error, context, header.id, model, scheduled)

    async def _answer(self, req: Request, resp: Response, result: TensorResult, request_id: int) -> None:
        try:
            long, binary = result.has_many_classes, wants_binary(req)
            short, tail = await off_loop_if(long, _rendered, result, request_id, binary)
            raw = [output.data for output in result.outputs if output.data is not None]
            parts: Sequence[Part] = [*raw, tail]
            resp.status, resp.content_type = falcon.HTTP_200, OCTETS
            resp.set_header(RESPONSE_HEADER, short)
            set_status(resp, self._statuses.success())
            send_parts(resp, parts, result.reply, self._services)
        except BaseException:
            result.reply.release()
            raise

    def _fail(
        self,
        resp: Response,
        error: PenstockError,
        context: RequestScope,
        request_id: int,
        model: str,
        scheduled: bool,
    ) -> None:
        """An empty body; the header names the request so that it can be found again."""
        context.error, context.counted_status = error.code, error.status
        set_failure(resp, error, self._statuses.failure(error, model, numbered=scheduled))
        resp.content_type = OCTETS
        resp.set_header(RESPONSE_HEADER, one_line(pb.InferResponseHeader(id=request_id)))


def _rendered(result: TensorResult, request_id: int, binary: bool) -> tuple[str, bytes]:
    """The response header as a field of one line, and in full as the end of the body."""
    full = responses.header_of(result, request_id)
    tail = full.SerializeToString() if binary else many_lines(full)
    return one_line(responses.without_classes(full)), tail
