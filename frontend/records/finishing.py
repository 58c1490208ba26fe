"""The one place where a request ends, over HTTP and gRPC alike.

The finisher reads the request's scope, counts the request in the metrics and in the statistics of tensor models, adds
the request to the live page, and closes its span. No other module counts a request.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

from frontend.http_counting import HttpCounts
from frontend.records.recent import Recent, RecentWriter, open_ring, shown_message
from frontend.records.recording import Recorder
from frontend.records.statistics import RequestCounters
from frontend.scope import RequestScope
from frontend.tracing import otlp as starting
from frontend.tracing.tracer import Tracer
from ipc.settings import Settings


class Outcome(NamedTuple):
    """How a request was asked and answered.

    An rpc has no `method`; its `status` is the HTTP status of the same outcome, so that both count alike.
    """

    method: str
    path: str
    route: str
    status: int


@dataclass(slots=True)
class Finisher:
    """Ends the requests of one frontend. `recorder` and `statistics` are there once the frontend has started.

    `http` counts all HTTP requests, also those without an operation; None where metrics are switched off.
    """

    recorder: Recorder | None = None
    statistics: RequestCounters | None = None
    recent: RecentWriter | None = None
    tracer: Tracer | None = None
    http: HttpCounts | None = None

    @classmethod
    def opened(cls, settings: Settings, name: str, recorder: Recorder) -> Finisher:
        """The finisher of the frontend `name` (`frontend-0`), with a ring of recent requests and a tracer."""
        tracer = starting.start(settings, name, recorder.traced)
        return cls(recorder, recent=open_ring(settings.paths, name), tracer=tracer)

    def begin(self, scope: RequestScope, path: str) -> None:
        """A request has arrived: open its span where requests are traced."""
        if self.tracer is not None:
            self.tracer.begin(scope, path)

    def finish(self, scope: RequestScope, protocol: str, outcome: Outcome) -> None:
        """One request of `protocol` has ended; a request without an operation is neither counted nor remembered."""
        if scope.operation and self.recorder is not None:
            if "total" not in scope.phases:
                scope.phases["total"] = scope.elapsed_ms()
            status = str(scope.counted_status or outcome.status)
            self.recorder.finished(protocol, scope.operation, scope.model, status, scope.error, scope.phases)
            self.count_inference(scope)
            self._remember(scope, protocol, outcome.status)
        if self.tracer is not None:
            self.tracer.end(scope, *outcome)

    def count_inference(self, scope: RequestScope) -> None:
        """Count a request of tensors in the statistics, from its scope."""
        if scope.inference is not None and self.statistics is not None:
            total_ns = int((time.perf_counter() - scope.started) * 1e9)
            self.statistics.ended(scope.inference, scope.error, total_ns)

    def close(self) -> None:
        """The frontend ends: export the last spans, and leave the ring of recent requests. May block for a moment."""
        if self.tracer is not None:
            self.tracer.close()
        if self.recent is not None:
            self.recent.close()
            self.recent = None

    def _remember(self, scope: RequestScope, protocol: str, status: int) -> None:
        if self.recent is not None:
            self.recent.add(
                Recent(
                    time.time(),
                    scope.request_id,
                    scope.trace_id,
                    protocol,
                    scope.operation,
                    scope.model,
                    status,
                    scope.error,
                    scope.phases,
                    shown_message(scope.message, scope.model) if scope.error else "",
                    scope.grant.caller,
                )
            )
