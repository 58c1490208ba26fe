"""The one place where a request ends, over HTTP and gRPC alike.

A request is counted in the metrics and in the statistics of tensor models, remembered for the live page, and its span
is closed, from what the request's scope knows by then. Nothing else books a request.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from frontend.engine.scope import RequestScope
from frontend.services import Services
from frontend.status.recent import Recent


class Outcome(NamedTuple):
    """How a request was asked and answered.

    An rpc has no `method`; its `status` is the HTTP status of the same outcome, so that both count alike.
    """

    method: str
    path: str
    route: str
    status: int


def finish(services: Services, made: RequestScope, protocol: str, outcome: Outcome) -> None:
    """One request of `protocol` has ended; without an operation it is neither counted nor remembered."""
    if made.operation and services.started:
        made.phases.setdefault("total", (time.perf_counter() - made.started) * 1e3)
        status = made.counted_status or outcome.status
        services.recorder.finished(protocol, made.operation, made.model, str(status), made.error, made.phases)
        book_inference(services, made)
        _remember(services, made, protocol, outcome.status)
    if services.tracer is not None:
        services.tracer.end(made, *outcome)


def book_inference(services: Services, made: RequestScope) -> None:
    """Count a request of tensors in the statistics, by what its scope knows."""
    if made.inference is not None:
        total_ns = int((time.perf_counter() - made.started) * 1e9)
        services.extensions.recorder.ended(made.inference, made.error, total_ns)


def _remember(services: Services, made: RequestScope, protocol: str, status: int) -> None:
    if services.recent is not None:
        ids = (made.request_id, made.trace_id)
        services.recent.add(
            Recent(time.time(), *ids, protocol, made.operation, made.model, status, made.error, made.phases)
        )
