"""POST /v1/encode/{model}: parse, run, render."""

from __future__ import annotations

import time
from typing import Any

import falcon
from falcon.asgi import Request, Response

from frontend.context import RequestContext
from frontend.protocols.sie import render
from frontend.protocols.sie.convert import EncodePlan, check_count, check_items, plan_encode
from frontend.protocols.sie.schemas import EncodeParams, EncodeRequest, read
from frontend.quantize import Quantized, quantize, shorten
from frontend.responding import send_parts
from frontend.services import Services
from ipc.client import Reply
from ipc.errors import InputTooLong


def wants_json(accept: str | None) -> bool:
    """Whether the response is JSON: JSON is named and msgpack is not; q-values and order do not matter."""
    lowered = (accept or "").lower()
    return (
        "application/json" in lowered
        and "application/msgpack" not in lowered
        and "application/x-msgpack" not in lowered
    )


def refuse_truncated(reply: Reply, model: str, longest: int) -> None:
    """Raise `InputTooLong` when an item was cut although the caller asked for an error."""
    if reply.truncated:
        index = reply.truncated[0]
        raise InputTooLong(
            f"items[{index}].text: longer than the model's {longest} tokens for {model}", model=model
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
    if phases.get("copy", 0.0) > 0:
        resp.set_header("X-Postprocessing-Time", f"{phases['copy']:.2f}")
    phases["total"] = (time.perf_counter() - context.started) * 1e3
    resp.set_header("X-Total-Time", f"{phases['total']:.2f}")


class EncodeResource:
    """Texts to vectors, in JSON or msgpack."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_post(self, req: Request, resp: Response, model: str) -> None:
        """One encode request."""
        services, context = self._services, req.context.penstock
        limits = services.settings.limits
        context.model, context.operation = model, "encode"
        body = await services.bodies.read(req)
        context.started = time.perf_counter()
        request = read(body, req.content_type, EncodeRequest, limits)
        del body
        engine = services.engine
        check_count(len(request.items), "items", limits)
        entry = engine.find(model)
        texts = check_items(request.items, entry, limits)
        status = await engine.ensure_loaded(entry.id, context.deadline_ns)
        params = request.params or EncodeParams()
        plan = plan_encode(texts, params, entry, services.catalog, status.dims, limits)
        if plan.model != entry.id:
            status = await engine.ensure_loaded(plan.model, context.deadline_ns)
        before = len(plan.call.instruction or "")
        cost = engine.cost_of([before + len(text) for text in texts], status)
        reply = await engine.run(context, plan.model, plan.call, cost, req.scope)
        try:
            if plan.refuse_truncation:
                refuse_truncated(reply, model, status.max_sequence_length)
            await self._respond(req, resp, reply, plan, model, [item.id for item in request.items])
        except BaseException:
            reply.release()
            raise

    async def _respond(
        self, req: Request, resp: Response, reply: Reply, plan: EncodePlan, model: str, ids: list[str | None]
    ) -> None:
        context = req.context.penstock
        began = time.perf_counter()
        rows = _dense(reply, plan)
        errors = {error.index: {"code": error.code, "message": error.message} for error in reply.errors}
        if wants_json(req.get_header("Accept")):
            resp.content_type = falcon.MEDIA_JSON
            parts: list[Any] = await render.json_parts(model, ids, rows, errors, timing_of(context))
            reply.check()
            reply.release()
        else:
            resp.content_type = falcon.MEDIA_MSGPACK
            parts = render.msgpack_parts(model, ids, rows, errors, timing_of(context))
            if rows.quantized.dtype != "float32" or plan.dimensions is not None:
                reply.check()
                reply.release()
        context.phases["encode"] = (time.perf_counter() - began) * 1e3
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
        "postprocessing_ms": phases.get("copy") or None,
    }


def _dense(reply: Reply, plan: EncodePlan) -> render.DenseRows:
    values = reply.tensors()["dense"]
    if plan.dimensions is not None:
        values = shorten(values, plan.dimensions)
    dims = values.shape[1]
    quantized: Quantized = quantize(values, plan.output_dtype)
    return render.DenseRows(quantized, dims)
