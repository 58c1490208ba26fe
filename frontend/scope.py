"""The scope of one request: ids, trace, start, deadline, caller, times of phases, outcome."""

from __future__ import annotations

import random
import re
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from frontend.access.gate import ANONYMOUS, Grant
from ipc import deadline
from ipc.errors import Cancelled, DeadlineExceeded, InvalidInput, PenstockError
from ipc.settings import Limits, Server
from ipc.wire.messages import Timing, Trace

if TYPE_CHECKING:
    from falcon.asgi import Request

    from frontend.access_log import HttpRecord

LATE_NS = 50_000_000
"""The clock of an rpc's client runs ahead of ours by the way of its request."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:+/=@-]{1,128}")
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(slots=True)
class ServerSpan:
    """The open span of a traced request: hexadecimal ids, start in CLOCK_MONOTONIC nanoseconds, and where it ran.

    Times of `trace` are nanoseconds after `began_ns`: the worker may be on a host with another clock.
    """

    span_id: str
    parent_id: str
    began_ns: int
    worker: str = ""
    trace: Trace | None = None


@dataclass(slots=True)
class InferenceRecord:
    """Facts of a tensor request for the statistics, filled in as they become known.

    Until the model is `found`, `model` and `version` are as the client wrote them; then the full name and the version
    that answers. `rows` is 0 until the count is known, and `cached` counts the rows from the cache of embeddings. The
    answer brings `timing` and the `uuid` of the device.
    """

    model: str
    version: int | None
    found: bool = False
    rows: int = 0
    timing: Timing | None = None
    uuid: str = ""
    cached: int = 0


PARTS = ("decode", "see", "prefill", "write")
"""Phases of generated text that are parts of others: the first of `tokenize`, the others of `device`."""


class Choice(msgspec.Struct, frozen=True):
    """Which boxes of a cluster a request may go to, in lower case; an empty field leaves the choice open.

    `pool` empty stands for that of the gateway. Boxes of the machine profile are preferred, others serve too. A box of
    another bundle does not.
    """

    pool: str = ""
    profile: str = ""
    bundle: str = ""

    def takes(self, profile: str) -> bool:
        """Whether a box of this machine profile is one that the request prefers."""
        return self.profile in ("", profile)


ANY_BOX = Choice()


class RequestScope(msgspec.Struct, eq=False):
    """Ids and instants of one request. `phases` (milliseconds) is filled by the engine and the protocol.

    `error` and `message`: code and message of the error that ended the request.
    `parent` is the caller's traceparent in the form of version 00. `traceparent` names our own span, empty unless
    the request is traced. `counted_status` is the HTTP status for the metrics, if the status of the answer does not
    show the outcome; 0: the status of the answer. `streams`: the answer is made while it is sent, and its maker
    ends the request. `start_by_ns` above 0: by then the request stops waiting unless a device has begun. `host`
    is the address of the client, `cache_hits` how many items were in the cache of embeddings, None without a look-up.
    `loaded_ns` is when a model of generated text was found loaded, of `time.perf_counter_ns`, 0 before.
    `names_deadline`: the caller has bounded the whole request.
    `session_id` is the session in which tools of the server run, empty for a request without such tools.
    `published_ms` is the time until the work of a gateway had left for a box, `fetched_ms` that in which the box got
    inputs that no message holds; of a request in pieces the longest. `worker` is the worker that ran the work last.
    `http` is the record of a counted HTTP request. Requests of tensors fill `inference`, which
    `frontend.records.finishing` counts. `choice` is for the engine of a cluster alone.
    """

    request_id: str
    trace_id: str
    parent: str
    started: float
    deadline_ns: int
    start_by_ns: int = 0
    model: str = ""
    operation: str = ""
    error: str = ""
    message: str = ""
    traceparent: str = ""
    counted_status: int = 0
    streams: bool = False
    span: ServerSpan | None = None
    grant: Grant = ANONYMOUS
    host: str = ""
    cache_hits: int | None = None
    loaded_ns: int = 0
    inference: InferenceRecord | None = None
    phases: dict[str, float] = {}
    http: HttpRecord | None = None
    session_id: str = ""
    worker: str = ""
    names_deadline: bool = False
    choice: Choice = ANY_BOX
    published_ms: float = 0.0
    fetched_ms: float = 0.0

    def names(self, model: str) -> None:
        """The body of the request names this model."""
        self.model = model
        if self.http is not None:
            self.http.name(model)

    def failed(self, error: PenstockError, counted_status: int = 0) -> None:
        """The request ends with this error; `counted_status` as above."""
        self.error, self.message = error.code, error.message
        self.counted_status = counted_status or self.counted_status

    @property
    def began_ns(self) -> int:
        """The start of the request in CLOCK_MONOTONIC nanoseconds."""
        return time.monotonic_ns() - int((time.perf_counter() - self.started) * 1e9)

    @property
    def waits_until_ns(self) -> int:
        """When the request stops waiting for its turn on a device, in CLOCK_MONOTONIC nanoseconds."""
        return self.start_by_ns or self.deadline_ns

    @property
    def caller(self) -> str:
        """The caller in whose name work of this request runs: the key, or without a key the address."""
        return self.grant.caller or self.host

    def left_s(self) -> tuple[float, float]:
        """Seconds until the deadline, and until the request stops waiting for its turn on a device."""
        return deadline.remaining_s(self.deadline_ns), deadline.remaining_s(self.waits_until_ns)

    def elapsed_ms(self) -> float:
        """Milliseconds since the start."""
        return (time.perf_counter() - self.started) * 1e3

    def ran(self, worker: str, timing: Timing, trace: Trace | None) -> None:
        """Note which worker ran the work and how long its phases took; times of `trace` as in `ServerSpan`."""
        self.worker = worker
        if self.span is not None:
            self.span.worker, self.span.trace = worker, trace
        self.phases |= {
            "tokenize": timing.prepare_ns / 1e6,
            "queue": timing.queue_ns / 1e6,
            "device": timing.device_ns / 1e6,
            "copy": timing.copy_ns / 1e6,
        }
        if (text := timing.text) is not None:
            parts = (text.decode_ns, text.see_ns, text.prefill_ns, text.write_ns)
            self.phases |= {name: part_ns / 1e6 for name, part_ns in zip(PARTS, parts, strict=True)}

    def ended_early(self) -> PenstockError:
        """Why the request was cancelled: its deadline passed, or its client went away."""
        if self.deadline_ns <= time.monotonic_ns() + LATE_NS:
            return DeadlineExceeded("the deadline of the rpc passed", retry_after_s=1)
        return Cancelled("the client went away")


current_scope: ContextVar[RequestScope | None] = ContextVar("current_scope", default=None)
"""The scope of the request that the present task works on."""


def scope_of_request(req: Request, limits: Limits) -> RequestScope:
    """Make the scope of an HTTP request, the current scope of its task from now on."""
    scope = scope_of_ids(req.get_header("X-Request-ID") or "", req.get_header("traceparent") or "", limits)
    client = req.scope.get("client")
    scope.host = client[0] if client else ""
    current_scope.set(scope)
    return scope


def scope_of_ids(given: str, traceparent: str, limits: Limits) -> RequestScope:
    """Make a scope from the caller's ids; new ids replace ids that are not safe to echo."""
    request_id = given if given and _REQUEST_ID.fullmatch(given) else f"req_{_fresh_id()}"
    parent = _parent(traceparent) if traceparent else ""
    return RequestScope(
        request_id=request_id,
        trace_id=parent[3:35] or _fresh_id(),
        parent=parent,
        started=time.perf_counter(),
        deadline_ns=deadline.after(limits.request_timeout_s),
    )


