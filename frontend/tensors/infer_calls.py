"""Requests to programs of named tensors: inputs to where the worker reads them, the call, the outputs of its reply."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial

from frontend.engine.answer import Answer, AnswerStream
from frontend.tensors.job import Called, Job
from frontend.tensors.placing import Upload, nbytes_of
from frontend.tensors.request import InputTensor, Sequence, WantedOutput
from frontend.tensors.result import OutputTensor
from ipc.catalog.model_config import ROW_COST
from ipc.wire.messages import InferCall, Region, Step, TensorInput, TensorOutput


async def call(job: Job) -> Called:
    """Run the program.

    Raises as `Upload.place`, `ShmExhausted` when large inputs found no room in time, and `DeadlineExceeded` when the
    requests of the sequence before this one took too long.
    """
    request = job.request
    step = request.sequence if job.served.config.sequence_batching is not None else None
    with _regions(job), Upload(job.services, request, job.context.waits_until_ns) as upload:
        if step is None:
            await upload.place()
        else:
            await _place_in_order(job, upload, step)
        made = _call(job, upload.starts, None if step is None else Step(step.id, step.start, step.end))
        reply = await job.run(made, ROW_COST * job.rows, upload.payload)
        return reply, partial(outputs_of, job, reply)


async def _place_in_order(job: Job, upload: Upload, step: Sequence) -> None:
    """Put the inputs into the payload when those of the requests before it, of the same sequence, are there."""
    turns = job.services.uploads.of(job.served.id, step.id)
    # NOTE: who is before this request may have to wait for room.
    async with turns.take(upload.leave_block, job.context.waits_until_ns):
        await upload.place()


@asynccontextmanager
async def streamed(job: Job) -> AsyncIterator[AnswerStream]:
    """Run a decoupled program; the context holds its work, and its inputs while it is done. Raises as `call`."""
    with _regions(job), Upload(job.services, job.request, job.context.waits_until_ns) as upload:
        await upload.place()
        made = _call(job, upload.starts, None)
        async with job.stream(made, ROW_COST * job.rows, upload.payload) as parts:
            # NOTE: a client may read what is done for long.
            parts.when_answered(upload.release)
            yield parts


def _regions(job: Job) -> AbstractContextManager[None]:
    """The clients' regions that the request uses stay listed until it has ended."""
    used = [*job.request.inputs, *(job.request.outputs or ())]
    names = [each.region.name for each in used if each.region is not None]
    return job.services.extensions.regions.holding(names) if names else nullcontext()


def _call(job: Job, starts: list[int], step: Step | None) -> InferCall:
    request, wanted = job.request, job.request.outputs
    return InferCall(
        inputs=[_input(job, tensor, at) for tensor, at in zip(request.inputs, starts, strict=True)],
        outputs=job.served.every_output if wanted is None else [_output(job, one) for one in wanted],
        rows=job.rows,
        parameters=request.parameters,
        step=step,
        priority=request.priority,
    )


def _input(job: Job, tensor: InputTensor, start: int) -> TensorInput:
    if tensor.region is None:
        return TensorInput(tensor.name, tensor.datatype, tensor.shape, start, nbytes_of(tensor))
    region = job.services.extensions.regions.resolve(tensor.region)
    return TensorInput(tensor.name, tensor.datatype, tensor.shape, 0, tensor.region.nbytes, region)


def _output(job: Job, wanted: WantedOutput) -> TensorOutput:
    region: Region | None = None
    if wanted.region is not None:
        region = job.services.extensions.regions.resolve(wanted.region)
    return TensorOutput(wanted.name, region)


def outputs_of(job: Job, reply: Answer) -> list[OutputTensor]:
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
