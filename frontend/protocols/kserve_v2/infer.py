"""POST /v2/models/{model}[/versions/{version}]/infer.

1. Find the model, and wait for its load if need be.
2. A small binary request may have a plan: the head (JSON) equals the head of an earlier request, whose plan the model
   kept. The plan runs over the new bytes (`frontend.tensors.program_calls`). All other requests go on with 3.
3. Read the body (`Arriving`). Parse the JSON and split the bytes behind the JSON (`reading`). Mark the inputs that
   are encoded images or strings (`conversions`).
4. Run the request (`frontend.tensors.inference`), and keep the plan of a plain request.
5. Render the result (`rendering`), packed for clients that ask for a packed body.

Large bodies and answers are parsed, decoded, rendered and packed in the rendering threads.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import falcon
from falcon.asgi import Request, Response

from frontend.access.gate import Restrictions
from frontend.engine.interface import Block
from frontend.http.bodies import HeldBody, Holding
from frontend.http.threads import Steps, at_once, in_steps, off_loop
from frontend.protocols.kserve_v2 import conversions, reading, rendering
from frontend.protocols.kserve_v2.reading import InferRequest, Target
from frontend.scope import RequestScope
from frontend.sending import InferenceRoute, send_parts
from frontend.services import Services
from frontend.tensors.models import TensorModel
from frontend.tensors.program_calls import HeadPlan
from frontend.tensors.request import Forwarding
from frontend.tensors.result import TensorResult
from frontend.tensors.uploading import Receiving, receive
from ipc.errors import BodyTooLarge, InvalidInput, PenstockError, Unsupported
from ipc.settings import Settings

LENGTH_HEADER = "Inference-Header-Content-Length"
LONG_NBYTES = 64 << 10
"""Work for a thread: JSON to be parsed and answers to be packed above this size, packed bodies above a sixteenth."""
OFFERED = ("gzip", "deflate")
FREE_NBYTES = 4 << 20
"""Unpacked bytes up to which the growth is not looked at: small tensors of zeros are honest."""
_OTHER_NAMES = {"x-gzip": "gzip"}
"""RFC 9110, 8.4.1.3."""
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_STEP_NBYTES = 1 << 20
_SLICE_NBYTES = 64 << 10
_LEVEL = 1
MOST_DIGITS = 18


@dataclass(slots=True, frozen=True)
class Arrived:
    """JSON, and the bytes behind it (None: the whole body is JSON); `block` as in `frontend.tensors.uploading.Body`.

    `head_nbytes` is what the length header said, -1 without it; 0 means that the body is one tensor and no JSON.
    """

    head: bytes | memoryview
    data: memoryview | None
    block: Block | None = None
    head_nbytes: int = -1


class Arriving:
    """A body on its way, as an asynchronous context; leaving it ends its share of the budgets, and its block."""

    __slots__ = ("_deadline_ns", "_held", "_req", "_services", "_unpacked")

    def __init__(self, services: Services, req: Request, deadline_ns: int) -> None:
        self._services, self._req, self._deadline_ns = services, req, deadline_ns
        self._held: HeldBody | Receiving | None = None
        self._unpacked: Holding | None = None

    async def __aenter__(self) -> Arriving:
        return self

    async def receive(self) -> Arrived:
        """The body, once all of it has come.

        Raises as `receive` does, and:
            InvalidInput: the length header is wrong, or the packed body broken.
            UnsupportedEncoding: by `Content-Encoding`.
            BodyTooLarge: the body, packed or unpacked, or its JSON is over a limit.
        """
        services, req, settings = self._services, self._req, self._services.settings
        encoding = encoding_of(req.get_header("Content-Encoding"))
        announced = None if encoding else req.content_length
        length = reading.header_length(req.get_header(LENGTH_HEADER), announced)
        _check_json(length if length is not None else announced or 0, settings)
        if length is not None and (announced or 0) - length > settings.arena.input_inline_bytes:
            receiving = receive(services.tensor_inference.inputs, req, length, self._deadline_ns)
            received = await receiving.__aenter__()
            self._held = receiving
            return Arrived(received.head, received.data, received.block, length)
        holding = services.bodies.receive(req, self._deadline_ns)
        body = await holding.__aenter__()
        self._held = holding
        if encoding:
            body = await _unpack(body, encoding, settings)
            self._unpacked = services.bodies.holding(len(body))
            self._unpacked.__enter__()
        return _divided(body, length, settings)

    async def __aexit__(self, *_: object) -> None:
        if self._unpacked is not None:
            self._unpacked.__exit__(None, None, None)
            self._unpacked = None
        if self._held is not None:
            held, self._held = self._held, None
            await held.__aexit__()


async def _unpack(packed: bytes, encoding: str, settings: Settings) -> bytes:
    limits = settings.limits.max_body_bytes, settings.kserve.max_unpack_ratio
    if len(packed) > LONG_NBYTES >> 4:
        return await in_steps(unpack(packed, encoding, *limits))
    return at_once(unpack(packed, encoding, *limits))


def _divided(body: bytes, length: int | None, settings: Settings) -> Arrived:
    if length is None:
        _check_json(len(body), settings)
        return Arrived(body, None)
    reading.check_header_length(length, len(body))
    _check_json(length, settings)
    whole = memoryview(body)
    return Arrived(whole[:length], whole[length:], None, length)


def _check_json(nbytes: int, settings: Settings) -> None:
    limit = settings.kserve.max_json_bytes
    if nbytes > limit:
        raise BodyTooLarge(
            f"the JSON of the request has {nbytes} bytes, the limit is {limit} (kserve.max_json_bytes); "
            "send large tensors in binary"
        )


class UnsupportedEncoding(Unsupported):
    """A `Content-Encoding` that is not offered; the answer says which are."""


def encoding_of(header: str | None) -> str:
    """Encoding that a `Content-Encoding` names; "" for none. Raises `UnsupportedEncoding`."""
    name = (header or "").strip().lower()
    name = _OTHER_NAMES.get(name, name)
    if name in ("", "identity"):
        return ""
    if name not in OFFERED:
        raise UnsupportedEncoding(
            f"Content-Encoding {name[:64]!r} is not supported, only {' and '.join(OFFERED)}"
        )
    return name


def unpack(body: bytes, encoding: str, most_nbytes: int, most_ratio: int) -> Steps[bytes]:
    """The body that was packed: with gzip (one member or several, also named x-gzip) or deflate (a zlib stream).

    `most_nbytes` and `most_ratio` (beyond `FREE_NBYTES`) bound the body, so that a small one cannot become a large one
    unnoticed. Raises `BodyTooLarge` without growing past the bounds, `InvalidInput` for broken or cut streams.
    """
    stream = zlib.decompressobj(_WINDOWS[encoding])
    limit = min(most_nbytes, max(FREE_NBYTES, most_ratio * len(body)))
    parts: list[bytes] = []
    total = given = 0
    rest: bytes | memoryview = b""
    try:
        while not stream.eof:
            if not rest:
                # PERF: in slices, since a step copies the rest of its input.
                rest = memoryview(body)[given : given + _SLICE_NBYTES]
                given += len(rest)
            part = stream.decompress(rest, min(_STEP_NBYTES, limit - total + 1))
            rest = stream.unconsumed_tail
            total += len(part)
            if total > limit:
                raise BodyTooLarge(_too_large(encoding, len(body), limit, most_nbytes))
            parts.append(part)
            if stream.eof and encoding == "gzip" and (stream.unused_data or given < len(body)):
                # RFC 1952, 2.2: a gzip file is a series of members.
                rest, stream = stream.unused_data, zlib.decompressobj(_WINDOWS[encoding])
            elif not part and not rest and given == len(body):
                break
            yield
    except zlib.error as error:
        raise InvalidInput(f"the body is not valid {encoding}: {error}") from error
    if not stream.eof:
        raise InvalidInput(f"the {encoding} body ends before its stream does")
    behind = len(stream.unused_data) + len(body) - given
    if behind:
        raise InvalidInput(f"{behind} bytes follow the {encoding} stream of the body")
    return b"".join(parts)


def _too_large(encoding: str, packed_nbytes: int, limit: int, most_nbytes: int) -> str:
    setting = "limits.max_body_bytes" if limit == most_nbytes else "kserve.max_unpack_ratio"
    return f"the {encoding} body of {packed_nbytes} bytes holds more than {limit} bytes ({setting})"


def choose(accept: str | None, binary: bool) -> str:
    """Encoding of an answer for an `Accept-Encoding`; "" for none.

    NOTE: the asyncio client offers gzip, deflate and br on every request though nobody asked it to; so what holds
    tensors in binary is packed only for clients that offer gzip or deflate alone.
    """
    if not accept:
        return ""
    offers = dict(_offers(accept))
    if binary and (len(offers) != 1 or next(iter(offers)) not in OFFERED):
        return ""
    best = max(OFFERED, key=lambda name: offers.get(name, 0.0))
    quality = offers.get(best, 0.0)
    return best if quality > 0 and quality >= offers.get("identity", 0.0) else ""


def _offers(accept: str) -> Iterable[tuple[str, float]]:
    for offer in accept[:1024].lower().split(","):
        name, *fields = (part.strip() for part in offer.split(";"))
        quality = next((field[2:] for field in fields if field.startswith("q=")), "1")
        try:
            weight = float(quality)
        except ValueError:
            continue
        if name and 0 <= weight <= 1:
            yield name, weight


def pack(parts: Sequence[bytes | memoryview], encoding: str) -> Steps[bytes]:
    """These parts one after another, packed."""
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOWS[encoding])
    packed: list[bytes] = []
    for part in parts:
        whole = memoryview(part).cast("B")
        for at in range(0, len(whole), _STEP_NBYTES):
            packed.append(stream.compress(whole[at : at + _STEP_NBYTES]))
            yield
    return b"".join([*packed, stream.flush()])


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
        if model.plans and (planned := self._planned(req, model)) is not None:
            await self._respond_planned(req, resp, scope, model, *planned)
            return
        try:
            async with Arriving(self.services, req, scope.deadline_ns) as arriving:
                arrived = await arriving.receive()
                parsed = await self._parsed(model, target, arrived)
                given_id, request = parsed.id, parsed.request
                request.block = arrived.block
                if self._forwarding.active:
                    self._forwarding.apply(req.headers_lower, request)
                conversions.defer(model.config, request.inputs, self.services.settings.limits)
                result = await self.services.tensor_inference.run(scope, model, request)
                if arrived.head_nbytes > 0 and not given_id and not self._forwarding.active:
                    self._keep(model, arrived, parsed)
            await self._send(req, resp, result, parsed)
        except PenstockError as error:
            reading.identified(error, given_id)
            raise

    async def find(self, req: Request, scope: RequestScope, target: Target) -> TensorModel:
        """The model that was asked for, once it can answer. Raises as `TensorInference.find`."""
        scope.model = target.name
        self._restrictions.require_secret("inference", req.get_header)
        return await self.services.tensor_inference.find(scope, target.name, target.version)

    def _planned(self, req: Request, model: TensorModel) -> tuple[HeadPlan, bytes, int] | None:
        """The plan of a request, the body, and the bytes of the head; None without a plan."""
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

    async def _respond_planned(
        self,
        req: Request,
        resp: Response,
        scope: RequestScope,
        model: TensorModel,
        plan: HeadPlan,
        body: bytes,
        head_nbytes: int,
    ) -> None:
        """One request that has a plan."""
        try:
            with self.services.bodies.holding(len(body)):
                data = memoryview(body)[head_nbytes:]
                result = await self.services.tensor_inference.run_plan(scope, model, plan, data)
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
        self.services.tensor_inference.keep_plan(model, head, nbytes, wanted.request, bare)

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
        encoding = choose(req.get_header("Accept-Encoding"), answer.json_nbytes > 0)
        nbytes = sum(map(len, answer.parts)) if encoding else 0
        if not encoding or nbytes < self._settings.compress_min_bytes:
            return answer.parts, ""
        if nbytes > LONG_NBYTES:
            return [await in_steps(pack(answer.parts, encoding))], encoding
        return [at_once(pack(answer.parts, encoding))], encoding
