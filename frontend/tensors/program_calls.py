"""Requests to programs of named tensors: inputs to where the worker reads them, the call, the outputs of its answer.

1. `ProgramCalls.run` is the way of one request: `Upload` makes the payload, `plan` makes the work, the engine runs the
   work, and `outputs_of` reads the answer.
2. `keep` keeps the plan of a plain request. `HeadPlan` runs the plan for later requests with the same head.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from frontend.engine.answer import Answer, AnswerStream
from frontend.engine.interface import Block, Engine, Payload
from frontend.engine.planning import plan
from frontend.http.threads import MAKING, in_steps, off_loop
from frontend.scope import RequestScope
from frontend.tensors.checking import CheckedRequest, check
from frontend.tensors.models import TensorModel
from frontend.tensors.regions import ClientRegions
from frontend.tensors.request import InputTensor, TensorRequest, WantedOutput
from frontend.tensors.result import OutputTensor
from frontend.tensors.uploading import InputMemory, UploadOrder
from ipc.catalog.model_config import ROW_COST
from ipc.errors import InvalidInput
from ipc.memory import copies
from ipc.memory.datatypes import DATATYPES
from ipc.settings import Settings
from ipc.wire.messages import InferCall, Region, Step, TensorInput, TensorOutput, Work

T = TypeVar("T")
ALIGNMENT = 8
"""Inputs of a payload start at multiples of this many bytes."""
SLICE_NBYTES = 1 << 20
"""Bytes that are copied before others on this event loop have their turn."""
MOST_HEADS = 64
"""Plans that a model keeps. The oldest goes for a new one."""
MOST_HEAD_NBYTES = 4096
"""Longer heads are not kept: they cost more to compare, and more memory, than most plans are worth."""


class ProgramCalls:
    """Runs requests to programs; `uploads` keeps the inputs of one sequence in order."""

    def __init__(
        self, engine: Engine, memory: InputMemory, regions: ClientRegions, settings: Settings
    ) -> None:
        self._engine, self._memory, self._regions, self._settings = engine, memory, regions, settings
        self.uploads = UploadOrder()

    async def run(self, checked: CheckedRequest) -> tuple[Answer, Callable[[], list[OutputTensor]]]:
        """Run the program: the answer, and the reader of its wanted outputs.

        Raises as `Upload.place`, `ShmExhausted` when large inputs found no room in time, `DeadlineExceeded` when the
        requests of the sequence before this one took too long, and the errors of the engine.
        """
        scope, model, request = checked.scope, checked.model, checked.request
        sequence = request.sequence if model.config.sequence_batching is not None else None
        with self._used(request), Upload(self._memory, request, scope.waits_until_ns) as upload:
            if sequence is None:
                await upload.place()
            else:
                turns = self.uploads.of(model.id, sequence.id)
                # NOTE: earlier requests may have to wait for room, so this request leaves its block until its turn.
                async with turns.take(upload.leave_block, scope.waits_until_ns):
                    await upload.place()
            step = None if sequence is None else Step(sequence.id, sequence.start, sequence.end)
            call = self._call(checked, upload.starts, step)
            cost = ROW_COST * checked.rows
            work = plan(scope, self._settings, model.id, call, cost, lane=request.lane, tensors=True)
            answer = await self._engine.run(scope, work, upload.payload)
            return answer, partial(outputs_of, answer, regions_of(request))

    @asynccontextmanager
    async def stream(self, checked: CheckedRequest) -> AsyncIterator[AnswerStream]:
        """Run a decoupled program; the context holds its work, and its inputs while it is done. Raises as `run`."""
        scope, model, request = checked.scope, checked.model, checked.request
        with self._used(request), Upload(self._memory, request, scope.waits_until_ns) as upload:
            await upload.place()
            call = self._call(checked, upload.starts, None)
            cost = ROW_COST * checked.rows
            work = plan(
                scope, self._settings, model.id, call, cost, lane=request.lane, streams=True, tensors=True
            )
            async with self._engine.stream(scope, work, upload.payload) as parts:
                # NOTE: a client may go on reading long after the work is done.
                parts.when_answered(upload.release)
                yield parts

    def _used(self, request: TensorRequest) -> AbstractContextManager[None]:
        """The clients' regions that the request uses stay listed until it has ended."""
        used = [*request.inputs, *(request.outputs or ())]
        names = [each.region.name for each in used if each.region is not None]
        return self._regions.holding(names) if names else nullcontext()

    def _call(self, checked: CheckedRequest, starts: list[int], step: Step | None) -> InferCall:
        request, outputs = checked.request, checked.request.outputs
        return InferCall(
            inputs=[self._input(tensor, at) for tensor, at in zip(request.inputs, starts, strict=True)],
            outputs=checked.model.every_output if outputs is None else [self._output(one) for one in outputs],
            rows=checked.rows,
            parameters=request.parameters,
            step=step,
            priority=request.priority,
        )

    def _input(self, tensor: InputTensor, start: int) -> TensorInput:
        if tensor.region is None:
            return TensorInput(tensor.name, tensor.datatype, tensor.shape, start, nbytes_of(tensor))
        region = self._regions.resolve(tensor.region)
        return TensorInput(tensor.name, tensor.datatype, tensor.shape, 0, tensor.region.nbytes, region)

    def _output(self, wanted: WantedOutput) -> TensorOutput:
        region: Region | None = None
        if wanted.region is not None:
            region = self._regions.resolve(wanted.region)
        return TensorOutput(wanted.name, region)


