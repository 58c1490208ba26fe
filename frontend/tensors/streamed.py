"""Runs a request of named tensors to a decoupled model, whose answer is any number of results.

The way is that of `frontend.tensors.running`. The request is booked once, when its last result was taken or it failed;
who leaves the iteration early has gone away.

    async with closing(results(services, context, request, req.scope)) as found:
        async for result in found: ... render; after the last copy out of `data`: result.reply.check()
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from frontend.engine.answer import Answer, AnswerStream
from frontend.http.disconnect import until_disconnect
from frontend.tensors import infer_calls, running
from frontend.tensors.checking import check
from frontend.tensors.classification import classify
from frontend.tensors.job import Job
from frontend.tensors.models import TensorModel
from frontend.tensors.recorder import Times
from frontend.tensors.request import TensorRequest
from frontend.tensors.result import TensorResult
from frontend.tensors.running import Known
from ipc.errors import PenstockError

if TYPE_CHECKING:
    from frontend.engine.scope import RequestScope
    from frontend.services import Services

T = TypeVar("T")


async def results(
    services: Services, context: RequestScope, request: TensorRequest, scope: dict[str, Any] | None = None
) -> AsyncGenerator[TensorResult, None]:
    """The results as they come, each valid until the next one is asked for. `scope` is that of an HTTP request.

    Raises what `running.run` does; once the first result is there, `WorkerLost` of a worker that died.
    """
    known = Known()
    running.limit_waiting(context, request.timeout_us)
    try:
        served = await services.models.ready(request.model, request.version, context.waits_until_ns)
        known.served, context.model = served, served.id
        known.rows = check(served, request)
        job = Job(services, context, served, request, known.rows, scope)
        async with infer_calls.streamed(job) as parts:
            while (reply := await _next(parts, scope)) is not None:
                yield await _result(job, reply)
            _book(job, parts)
    except PenstockError as found:
        error = running.told_as(context, found)
        running.book_error(services, context, request, known, error)
        raise error from (found if error is not found else None)
    except (asyncio.CancelledError, GeneratorExit):
        running.book_error(services, context, request, known, context.ended_early())
        raise


@asynccontextmanager
async def closing(answers: AsyncGenerator[T, None]) -> AsyncIterator[AsyncGenerator[T, None]]:
    """Close `results`, or what is made of them, at the end; what went wrong outside is told, so that it is booked."""
    try:
        yield answers
    except Exception as error:
        told = error if isinstance(error, PenstockError) else PenstockError("internal error")
        with contextlib.suppress(PenstockError, StopAsyncIteration):
            await answers.athrow(told)
        raise
    finally:
        await answers.aclose()


async def _next(parts: AnswerStream, scope: dict[str, Any] | None) -> Answer | None:
    """The next part, None at the end. Raises `Cancelled` when the client of `scope` went away."""
    return await (_part_of(parts) if scope is None else until_disconnect(_part_of(parts), scope))


async def _part_of(parts: AnswerStream) -> Answer | None:
    return await anext(parts, None)


async def _result(job: Job, reply: Answer) -> TensorResult:
    served: TensorModel = job.served
    outputs = infer_calls.outputs_of(job, reply)
    if job.request.outputs and await classify(outputs, job.request.outputs, served, job.rows):
        reply.check()
    return TensorResult(served.name, served.version, outputs, reply, job.rows, served.config.batches)


def _book(job: Job, parts: AnswerStream) -> None:
    """An answered request, however many results it had."""
    assert parts.result is not None
    times = Times.of(parts.result.timing, running.since_ns(job.context))
    served = job.served
    recorder = job.services.extensions.recorder
    recorder.succeeded(served.model, served.version, job.rows, times, parts.result.uuid)
