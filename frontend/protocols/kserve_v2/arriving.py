"""The body of an infer request: unpacked, and divided into its JSON and the bytes behind it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from falcon.asgi import Request

from frontend.http.bodies import HeldBody
from frontend.http.rendering import at_once, in_steps
from frontend.protocols.kserve_v2 import compression, reading
from frontend.services import Services
from frontend.tensors.receiving import Receiving, receive
from ipc.errors import BodyTooLarge
from ipc.memory.input_arena import InputBlock
from ipc.settings import Settings

LENGTH_HEADER = "Inference-Header-Content-Length"
LONG_NBYTES = 64 << 10


@dataclass(slots=True, frozen=True)
class Arrived:
    """JSON, and the bytes behind it (None: the whole body is JSON); `block` as in `receiving.Body`.

    `head_nbytes` is what the length header said, -1 without it; 0 means that the body is one tensor and no JSON.
    """

    head: bytes | memoryview
    data: memoryview | None
    block: InputBlock | None = None
    head_nbytes: int = -1


class Arriving:
    """A body on its way, as an asynchronous context; leaving it ends its share of the budgets, and its block."""

    __slots__ = ("_deadline_ns", "_held", "_req", "_services", "_unpacked")

    def __init__(self, services: Services, req: Request, deadline_ns: int) -> None:
        self._services, self._req, self._deadline_ns = services, req, deadline_ns
        self._held: HeldBody | Receiving | None = None
        self._unpacked: AbstractContextManager[None] | None = None

    async def __aenter__(self) -> Arriving:
        return self

    async def receive(self) -> Arrived:
        """The body, once all of it has come.

        Raises as `receive` does, and:
            InvalidInput: the length header is wrong, or the packed body broken.
            UnsupportedEncoding: by `Content-Encoding`.
            BodyTooLarge: the body, what it unpacks to, or its JSON is over a limit.
        """
        services, req, settings = self._services, self._req, self._services.settings
        encoding = compression.encoding_of(req.get_header("Content-Encoding"))
        announced = None if encoding else req.content_length
        length = reading.header_length(req.get_header(LENGTH_HEADER), announced)
        _check_json(length if length is not None else announced or 0, settings)
        if length is not None and (announced or 0) - length > settings.arena.input_inline_bytes:
            receiving = receive(services, req, length, self._deadline_ns)
            received = await receiving.__aenter__()
            self._held = receiving
            return Arrived(received.head, received.data, received.block, length)
        holding = services.bodies.hold(req, self._deadline_ns)
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
        return await in_steps(compression.unpack(packed, encoding, *limits))
    return at_once(compression.unpack(packed, encoding, *limits))


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