def outputs_of(answer: Answer, in_regions: Collection[str] = ()) -> list[OutputTensor]:
    """The outputs of an answer in the order in which they are wanted, as views of the answer's memory.

    Outputs `in_regions` were written to regions of the client and have no bytes here.
    """
    return [
        OutputTensor(
            info.name,
            info.datatype,
            info.shape,
            None if info.name in in_regions else answer.raw(info.name),
            info.nbytes,
        )
        for info in answer.infos
    ]


def regions_of(request: TensorRequest) -> set[str]:
    """The names of the outputs that are wanted in regions of the client."""
    return {output.name for output in request.outputs or () if output.region is not None}


class Upload:
    """The inputs of one request in a payload, the message or a block of the input arena, where a worker reads them.

    1. Small inputs are joined and travel in the message. Large inputs are copied once, into a block.
    2. Inputs that were received into a block stay in the block. Other inputs go behind them, where reading left room.
       If the room is too small, the request gives the block back, since no request waits for room in the arena and
       holds a block (`uploading`).
    3. An input with a recipe is made in its place, step by step in a thread, once the place is there. Without a block
       the place is private memory, which counts as a body does. Pixels to be decoded are bounded for all requests
       together.

        with Upload(memory, request, scope.waits_until_ns) as upload:
            await upload.place()
            ... send upload.payload, each input of which begins at upload.starts

    Leaving the context, or `release`, frees memory made for the inputs.
    """

    def __init__(self, memory: InputMemory, request: TensorRequest, deadline_ns: int) -> None:
        self.starts: list[int] = []
        self.payload: Payload = None
        self._memory, self._request, self._deadline_ns = memory, request, deadline_ns
        self._made: ExitStack | None = None

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """The payload is read no more. Safe to call twice."""
        if self._made is not None:
            self._made.close()

    def _keep(self, made: AbstractContextManager[T]) -> T:
        """Give `made` back with the payload."""
        # PERF: most payloads are bytes, with nothing to give back.
        self._made = self._made or ExitStack()
        return self._made.enter_context(made)

    async def place(self) -> None:
        """Put all inputs into a payload.

        Raises `ShmExhausted` when there was no room in time, `QueueFull` when there is none for what recipes make in
        private memory or too many pixels are being decoded, and what recipes raise.
        """
        inputs = self._request.inputs
        if all(tensor.recipe is None for tensor in inputs):
            await self._place()
            return
        with ExitStack() as making:
            for tensor in inputs:
                if tensor.recipe is not None:
                    assert tensor.data is not None
                    plan = await in_steps(tensor.recipe.plan(tensor.data), MAKING)
                    tensor.shape = plan.shape
                    if plan.pixels:
                        making.enter_context(self._memory.decoding(plan.pixels))
            await self._place()

    async def _place(self) -> None:
        inputs = self._request.inputs
        if self._request.block is not None:
            if await self._place_beside():
                return
            await self.leave_block()
        self.starts, nbytes = laid_out(inputs)
        if nbytes > self._memory.inline_nbytes:
            reserved = await self._memory.room.reserve(nbytes, self._deadline_ns)
            if reserved is not None:
                self.payload = self._keep(reserved)
                await self._fill(range(len(inputs)), reserved.buffer)
                return
        if all(tensor.recipe is None for tensor in inputs):
            self.payload = joined(inputs)
            return
        self._keep(self._memory.bodies.holding(nbytes))
        self.payload = np.empty(nbytes, np.uint8).data
        await self._fill(range(len(inputs)), self.payload)

    async def leave_block(self) -> None:
        """Go on in private memory, and give the block back into which inputs were received."""
        block = self._request.block
        if block is None:
            return
        for tensor in self._request.inputs:
            if tensor.data and _place_in(block, tensor.data) is not None:
                copies.count("own", len(tensor.data))
                tensor.data = await off_loop(bytes, tensor.data)
        self._request.block = None
        block.release()

    async def _place_beside(self) -> bool:
        """Put the inputs into the block that received some of them, if that block has room for all."""
        inputs, block = self._request.inputs, self._request.block
        if block is None:
            return False
        starts, received, nbytes = beside(block, inputs)
        if nbytes > len(block.buffer):
            return False
        self.starts, self.payload = starts, block
        block.shorten(nbytes)
        _clear(block.buffer, received)
        await self._fill([at for at in range(len(inputs)) if not _is_in(block, inputs[at])], block.buffer)
        return True

    async def _fill(self, chosen: Sequence[int], memory: memoryview) -> None:
        """Put these inputs into the payload's memory."""
        for at in chosen:
            tensor, start = self._request.inputs[at], self.starts[at]
            if tensor.data is None:
                continue
            place = memory[start : start + nbytes_of(tensor)]
            _clear(memory, start + len(place))
            if tensor.recipe is None:
                await _copy(tensor.data, place)
            elif place:
                await in_steps(tensor.recipe.write(tensor.data, tensor.shape, place), MAKING)


