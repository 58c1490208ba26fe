"""POST /v2/models/{model}[/versions/{version}]/infer.

1. Find the model, and wait for its load if need be.
2. A small binary request whose head (JSON) equals the head of an earlier request takes the short way: the model kept
   the plan, and the plan runs over the new bytes (`frontend.tensors.head_plans`). All other requests go on with 3.
3. Read the body (`infer_bodies`). Parse the JSON and split the bytes behind the JSON (`reading`). Mark the inputs that
   are encoded images or strings (`images`).
4. Run the request (`frontend.tensors.inference`), and keep the plan of a plain request.
5. Render the result (`rendering`), packed for clients that ask for a packed body.

Large bodies and answers are parsed, decoded, rendered and packed in the rendering threads.
"""

from __future__ import annotations

import time

import falcon
from falcon.asgi import Request, Response

from frontend.access.restricted import Restrictions
from frontend.http.rendering import at_once, in_steps, off_loop
from frontend.protocols.kserve_v2 import images, infer_bodies, reading, rendering
from frontend.protocols.kserve_v2.infer_bodies import LENGTH_HEADER, LONG_NBYTES, Arrived, Arriving
from frontend.protocols.kserve_v2.parameters import Forwarding
from frontend.protocols.kserve_v2.reading import InferRequest, Target
from frontend.resources.sending import InferenceRoute, send_parts
from frontend.scope import RequestScope
from frontend.services import Services
from frontend.tensors.head_plans import HeadPlan
from frontend.tensors.models import TensorModel
from frontend.tensors.result import TensorResult
from ipc.errors import PenstockError

MOST_DIGITS = 18


class InferResource(InferenceRoute):
    """The endpoint."""

    operation = "infer"

    def __init__(self, services: Services, restrictions: Restrictions) -> None:
        super().__init__(services)
        self._restrictions, self._settings = restrictions, services.settings.kserve
        self._forwarding = Forwarding(self._settings.forward_headers)

    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: Target) -> None:
        """One request. Errors of validation begin with the client's id of the request."""
        model, given_id = await self.find(req, scope, target), ""
        if model.plans and (known := self._known(req, model)) is not None:
            await self._respond_again(req, resp, scope, model, *known)
            return
        try:
            async with Arriving(self.services, req, scope.deadline_ns) as arriving:
                arrived = await arriving.receive()
                wanted = await self._parsed(model, target, arrived)
                given_id, request = wanted.id, wanted.request
                request.block = arrived.block
                if self._forwarding.active:
                    self._forwarding.apply(req.headers_lower, request)
                images.defer(model.config, request.inputs, self.services.settings.limits)
                result = await self.services.inference.run(scope, model, request)
                if arrived.head_nbytes > 0 and not given_id and not self._forwarding.active:
                    self._keep(model, arrived, wanted)
            await self._send(req, resp, result, wanted)
        except PenstockError as error:
            reading.identified(error, given_id)
            raise

    async def find(self, req: Request, scope: RequestScope, target: Target) -> TensorModel:
        """The model that was asked for, once it can answer. Raises as `TensorInference.find`."""
        scope.model = target.name
        self._restrictions.require_secret("inference", req.get_header)
        return await self.services.inference.find(scope, target.name, target.version)

    def _known(self, req: Request, model: TensorModel) -> tuple[HeadPlan, bytes, int] | None:
        """The plan of a request whose head has been seen, the body, and the bytes of the head."""
        body, length = self.services.bodies.at_hand(req), req.get_header(LENGTH_HEADER)
        if body is None or length is None or not length.isdecimal() or len(length) > MOST_DIGITS:
            return None
        if req.get_header("Content-Encoding"):
            return None
        head_nbytes = int(length)
        plan = model.plans.get(body[:head_nbytes])
        if plan is None or head_nbytes + plan.nbytes != len(body):
            return None
        return plan, body, head_nbytes

    async def _respond_again(
        self,
        req: Request,
        resp: Response,
        scope: RequestScope,
        model: TensorModel,
        plan: HeadPlan,
        body: bytes,
        head_nbytes: int,
    ) -> None:
        """One request with a known head."""
        try:
            with self.services.bodies.holding(len(body)):
                data = memoryview(body)[head_nbytes:]
                result = await self.services.inference.run_plan(scope, model, plan, data)
            await self._send(req, resp, result, plan.wanted)
        except PenstockError as error:
            reading.identified(error, "")
            raise

    @staticmethod
    async def _parsed(model: TensorModel, target: Target, arrived: Arrived) -> InferRequest:
        if arrived.data is not None and not arrived.head_nbytes:
            return reading.parse_raw(target.name, target.version, model.config, arrived.data)
        if len(arrived.head) > LONG_NBYTES:
            return await off_loop(reading.parse, target.name, target.version, arrived.head, arrived.data)
        return reading.parse(target.name, target.version, arrived.head, arrived.data)

    def _keep(self, model: TensorModel, arrived: Arrived, wanted: InferRequest) -> None:
        """Keep the plan of a request that has run, without the bytes of its tensors."""
        assert arrived.data is not None
        head, nbytes, bare = bytes(arrived.head), len(arrived.data), wanted.without_tensors()
        self.services.inference.keep_plan(model, head, nbytes, wanted.request, bare)

    async def _send(self, req: Request, resp: Response, result: TensorResult, wanted: InferRequest) -> None:
        scope, began = req.context.penstock, time.perf_counter()
        with result.answer as answer:
            words = self._settings.json_nonfinite == "words"
            steps = rendering.render(result, wanted, scope.request_id, words)
            body = await in_steps(steps) if rendering.is_long(result, wanted) else at_once(steps)
            parts, encoding = await self._packed(req, body)
            is_private = len(parts) == 1
            if not is_private:
                send_parts(resp, parts, answer, self.services)
        if is_private:
            send_parts(resp, parts, answer, self.services)
        if encoding:
            resp.set_header("Content-Encoding", encoding)
            resp.set_header("Vary", "Accept-Encoding")
        if body.json_nbytes:
            resp.content_type = "application/octet-stream"
            resp.set_header(LENGTH_HEADER, str(body.json_nbytes))
        else:
            resp.content_type = falcon.MEDIA_JSON
        scope.phases["encode"] = (time.perf_counter() - began) * 1e3

    async def _packed(
        self, req: Request, answer: rendering.AnswerBody
    ) -> tuple[list[bytes | memoryview], str]:
        """The parts of the body, and the encoding that they were packed with."""
        encoding = infer_bodies.choose(req.get_header("Accept-Encoding"), answer.json_nbytes > 0)
        nbytes = sum(map(len, answer.parts)) if encoding else 0
        if not encoding or nbytes < self._settings.compress_min_bytes:
            return answer.parts, ""
        if nbytes > LONG_NBYTES:
            return [await in_steps(infer_bodies.pack(answer.parts, encoding))], encoding
        return [at_once(infer_bodies.pack(answer.parts, encoding))], encoding
