"""POST /v2/models/{model}[/versions/{version}]/infer.

1. Find the model, and wait for it if it is being loaded; read the head of the request, then its body (`arriving`).
2. Parse the JSON and split the bytes behind it (`reading`); say which inputs are encoded images or strings (`images`).
3. Run the request (`frontend.tensors.running`); render the result (`rendering`), packed where the client wants that.

What takes long, by the size of what is parsed, decoded, rendered or packed, is done in the rendering threads.
"""

from __future__ import annotations

import time

import falcon
from falcon.asgi import Request, Response

from frontend.access.restricted import Restrictions
from frontend.http.disconnect import until_disconnect
from frontend.http.rendering import at_once, in_steps, off_loop
from frontend.http.responding import send_parts
from frontend.protocols.kserve_v2 import images, infer_bodies, reading, rendering
from frontend.protocols.kserve_v2.infer_bodies import Arrived, Arriving
from frontend.protocols.kserve_v2.parameters import Forwarding
from frontend.protocols.kserve_v2.paths import Target
from frontend.protocols.kserve_v2.reading import InferRequest
from frontend.services import Services
from frontend.tensors.models import TensorModel
from frontend.tensors.refusals import UnavailableModel
from frontend.tensors.result import TensorResult
from frontend.tensors.running import book_answered, book_failure, run
from ipc.errors import PenstockError

LONG_NBYTES = 64 << 10
"""JSON to be parsed, and answers to be packed, above this size are work for a thread."""
LENGTH_HEADER = "Inference-Header-Content-Length"


class InferResource:
    """The endpoint."""

    def __init__(self, services: Services, restrictions: Restrictions) -> None:
        self.services, self.restrictions = services, restrictions
        self._settings = services.settings.kserve
        self._forwarding = Forwarding(self._settings.forward_headers)

    async def on_post(self, req: Request, resp: Response, target: Target) -> None:
        """One request."""
        services, context = self.services, req.context.penstock
        context.model, context.operation = target.name, "infer"
        self.restrictions.require_secret("inference", req.get_header)
        served = await self.find(req, target)
        async with Arriving(services, req, context.deadline_ns) as arriving:
            wanted = await self._parse(req, served, target, arriving)
            result = await self.run(req, wanted)
        try:
            await self._send(req, resp, result, wanted)
        except PenstockError as error:
            raise self.refused(req, target, error, wanted.id, result) from error.__cause__
        book_answered(services, context, served.model, result)

    async def find(self, req: Request, target: Target) -> TensorModel:
        """The model that was asked for, once it can answer. Raises as `TensorModels.ready`."""
        context = req.context.penstock
        try:
            served = self._find_loaded(target)
            if served is None:
                ready = self.services.models.ready(target.name, target.version, context.deadline_ns)
                served = await until_disconnect(ready, req.scope, body_read=False)
        except PenstockError as error:
            book_failure(self.services, context, target.name, target.version, error)
            raise
        context.model = served.id
        return served

    def _find_loaded(self, target: Target) -> TensorModel | None:
        """The model if it is loaded: the usual case, in which nothing has to be awaited."""
        try:
            served = self.services.models.find(target.name, target.version)
        except UnavailableModel:
            raise
        except PenstockError:
            return None
        return served if served.status.state == "loaded" else None

    async def run(self, req: Request, wanted: InferRequest) -> TensorResult:
        """The result of a parsed request, not booked yet. Raises as `frontend.tensors.running.run`."""
        try:
            return await run(self.services, req.context.penstock, wanted.request, req.scope, book=False)
        except PenstockError as error:
            raise reading.identified(error, wanted.id) from error.__cause__

    def refused(
        self,
        req: Request,
        target: Target,
        error: PenstockError,
        given_id: str = "",
        result: TensorResult | None = None,
    ) -> PenstockError:
        """`error` of a request that did not come to `run`, or of its `result`: booked, and with the client's id."""
        version, rows = (target.version, 0) if result is None else (result.version, result.rows)
        book_failure(self.services, req.context.penstock, target.name, version, error, rows)
        return reading.identified(error, given_id)

    async def _parse(
        self, req: Request, served: TensorModel, target: Target, arriving: Arriving
    ) -> InferRequest:
        given_id = ""
        try:
            arrived = await arriving.receive()
            wanted = await self._read(served, target, arrived)
            wanted.request.block, given_id = arrived.block, wanted.id
            if self._forwarding.active:
                self._forwarding.apply(req.headers_lower, wanted.request)
            images.defer(served.config, wanted.request.inputs, self.services.settings.limits)
        except PenstockError as error:
            asked = target._replace(version=served.version)
            raise self.refused(req, asked, error, given_id) from error.__cause__
        return wanted

    async def _read(self, served: TensorModel, target: Target, arrived: Arrived) -> InferRequest:
        if arrived.data is not None and not arrived.head_nbytes:
            return reading.parse_raw(target.name, target.version, served.config, arrived.data)
        if len(arrived.head) > LONG_NBYTES:
            return await off_loop(reading.parse, target.name, target.version, arrived.head, arrived.data)
        return reading.parse(target.name, target.version, arrived.head, arrived.data)

    async def _send(self, req: Request, resp: Response, result: TensorResult, wanted: InferRequest) -> None:
        context, reply = req.context.penstock, result.reply
        began = time.perf_counter()
        try:
            words = self._settings.json_nonfinite == "words"
            steps = rendering.render(result, wanted, context.request_id, words)
            answer = await in_steps(steps) if rendering.is_long(result, wanted) else at_once(steps)
            parts, encoding = await self._packed(req, answer)
            if len(parts) == 1:
                reply.check()
                reply.release()
            if encoding:
                resp.set_header("Content-Encoding", encoding)
                resp.set_header("Vary", "Accept-Encoding")
            if answer.json_nbytes:
                resp.content_type = "application/octet-stream"
                resp.set_header(LENGTH_HEADER, str(answer.json_nbytes))
            else:
                resp.content_type = falcon.MEDIA_JSON
            context.phases["encode"] = (time.perf_counter() - began) * 1e3
            send_parts(resp, parts, reply, self.services)
        except BaseException:
            reply.release()
            raise

    async def _packed(self, req: Request, answer: rendering.Answer) -> tuple[list[bytes | memoryview], str]:
        """The parts of the body, and the encoding that they were packed with."""
        encoding = infer_bodies.choose(req.get_header("Accept-Encoding"), answer.json_nbytes > 0)
        nbytes = sum(map(len, answer.parts)) if encoding else 0
        if not encoding or nbytes < self._settings.compress_min_bytes:
            return answer.parts, ""
        if nbytes > LONG_NBYTES:
            return [await in_steps(infer_bodies.pack(answer.parts, encoding))], encoding
        return [at_once(infer_bodies.pack(answer.parts, encoding))], encoding
