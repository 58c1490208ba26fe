"""Every metric family, declared once for both sides, in files named by slot so that they stay bounded.

prometheus_client's multi-process mode keeps one file per process identity. The identity here is the slot (`frontend-3`,
`worker-0`), so counters go on across restarts and the number of files does not grow. Gauges all use a `live` mode and
are removed when a slot starts again. Any frontend serves `/metrics` by merging the files.

PERF: an increment of the multi-process mode takes a lock and packs two numbers into a mapped file. A request needs
about 24 increments. A `Tally` adds up the figures that are counted for every request, and one turn of the event loop
writes the sums of the last 20 ms. A killed process loses the counts of that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

from ipc.catalog.ids import NO_VERSION, split_id
from ipc.metrics import nv_names
from ipc.metrics.families import (
    ACCESS_REFUSALS,
    CALLS,
    CANCEL_STAGES,
    CONTINUATIONS,
    DIRECTIONS,
    FRONTEND,
    GENERATION_STATES,
    GPU_GAUGES,
    LOADS,
    NO_KEY,
    PHASES,
    REASONS,
    REJECTIONS,
    REVOCATIONS,
    RUNS,
    SEQUENCE_STATES,
    STATES,
    SUPERVISOR,
    TOOLS,
    TRACED,
    UNKNOWN,
    UNLOADS,
    UNVERSIONED,
    WORKER,
    Family,
)
from ipc.processes.paths import RunPaths
from ipc.wire.messages import LANES
from ipc.wire.streams import FINISH_REASONS

_MOST_LOOKS = 5
"""How often the files are listed and read before their errors are told."""
MOST_TOUCHED = 200
"""Longest catalog whose series exist at zero from the start; in a longer one, series begin with their first use."""
FLUSH_S = 0.02
_PAIR = struct.Struct("dd")


def configure(paths: RunPaths, slot: str) -> None:
    """Bind this process to the metric files of `slot`; before any family is made."""
    directory = str(paths.metrics())
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = directory
    from prometheus_client import multiprocess, values

    # NOTE: the value class is chosen when the library is imported, which may have been before the directory was known.
    values.ValueClass = values.MultiProcessValue(lambda: slot)  # type: ignore[no-untyped-call]
    multiprocess.mark_process_dead(slot, directory)  # type: ignore[no-untyped-call]


def retire(paths: RunPaths, slot: str) -> None:
    """A process ends in good order: drop its gauges, keep its counters."""
    from prometheus_client import multiprocess

    multiprocess.mark_process_dead(slot, str(paths.metrics()))  # type: ignore[no-untyped-call]


class Families:
    """The families of one table, as attributes."""

    def __init__(self, table: tuple[Family, ...]) -> None:
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry()
        self._made = {family.attribute: _make(family, registry) for family in table}

    def __getattr__(self, attribute: str) -> Any:
        try:
            return self._made[attribute]
        except KeyError:
            raise AttributeError(attribute) from None


def _make(family: Family, registry: Any) -> Any:
    from prometheus_client import Counter, Gauge, Histogram

    if family.kind == "counter":
        return Counter(family.name, family.text, family.labels, registry=registry)
    if family.kind == "gauge":
        return Gauge(
            family.name, family.text, family.labels, registry=registry, multiprocess_mode=family.mode
        )
    return Histogram(family.name, family.text, family.labels, registry=registry, buckets=family.buckets)


def touched(models: Iterable[str]) -> list[str]:
    """PERF: a model has some 300 series. 2,000 models would take 100 MB of files and a minute for each scrape."""
    names = list(models)
    return names if len(names) <= MOST_TOUCHED else []


class FrontendMetrics(Families):
    """Families fed by frontends."""

    def __init__(self) -> None:
        super().__init__((*FRONTEND, *RUNS))
        self.tally = Tally()

    def touch(self, models: Iterable[str], workers: int, version: str) -> None:
        """Make every series exist at zero from the first scrape on, of `MOST_TOUCHED` models at most."""
        self.build_info.labels(version).set(1)
        for slot in range(workers):
            self.workers_joined.labels(f"worker-{slot}").set(0)
        self.ready.set(0)
        for reason in ("suspect", "bystander"):
            self.retries.labels(reason)
        for outcome in CONTINUATIONS:
            self.continuations.labels(outcome)
        self.poison.labels("crashed"), self.poison.labels("refused")
        for kind in CALLS:
            self.infer_calls.labels(kind), self.infer_calls_time.labels(kind)
        for outcome in TRACED:
            self.traced.labels(outcome)
        self.touch_models(models)
        self._touch_requests(UNKNOWN)
        for reason in FINISH_REASONS:
            self.rs_completed.labels(reason)
        asked = "GET", "/v1/models", "none"
        for family in (self.http_requests, self.http_duration):
            family.labels(*asked, "200")
        self.http_body.labels(*asked), self.http_in_flight.labels(*asked)
        for family in (self.rs_first_token, self.rs_between_tokens):
            family.labels("POST", "/v1/chat/completions", UNKNOWN, "200")

    def touch_models(self, models: Iterable[str]) -> None:
        """Make the series of these models exist, which stay as they are where they exist already."""
        for model in touched(models):
            self._touch_infer(*split_id(model))
            self._touch_requests(model)

    def _touch_requests(self, model: str) -> None:
        self.requests.labels("sie", "encode", model, "200")
        self.sie_requests.labels(model, "encode", "success")
        self.sie_active.labels(model)
        for reason in REJECTIONS:
            self.rejected.labels(model, reason)
        for lane in LANES:
            self.in_flight.labels(model, lane)
        for phase in PHASES:
            self.duration.labels("encode", model, phase, "ok")
        for phase in ("total", "queue", "tokenize", "inference"):
            self.sie_duration.labels(model, "encode", phase)
        for family in (self.first_token, self.between_tokens, self.cached_tokens):
            family.labels(model)
        for name in ("hits", "misses", "evictions", "bytes"):
            getattr(self, f"kept_{name}").labels(model)

    def _touch_infer(self, model: str, version: int) -> None:
        """Series of tensor requests. Series of a batch size above 1 begin with the first request of that size."""
        key, unsized = (model, str(version)), (model, str(UNVERSIONED), "0")
        self.infer_failed.labels(*unsized)
        for reason in REASONS:
            self.infer_failures.labels(*unsized, reason)
        if version == NO_VERSION:
            return
        self.infer_rows.labels(*key, ""), self.infer_last.labels(*key)
        for name in ("requests", "seconds", "queue", "input", "compute", "output", "cached"):
            getattr(self, f"infer_{name}").labels(*key, "1", "")

    def touch_keys(self, names: Iterable[str]) -> None:
        """Make the series of API keys exist at zero; `names` are the names of the keys."""
        for reason in ACCESS_REFUSALS:
            self.access_refused.labels(reason)
        self.by_key.labels(NO_KEY, "401")
        for direction in DIRECTIONS:
            self.tokens_by_key.labels(NO_KEY, direction)
        for name in names:
            self.by_key.labels(name, "200")
            for direction in DIRECTIONS:
                self.tokens_by_key.labels(name, direction)


class WorkerMetrics(Families):
    """Families fed by workers."""

    def __init__(self, worker: str) -> None:
        super().__init__(WORKER)
        self.worker, self.device = worker, ""

    def touch(self, models: Iterable[str], device: str) -> None:
        """Make every series exist at zero from the first scrape on, of `MOST_TOUCHED` models at most.

        `device` is the uuid of the device.
        """
        models = touched(models)
        w, self.device = self.worker, device
        self.model_budget.labels(w).set(0)
        self.shm_used.labels(w).set(0), self.shm_leases.labels(w).set(0)
        self.busy.labels(w)
        for reason in REVOCATIONS:
            self.revoked.labels(w, reason)
        for name in GPU_GAUGES:
            getattr(self, f"gpu_{name}").labels(w, device).set(0)
        for model in models:
            for lane in LANES:
                for gauge in (self.queue_depth, self.queue_tokens, self.queue_oldest):
                    gauge.labels(model, lane).set(0)
            for stage in CANCEL_STAGES:
                self.cancelled.labels(model, stage)
            self.saved.labels(model, "queued")
            for family in (self.batch_size, self.batch_tokens, self.padding, self.oom):
                family.labels(model, w)
            for gauge in (self.budget, self.load_seconds, self.load_progress, self.memory):
                gauge.labels(model, w).set(0)
            for state in STATES:
                self.state.labels(model, w, state).set(0)
            for name in ("runs", "runs_input", "runs_compute", "runs_output"):
                getattr(self, name).labels(model, "1", device)
            self.tokens.labels(model, "in"), self.truncated.labels(model, "truncate")
            self.sie_batch_size.labels(model), self.sie_tokens.labels(model)
            self.sie_queue_depth.labels(model).set(0), self.sie_request_queue.labels(model).set(0)
            for family in (self.sie_gpu_items, self.sie_gpu_tokens, *self._recoveries()):
                family.labels(model)
            for name in ("wait", "p50", "cost", "fill"):
                getattr(self, f"sie_adaptive_{name}").labels(model).set(0)
            self.sie_adaptive_efficiency.labels(model)
            self.sie_loaded.labels(model, device).set(0), self.sie_memory.labels(model, device).set(0)
            self.sie_idle_evictions.labels(model)
            self.sequences_expired.labels(model, w), self.parts.labels(model)
            self._touch_generation(model)
            for state in SEQUENCE_STATES:
                self.sequences.labels(model, w, state).set(0)
            for outcome in LOADS:
                self.loads.labels(model, w, outcome)
            for reason in UNLOADS:
                self.unloads.labels(model, w, reason)

    def _touch_generation(self, model: str) -> None:
        key = model, self.worker
        self.tokens.labels(model, "out")
        for state in GENERATION_STATES:
            self.generations.labels(*key, state).set(0)
        for gauge in (self.cache_used, self.cache_blocks, self.feature_bytes):
            gauge.labels(*key).set(0)
        for counter in (self.preemptions, self.prefix_lookups, self.prefix_hits, self.prefix_evictions):
            counter.labels(*key)
        for counter in (self.pictures, self.feature_lookups, self.feature_hits, self.feature_evictions):
            counter.labels(*key)

    def _recoveries(self) -> list[Any]:
        """Families about batches that ran out of memory, under the names of the SIE contract."""
        names = ("attempted", "succeeded", "terminal", "clears", "splits", "evictions")
        return [getattr(self, f"sie_oom_{name}") for name in names]


class SupervisorMetrics(Families):
    """Families fed by the embedded supervisor."""

    def __init__(self) -> None:
        super().__init__(SUPERVISOR)


class ToolsMetrics(Families):
    """Families fed by the tool host."""

    def __init__(self) -> None:
        super().__init__(TOOLS)

    def touch(self, layers: Mapping[str, str]) -> None:
        """Make the series of all tools, and set the layers of the sandbox; an active one has the state "active"."""
        self.sandboxes.set(0)
        for gauge in (self.mcp_servers, self.mcp_tools):
            gauge.set(0)
        for tool in ("python", "shell", "surface", "reset", "mcp"):
            self.seconds.labels(tool)
            for outcome in ("success", "error", "timeout", "failed", "cancelled"):
                self.calls.labels(tool, outcome)
        for name, state in layers.items():
            self.layer.labels(name).set(state == "active")


def render(paths: RunPaths, tags: nv_names.Tags = nv_names.NO_TAGS) -> bytes:
    """Text exposition of all slots merged; reads files, so call in a thread. `tags` are tags of models."""
    from prometheus_client import generate_latest

    families = _merged(paths)
    return generate_latest(_Collected(families)) + nv_names.text(families, tags)


def _merged(paths: RunPaths) -> list[Any]:
    """The families of all files that have bytes.

    A process that begins makes its files, of which some replace those of the life before, and a file has no bytes at
    first. If the process dies then, the file stays as it is. The library fails on such a file.
    """
    from prometheus_client.multiprocess import MultiProcessCollector

    looks_left = _MOST_LOOKS
    while True:
        looks_left -= 1
        try:
            files = [str(path) for path in paths.metrics().glob("*.db") if path.stat().st_size]
            return list(MultiProcessCollector.merge(files, accumulate=True))  # type: ignore[no-untyped-call]
        except (struct.error, FileNotFoundError):
            # NOTE: a file was replaced between the look at its size and the reading. The next look leaves it out.
            if not looks_left:
                raise


class _Collected:
    """Stands in for a registry: gives families that have been collected."""

    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        """All families."""
        return self._families


class Tally:
    """Counts that are not written yet. Until `follow` is called, every count is written at once."""

    def __init__(self) -> None:
        self._fresh: list[Amount | Observations] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._held = False

    def hold(self) -> None:
        """Write from now on only when `flush` is called."""
        self._held = True

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Write on turns of `loop` from now on."""
        self._loop = loop

    def amount(self, *children: Any) -> Amount:
        """Count with counters or gauges of prometheus_client that always change together."""
        return Amount(self, children)

    def observations(self, *children: Any) -> Observations:
        """Observe with histograms of prometheus_client that have the same bounds and always change together."""
        return Observations(self, children)

    def note(self, changed: Amount | Observations) -> None:
        """`changed` has something to write."""
        self._fresh.append(changed)
        if self._held:
            return
        if self._loop is None:
            self.flush()
        elif len(self._fresh) == 1:
            self._loop.call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Write the counts now, for a reader of the metric files."""
        fresh, self._fresh = self._fresh, []
        for changed in fresh:
            changed.write()


class Amount:
    """Counters or gauges that change together."""

    __slots__ = ("_children", "_noted", "_tally", "_waiting")

    def __init__(self, tally: Tally, children: tuple[Any, ...]) -> None:
        self._tally, self._children = tally, children
        self._waiting, self._noted = 0.0, False

    def inc(self, amount: float = 1.0) -> None:
        """Add; a gauge may go down by a negative amount."""
        self._waiting += amount
        if not self._noted:
            self._noted = True
            self._tally.note(self)

    def write(self) -> None:
        """Write the waiting amounts."""
        waiting, self._waiting, self._noted = self._waiting, 0.0, False
        if waiting:
            for child in self._children:
                child.inc(waiting)


class WrittenAmount:
    """A counter of one thread that is written at once, without the checks and the lock of the library."""

    __slots__ = ("_child", "_value")

    def __init__(self, child: Any) -> None:
        self._child = child
        self._value: Any = None
        # NOTE: without a directory for metric files the library keeps a plain value, which has no file. A later library
        # may keep the value in another way.
        with contextlib.suppress(AttributeError, KeyError, TypeError):
            value = child._value
            file, written = value._file, _PAIR.pack(value._value, value._timestamp)
            at = file._positions[value._key]
            if file._m[at : at + _PAIR.size] == written:
                self._value = value

    def inc(self, amount: float = 1.0) -> None:
        """Add, and write the sum into the metric file."""
        value = self._value
        if value is None:
            self._child.inc(amount)
            return
        value._value += amount
        # NOTE: another thread may have grown the file and mapped the file anew. Both mappings are the same memory.
        file = value._file
        at = file._positions[value._key]
        file._m[at : at + _PAIR.size] = _PAIR.pack(value._value, value._timestamp)


class Observations:
    """Histograms with the same bounds that change together."""

    __slots__ = ("_bounds", "_children", "_counts", "_noted", "_tally", "_total")

    def __init__(self, tally: Tally, children: tuple[Any, ...]) -> None:
        self._tally, self._children = tally, children
        self._bounds: list[float] = children[0]._upper_bounds
        self._counts = [0] * len(self._bounds)
        self._total, self._noted = 0.0, False

    def observe(self, value: float) -> None:
        """One more value, not NaN."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value
        if not self._noted:
            self._noted = True
            self._tally.note(self)

    def write(self) -> None:
        """Write the waiting amounts."""
        # NOTE: the library observes single values only; these are the three fields that `Histogram.observe` changes.
        for place, count in enumerate(self._counts):
            if count:
                for child in self._children:
                    child._buckets[place].inc(count)
                self._counts[place] = 0
        for child in self._children:
            child._sum.inc(self._total)
        self._total, self._noted = 0.0, False
