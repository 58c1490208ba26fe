"""POST /v2/models/{model}[/versions/{version}]/generate and /generate_stream: tensors without their wrapping.

1. Every key of the body that names an input becomes that tensor: a scalar or a list, in the shape that the model has.
   All other keys, and those of `parameters`, become parameters of the request.
2. The answer has each output under its name: a list, or the element itself if there is a single element.
3. A stream sends each answer as a Server-Sent Event. The status of the response comes from the first answer, unless
   that takes long: then the stream is open, and a failure is its last event.
4. A decoupled model gives any number of answers: events as they come, or exactly one without a stream.

Answers of Server-Sent Events: an event for each text, and an event for an error that ends the stream.

A stream whose first text takes long opens with a comment, and comments fill later pauses (`generation.keep_alive_s`).
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

import falcon
import msgspec
import orjson
from falcon.asgi import Request, Response

from frontend.http.threads import at_once, off_loop, off_loop_if
from frontend.protocols.kserve_v2 import elements, errors, reading, rendering, schemas
from frontend.protocols.kserve_v2.infer import InferResource
from frontend.protocols.kserve_v2.reading import InferRequest, Target, identifying
from frontend.protocols.kserve_v2.schemas import Decoder
from frontend.scope import RequestScope
from frontend.sending import CONTENT_TYPE, EventStream, InferenceRoute, data, prepare
from frontend.services import Services
from frontend.tensors.models import TensorModel
from frontend.tensors.request import InputTensor, Parameter, TensorRequest
from frontend.tensors.result import TensorResult
from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.errors import InvalidInput, PenstockError

GENERATE = Decoder(dict[str, msgspec.Raw])
_PARAMETER = msgspec.json.Decoder(Parameter | None)
_PARAMETERS = msgspec.json.Decoder(dict[str, Parameter | None] | None)


async def send(services: Services, req: Request, resp: Response, texts: AsyncGenerator[bytes, None]) -> None:
    """Answer with an event for each text, and with an event for an error that ends the stream.

    The status is fixed by the first text, or when that takes long. Raises what fails before that.
    """
    idle_s = services.settings.generation.keep_alive_s
    last = partial(_last_event, req.path)
    events = EventStream(services, req, _framed(texts), "kserve", last, idle_s=idle_s)
    await events.begin()
    prepare(resp, f"{CONTENT_TYPE}; charset=utf-8")
    resp.stream = events


async def _framed(texts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(texts):
        async for text in texts:
            yield data(text)


def _last_event(path: str, error: PenstockError) -> tuple[int, bytes]:
    status, body, _ = errors.render(error, path)
    return status, data(orjson.dumps(body))


def parsed_body(target: Target, config: ModelConfig, body: bytes) -> InferRequest:
    """The request of a body in JSON. Raises `InvalidInput`."""
    return request_of(target, config, GENERATE.decode(body))


def request_of(target: Target, config: ModelConfig, body: dict[str, msgspec.Raw]) -> InferRequest:
    """The request of a body. Raises `InvalidInput` that names the key."""
    request = TensorRequest(target.name, target.version, [], None)
    given: dict[str, Any] = {}
    for key, raw in body.items():
        expected = config.input(key)
        if expected is not None:
            request.inputs.append(_input(expected, bytes(raw), config.batches))
        elif key == "parameters":
            given |= _decoded(_PARAMETERS, raw, key) or {}
        elif key != "id":
            given[key] = _decoded(_PARAMETER, raw, key)
            reading.check_parameter_count(len(given))
    reading.apply_parameters(request, reading.without_nulls(given))
    return InferRequest(request, "", False, {})


def _decoded(decoder: msgspec.json.Decoder[Any], raw: msgspec.Raw, key: str) -> Any:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"'{key[:200]}': {str(error)[:200]}") from None


def _input(expected: TensorConfig, text: bytes, batches: bool) -> InputTensor:
    where = f"input '{expected.name}'"
    dims = [1, *expected.dims] if batches else list(expected.dims)
    count = math.prod(dim for dim in dims if dim >= 0)
    if -1 in dims:
        if dims.count(-1) > 1:
            raise InvalidInput(f"{where}: generate cannot tell the shape, the model takes {dims}")
        elements_given = elements.count_of(text, where)
        if not count or elements_given % count:
            raise InvalidInput(
                f"{where}: expected a multiple of {count} elements for shape {dims}, got {elements_given}"
            )
        dims[dims.index(-1)] = elements_given // count
        count = elements_given
    return InputTensor(
        expected.name, expected.datatype, dims, elements.read(text, expected.datatype, count, where)
    )


def answer_of(result: TensorResult, words: bool) -> bytes:
    """The body of an answer. Raises `InvalidInput` for values that JSON cannot express."""
    body: dict[str, Any] = {"model_name": result.model, "model_version": str(result.version)}
    for output in result.outputs:
        datatype, shape, data = rendering.told(output, result.batches)
        if data is None:
            continue
        text = at_once(rendering.json_of(data, datatype, shape, f"output '{output.name}'", words))
        body[output.name] = orjson.Fragment(text[1:-1] if math.prod(shape) == 1 else text)
    return orjson.dumps(body)


MOST_NBYTES = 16 << 20


class GenerateResource(InferenceRoute):
    """Both endpoints; `stream` says which one."""

    operation = "generate"

    def __init__(self, infer: InferResource, *, stream: bool) -> None:
        super().__init__(infer.services)
        self._infer, self._stream = infer, stream

    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: Target) -> None:
        """One request."""
        services, model = self.services, await self._infer.find(req, scope, target)
        with identifying(""):
            parse = partial(parsed_body, target, model.config)
            arrived = await schemas.parsed(services, req, parse, MOST_NBYTES)
        answers = self._texts if model.config.decoupled else self._text
        texts = answers(scope, model, arrived)
        if self._stream:
            await send(services, req, resp, texts)
        else:
            resp.data = await _only(texts, arrived.request.model)
            resp.content_type = falcon.MEDIA_JSON

    @property
    def _words(self) -> bool:
        return self.services.settings.kserve.json_nonfinite == "words"

    async def _text(
        self, scope: RequestScope, model: TensorModel, wanted: InferRequest
    ) -> AsyncGenerator[bytes, None]:
        """The answer of a model with one answer for each request."""
        with identifying(""):
            result = await self.services.tensor_inference.run(scope, model, wanted.request)
            with result.answer:
                text = await off_loop(answer_of, result, self._words)
        yield text

    async def _texts(
        self, scope: RequestScope, model: TensorModel, wanted: InferRequest
    ) -> AsyncGenerator[bytes, None]:
        """The answers of a decoupled model."""
        held = sum(len(tensor.data or b"") for tensor in wanted.request.inputs)
        with self.services.bodies.holding(held):
            async with aclosing(
                self.services.tensor_inference.stream(scope, model, wanted.request)
            ) as results:
                async for result in results:
                    # NOTE: the lease ends before the answer is sent, which takes as long as its client likes.
                    with result.answer:
                        text = await off_loop_if(
                            rendering.is_long(result, wanted), answer_of, result, self._words
                        )
                    del result
                    yield text


async def _only(texts: AsyncGenerator[bytes, None], model: str) -> bytes:
    """The single answer. Raises `InvalidInput` for no answer, and at the second answer without waiting for more."""
    async with aclosing(texts):
        first = await anext(texts, None)
        if first is None or await anext(texts, None) is not None:
            number = "none" if first is None else "more than one"
            raise InvalidInput(
                f"generate expects exactly one response, model {model[:200]!a} gave {number}: use generate_stream"
            )
    return first
