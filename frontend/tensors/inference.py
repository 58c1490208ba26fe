"""The way of a request of named tensors to the engine, for both tensor protocols.

1. `find` looks the model up and waits for its load if need be; protocols parse with what it returns.
2. `run` checks the request against the model's configuration and runs the call of its kind: `program_calls` for
   programs of named tensors, `catalog_calls` for catalog models.
3. The outputs are read, and ranked where classes are wanted. What the statistics count is noted in the scope.
4. `keep_plan` keeps the plan of a plain request by its head, and `run_plan` runs the plan for the next equal head.

A protocol parses into a `TensorRequest` and renders the `TensorResult` while its answer is open:

    model = await inference.find(scope, name, version)
    result = await inference.run(scope, model, TensorRequest(name, version, ...))
    with result.answer:
        ... render
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from frontend.engine.answer import Answer
from frontend.engine.interface import Engine
from frontend.scope import InferenceRecord, RequestScope
from frontend.tensors import program_calls
from frontend.tensors.catalog_calls import CatalogCalls
from frontend.tensors.checking import CheckedRequest, check
from frontend.tensors.models import TensorModel, TensorModels
from frontend.tensors.program_calls import HeadPlan, ProgramCalls, outputs_of, regions_of
from frontend.tensors.regions import ClientRegions
from frontend.tensors.request import TensorRequest, TimeoutExpired, UnavailableModel
from frontend.tensors.result import OutputTensor, TensorResult, classify
from frontend.tensors.uploading import InputMemory
from ipc.errors import (
    DeadlineExceeded,
    DependencyConflict,
    ModelLoadFailed,
    ModelNotFound,
    PenstockError,
    Unsupported,
)
from ipc.settings import Settings


class TensorInference:
    """Runs the requests of named tensors of one frontend."""

    def __init__(
        self,
        engine: Engine,
        models: TensorModels,
        memory: InputMemory,
        regions: ClientRegions,
        settings: Settings,
    ) -> None:
        """`memory` is where large inputs go; bodies are received into it before their requests are run."""
        self._engine, self._models, self.inputs, self._settings = engine, models, memory, settings
        self._programs = ProgramCalls(engine, memory, regions, settings)
        self._catalog = CatalogCalls(engine, models.directory.catalog, settings)

    @staticmethod
    def begin(scope: RequestScope, name: str, version: int | None) -> InferenceRecord:
        """Have the request counted in the statistics of a model, however it ends."""
        scope.inference = record = InferenceRecord(name, version)
        return record

    def look(self, scope: RequestScope, name: str, version: int | None) -> TensorModel | None:
        """The model if it is loaded; None for one to be waited for, or refused, by `find`. The request has begun."""
        try:
            model = self._models.find(name, version)
        except PenstockError:
            return None
        _note_model(scope, model)
        return model if model.is_loaded else None

    async def find(
        self, scope: RequestScope, name: str, version: int | None, timeout_us: int = 0
    ) -> TensorModel:
        """The model of a request, once the model is loaded; a loaded model comes without waiting.

        `timeout_us` is the request's own timeout, if it is known already. Raises as `TensorModels.ready`, and
        `TimeoutExpired`.
        """
        if scope.inference is None:
            self.begin(scope, name, version)
        model = self.look(scope, name, version)
        if model is None:
            _limit_waiting(scope, timeout_us)
            try:
                model = await self._models.ready(name, version, scope.waits_until_ns)
            except DeadlineExceeded as error:
                raise _told(scope, error) from error
            _note_model(scope, model)
        return model

    async def run(self, scope: RequestScope, model: TensorModel, request: TensorRequest) -> TensorResult:
        """The result, whose answer the caller closes. When `run` has ended, nobody reads the inputs any more.

        Raises:
            UnavailableModel: the model was taken away since it was found.
            Unsupported: the model writes text, or gives any number of responses.
            InvalidInput: what `checking.check` refuses, and what the model refuses.
            TimeoutExpired: `timeout_us` passed before a device began it.
            DeadlineExceeded, QueueFull, ShmExhausted and every other error of the engine.
        """
        _limit_waiting(scope, request.timeout_us)
        try:
            return await self._run(scope, self._current(scope, model, request), request)
        except DeadlineExceeded as error:
            raise _told(scope, error) from error

    async def _run(self, scope: RequestScope, model: TensorModel, request: TensorRequest) -> TensorResult:
        if model.config.decoupled:
            raise Unsupported(
                f"model {model.name!a} gives any number of responses to a request "
                "(model_transaction_policy.decoupled): ask it with generate_stream, or ModelStreamInfer over gRPC, of "
                "KServe v2"
            )
        checked = _checked(scope, model, request)
        calls: ProgramCalls | CatalogCalls = self._programs if model.kind == "infer" else self._catalog
        try:
            answer, read = await calls.run(checked)
        except (ModelLoadFailed, DependencyConflict, ModelNotFound) as error:
            raise self._unavailable(request.model, request.version, error) from error
        try:
            result = await _result(checked, answer, read())
        except BaseException:
            answer.release()
            raise
        _note_answer(scope, answer)
        return result

    def keep_plan(
        self, model: TensorModel, head: bytes | str, behind_nbytes: int, request: TensorRequest, wanted: Any
    ) -> None:
        """Keep the plan of a request that was run, for requests with the same head and as many bytes behind.

        `wanted` is what the protocol keeps beside the plan. Inputs that travel in shared memory have no plan.
        """
        if behind_nbytes <= self.inputs.inline_nbytes:
            program_calls.keep(model, head, behind_nbytes, request, wanted)

    async def run_plan(
        self, scope: RequestScope, model: TensorModel, plan: HeadPlan, data: memoryview
    ) -> TensorResult:
        """The result of a kept plan over the bytes behind the head, `plan.nbytes` of them. Raises as `run`.

        The model was found in this turn of the event loop.
        """
        if scope.inference is not None:
            scope.inference.rows = plan.call.rows
        try:
            answer = await self._engine.run(
                scope, plan.work(scope, self._settings, model), plan.payload(data)
            )
        except (ModelLoadFailed, DependencyConflict, ModelNotFound) as error:
            raise self._unavailable(model.name, plan.version, error) from error
        try:
            outputs = outputs_of(answer)
        except BaseException:
            answer.release()
            raise
        _note_answer(scope, answer)
        return TensorResult(model.name, model.version, outputs, answer, plan.call.rows, model.config.batches)

    async def stream(
        self, scope: RequestScope, model: TensorModel, request: TensorRequest
    ) -> AsyncGenerator[TensorResult, None]:
        """The results of a decoupled model as they come, each valid until the next one is asked for.

        Close it when done (`contextlib.aclosing`). Raises as `run`; once the first result is there, `WorkerLost` of a
        worker that died.
        """
        _limit_waiting(scope, request.timeout_us)
        checked = _checked(scope, self._current(scope, model, request), request)
        try:
            in_regions = regions_of(request)
            async with self._programs.stream(checked) as parts:
                async for answer in parts:
                    yield await _result(checked, answer, outputs_of(answer, in_regions))
                assert parts.result is not None
                _note_answer(scope, parts.result)
        except (ModelLoadFailed, DependencyConflict, ModelNotFound) as error:
            raise self._unavailable(request.model, request.version, error) from error
        except DeadlineExceeded as error:
            raise _told(scope, error) from error

    def _current(self, scope: RequestScope, model: TensorModel, request: TensorRequest) -> TensorModel:
        """The model as it is now: while the body arrived, it may have got another configuration or version."""
        return self.look(scope, request.model, request.version) or model

    def _unavailable(self, name: str, version: int | None, error: PenstockError) -> UnavailableModel:
        """Why the model that was found cannot answer any more, under the name that the client uses."""
        if isinstance(error, ModelNotFound):
            return self._models.gone(name, version)
        return UnavailableModel(name, version, "failed", error.message)


def _note_model(scope: RequestScope, model: TensorModel) -> None:
    scope.model, record = model.id, scope.inference
    if record is not None:
        record.model, record.version, record.found = model.model, model.version, True


def _note_answer(scope: RequestScope, answer: Answer) -> None:
    record = scope.inference
    if record is not None:
        record.timing, record.uuid, record.cached = answer.timing, answer.uuid, scope.cache_hits or 0


def _checked(scope: RequestScope, model: TensorModel, request: TensorRequest) -> CheckedRequest:
    if model.kind == "chat":
        raise Unsupported(
            f"model {model.name!a} writes text, and has no tensors: ask it with /v1/chat/completions"
        )
    rows = check(model, request)
    if scope.inference is not None:
        scope.inference.rows = rows
    return CheckedRequest(scope, model, request, rows)


async def _result(checked: CheckedRequest, answer: Answer, outputs: list[OutputTensor]) -> TensorResult:
    model, wanted_outputs = checked.model, checked.request.outputs
    if wanted_outputs:
        await classify(outputs, wanted_outputs, model, checked.rows)
    return TensorResult(model.name, model.version, outputs, answer, checked.rows, model.config.batches)


def _limit_waiting(scope: RequestScope, timeout_us: int) -> None:
    """Let the request wait no longer than its own timeout says, which counts from its arrival; 0 is no timeout."""
    if not timeout_us:
        return
    until_ns = scope.began_ns + timeout_us * 1000
    if until_ns < scope.deadline_ns:
        scope.start_by_ns = until_ns


def _told(scope: RequestScope, error: DeadlineExceeded) -> DeadlineExceeded:
    """The error of a request that waited too long: its own timeout ended it, or the deadline of its client."""
    if 0 < scope.start_by_ns <= time.monotonic_ns() < scope.deadline_ns:
        return TimeoutExpired("Request timeout expired", retry_after_s=1)
    return error
