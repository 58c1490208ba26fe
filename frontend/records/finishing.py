"""The one place where a request ends, over HTTP and gRPC alike.

The finisher reads the request's scope, counts the request in the metrics and in the statistics of tensor models, adds
the request to the live page, and closes its span. `frontend.access_log` counts requests once more, by HTTP's words.

The `Recorder` counts requests, phases and refusals, with the label children looked up once and written a little later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from frontend import tracing
from frontend.access_log import UNMATCHED, HttpCounts
from frontend.records.recent import LiveRuns, Recent, RecentWriter, open_ring, shown_message
from frontend.records.statistics import RequestCounters
from frontend.scope import PARTS, RequestScope
from frontend.tracing import Tracer
from ipc.errors import InputRefused, WorkerCrashed
from ipc.metrics.families import DIRECTIONS, NO_KEY, UNKNOWN
from ipc.metrics.registry import Amount, FrontendMetrics, Observations
from ipc.settings import Settings
from ipc.wire.streams import FINISH_REASONS

_REJECTIONS = {
    "QUEUE_FULL": "queue_full",
    "NO_REPLICA": "no_worker",
    "PROVISIONING": "no_worker",
    "QUEUE_UNAVAILABLE": "no_worker",
    "MODEL_LOADING": "loading",
    "MODEL_NOT_LOADED": "loading",
    "LORA_LOADING": "loading",
    "SHM_EXHAUSTED": "queue_full",
    "DEADLINE_EXCEEDED": "deadline",
    "INPUT_TOO_LONG": "too_long",
    "BODY_TOO_LARGE": "too_long",
    "DRAINING": "draining",
}
_OF_TEXTS = ("chat", "responses", "messages", "ollama")
"""Protocols of generated text."""
_OF_VECTORS = ("embed", "embeddings")
"""Operations of these protocols that give vectors."""
_SIE_PHASES = {"total": "total", "queue": "queue", "tokenize": "tokenize", "device": "inference"}


class _InFlight:
    """Counts a request as being served while the request is within, and an input that crashes workers.

    One context serves all requests of a model and lane: the context keeps nothing of a request.
    """

    __slots__ = ("_gauges", "_recorder")

    def __init__(self, recorder: Recorder, gauges: Amount) -> None:
        self._recorder, self._gauges = recorder, gauges

    def __enter__(self) -> None:
        self._gauges.inc()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._gauges.inc(-1)
        if kind is not None and issubclass(kind, WorkerCrashed):
            self._recorder.poisoned("refused" if issubclass(kind, InputRefused) else "crashed")


class _Ended(NamedTuple):
    """The families of requests that ended alike: the counters, and the histograms of each phase once it was timed."""

    counters: Amount
    phases: dict[str, tuple[Observations, ...]]


class TextMeter(NamedTuple):
    """Counts the tokens of one model and API key, and the times between them in seconds."""

    first: Observations
    between: Observations
    prompt: Amount
    cached: Amount
    generated: Amount
    ended: dict[str, Amount]
    """By the reason of the end of a choice."""


class CacheMeter(NamedTuple):
    """Counts look-ups of one model in the cache of embeddings, and what the cache holds."""

    hits: Amount
    misses: Amount
    evictions: Amount
    nbytes: Amount


class Recorder:
    """Writes each ended request into all its metric families, soon after the end (`ipc.metrics.registry`)."""

    def __init__(
        self, metrics: FrontendMetrics, models: Container[str], id_of: Callable[[str], str] = str
    ) -> None:
        """`models` has all names of models, `id_of` tells the id behind a name."""
        self._id_of = id_of
        self._metrics, self._models, self._tally = metrics, models, metrics.tally
        self._outcomes = lru_cache(maxsize=4096)(self._outcome)
        self._gauges = lru_cache(maxsize=4096)(self._serving)
        self._amounts = lru_cache(maxsize=4096)(self._amount)
        self._meters = lru_cache(maxsize=4096)(self._meter)
        self._caches = lru_cache(maxsize=4096)(self._cache)
        self.kept_ids = self._tally.amount(metrics.continuation_bytes).inc
        """Told of so many bytes more of ids of written tokens that are kept."""

    def _amount(self, family: str, *labels: str) -> Amount:
        return self._tally.amount(self._child(family, *labels))

    def _child(self, family: str, *labels: str) -> Any:
        return getattr(self._metrics, family).labels(*labels)

    def _outcome(self, protocol: str, operation: str, model: str, status: str, code: str) -> _Ended:
        """What one more request counts into."""
        counters = [self._child("requests", protocol, operation, model, status)]
        if protocol == "sie":
            outcome = "queue_full" if code == "QUEUE_FULL" else "error" if code else "success"
            counters.append(self._child("sie_requests", model, operation, outcome))
        if code in _REJECTIONS:
            counters.append(self._child("rejected", model, _REJECTIONS[code]))
            if protocol in _OF_TEXTS and operation not in _OF_VECTORS:
                counters.append(self._metrics.rs_rejected)
        return _Ended(self._tally.amount(*counters), {})

    def _phase(
        self, protocol: str, operation: str, model: str, phase: str, outcome: str
    ) -> tuple[Observations, ...]:
        """What the time of a phase is observed in."""
        children = [self._child("duration", operation, model, phase, outcome)]
        if protocol == "sie" and phase in _SIE_PHASES:
            children.append(self._child("sie_duration", model, operation, _SIE_PHASES[phase]))
        return tuple(map(self._tally.observations, children))

    def _serving(self, model: str, lane: str) -> _InFlight:
        gauges = self._child("in_flight", model, lane), self._child("sie_active", model)
        return _InFlight(self, self._tally.amount(*gauges))

    def _meter(self, model: str, key: str, route: str) -> TextMeter:
        # NOTE: a request that gets tokens is answered 200, unless the model fails before an answer is sent whole.
        asked = "POST", route, model, "200"
        prompt, generated = (
            self._tally.amount(self._child("tokens_by_key", key, direction)) for direction in DIRECTIONS
        )
        return TextMeter(
            self._tally.observations(
                self._child("first_token", model), self._child("rs_first_token", *asked)
            ),
            self._tally.observations(
                self._child("between_tokens", model), self._child("rs_between_tokens", *asked)
            ),
            prompt,
            self._tally.amount(self._child("cached_tokens", model)),
            generated,
            {reason: self._amounts("rs_completed", reason) for reason in FINISH_REASONS},
        )

    def model_label(self, model: str) -> str:
        """The model's id if the catalog has its name, so that clients cannot invent label values."""
        return self._id_of(model) if model in self._models else UNKNOWN

    def finished(
        self, protocol: str, operation: str, model: str, status: str, code: str, phases: dict[str, float]
    ) -> None:
        """One request ended with HTTP `status` and error `code` (empty for success); `phases` are milliseconds."""
        model = self.model_label(model)
        ended = self._outcomes(protocol, operation, model, status, code)
        ended.counters.inc()
        for phase, milliseconds in phases.items():
            if milliseconds <= 0 or phase in PARTS:
                continue
            histograms = ended.phases.get(phase)
            if histograms is None:
                outcome = "error" if code or status >= "400" else "ok"
                histograms = ended.phases[phase] = self._phase(protocol, operation, model, phase, outcome)
            for histogram in histograms:
                histogram.observe(milliseconds / 1000)

    def called(self, key: str, code: str) -> None:
        """A request with the API key named `key` ended with HTTP status `code`; `NO_KEY` for requests without one."""
        self._amounts("by_key", key, code).inc()

    def refused(self, reason: str) -> None:
        """A request was refused for its key: unauthenticated, forbidden or rate_limited."""
        self._amounts("access_refused", reason).inc()

    def traced(self, outcome: str, requests: int) -> None:
        """Spans of so many requests were exported, failed to be exported, or were dropped for lack of room."""
        self._metrics.traced.labels(outcome).inc(requests)

    def in_flight(self, model: str, lane: str) -> _InFlight:
        """Count one more request inside the context; its label stays, even if the model leaves the catalog."""
        return self._gauges(self.model_label(model), lane)

    def text(self, model: str, key: str, route: str) -> TextMeter:
        """The counters for the tokens of a request: by model, name of the API key, and route."""
        return self._meters(self.model_label(model), key or NO_KEY, route or UNMATCHED)

    def cache(self, model: str) -> CacheMeter:
        """Where look-ups of a model in the cache of embeddings are counted."""
        return self._caches(self.model_label(model))

    def _cache(self, label: str) -> CacheMeter:
        return CacheMeter(
            *(self._amount(f"kept_{name}", label) for name in ("hits", "misses", "evictions", "bytes"))
        )

    def flush(self) -> None:
        """Write the counts now, for a reader of the metric files."""
        self._tally.flush()

    def retried(self, reason: str) -> None:
        """A request was sent again."""
        self._metrics.retries.labels(reason).inc()

    def carried_on(self, outcome: str) -> None:
        """A text whose worker was lost, or is leaving, goes on at another, or does not."""
        self._metrics.continuations.labels(outcome).inc()

    def poisoned(self, reason: str) -> None:
        """An input crashed workers, or was refused because of earlier crashes."""
        self._metrics.poison.labels(reason).inc()

    def agent_doing(self, before: str | None, now: str | None) -> None:
        """A run with tools of the server begins (`before` None), does something else, or ends (`now` None)."""
        for doing, change in ((before, -1), (now, 1)):
            if doing is not None:
                self._amounts("agent_running", doing).inc(change)

    def agent_run(self, model: str, outcome: str) -> None:
        """A run with tools of the server has ended: finished, failed or cancelled."""
        self._amounts("agent_runs", self.model_label(model), outcome).inc()

    def agent_round(self, model: str) -> None:
        """A run with tools of the server asked its model."""
        self._amounts("agent_rounds", self.model_label(model)).inc()

    def agent_call(self, tool: str, outcome: str, seconds: float | None) -> None:
        """A run called a tool of the server; None for a call that did not run."""
        self._amounts("agent_calls", tool, outcome).inc()
        if seconds is not None:
            self._metrics.agent_call_seconds.labels(tool).observe(seconds)

    def agent_wait(self, outcome: str, seconds: float) -> None:
        """A run waited for a decision about a call."""
        self._metrics.agent_waits.labels(outcome).observe(seconds)


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

    `http` counts and logs all HTTP requests, also those without an operation; None where both are switched off.
    """

    recorder: Recorder | None = None
    statistics: RequestCounters | None = None
    recent: RecentWriter | None = None
    runs: LiveRuns | None = None
    tracer: Tracer | None = None
    http: HttpCounts | None = None
    gateway: Callable[[RequestScope, str], None] | None = None
    """Counts a request of a gateway, by its status."""

    @classmethod
    def opened(cls, settings: Settings, name: str, recorder: Recorder) -> Finisher:
        """The finisher of the frontend `name` (`frontend-0`), with a ring of recent requests, live runs, a tracer."""
        tracer = tracing.start(settings, name, recorder.traced)
        recent, runs = open_ring(settings.paths, name), LiveRuns(settings.paths, name)
        return cls(recorder, recent=recent, runs=runs, tracer=tracer)

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
            if self.gateway is not None:
                self.gateway(scope, status)
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
        if self.runs is not None:
            self.runs.close()
            self.runs = None

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
