"""The way of every inference request of this contract, and the headers that all of them answer with.

1. Check what the head asks for, read and validate the body; the request's time starts then.
2. Refuse requests that no model could answer, find the model, and refuse what the model lacks. Nothing is loaded yet.
3. Wait until the model is loaded, plan the call from the request's options, and run the call. A client that leaves ends
   the wait and the call.
4. Render the result and send the body. The lease on the result ends with the last byte, or with an error.

A route is one subclass of `InferenceResource`, which says how to check, plan and render (`ModelRoute`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

import falcon
from falcon.asgi import Request, Response

from frontend.engine.answer import Answer
from frontend.engine.options import target_of
from frontend.engine.planning import cost_of
from frontend.engine.planning import plan as plan_work
from frontend.http.media import check_all
from frontend.http.rendering import off_loop, off_loop_if
from frontend.http.values import model_in
from frontend.protocols.sie import repeating
from frontend.protocols.sie.items import warnings_of
from frontend.protocols.sie.machine_profile import check_machine_profile
from frontend.protocols.sie.route import Form, ModelRoute, Plan
from frontend.protocols.sie.schemas import Body, is_large, is_msgpack, read, read_aside, unknown_fields
from frontend.resources.sending import Buffer, send_parts
from frontend.scope import RequestScope
from ipc.errors import InvalidInput, ModelNotFound, of_items

R = TypeVar("R", bound=Body)
P = TypeVar("P", bound=Plan[Any])


def wants_json(accept: str | None) -> bool:
    """Whether the response is JSON: JSON is named and msgpack is not; q-values and order do not matter."""
    lowered = (accept or "").lower()
    return (
        "application/json" in lowered
        and "application/msgpack" not in lowered
        and "application/x-msgpack" not in lowered
    )


_ASKING = {"item_errors": "X-Penstock-item-errors", "warnings": "X-Penstock-warnings"}


def asks(req: Request, params: object, name: str) -> bool:
    """Whether a request asks for `item_errors` or `warnings`: in its parameters, else by a header."""
    given = getattr(params, name, None)
    if given is not None:
        return bool(given)
    header = req.get_header(_ASKING[name]) or ""
    return header.strip().lower() in ("1", "true")


def media_type(json: bool) -> str:
    """Content-Type of an answer."""
    return falcon.MEDIA_JSON if json else falcon.MEDIA_MSGPACK


PATH_MODEL = "{model:path}"
"""End of the template of a route whose path names the model."""
_PHASE_HEADERS = (
    ("X-Queue-Time", "queue"),
    ("X-Tokenization-Time", "tokenize"),
    ("X-Inference-Time", "device"),
)


def headers_of(phases: Mapping[str, float], cache_hits: int | None) -> list[tuple[str, str]]:
    """The timing headers of a successful answer without the total, in milliseconds."""
    headers = [(header, f"{phases.get(phase, 0.0):.2f}") for header, phase in _PHASE_HEADERS]
    after = _postprocessing_ms(phases)
    if after > 0:
        headers.append(("X-Postprocessing-Time", f"{after:.2f}"))
    if cache_hits is not None:
        headers.append(("X-Penstock-Cache-Hits", str(cache_hits)))
    return headers


@lru_cache(maxsize=256)
def _repeated_headers(json: bool, items: int) -> tuple[tuple[str, str], ...]:
    """The headers of a kept answer without the total. Answers with as many items share one tuple."""
    return ("Content-Type", media_type(json)), *headers_of({}, items)


def total_header(total_ms: float) -> tuple[str, str]:
    """The timing header of the total."""
    return "X-Total-Time", f"{total_ms:.2f}"


def timing_of(phases: Mapping[str, float], total_ms: float) -> dict[str, float | None]:
    """The timing block of a body, in milliseconds; the total comes first."""
    return {
        "total_ms": total_ms,
        "queue_ms": phases.get("queue", 0.0),
        "tokenization_ms": phases.get("tokenize", 0.0),
        "inference_ms": phases.get("device", 0.0),
        "postprocessing_ms": _postprocessing_ms(phases) or None,
    }


def _postprocessing_ms(phases: Mapping[str, float]) -> float:
    """What follows the forward pass: results into shared memory or a frame, then conversion and rendering here."""
    return phases.get("copy", 0.0) + phases.get("encode", 0.0)


class InferenceResource(ModelRoute[R, P], Generic[R, P]):
    """One POST route over the engine. A subclass adds the parts that are special to the route (`ModelRoute`)."""

    def respond_at_once(self, req: Request, resp: Response, scope: RequestScope, model: str) -> bool:
        """Answer a request whose body is at hand and whose whole answer is kept.

        Raises `ModelNotFound` for a path that ends before the name of its model, whatever the body.
        """
        if not model and (req.uri_template or "").endswith(PATH_MODEL):
            raise ModelNotFound("the path names no model")
        scope.model = model
        check_machine_profile(req, self.services)
        small = self.services.bodies.at_hand(req)
        return small is not None and self._repeated(req, resp, scope, model, small)

    async def respond(self, req: Request, resp: Response, scope: RequestScope, model: str) -> None:
        """One request. `model` is the name in the path; empty if the body names the model."""
        services = self.services
        sent = "application/json" if self.always_json else req.content_type
        small = services.bodies.at_hand(req)
        if small is not None:
            with services.bodies.holding(len(small)):
                try:
                    request = read(small, sent, self.body, services.settings.limits)
                except InvalidInput:
                    self._name(scope, model, small, sent)
                    raise
                unknown = self._unknown(req, request, small, sent)
                del small
                await self._answer(req, resp, scope, model, request, unknown, large=False)
            return
        async with services.bodies.receive(req, scope.deadline_ns) as body:
            if self._repeated(req, resp, scope, model, body):
                return
            try:
                request = await read_aside(body, sent, self.body, services.settings.limits)
            except InvalidInput:
                await off_loop_if(is_large(body), self._name, scope, model, body, sent)
                raise
            large = is_large(body)
            unknown = await off_loop_if(large, self._unknown, req, request, body, sent)
            del body
            await self._answer(req, resp, scope, model, request, unknown, large=large)

    def _unknown(self, req: Request, request: R, body: bytes, sent: str | None) -> list[str] | None:
        """Names of fields that are no parameters, None where the request does not ask for warnings."""
        params = self.params_of(request)
        if not asks(req, params, "warnings"):
            return None
        return unknown_fields(body, sent, params, at_top=params is request)

    @staticmethod
    def _name(scope: RequestScope, model: str, body: bytes, sent: str | None) -> None:
        """A refused body counts for the model of the path, else for the one that the body names."""
        if named := model or model_in(body, binary=is_msgpack(sent)):
            scope.names(named)

    def _repeated(self, req: Request, resp: Response, scope: RequestScope, model: str, body: bytes) -> bool:
        """Answer a request whose whole answer is kept; returns whether there is one."""
        answers = self.services.engine.answers
        if answers is None or not self.kept:
            return False
        scope.answer_key = repeating.key_of(req, scope, self.services, model, body)
        scope.started = time.perf_counter()
        answer = answers.find(scope.answer_key)
        if answer is None:
            return False
        if not model:
            scope.names(answer.name)
        scope.cache_hits = answer.items
        scope.phases["total"] = total = scope.elapsed_ms()
        resp.data = repeating.body_of(answer, total)
        resp.set_headers([*answer.headers, total_header(total)])
        return True

    async def _answer(
        self,
        req: Request,
        resp: Response,
        scope: RequestScope,
        model: str,
        request: R,
        unknown: list[str] | None,
        *,
        large: bool,
    ) -> None:
        """Run and render, with warnings unless `unknown` is None; the time of the request starts now.

        Checks of a `large` body are work for a thread.
        """
        scope.started = time.perf_counter()
        if model:
            scope.model = model
        else:
            scope.names(self.model_of(request))
        reply, plan, warnings = await self._run(req, request, unknown, large)
        with reply:
            began = time.perf_counter()
            if reply.errors and not (self.itemized and asks(req, self.params_of(request), "item_errors")):
                raise of_items(reply.errors)
            form = self._form(req, reply, warnings)
            parts = await self.render(reply, plan, request, scope, form)
            scope.phases.setdefault("encode", (time.perf_counter() - began) * 1e3)
            resp.content_type = media_type(form.json)
            times = headers_of(scope.phases, scope.cache_hits)
            scope.phases["total"] = total = scope.elapsed_ms()
            resp.set_headers([*times, total_header(total)])
            self._keep(scope, plan, parts, json=form.json)
            send_parts(resp, parts, reply, self.services)

    def _form(self, req: Request, reply: Answer, warnings: list[str] | None) -> Form:
        """The form of an answer with these warnings, None where the request does not ask for warnings."""
        beside: dict[str, Any] = {"usage": {"tokens": reply.tokens, "truncated": reply.truncated}}
        if warnings is not None:
            beside["warnings"] = warnings
        return Form(self.always_json or wants_json(req.get_header("Accept")), beside)

    def _keep(self, scope: RequestScope, plan: P, parts: Sequence[Buffer], *, json: bool) -> None:
        """Keep a whole answer that was made of kept embeddings alone."""
        answers, items = self.services.engine.answers, len(plan.call.items)
        if answers is None or not scope.answer_key or scope.cache_hits != items:
            return
        headers = _repeated_headers(json, items)
        block = timing_of({}, 0.0) if self.kept == "timed" else None
        whole = repeating.whole_of(scope.model, plan.model, items, headers, parts, block, json=json)
        answers.keep(scope.answer_key, whole)

    async def _run(
        self, req: Request, request: R, unknown: list[str] | None, large: bool
    ) -> tuple[Answer, P, list[str] | None]:
        """The result, how to render it, and warnings where the request asks for them; the body was `large`."""
        services, scope = self.services, req.context.penstock
        directory, settings = services.directory, services.settings
        if large:
            await off_loop(self.examine, request)
        else:
            self.examine(request)
        self._refuse_program(scope.model)
        entry = directory.find(scope.model)
        if self.capability and self.capability not in entry.outputs:
            raise InvalidInput(f"model '{entry.id}' does not support {self.operation}")
        inputs = await off_loop_if(large, self.check, request, entry)
        if "image" in entry.inputs:
            await check_all(self.images(request, inputs), settings.limits)
        options = getattr(self.params_of(request), "options", None)
        target = target_of(entry, options, services.catalog)
        status = await directory.ensure_loaded(target.id, scope.deadline_ns)
        plan = self.plan(request, entry, inputs, status)
        cost = cost_of(plan.call, status, settings.limits)
        warnings = None
        if unknown is not None:
            warnings = await off_loop_if(large, warnings_of, request, entry, status, unknown)
        work = plan_work(scope, settings, plan.model, plan.call, cost)
        reply = await services.engine.run(scope, work)
        return reply, plan, warnings

    def _refuse_program(self, name: str) -> None:
        """Raise `InvalidInput` for a model of named tensors, by its name or with its version."""
        model = name.rpartition("@")[0] or name
        if model in self.services.catalog.versions:
            raise InvalidInput(
                f"model '{model}' takes named tensors and does not support {self.operation}; "
                f"it is called by /v2/models/{model}/infer"
            )
