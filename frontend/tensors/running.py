"""Runs a request of named tensors: the one way of both tensor protocols to the engine.

1. Find the model, wait for it if it is being loaded, and check the request against its configuration.
2. Make a call of it and run it: `infer_calls` for programs of named tensors, `catalog_calls` for catalog models.
3. Read the outputs, rank those that are wanted as classes, and book the request in the statistics.

A protocol parses into a `TensorRequest`, calls `run`, renders the `TensorResult` and ends its lease:

    served = await services.models.ready(name, version, context.deadline_ns)
    result = await run(services, context, TensorRequest(name, version, ...), req.scope)
    try: ... render; after the last copy out of `data`: result.reply.check()
    finally: result.reply.release()

Decoupled models are asked by `frontend.tensors.streamed`, in the same way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from frontend.http.disconnect import until_disconnect
from frontend.tensors import catalog_calls, infer_calls
from frontend.tensors.checking import check
from frontend.tensors.classification import classify
from frontend.tensors.job import Job
from frontend.tensors.models import TensorModel
from frontend.tensors.recorder import Times
from frontend.tensors.refusals import TimeoutExpired
from frontend.tensors.request import TensorRequest
from frontend.tensors.result import TensorResult
from ipc.errors import DeadlineExceeded, PenstockError, Unsupported

if TYPE_CHECKING:
    from frontend.engine.scope import RequestScope
    from frontend.services import Services


@dataclass(slots=True)
class Known:
    """What is known of a request so far, for the statistics."""

    served: TensorModel | None = None
    rows: int = 0


async def run(
    services: Services,
    context: RequestScope,
    request: TensorRequest,
    scope: dict[str, Any] | None = None,
    *,
    book: bool = True,
) -> TensorResult:
    """The result; its lease is the caller's to end. `scope` is that of an HTTP request, whose client may go away.

    The request's inputs are in no use any more when this returns or raises. It books the request in the statistics;
    what fails before this is called is the protocol's to book (`book_failure`), and so is a result that may yet turn
    out not to be sayable (`book` false: `book_answered` or `book_failure`).

    Raises:
        UnavailableModel, ModelLoading, NoReplica: as `TensorModels.ready`.
        InvalidInput: what `checking.check` refuses, and what the model refuses.
        TimeoutExpired: `timeout_us` passed before a device began it.
        DeadlineExceeded, QueueFull, ShmExhausted, Cancelled and every other error of the engine.
    """
    known = Known()
    limit_waiting(context, request.timeout_us)
    try:
        work = _answer(services, context, request, scope, known)
        result = await (work if scope is None else until_disconnect(work, scope))
    except PenstockError as found:
        error = told_as(context, found)
        book_error(services, context, request, known, error)
        raise error from (found if error is not found else None)
    except asyncio.CancelledError:
        book_error(services, context, request, known, context.ended_early())
        raise
    assert known.served is not None
    if book:
        book_answered(services, context, known.served.model, result)
    return result


def limit_waiting(context: RequestScope, timeout_us: int) -> None:
    """Let the request wait no longer than its own timeout says, which counts from its arrival; 0 is no timeout."""
    if not timeout_us:
        return
    until_ns = time.monotonic_ns() + timeout_us * 1000 - since_ns(context)
    if until_ns < context.deadline_ns:
        context.start_by_ns = until_ns


def told_as(context: RequestScope, error: PenstockError) -> PenstockError:
    """What the error of a request is told as: what its own timeout ended was no deadline of its client."""
    timed_out = 0 < context.start_by_ns <= time.monotonic_ns() < context.deadline_ns
    if timed_out and isinstance(error, DeadlineExceeded):
        return TimeoutExpired("Request timeout expired", retry_after_s=1)
    return error


def since_ns(context: RequestScope) -> int:
    """Nanoseconds since the request arrived."""
    return int((time.perf_counter() - context.started) * 1e9)


async def _answer(
    services: Services,
    context: RequestScope,
    request: TensorRequest,
    scope: dict[str, Any] | None,
    known: Known,
) -> TensorResult:
    served = await services.models.ready(request.model, request.version, context.waits_until_ns)
    known.served, context.model = served, served.id
    if served.config.decoupled:
        raise Unsupported(
            f"model {served.name!a} gives any number of responses to a request (model_transaction_policy.decoupled): "
            "ask it with generate_stream, or ModelStreamInfer over gRPC, of KServe v2"
        )
    known.rows = rows = check(served, request)
    job = Job(services, context, served, request, rows, scope)
    kind = infer_calls if served.kind == "infer" else catalog_calls
    reply, read = await kind.call(job)
    try:
        outputs = read()
        if request.outputs and await classify(outputs, request.outputs, served, rows):
            reply.check()
        return TensorResult(served.name, served.version, outputs, reply, rows, served.config.batches)
    except BaseException:
        reply.release()
        raise


def book_error(
    services: Services, context: RequestScope, request: TensorRequest, known: Known, error: PenstockError
) -> None:
    """Book a failed request in the statistics."""
    served = known.served
    if served is None:
        book_failure(services, context, request.model, request.version, error)
        return
    elapsed_ns = since_ns(context)
    services.extensions.recorder.failed(served.model, served.version, known.rows, error, elapsed_ns)


def book_answered(services: Services, context: RequestScope, model: str, result: TensorResult) -> None:
    """Book a result of `run` in the statistics; `model` is its full name."""
    times = Times.of(result.reply.timing, since_ns(context))
    services.extensions.recorder.succeeded(model, result.version, result.rows, times, result.reply.uuid)


@contextmanager
def booking_failures(
    services: Services, context: RequestScope, name: str, version: int | None = None, rows: int = 0
) -> Iterator[None]:
    """Book what fails inside, and what is cancelled there, as `book_failure` does."""
    try:
        yield
    except PenstockError as error:
        book_failure(services, context, name, version, error, rows)
        raise
    except asyncio.CancelledError:
        book_failure(services, context, name, version, context.ended_early(), rows)
        raise


def book_failure(
    services: Services,
    context: RequestScope,
    name: str,
    version: int | None,
    error: PenstockError,
    rows: int = 0,
) -> None:
    """Book a request in the statistics that failed before `run` was called, or after; unknown models are not booked.

    `rows` 0 is for a request whose batch size was not known yet.
    """
    found = services.models.known(name)
    if found is not None:
        model, versions = found
        known = version if version in versions else None
        services.extensions.recorder.failed(model, known, rows, error, since_ns(context))
