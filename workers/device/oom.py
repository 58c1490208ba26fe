"""Out of memory: which errors say so, the token budgets that shrink then and grow back, and who makes room.

The budget of a model halves when a batch of it does not fit and recovers by a quarter after every `GROW_AFTER_S`
without trouble, so it is back at its configured size within five minutes.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable

import torch

from ipc.metrics.registry import WorkerMetrics
from workers import foreign

MARKS = (
    "out of memory",
    "cannot allocate memory",
    "failed to allocate",
    "can't allocate memory",
    "not enough memory",
    "status_alloc_failed",  # of cuBLAS and cuDNN
)
LOST_MARKS = ("uncorrectable ecc", "fallen off the bus", "no cuda-capable device", "device is lost")
GROW_AFTER_S = 20.0
SMALLEST_TOKENS = 64
EVICTION_WAIT_S = 5.0
"""How long the device thread waits for the memory of another model."""
EVICT_AGAIN_AFTER_S = 60.0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out on the device or the host."""
    text = foreign.text_of(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(mark in text for mark in MARKS)


def context_is_broken() -> bool:
    """Whether the CUDA context is poisoned, so that nothing may run on it again. Never on CPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def is_device_lost(error: BaseException) -> bool:
    """Whether the device itself is gone, so that a restart at once would not help."""
    text = foreign.text_of(error).lower()
    return any(mark in text for mark in LOST_MARKS)


def forget_frames(error: BaseException) -> None:
    """Drop the local variables of the frames that an error and its causes passed through; its text stays."""
    for link in foreign.chain(error):
        traceback.clear_frames(link.__traceback__)


def release_cached() -> None:
    """Give cached device memory back."""
    # PERF: what a failed pass left is young; a full collection takes 0.1 s, and a split batch needs many.
    gc.collect(1)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


class TokenBudget:
    """Tokens per batch of one model."""

    def __init__(self, tokens: int) -> None:
        self.configured = self.tokens = tokens
        self._calm_since = time.monotonic()

    def shrink(self, tried: int) -> None:
        """A batch of `tried` tokens did not fit."""
        self.tokens = min(self.configured, max(SMALLEST_TOKENS, min(self.tokens, tried) // 2))
        self._calm_since = time.monotonic()

    def grow(self) -> None:
        """A batch fitted: after `GROW_AFTER_S` without trouble a quarter is added."""
        now = time.monotonic()
        if self.tokens < self.configured and now - self._calm_since > GROW_AFTER_S:
            self.tokens = min(self.configured, self.tokens + max(1, self.configured // 4))
            self._calm_since = now


class ModelBudgets:
    """One token budget per model; models that never ran out of memory have the configured one, or their own limit."""

    def __init__(self, tokens: int) -> None:
        """`tokens` is what is configured for all models."""
        self.configured = tokens
        self.limits: dict[str, int] = {}
        """Tokens of a full batch of the models that the worker offers; the table of models keeps the numbers."""
        self._by_model: dict[str, TokenBudget] = {}

    @property
    def smallest(self) -> int:
        """Tokens of the smallest budget there is."""
        return min((budget.tokens for budget in list(self._by_model.values())), default=self.configured)

    def tokens_of(self, model: str) -> int:
        """Tokens per batch of a model."""
        budget = self._by_model.get(model)
        return self.limits.get(model, self.configured) if budget is None else budget.tokens

    def shrink(self, model: str, tried: int, full: int | None = None) -> None:
        """A batch of `tried` tokens did not fit. `full` is the limit of the adapter; None: as `limits` says."""
        # NOTE: a model that is unloading has no limit any more, so `limits` would give the number for all models.
        full = self.limits.get(model, self.configured) if full is None else full
        self._by_model.setdefault(model, TokenBudget(full)).shrink(tried)

    def grow(self, model: str) -> None:
        """Called after a batch that fitted."""
        budget = self._by_model.get(model)
        if budget is not None:
            budget.grow()
            if budget.tokens >= budget.configured:
                del self._by_model[model]


class Eviction:
    """Has an idle model unloaded for an item that does not fit even alone.

    An item may simply be too large for the device. After an eviction that did not help, the same model causes none for
    `EVICT_AGAIN_AFTER_S`, so that such items do not clear the device of all other models.
    """

    def __init__(self, unload_idle: Callable[[str, float], bool]) -> None:
        """`unload_idle(model, wait_s)` unloads an idle model other than `model`; whether its memory has come back."""
        self._unload_idle = unload_idle
        self._in_vain: dict[str, float] = {}

    def make_room(self, model: str) -> bool:
        """Whether memory of another model was given back for this one. Device thread only."""
        since = self._in_vain.get(model)
        if since is not None and time.monotonic() < since + EVICT_AGAIN_AFTER_S:
            return False
        self._in_vain.pop(model, None)
        return self._unload_idle(model, EVICTION_WAIT_S)

    def in_vain(self, model: str) -> None:
        """The item did not fit after the eviction either."""
        self._in_vain[model] = time.monotonic()


class RecoveryCounts:
    """Counts how batches that ran out of memory ended, under the names that dashboards of the SIE contract ask for."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._attempted = self._lost = False

    def exhausted(self, model: str, items: int, *, lost: bool = False) -> None:
        """Some items of a batch did not fit: several are split, one alone is tried again and may be `lost`."""
        metrics = self._metrics
        metrics.oom.labels(model, metrics.worker).inc()
        metrics.sie_oom_clears.labels(model).inc()
        if not self._attempted:
            self._attempted = True
            metrics.sie_oom_attempted.labels(model).inc()
        if items > 1:
            metrics.sie_oom_splits.labels(model).inc()
        elif lost:
            self._lost = True
            metrics.sie_oom_terminal.labels(model).inc()

    def evicted(self, model: str) -> None:
        """Another model was unloaded for an item of this one."""
        self._metrics.sie_oom_evictions.labels(model).inc()

    def ended(self, model: str) -> None:
        """A batch is done; a recovery in which no item was given up succeeded."""
        if self._attempted and not self._lost:
            self._metrics.sie_oom_succeeded.labels(model).inc()
        self._attempted = self._lost = False
