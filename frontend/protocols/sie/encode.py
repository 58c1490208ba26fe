"""POST /v1/encode/{model}: parse, run, render."""

from __future__ import annotations

import asyncio
import time

import falcon
import numpy as np
from falcon.asgi import Request, Response

from frontend.context import RequestContext
from frontend.disconnect import until_disconnect
from frontend.protocols.sie import render
from frontend.protocols.sie.convert import EncodePlan, plan_encode
from frontend.protocols.sie.items import check_count, inputs_of
from frontend.protocols.sie.options import resolve
from frontend.protocols.sie.schemas import EncodeParams, EncodeRequest, read
from frontend.quantize import Quantized, quantize, shorten
from frontend.responding import send_parts
from frontend.services import Services
from ipc.client import Reply

INLINE_NBYTES = 1 << 20
"""Rows up to this size are converted on the event loop, larger ones in a thread."""


def wants_json(accept: str | None) -> bool:
    """Whether the response is JSON: JSON is named and msgpack is not; q-values and order do not matter."""
    lowered = (accept or "").lower()
    return (
        "application/json" in lowered
        and "application/msgpack" not in lowered
        and "application/x-msgpack" not in lowered
    )


def time_headers(resp: Response, context: RequestContext) -> None:
    """The timing headers of a successful answer, in milliseconds."""
    phases = context.phases
    for header, phase in (
        ("X-Queue-Time", "queue"),
        ("X-Tokenization-Time", "tokenize"),
        ("X-Inference-Time", "device"),
    ):
        resp.set_header(header, f"{phases.get(phase, 0.0):.2f}")
    after = _postprocessing_ms(phases)
    if after > 0:
        resp.set_header("X-Postprocessing-Time", f"{after:.2f}")
    phases["total"] = (time.perf_counter() - context.started) * 1e3
    resp.set_header("X-Total-Time", f"{phases['total']:.2f}")


def _postprocessing_ms(phases: dict[str, float]) -> float:
    """What follows the forward pass: results into shared memory or a frame, then conversion and rendering here."""
    return phases.get("copy", 0.0) + phases.get("encode", 0.0)


class EncodeResource:
    """Texts to vectors, in JSON or msgpack."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_post(self, req: Request, resp: Response, model: str) -> None:
        """One encode request."""
        services, context = self._services, req.context.penstock
        limits = services.settings.limits
        context.model, context.operation = model, "encode"
        async with services.bodies.hold(req, context.deadline_ns) as body:
            request = read(body, req.content_type, EncodeRequest, limits)
            del body
            context.started = time.perf_counter()
            work = self._run(req, model, request)
            reply, plan = await until_disconnect(work, req.scope)
            try:
                await self._respond(req, resp, reply, plan, model, [item.id for item in request.items])
            except BaseException:
                reply.release()
                raise

    async def _run(self, req: Request, model: str, request: EncodeRequest) -> tuple[Reply, EncodePlan]:
        """The result, and how to render it."""
        services, engine, context = self._services, self._services.engine, req.context.penstock
        limits = services.settings.limits
        check_count(len(request.items), "items", limits)
        entry = engine.find(model)
        items = inputs_of(request.items, entry, limits)
        status = await engine.ensure_loaded(entry.id, context.deadline_ns)
        params = request.params or EncodeParams()
        resolved = resolve(entry, params.options, params.instruction, services.catalog, len(items), limits)
        plan = plan_encode(items, resolved, params, status.dims)
        if plan.model != entry.id:
            status = await engine.ensure_loaded(plan.model, context.deadline_ns)
        before = len(plan.call.instruction or "")
        cost = engine.cost_of([before + len(item.text or "") for item in items], status)
        reply = await engine.run(context, plan.model, plan.call, cost, req.scope)
        return reply, plan

    async def _respond(
        self, req: Request, resp: Response, reply: Reply, plan: EncodePlan, model: str, ids: list[str | None]
    ) -> None:
        context = req.context.penstock
        began = time.perf_counter()
        rows = await dense_rows(reply, plan.output_dtype, plan.dimensions)
        errors = {error.index: {"code": error.code, "message": error.message} for error in reply.errors}

        def timing() -> dict[str, float | None]:
            context.phases["encode"] = (time.perf_counter() - began) * 1e3
            return timing_of(context)

        if wants_json(req.get_header("Accept")):
            resp.content_type = falcon.MEDIA_JSON
            parts = await render.json_parts(model, ids, rows, errors, timing)
            reply.check()
            reply.release()
        else:
            resp.content_type = falcon.MEDIA_MSGPACK
            parts = await render.msgpack_parts(model, ids, rows, errors, timing)
        time_headers(resp, context)
        send_parts(resp, parts, reply, self._services)


def timing_of(context: RequestContext) -> dict[str, float | None]:
    """The timing block of the body, in milliseconds."""
    phases = context.phases
    return {
        "total_ms": (time.perf_counter() - context.started) * 1e3,
        "queue_ms": phases.get("queue", 0.0),
        "tokenization_ms": phases.get("tokenize", 0.0),
        "inference_ms": phases.get("device", 0.0),
        "postprocessing_ms": _postprocessing_ms(phases) or None,
    }


async def dense_rows(reply: Reply, dtype: str, dimensions: int | None) -> render.DenseRows:
    """The dense vectors, cut to `dimensions` and in `dtype`; when that made copies of them, the lease has ended."""
    values = reply.tensors()["dense"]
    if values.nbytes > INLINE_NBYTES and (dtype != "float32" or dimensions is not None):
        quantized = await asyncio.to_thread(_convert, values, dtype, dimensions)
    else:
        quantized = _convert(values, dtype, dimensions)
    if quantized.values is not values:
        reply.check()
        reply.release()
    return render.DenseRows(quantized, dimensions or values.shape[1])


def _convert(values: np.ndarray, dtype: str, dimensions: int | None) -> Quantized:
    return quantize(values if dimensions is None else shorten(values, dimensions), dtype)
