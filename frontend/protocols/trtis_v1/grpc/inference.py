"""Infer and StreamInfer: raw tensors in and out of one message, the outcome always within it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from frontend.grpc import received
from frontend.grpc.call import Answer, Call
from frontend.http.rendering import off_loop_if
from frontend.protocols.trtis_v1 import requests
from frontend.protocols.trtis_v1.statuses import Statuses
from frontend.tensors import checking
from frontend.tensors.result import TensorResult
from ipc.catalog.model_config import ModelConfig
from ipc.errors import PenstockError
from ipc.protos import trtis_v1_pb2 as pb

RAW_INPUT = pb.InferRequest.RAW_INPUT_FIELD_NUMBER
RAW_OUTPUT = pb.InferResponse.RAW_OUTPUT_FIELD_NUMBER


class Inference:
    """Answers one request, alone or in a stream."""

    def __init__(self, statuses: Statuses) -> None:
        self._statuses, self._order = statuses, AnswerOrder()

    async def answer(self, call: Call, request: pb.InferRequest) -> Answer:
        """The whole response. A model that keeps the order waits for earlier answers. Raises the request's error."""
        with self._order.take(call.rpc, request.model_name) as place:
            try:
                return await self._infer(call, request, place)
            finally:
                await place.wait()

    async def _infer(self, call: Call, request: pb.InferRequest, place: PlaceInOrder) -> Answer:
        scope, inference, header = call.context, call.services.inference, request.meta_data
        scope.model, version = request.model_name, requests.version_of(request.model_version)
        record = inference.begin(scope, request.model_name, version)
        model = await inference.find(scope, request.model_name, version)
        record.rows = requests.rows_of(model, header)
        place.note_model(model.config)
        wanted = requests.request_of(model, header)
        checking.check_shapes(model, wanted)
        sizes = requests.sizes_of(model, header, wanted)
        requests.attach(model, wanted, sizes, call.raw)
        call.scheduled = True
        result = await inference.run(scope, model, wanted)
        with result.answer:
            status = self._statuses.success()
            return await off_loop_if(result.has_many_classes, _rendered, result, header.id, status)

    def failed(self, call: Call, request: pb.InferRequest | None, error: PenstockError) -> Answer:
        """A response that says what went wrong, with the request's id so that it can be found again."""
        model, given_id = ("", 0) if request is None else (request.model_name, request.meta_data.id)
        status = self._statuses.failure(error, model, numbered=call.scheduled)
        return pb.InferResponse(request_status=status, meta_data=pb.InferResponseHeader(id=given_id))


def _rendered(result: TensorResult, request_id: int, status: pb.RequestStatus) -> bytes:
    """The whole response; outputs without bytes of their own keep their place with an empty entry."""
    response = pb.InferResponse(request_status=status, meta_data=requests.typed_header_of(result, request_id))
    contents = [b"" if output.data is None else output.data for output in result.outputs]
    return b"".join(received.parts(response.SerializeToString(), RAW_OUTPUT, contents))


class PlaceInOrder:
    """The place of one request among those of its stream for the same model."""

    def __init__(self, before: asyncio.Event | None) -> None:
        self._before = before
        self.keeps_order = False

    def note_model(self, config: ModelConfig) -> None:
        """Learn whether the model keeps an order."""
        batching = config.dynamic_batching
        self.keeps_order = batching is not None and batching.preserve_ordering

    async def wait(self) -> None:
        """Wait until the request before this one has been answered."""
        if self.keeps_order and self._before is not None:
            await self._before.wait()


class AnswerOrder:
    """The order of answers on a stream, for models with `preserve_ordering`: each waits for the answer before it.

    Workers keep the order of their requests, but the requests of one stream may go to several workers. Kept is the last
    request of each model on each rpc that is under way.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, str], asyncio.Event] = {}

    @contextmanager
    def take(self, rpc: object, model: str) -> Iterator[PlaceInOrder]:
        """The place of a request, in the order of the calls. Leaving the context lets the next request answer."""
        # NOTE: the rpc lives as long as any of its requests, so its number belongs to no other one meanwhile.
        key, mine = (id(rpc), model), asyncio.Event()
        before, self._last[key] = self._last.get(key), mine
        try:
            yield PlaceInOrder(before)
        finally:
            mine.set()
            if self._last.get(key) is mine:
                del self._last[key]
