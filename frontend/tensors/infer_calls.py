"""Requests to programs of named tensors: inputs to where the worker reads them, the call, the outputs of its reply."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from frontend.tensors import uploading
from frontend.tensors.job import Called, Job
from frontend.tensors.request import InputTensor, WantedOutput
from frontend.tensors.result import OutputTensor
from ipc.channel import Payload
from ipc.client import PartStream, Reply
from ipc.input_arena import InputBlock
from ipc.messages import InferCall, Region, Step, TensorInput, TensorOutput
from ipc.model_config import ROW_COST


async def call(job: Job) -> Called:
    """Run the program. Raises `ShmExhausted` when large inputs found no room in time."""
    request = job.request
    step = request.sequence if job.served.config.sequence_batching is not None else None
    if step is None:
        starts, payload = await _upload(job)
    else:
        async with job.services.uploads.of(job.served.id, step.id):
            starts, payload = await _upload(job)
    with _releasing(job, payload):
        made = _call(job, starts, None if step is None else Step(step.id, step.start, step.end))
        reply = await job.run(made, ROW_COST * job.rows, payload)
        return reply, partial(outputs_of, job, reply)


@asynccontextmanager
async def streamed(job: Job) -> AsyncIterator[PartStream]:
    """Run a decoupled program; the context holds its work, and its inputs while it is done. Raises as `call`."""
    starts, payload = await _upload(job)
    with _releasing(job, payload) as release:
        async with job.stream(_call(job, starts, None), ROW_COST * job.rows, payload) as parts:
            # NOTE: a client may read what is done for long.
            parts.when_answered(release)
            yield parts


@contextmanager
def _releasing(job: Job, payload: Payload) -> Iterator[Callable[[], None]]:
    """Give a payload back that was made for the call, at the end or by what is yielded before."""

    def release() -> None:
        if isinstance(payload, InputBlock) and payload is not job.request.block:
            payload.release()

    try:
        yield release
    finally:
        release()


def _call(job: Job, starts: list[int], step: Step | None) -> InferCall:
    request, wanted = job.request, job.request.outputs
    return InferCall(
        inputs=[_input(job, tensor, at) for tensor, at in zip(request.inputs, starts, strict=True)],
        outputs=job.served.every_output if wanted is None else [_output(job, one) for one in wanted],
        rows=job.rows,
        parameters=request.parameters,
        step=step,
        priority=request.priority,
        timeout_us=request.timeout_us,
    )


async def _upload(job: Job) -> tuple[list[int], Payload]:
    """The place of each input in the payload, and the payload."""
    inputs, received = job.request.inputs, job.request.block
    places = None if received is None else uploading.places_in(received, inputs)
    if places is not None:
        return places, received
    starts, nbytes = uploading.laid_out(inputs)
    if nbytes > job.services.settings.arena.input_inline_bytes:
        block = await job.services.room.reserve(nbytes, job.context.deadline_ns)
        if block is not None:
            try:
                await uploading.copy(inputs, starts, block)
            except BaseException:
                block.release()
                raise
            return starts, block
    return starts, uploading.joined(inputs)


def _input(job: Job, tensor: InputTensor, start: int) -> TensorInput:
    if tensor.region is None:
        nbytes = 0 if tensor.data is None else len(tensor.data)
        return TensorInput(tensor.name, tensor.datatype, tensor.shape, start, nbytes)
    region = job.services.extensions.regions.resolve(tensor.region)
    return TensorInput(tensor.name, tensor.datatype, tensor.shape, 0, tensor.region.nbytes, region)


def _output(job: Job, wanted: WantedOutput) -> TensorOutput:
    region: Region | None = None
    if wanted.region is not None:
        region = job.services.extensions.regions.resolve(wanted.region)
    return TensorOutput(wanted.name, region)


def outputs_of(job: Job, reply: Reply) -> list[OutputTensor]:
    """The outputs in the order in which they are wanted, as views of the reply's memory."""
    regions = {wanted.name for wanted in job.request.outputs or () if wanted.region is not None}
    return [
        OutputTensor(
            info.name,
            info.datatype,
            info.shape,
            None if info.name in regions else reply.raw(info.name),
            info.nbytes,
        )
        for info in reply.infos
    ]
