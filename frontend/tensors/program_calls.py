"""Requests to programs of named tensors: inputs to where the worker reads them, the call, the outputs of its answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial

from frontend.engine.answer import Answer, AnswerStream
from frontend.engine.interface import Engine
from frontend.engine.planning import plan
from frontend.tensors.checking import CheckedRequest
from frontend.tensors.placing import Upload, nbytes_of
from frontend.tensors.regions import ClientRegions
from frontend.tensors.request import InputTensor, TensorRequest, WantedOutput
from frontend.tensors.result import OutputTensor
from frontend.tensors.uploading import InputMemory, UploadOrder
from ipc.catalog.model_config import ROW_COST
from ipc.settings import Settings
from ipc.wire.messages import InferCall, Region, Step, TensorInput, TensorOutput


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
        step = request.sequence if model.config.sequence_batching is not None else None
        with self._used(request), Upload(self._memory, request, scope.waits_until_ns) as upload:
            if step is None:
                await upload.place()
            else:
                turns = self.uploads.of(model.id, step.id)
                # NOTE: requests before this one may have to wait for room, so this one leaves its block meanwhile.
                async with turns.take(upload.leave_block, scope.waits_until_ns):
                    await upload.place()
            place = None if step is None else Step(step.id, step.start, step.end)
            call = self._call(checked, upload.starts, place)
            cost = ROW_COST * checked.rows
            work = plan(scope, self._settings, model.id, call, cost, lane=checked.lane)
            answer = await self._engine.run(scope, work, upload.payload)
            return answer, partial(self.outputs, checked, answer)

    @asynccontextmanager
    async def stream(self, checked: CheckedRequest) -> AsyncIterator[AnswerStream]:
        """Run a decoupled program; the context holds its work, and its inputs while it is done. Raises as `run`."""
        scope, model, request = checked.scope, checked.model, checked.request
        with self._used(request), Upload(self._memory, request, scope.waits_until_ns) as upload:
            await upload.place()
            call = self._call(checked, upload.starts, None)
            cost = ROW_COST * checked.rows
            work = plan(scope, self._settings, model.id, call, cost, lane=checked.lane, streams=True)
            async with self._engine.stream(scope, work, upload.payload) as parts:
                # NOTE: a client may go on reading long after the work is done.
                parts.when_answered(upload.release)
                yield parts

    @staticmethod
    def outputs(checked: CheckedRequest, answer: Answer) -> list[OutputTensor]:
        """The outputs in the order in which they are wanted, as views of the answer's memory."""
        regions = {wanted.name for wanted in checked.request.outputs or () if wanted.region is not None}
        return [
            OutputTensor(
                info.name,
                info.datatype,
                info.shape,
                None if info.name in regions else answer.raw(info.name),
                info.nbytes,
            )
            for info in answer.infos
        ]

    def _used(self, request: TensorRequest) -> AbstractContextManager[None]:
        """The clients' regions that the request uses stay listed until it has ended."""
        used = [*request.inputs, *(request.outputs or ())]
        names = [each.region.name for each in used if each.region is not None]
        return self._regions.holding(names) if names else nullcontext()

    def _call(self, checked: CheckedRequest, starts: list[int], step: Step | None) -> InferCall:
        request, wanted = checked.request, checked.request.outputs
        return InferCall(
            inputs=[self._input(tensor, at) for tensor, at in zip(request.inputs, starts, strict=True)],
            outputs=checked.model.every_output if wanted is None else [self._output(one) for one in wanted],
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