def _parent(traceparent: str) -> str:
    """A valid traceparent in the form of version 00, else "" (W3C Trace Context, section 4.3.4).

    A later version may have further fields behind those of version 00, and flags of which only `sampled` is known.
    """
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return ""
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not trace_id.strip("0") or not span_id.strip("0"):
        return ""
    return f"00-{trace_id}-{span_id}-{flags if version == '00' else f'{int(flags, 16) & 1:02x}'}"


def plain_scope() -> RequestScope:
    """Context of a request that was refused before its own could be made."""
    return RequestScope(f"req_{_fresh_id()}", _fresh_id(), "", time.perf_counter(), 0)


def _fresh_id() -> str:
    """32 hexadecimal digits."""
    return random.randbytes(16).hex()


def common_headers(made: RequestScope, server: Server) -> dict[str, str]:
    """Headers of every answer about its request and the server."""
    common = {"X-Trace-ID": made.trace_id, "X-SIE-Server-Version": server.version_header}
    if server.engine == "cluster":
        common |= {"X-SIE-Version": server.version_header, "X-SIE-Request-ID": made.request_id}
    if server.request_id_header:
        common["X-Request-ID"] = made.request_id
    if made.parent:
        common["traceparent"] = made.parent
    return common


def shorten_deadline(context: RequestScope, req: Request, limits: Limits) -> None:
    """Apply the caller's X-Request-Timeout. Raises `InvalidInput` for a value that is no positive number of seconds."""
    given = req.get_header("X-Request-Timeout")
    if given is None:
        return
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise InvalidInput(
            f"header X-Request-Timeout: expected a positive number of seconds, got {given[:64]!r}"
        )
    context.deadline_ns = deadline.after(min(seconds, limits.request_timeout_s))
    context.names_deadline = True