def nbytes_of(tensor: InputTensor) -> int:
    """Bytes that an input takes in a payload; the shape of one with a recipe must be known."""
    if tensor.recipe is not None:
        return math.prod(tensor.shape) * DATATYPES[tensor.datatype].nbytes
    return 0 if tensor.data is None else len(tensor.data)


def beside(block: Block, inputs: Sequence[InputTensor]) -> tuple[list[int], int, int]:
    """Start of each input if new inputs go behind those in the block; the end of the block's inputs, and of all."""
    places = [None if tensor.data is None else _place_in(block, tensor.data) for tensor in inputs]
    ends = [at + len(tensor.data or b"") for tensor, at in zip(inputs, places, strict=True) if at is not None]
    received = end = max(ends, default=0)
    starts = []
    for tensor, at in zip(inputs, places, strict=True):
        if at is None or tensor.recipe is not None:
            at = _aligned(end) if nbytes_of(tensor) else 0
            end = max(end, at + nbytes_of(tensor))
        starts.append(at)
    return starts, received, end


def laid_out(inputs: Sequence[InputTensor]) -> tuple[list[int], int]:
    """Start of each input in a payload of all inputs, and the number of bytes of the payload."""
    starts, at = [], 0
    for tensor in inputs:
        starts.append(at)
        at += _aligned(nbytes_of(tensor))
    return starts, at


def _clear(memory: memoryview, end: int) -> None:
    """Clear the gaps between inputs, so that equal requests have equal payloads."""
    gap = memory[end : _aligned(end)]
    gap[:] = bytes(len(gap))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _is_in(block: Block, tensor: InputTensor) -> bool:
    """Whether an input lies in a block in the form that the worker reads."""
    return tensor.recipe is None and bool(tensor.data) and _place_in(block, tensor.data or b"") is not None


def _place_in(block: Block, data: bytes | memoryview) -> int | None:
    """First byte of data within a block; None for data elsewhere, or no data."""
    if not data:
        return None
    place = _address(data) - _address(block.buffer)
    return place if 0 <= place <= len(block.buffer) - len(data) else None


def _address(data: bytes | memoryview) -> int:
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


