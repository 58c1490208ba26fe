"""ModelInfer and ModelStreamInfer: the same request, alone or as a message of a stream.

1. `refuse_too_many_values` counts the values of typed contents before the protobuf library makes anything of them.
2. `Infer` reads and runs a request. A decoupled model gives any number of responses to a message of a stream, which
   leave as they come.
3. `response_of` writes a `TensorResult` as the bytes of a ModelInferResponse: tensors are raw, and joined in without a
   copy of their own.
4. `PlannedHeads` finds the kept plan of a ModelInfer message, which is then not parsed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from frontend.grpc import received
from frontend.grpc.call import Call, Several
from frontend.http.threads import off_loop_if
from frontend.protocols.kserve_v2 import conversions, rendering
from frontend.protocols.kserve_v2.errors import text_of
from frontend.protocols.kserve_v2.grpc.reading import EMPTY_FINAL, request_of, version_of
from frontend.protocols.kserve_v2.reading import identified, identifying
from frontend.scope import RequestScope
from frontend.tensors.checking import check_dimensions
from frontend.tensors.inference import TensorInference
from frontend.tensors.models import TensorModel
from frontend.tensors.program_calls import MOST_HEAD_NBYTES, HeadPlan
from frontend.tensors.request import Forwarding, TensorRequest
from frontend.tensors.result import TensorResult
from ipc.errors import InvalidInput, PenstockError
from ipc.protos import kserve_v2_pb2 as pb

MOST_NUMBERS = 1 << 24
"""Numbers and truth values in the typed contents of one request."""
MOST_SINGLE = 1 << 16
"""Strings in the typed contents of one request, and numbers that are not packed."""
NUMBER_NBYTES, STRING_NBYTES = 16, 96
"""Bytes of a value: parsed, and once more as raw bytes."""
_BYTES = 2
_INPUTS = pb.ModelInferRequest.INPUTS_FIELD_NUMBER << 3 | _BYTES
_CONTENTS = pb.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER << 3 | _BYTES
_SHAPE = pb.ModelInferRequest.InferInputTensor.SHAPE_FIELD_NUMBER << 3 | _BYTES
_PIECE_NBYTES = 1 << 20
_typed = pb.InferTensorContents
RAW_OUTPUT = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
STREAMED = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER
FINAL = "triton_final_response"
Shown = tuple[str, str, tuple[int, ...]]
"""Name, datatype and shape of an output."""
RAW_INPUT = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
MOST_LENGTHS = 256
"""Lengths of messages of which the last head with a plan is kept."""
MOST_NBYTES = 16 << 10
"""Longer messages are always parsed."""


def refuse_too_many_values(data: bytes) -> None:
    """Raise `InvalidInput` when a ModelInferRequest, of which the raw contents are left out, has too many values.

    A number takes one byte on the wire and eight in memory; a string takes two and becomes an object. So their counts
    are bounded, and their memory is counted among the bytes that requests hold. Raw contents have no such bounds.

    Raises `ValueError` for other bytes. The fields of the message, and those a level below, must have been counted.
    """
    numbers = single = 0
    for tag, _, began, end in received.fields(data, 0, len(data)):
        for inner, _, start, stop in received.fields(data, began, end) if tag == _INPUTS else ():
            if inner == _SHAPE:
                check_dimensions(_varints(data, start, stop), "an input")
            for field, _, first, last in received.fields(data, start, stop) if inner == _CONTENTS else ():
                count = _PACKED.get(field)
                if count is None:
                    single += 1
                else:
                    numbers += count(data, first, last)
                _check_counts(numbers, single)


def message_nbytes(message: pb.ModelInferRequest) -> int:
    """About what the typed contents of a request take, parsed and made into raw bytes."""
    nbytes = 0
    for tensor in message.inputs:
        if not tensor.HasField("contents"):
            continue
        for field, values in tensor.contents.ListFields():
            each = STRING_NBYTES if field.number == _typed.BYTES_CONTENTS_FIELD_NUMBER else NUMBER_NBYTES
            nbytes += each * len(values)
    return nbytes


def _check_counts(numbers: int, single: int) -> None:
    if numbers > MOST_NUMBERS:
        raise InvalidInput(
            f"typed contents: more than {MOST_NUMBERS} numbers in one request; send them in raw_input_contents"
        )
    if single > MOST_SINGLE:
        raise InvalidInput(
            f"typed contents: more than {MOST_SINGLE} strings, or numbers that are not packed, in one request; "
            "send them in raw_input_contents"
        )


def _varints(data: bytes, first: int, last: int) -> int:
    """Numbers of variable length: the last byte of each is below 128."""
    numbers = 0
    for at in range(first, last, _PIECE_NBYTES):
        piece = np.frombuffer(data, np.uint8, min(_PIECE_NBYTES, last - at), at)
        numbers += int(np.count_nonzero(piece < 128))
        if numbers > MOST_NUMBERS:
            break
    return numbers


def _fixed(size: int) -> Callable[[bytes, int, int], int]:
    return lambda data, first, last: (last - first) // size


_PACKED: dict[int, Callable[[bytes, int, int], int]] = {
    number << 3 | _BYTES: count
    for number, count in (
        (_typed.BOOL_CONTENTS_FIELD_NUMBER, _varints),
        (_typed.INT_CONTENTS_FIELD_NUMBER, _varints),
        (_typed.INT64_CONTENTS_FIELD_NUMBER, _varints),
        (_typed.UINT_CONTENTS_FIELD_NUMBER, _varints),
        (_typed.UINT64_CONTENTS_FIELD_NUMBER, _varints),
        (_typed.FP32_CONTENTS_FIELD_NUMBER, _fixed(4)),
        (_typed.FP64_CONTENTS_FIELD_NUMBER, _fixed(8)),
    )
}
"""Functions that count the values of a packed field, by its tag."""


def response_of(result: TensorResult, given_id: str, streamed: bool = False, *, final: bool = True) -> bytes:
    """The response; an output in shared memory has an empty raw entry, so that the others keep their places.

    In a stream it is wrapped in a ModelStreamInferResponse, and says whether it is the `final` one to its request. This
    copies out of the answer's block, so the answer must still be open.
    """
    shown: list[Shown] = []
    contents: list[bytes | memoryview] = []
    for output in result.outputs:
        datatype, shape, data = rendering.told(output, result.batches)
        shown.append((output.name, datatype, tuple(shape)))
        contents.append(b"" if data is None else data)
    if streamed or given_id:
        head = _message(result.model, result.version, tuple(shown))
        head.id = given_id
        if streamed:
            head.parameters[FINAL].bool_param = final
        parts = received.parts(head.SerializeToString(), RAW_OUTPUT, contents)
    else:
        parts = received.parts(_plain_head(result.model, result.version, tuple(shown)), RAW_OUTPUT, contents)
    return b"".join(received.nested(STREAMED, parts) if streamed else parts)


def _message(model: str, version: int, shown: tuple[Shown, ...]) -> pb.ModelInferResponse:
    """A response without raw contents."""
    message = pb.ModelInferResponse(model_name=model, model_version=str(version))
    for name, datatype, shape in shown:
        message.outputs.add(name=name, datatype=datatype, shape=shape)
    return message


@lru_cache(maxsize=256)
def _plain_head(model: str, version: int, shown: tuple[Shown, ...]) -> bytes:
    """PERF: most responses of a model begin with the same bytes."""
    return _message(model, version, shown).SerializeToString()


def is_long(result: TensorResult) -> bool:
    """Whether that is work for a thread."""
    return result.has_many_classes or conversions.is_long(result)


def bare_message(model: str, version: str, given_id: str, *, final: bool = True, error: str = "") -> bytes:
    """A message of a stream without tensors: no response follows, or the request failed with an `error`."""
    answer = pb.ModelStreamInferResponse(error_message=error)
    head = answer.infer_response
    head.model_name, head.model_version, head.id = model, version, given_id
    head.parameters[FINAL].bool_param = final
    return answer.SerializeToString()


class Infer:
    """Answers inference requests; metadata of an rpc may go to the model as header fields do."""

    def __init__(self, forwarding: Forwarding) -> None:
        self._forwarding = forwarding
        self._heads = PlannedHeads()

    async def alone(self, call: Call, message: pb.ModelInferRequest) -> bytes | Several:
        """ModelInfer."""
        return await self._identified(call, message, streamed=False)

    async def streamed(self, call: Call, message: pb.ModelInferRequest) -> bytes | Several:
        """One message of ModelStreamInfer."""
        return await self._identified(call, message, streamed=True)

    def planned(self, call: Call, data: bytes) -> Awaitable[bytes] | None:
        """The answer to a ModelInfer that has a plan; None for any other."""
        planned = self._heads.find(data, call.context, call.services.tensor_inference)
        return None if planned is None else self._run_plan(call, planned)

    @staticmethod
    def failed(call: Call, message: pb.ModelInferRequest | None, error: PenstockError) -> bytes:
        """A failed message of ModelStreamInfer: the final one, unless an empty one follows."""
        text = text_of(error)
        if message is None:
            return bare_message("", "", "", error=text)
        name, version, follows = message.model_name, message.model_version, False
        with suppress(PenstockError):
            model = call.services.tensor_models.find(name, version_of(version))
            name, version = model.name, str(model.version)
            follows = _last(message, model) is not None
        return bare_message(name, version, message.id, final=not follows, error=text)

    @staticmethod
    async def _run_plan(call: Call, planned: Planned) -> bytes:
        try:
            result = await call.services.tensor_inference.run_plan(call.context, *planned)
            with result.answer:
                return await off_loop_if(is_long(result), response_of, result, "")
        except PenstockError as error:
            identified(error, "")
            raise

    async def _identified(self, call: Call, message: pb.ModelInferRequest, streamed: bool) -> bytes | Several:
        """The answer; an error of validation begins with the client's id of the request."""
        bodies, nbytes = call.services.bodies, message_nbytes(message)
        # What typed contents become is larger than what was received, and lives as long as the request.
        bodies.held_nbytes += nbytes
        try:
            bodies.check_room(nbytes)
            return await self._run(call, message, streamed)
        except PenstockError as error:
            identified(error, message.id)
            raise
        finally:
            bodies.held_nbytes -= nbytes

    async def _run(self, call: Call, message: pb.ModelInferRequest, streamed: bool) -> bytes | Several:
        services, scope = call.services, call.context
        inference, scope.model = services.tensor_inference, message.model_name
        record = inference.begin(scope, message.model_name, None)
        record.version = version = version_of(message.model_version)
        model, request = inference.look(scope, message.model_name, version), None
        if model is None:
            request = request_of(message, call.raw)
            model = await inference.find(scope, request.model, version, request.timeout_us)
        if streamed and model.config.decoupled:
            return Several(self._responses(call, message, request, model), _last(message, model))
        request = self._completed(call, request or request_of(message, call.raw), model)
        result = await inference.run(scope, model, request)
        with result.answer:
            if not streamed and not message.id and not self._forwarding.active:
                key = self._heads.note(call.data, call.raw, version, model)
                if key is not None:
                    inference.keep_plan(model, key, sum(map(len, call.raw)), request, None)
            return await off_loop_if(is_long(result), response_of, result, message.id, streamed)

    def _completed(self, call: Call, request: TensorRequest, model: TensorModel) -> TensorRequest:
        """`request` with what the model and the metadata of the rpc add."""
        conversions.defer(model.config, request.inputs, call.services.settings.limits)
        self._forwarding.apply(call.metadata, request)
        return request

    async def _responses(
        self, call: Call, message: pb.ModelInferRequest, request: TensorRequest | None, model: TensorModel
    ) -> AsyncGenerator[bytes, None]:
        """Those of a decoupled model; `request` is None where the message has not been read yet."""
        services = call.services
        with identifying(message.id), services.bodies.holding(message_nbytes(message)):
            request = self._completed(call, request or request_of(message, call.raw), model)
            async with aclosing(services.tensor_inference.stream(call.context, model, request)) as results:
                async for result in results:
                    # NOTE: the lease ends before the response is written, which takes as long as its client likes.
                    with result.answer:
                        long = is_long(result)
                        answer = await off_loop_if(long, response_of, result, message.id, True, final=False)
                    del result
                    yield answer


