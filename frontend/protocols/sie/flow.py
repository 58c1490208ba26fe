"""The way of every inference request of this contract, and the headers that all of them answer with.

1. Check what the head asks for, read and validate the body; the request's time starts then.
2. Refuse requests that no model could answer, find the model, and refuse what the model lacks. Nothing is loaded yet.
3. Wait until the model is loaded, plan the call from the request's options, and run the call. A client that leaves ends
   the wait and the call.
4. Render the result and send the body. The lease on the result ends with the last byte, or with an error.

A route is one subclass of `InferenceResource`, which says how to check, plan and render.
"""

from __future__ import annotations

import re
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar

import falcon
import msgspec
from falcon.asgi import Request, Response
from msgspec import Meta

from frontend.engine.answer import Answer
from frontend.engine.boxes import known_profiles
from frontend.engine.planning import Resolved, cost_of, resolve, target_of
from frontend.engine.planning import plan as plan_work
from frontend.http.fields import model_in
from frontend.http.image_headers import check_all
from frontend.http.threads import off_loop, off_loop_if
from frontend.protocols.sie.items import warnings_of
from frontend.protocols.sie.schemas import (
    Body,
    EncodeParams,
    ExtractParams,
    ScoreRequest,
    is_large,
    is_msgpack,
    read,
    read_aside,
    read_loosely,
    unknown_fields,
)
from frontend.scope import Choice, RequestScope
from frontend.sending import Buffer, InferenceRoute, send_parts
from frontend.services import Services
from ipc.catalog.entries import ModelEntry
from ipc.errors import GpuNotConfigured, InvalidInput, ModelNotFound, NoReplica, of_items
from ipc.machine import CPU, UNKNOWN, gpu_type
from ipc.settings import Server
from ipc.wire.field_names import IN_PARAMS, FieldNames
from ipc.wire.messages import Call, ModelStatus

HEADER = "X-SIE-MACHINE-PROFILE"
POOL_HEADER = "X-SIE-Pool"
_POOL = re.compile(r"[a-z0-9-]{1,63}")
_SPOT = "-spot"
_SHOWN = 64
C = TypeVar("C", bound=Call)
R = TypeVar("R", bound=Body)


def choice_of(req: Request, services: Services) -> Choice:
    """The boxes that a request chooses by its head, at a gateway: a pool, and a machine profile, perhaps in one header.

    A machine profile is a wish: boxes of other profiles serve too. A bare type stands for its `-spot` form where only
    that is there. Raises `InvalidInput` for what cannot be a pool, and `GpuNotConfigured` for a profile that the
    settings do not name although they name some.
    """
    head, _, profile = (req.get_header(HEADER) or "").strip().lower().rpartition("/")
    pool = (req.get_header(POOL_HEADER) or "").strip().lower()
    for header, name in ((POOL_HEADER, pool), (HEADER, head)):
        if name and not _POOL.fullmatch(name):
            raise InvalidInput(
                f"{header}: {name[:_SHOWN]!a} cannot be a pool: expected 1 to 63 characters of a-z, 0-9 and -"
            )
    if profile:
        configured = services.settings.cluster.profiles
        known = known_profiles(configured, services.directory)
        if profile not in known and profile + _SPOT in known:
            profile += _SPOT
        if configured and profile not in known:
            raise GpuNotConfigured(
                f"{HEADER}: {profile[:_SHOWN]!a}: the machine profiles of this cluster are {', '.join(known)}",
                gpu=profile[:_SHOWN],
                configured_gpu_types=known,
            )
    return Choice(pool or head, profile[:_SHOWN])


def without_bundle(scope: RequestScope, model: str) -> str:
    """The model of `bundle:/model`, whose bundle joins the choice of the request. Raises `ModelNotFound`."""
    bundle, mark, rest = model.partition(":/")
    if not mark:
        return model
    if not bundle or not rest:
        raise ModelNotFound(f"Model '{model[:_SHOWN]}' not found: expected bundle:/model")
    scope.choice = msgspec.structs.replace(scope.choice, bundle=bundle.lower())
    return rest