def joined(inputs: Sequence[InputTensor]) -> bytes | memoryview:
    """The payload as bytes, laid out as `laid_out` says."""
    if len(inputs) == 1:
        return inputs[0].data or b""
    parts: list[bytes | memoryview] = []
    for tensor in inputs:
        if tensor.data is not None:
            parts.append(tensor.data)
            if len(tensor.data) % ALIGNMENT:
                parts.append(bytes(-len(tensor.data) % ALIGNMENT))
    return b"".join(parts)


async def _copy(data: bytes | memoryview, place: memoryview) -> None:
    """Copy an input to its place, slice by slice."""
    view = memoryview(data)
    copies.count("receive", len(view))
    for at in range(0, len(view), SLICE_NBYTES):
        piece = view[at : at + SLICE_NBYTES]
        place[at : at + len(piece)] = piece
        if at:
            await asyncio.sleep(0)


@dataclass(slots=True, frozen=True)
class HeadPlan:
    """The plan of all requests with one head. `wanted` is what the protocol renders the answer with.

    A client that asks the same question of other numbers sends the same head each time: names, datatypes, shapes and
    sizes of its tensors. Only the bytes behind the head differ. So the head is read, checked and planned once per
    model, and a request with an equal head and as many bytes runs the kept plan. The plans of a model go with its
    `TensorModel`, and so with every change of the model's state, configuration or version.

    The inputs take `nbytes` bytes behind the head, one after another; `cuts` has begin, end and padding of each, or is
    empty where the bytes are the payload as they stand.
    """

    version: int | None
    call: InferCall
    lane: str
    nbytes: int
    cuts: Sequence[tuple[int, int, bytes]]
    wanted: Any

    def work(self, scope: RequestScope, settings: Settings, model: TensorModel) -> Work:
        """The work of the next request."""
        cost = ROW_COST * self.call.rows
        return plan(scope, settings, model.id, self.call, cost, lane=self.lane, tensors=True)

    def payload(self, data: memoryview) -> bytes | memoryview:
        """The bytes behind the head as `laid_out` places the inputs."""
        if not self.cuts:
            return data
        return b"".join([piece for begin, end, padding in self.cuts for piece in (data[begin:end], padding)])


def keep(
    model: TensorModel, head: bytes | str, behind_nbytes: int, request: TensorRequest, wanted: Any
) -> None:
    """Keep the plan of a request that has run, if the request is plain; so many bytes lay behind `head`.

    Plain are requests to programs with small inputs behind the head. Regions, encoded images, sequences, timeouts,
    classes, and elements within the head take the long way (`TensorInference.run`).
    """
    if len(head) > MOST_HEAD_NBYTES or not _is_plain(model, request):
        return
    sizes = [len(tensor.data or b"") for tensor in request.inputs]
    if sum(sizes) != behind_nbytes:
        # Elements of other inputs lay within the head.
        return
    try:
        rows = check(model, request)
    except InvalidInput:
        # The model changed while the request ran.
        return
    starts, _ = laid_out(request.inputs)
    outputs = model.every_output
    if request.outputs is not None:
        outputs = [TensorOutput(output.name, None) for output in request.outputs]
    inputs = [
        TensorInput(tensor.name, tensor.datatype, list(tensor.shape), start, size)
        for tensor, start, size in zip(request.inputs, starts, sizes, strict=True)
    ]
    call = InferCall(inputs, outputs, rows, dict(request.parameters), None, request.priority)
    plans = model.plans
    if len(plans) >= MOST_HEADS:
        del plans[next(iter(plans))]
    plans[head] = HeadPlan(request.version, call, request.lane, sum(sizes), _cuts(sizes), wanted)


def _is_plain(model: TensorModel, request: TensorRequest) -> bool:
    config = model.config
    if (
        model.kind != "infer"
        or config.decoupled
        or config.sequence_batching is not None
        or request.timeout_us
    ):
        return False
    given = all(
        tensor.data is not None and tensor.region is None and tensor.recipe is None
        for tensor in request.inputs
    )
    return given and all(output.region is None and output.classes is None for output in request.outputs or ())


def _cuts(sizes: Sequence[int]) -> list[tuple[int, int, bytes]]:
    if len(sizes) == 1 or all(size % ALIGNMENT == 0 for size in sizes):
        return []
    ends = list(accumulate(sizes))
    return [(end - size, end, bytes(-size % ALIGNMENT)) for size, end in zip(sizes, ends, strict=True)]