def _last(message: pb.ModelInferRequest, model: TensorModel) -> bytes | None:
    """The empty message behind all responses of a decoupled model, for a client that asks for such a message."""
    asks_for_end = EMPTY_FINAL in message.parameters and message.parameters[EMPTY_FINAL].bool_param
    return (
        bare_message(model.name, str(model.version), message.id)
        if asks_for_end and model.config.decoupled
        else None
    )


@dataclass(slots=True, frozen=True)
class PlannedHead:
    """The head of a message, and `places` of its raw contents: begin and end, and the bytes that stand before."""

    head: bytes
    places: Sequence[tuple[int, int, bytes]]
    name: str
    version: int | None
    model: TensorModel
    """The model that the earlier message went to."""
    key: bytes
    """The message without its raw contents, by which the model keeps the plan."""

    def contents(self, data: bytes) -> memoryview | None:
        """The raw contents of a message one after another; None for a message with another head or other sizes."""
        if not data.startswith(self.head):
            return None
        for begin, _, before in self.places:
            if not data.startswith(before, begin - len(before)):
                return None
        return memoryview(b"".join([data[begin:end] for begin, end, _ in self.places]))


class Planned(NamedTuple):
    """A message that has a plan: its raw contents are all that is new."""

    model: TensorModel
    plan: HeadPlan
    contents: memoryview