def check_machine_profile(req: Request, services: Services) -> None:
    """Raise `InvalidInput` when the request asks by header for another kind of machine than this one.

    1. `server.machine_profile` names this machine; requests for other machines are refused.
    2. If `server.machine_profile` is empty, the header is ignored, unless `server.machine_profile_strict` is set. Then
       the header must name `server.gpu_type`, or, if this is empty, the type of the workers' GPUs. If no type is known,
       every request with the header is refused.

    Raises `NoReplica` if the answer depends on the workers' devices and no worker has reported a device yet.
    """
    server = services.settings.server
    if not (server.machine_profile or server.machine_profile_strict):
        return
    asked = req.get_header(HEADER)
    if asked is None:
        return
    own = profiles_of(server, [worker.device for worker in services.directory.workers()])
    if asked.strip().lower() in (profile.lower() for profile in own):
        return
    known = " or ".join(repr(profile) for profile in own)
    raise InvalidInput(
        f"{HEADER}: {asked[:_SHOWN]!r} was asked for, "
        + (f"this server is {known}" if own else "this server does not know what it is")
        + (" (server.machine_profile)" if server.machine_profile else " (server.machine_profile_strict)"),
        requested_profile=asked[:_SHOWN],
        worker_identity=own[0] if own else UNKNOWN,
    )


def profiles_of(server: Server, devices: Sequence[str]) -> list[str]:
    """The profiles of this server, by its settings or by the names of its workers' devices ("": unknown yet)."""
    named = server.machine_profile or server.gpu_type
    if named:
        return [named]
    if not any(devices):
        raise NoReplica("no worker has told its device yet", retry_after_s=1)
    types = dict.fromkeys(gpu_type(device) for device in devices if device)
    return [machine for machine in types if machine not in (CPU, UNKNOWN)]


@dataclass(frozen=True, slots=True)
class Plan(Generic[C]):
    """What a worker is asked to do; routes add what rendering needs.

    `model` is a catalog id, of a profile's variant where the request chose a profile.
    """

    model: str
    call: C


class ItemFault(msgspec.Struct):
    """Why one item failed while its neighbours did not."""

    code: Annotated[str, Meta(description="Kind of the error, for programs.")]
    message: Annotated[str, Meta(description="What is said.")]


class Timing(msgspec.Struct):
    """Milliseconds by phase."""

    total_ms: Annotated[float, Meta(description="From arrival to answer.")]
    queue_ms: Annotated[float, Meta(description="Waiting for the device.")]
    tokenization_ms: Annotated[float, Meta(description="Preparing the inputs.")]
    inference_ms: Annotated[float, Meta(description="On the device.")]
    postprocessing_ms: Annotated[float | None, Meta(description="Behind the device.")]


class EncodeUsage(msgspec.Struct):
    """Tokens of each item, and the indices of items that were cut."""

    tokens: Annotated[list[int], Meta(description="Tokens that the model read.")]
    truncated: Annotated[list[int], Meta(description="Places of items that were cut.")]


class Form(NamedTuple):
    """How the answer is written: as JSON or msgpack, with the fields `beside` the results in the contract's own forms.

    These fields are `usage` and, where the request asks for them, `warnings`.
    """

    json: bool
    beside: dict[str, Any]


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


def _headers_of_gateway(scope: RequestScope, queue_ms: str) -> list[tuple[str, str]]:
    """What a gateway tells besides: the box, and times of the way there in milliseconds; `queue_ms` at the box."""
    headers = [
        ("X-SIE-Worker", scope.worker),
        ("X-Queue-Publish-Time", f"{scope.published_ms:.2f}"),
        ("X-Queue-Wait-Time", queue_ms),
    ]
    if scope.fetched_ms > 0:
        headers.append(("X-Payload-Fetch-Time", f"{scope.fetched_ms:.2f}"))
    return headers