class PlannedHeads:
    """The last heads with a plan, one for each length of a message.

    In messages with one head, the bytes before the raw contents are equal, and the contents have equal sizes. A
    message with a plan is not parsed: its bytes are compared with those of the earlier message, and the plan runs that
    the model keeps for the head (`frontend.tensors.program_calls`). The head does not tell the sizes of BYTES
    tensors, so the model keeps the plan by the head with the tag and the size of each of the raw contents behind.
    """

    def __init__(self) -> None:
        self._by_nbytes: dict[int, PlannedHead] = {}

    def head_of(self, data: bytes) -> PlannedHead | None:
        """The head that this message may have."""
        return self._by_nbytes.get(len(data))

    def find(self, data: bytes, scope: RequestScope, inference: TensorInference) -> Planned | None:
        """The plan of a message; None without a plan, and where the model has dropped the plan."""
        head = self._by_nbytes.get(len(data))
        contents = None if head is None else head.contents(data)
        if head is None or contents is None:
            return None
        scope.model = head.name
        inference.begin(scope, head.name, head.version)
        model = inference.look(scope, head.name, head.version)
        plan = None if model is None else model.plans.get(head.key)
        return None if model is None or plan is None else Planned(model, plan, contents)

    def note(
        self, data: bytes, raw: Sequence[bytes | memoryview], version: int | None, model: TensorModel
    ) -> bytes | None:
        """The key of a message that was answered by `model`; None if it is not worth to keep, or was noted already."""
        tail_nbytes = sum(len(received.prefix(RAW_INPUT, len(content))) + len(content) for content in raw)
        head_nbytes = at = len(data) - tail_nbytes
        if not raw or len(data) > MOST_NBYTES or not 0 < head_nbytes <= MOST_HEAD_NBYTES:
            return None
        places = []
        for content in raw:
            before = received.prefix(RAW_INPUT, len(content))
            at += len(before) + len(content)
            places.append((at - len(content), at, before))
        head = data[:head_nbytes]
        key = b"".join([head, *[before for _, _, before in places]])
        planned, earlier = PlannedHead(head, places, model.name, version, model, key), self.head_of(data)
        if earlier is not None and earlier.model is model and earlier.key == key:
            return None
        # NOTE: a client may send the fields of a message in any order, and raw contents among the others.
        contents = planned.contents(data)
        if contents is None or bytes(contents) != b"".join(raw) or not _is_whole(head):
            return None
        if len(self._by_nbytes) >= MOST_LENGTHS:
            self._by_nbytes.clear()
        self._by_nbytes[len(data)] = planned
        return key


def _is_whole(head: bytes) -> bool:
    """Whether a head is a message by itself, without raw contents: no field of the head goes on behind the head."""
    try:
        return not pb.ModelInferRequest.FromString(head).raw_input_contents
    except DecodeError:
        return False