def total_header(total_ms: float) -> tuple[str, str]:
    """The timing header of the total."""
    return "X-Total-Time", f"{total_ms:.2f}"


def timing_of(phases: Mapping[str, float], total_ms: float) -> Timing:
    """The timing block of a body."""
    return Timing(
        total_ms,
        phases.get("queue", 0.0),
        phases.get("tokenize", 0.0),
        phases.get("device", 0.0),
        _postprocessing_ms(phases) or None,
    )


def faults_of(reply: Answer) -> dict[int, ItemFault]:
    """The errors of single items, by the place of the item."""
    return {error.index: ItemFault(error.code, error.message) for error in reply.errors}


def _postprocessing_ms(phases: Mapping[str, float]) -> float:
    """What follows the forward pass: results into shared memory or a frame, then conversion and rendering here."""
    return phases.get("copy", 0.0) + phases.get("encode", 0.0)


class InferenceResource(InferenceRoute, Generic[R, P]):
    """One POST route over the engine. A subclass says how to check, plan and render.

    `body` is the struct of the requests. `capability` is the output that a model must list to be asked at all (empty:
    decided in `plan`). `always_json`: both bodies are JSON whatever the headers say. `itemized`: an item can have an
    error of its own in the answer.
    """

    body: type[R]
    capability: ClassVar[str] = ""
    always_json: ClassVar[bool] = False
    itemized: ClassVar[bool] = False

    def model_of(self, request: R) -> str:
        """The model of a request whose path names none. Raises `ModelNotFound` where the request leaves it open."""
        name: str = getattr(request, "model", "")
        return name

    def known_name(self, name: str) -> str:
        """The catalog's name of the model that a body names."""
        return name

    def params_of(self, request: R) -> EncodeParams | ExtractParams | ScoreRequest | None:
        """What holds the options of a request, which may choose a profile; None where it has none."""
        return None

    def resolve(
        self,
        entry: ModelEntry,
        options: dict[str, Any] | None,
        instruction: str | None,
        items: int,
        names: FieldNames = IN_PARAMS,
    ) -> Resolved:
        """The options that hold for a request over `items` items. Raises `InvalidInput` that names the field."""
        catalog, limits = self.services.catalog, self.services.settings.limits
        return resolve(entry, options, instruction, catalog, items, limits, names)

    @abstractmethod
    def examine(self, request: R) -> None:
        """Raise `InvalidInput` for a body that no model could answer; a model is looked up only afterwards.

        Called in a thread for a large body.
        """

    @abstractmethod
    def check(self, request: R, entry: ModelEntry) -> Any:
        """The inputs as workers take them. Raises `InvalidInput` for what this model cannot take; nothing is loaded.

        Called in a thread for a large body.
        """

    def images(self, request: R, inputs: Any) -> Sequence[tuple[str, bytes]]:
        """JSON path and bytes of each image of `inputs`, which `check` returned."""
        return ()

    @abstractmethod
    def plan(self, request: R, entry: ModelEntry, inputs: Any, status: ModelStatus) -> P:
        """The call, from what `check` returned and the request's options; `status` is that of the loaded model."""

    @abstractmethod
    async def render(
        self, reply: Answer, plan: P, request: R, scope: RequestScope, form: Form
    ) -> Sequence[Buffer]:
        """The body of the answer.

        May close the answer early (`with reply:`), once it holds no views.
        """

    async def respond(self, req: Request, resp: Response, scope: RequestScope, model: str) -> None:
        """One request. `model` is the name in the path; empty if the body names the model.

        Raises `ModelNotFound` for a path that ends before the name of its model, whatever the body.
        """
        if not model and (req.uri_template or "").endswith(PATH_MODEL):
            raise ModelNotFound("the path names no model")
        services = self.services
        reader = read
        if services.settings.is_gateway:
            scope.choice = choice_of(req, services)
            model = without_bundle(scope, model)
            reader = read_loosely
        else:
            check_machine_profile(req, services)
        scope.model = model
        sent = "application/json" if self.always_json else req.content_type
        small = services.bodies.at_hand(req)
        if small is not None:
            with services.bodies.holding(len(small)):
                try:
                    request = reader(small, sent, self.body, services.settings.limits)
                except InvalidInput:
                    self._name(scope, model, small, sent)
                    raise
                unknown = self._unknown(req, request, small, sent)
                del small
                await self._answer(req, resp, scope, model, request, unknown, large=False)
            return
        async with services.bodies.receive(req, scope.deadline_ns) as body:
            try:
                request = await read_aside(body, sent, self.body, services.settings.limits, reader)
            except InvalidInput:
                await off_loop_if(is_large(body), self._name, scope, model, body, sent)
                raise
            large = is_large(body)
            unknown = await off_loop_if(large, self._unknown, req, request, body, sent)
            del body
            await self._answer(req, resp, scope, model, request, unknown, large=large)

    async def answered(self, scope: RequestScope, model: str, body: bytes) -> bytes:
        """The msgpack answer to a msgpack body that came another way than by HTTP. Raises a `PenstockError`."""
        request = await read_aside(body, falcon.MEDIA_MSGPACK, self.body, self.services.settings.limits)
        scope.operation, scope.model, scope.started = self.operation, model, time.perf_counter()
        reply, plan, _ = await self._run(scope, request, None, is_large(body))
        with reply:
            if reply.errors:
                raise of_items(reply.errors)
            return b"".join(await self.render(reply, plan, request, scope, Form(False, {})))

    def _unknown(self, req: Request, request: R, body: bytes, sent: str | None) -> list[str] | None:
        """Names of fields that are no parameters, None where the request does not ask for warnings."""
        params = self.params_of(request)
        if not asks(req, params, "warnings"):
            return None
        return unknown_fields(body, sent, params, at_top=params is request)

    def _name(self, scope: RequestScope, model: str, body: bytes, sent: str | None) -> None:
        """A refused body counts for the model of the path, else for the model that the body names."""
        named = model or self.known_name(model_in(body, binary=is_msgpack(sent)) or "")
        if named:
            scope.names(named)

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
            named = self.model_of(request)
            scope.names(without_bundle(scope, named) if self.services.settings.is_gateway else named)
        reply, plan, warnings = await self._run(scope, request, unknown, large)
        with reply:
            began = time.perf_counter()
            if reply.errors and not (self.itemized and asks(req, self.params_of(request), "item_errors")):
                raise of_items(reply.errors)
            form = self._form(req, reply, warnings)
            parts = await self.render(reply, plan, request, scope, form)
            scope.phases.setdefault("encode", (time.perf_counter() - began) * 1e3)
            resp.content_type = media_type(form.json)
            times = headers_of(scope.phases, scope.cache_hits)
            if self.services.settings.is_gateway and scope.worker:
                times += _headers_of_gateway(scope, times[0][1])
            scope.phases["total"] = total = scope.elapsed_ms()
            resp.set_headers([*times, total_header(total)])
            send_parts(resp, parts, reply, self.services)

    def _form(self, req: Request, reply: Answer, warnings: list[str] | None) -> Form:
        """The form of an answer with these warnings, None where the request does not ask for warnings."""
        beside: dict[str, Any] = {"usage": EncodeUsage(reply.tokens, reply.truncated)}
        if warnings is not None:
            beside["warnings"] = warnings
        return Form(self.always_json or wants_json(req.get_header("Accept")), beside)

    async def _run(
        self, scope: RequestScope, request: R, unknown: list[str] | None, large: bool
    ) -> tuple[Answer, P, list[str] | None]:
        """The result, how to render it, and warnings where the request asks for them; the body was `large`."""
        services = self.services
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
        status = await directory.ensure_loaded(target.id, scope.deadline_ns, (), scope.choice)
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
