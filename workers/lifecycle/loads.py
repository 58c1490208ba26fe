"""Loads of one kind (models, or LoRA adapters), each in a thread of its own, and their outcomes.

1. `start` begins the loads that are due, a bounded number at a time. Two models of which this process may have died are
   not loaded at the same time, and no such model for a while after the second death (`LoadCrashes`).
2. A load succeeds, fails, or is given up (`LoadAbandoned`, `NoRoom`). A failure is classified, logged and kept.

Each of the two kinds carries out its loads and draws the consequences of an outcome: `ModelLoads` here, which makes
room within the memory budget, and `LoraLoads` in `lifecycle.loras`.

`LoadCrashes` remembers which models were being loaded when this worker's process died, so that no model can kill the
worker for ever:

1. A file per load is written before the load begins and removed when the load ends, well or not. The file holds the
   number of tries. A worker that ends in order removes the files of its loads too.
2. A file that a starting worker finds tells of a load during which an earlier life of its slot died. Of those models
   only one at a time is loaded, so that a second death names the guilty model. Other models are loaded beside it.
3. A model that was being loaded at two deaths in a row is not loaded again for a while, by no worker, unless some
   worker loads the model well meanwhile.
4. A process may be killed from outside. SIGKILL does not tell who sent the signal: an operator, the kernel for want of
   memory, the model itself. A model that has loaded well before is trusted for `MOST_KILLS` such deaths, and likewise
   where nobody says how the process ended (systemd). A death by another signal or an exit code ends the trust.
5. A mark whose model nobody tries for `KEPT_S` of a life is forgotten.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from ipc.errors import ProtocolError
from ipc.metrics.registry import WorkerMetrics
from ipc.settings import Settings
from workers import foreign
from workers.adapters.base import Adapter
from workers.device import oom
from workers.device.devices import Device
from workers.device.stepping import vital_thread
from workers.lifecycle import memory_budget
from workers.lifecycle.instance import Instance, LifeCycle, LoadAbandoned, NoRoom
from workers.lifecycle.loading import Loaded, Loader, keeps_threads
from workers.lifecycle.model_states import LoadLine, ModelStates
from workers.loading import failure
from workers.loading.failure import LoadFailure
from workers.loading.source import DownloadFailed, SourceError
from workers.repository.catalog_files import EVERY_S
from workers.repository.layout import ModelRefused

log = logging.getLogger(__name__)

MOST_DEATHS = 2
MOST_KILLS = 5
_FROM_OUTSIDE = ("", f"signal-{signal.SIGKILL:d}")
"""Ways in which a process ends that need not be its own fault."""
RETRY_AFTER_S = 300.0
KEPT_S = 300.0
"""Seconds for which a process remembers the mark of a load in which an earlier process died."""
LOWER = 5
"""Added to the nice value of a load that gives way: beside a busy thread the load has a quarter of a processor."""
T = TypeVar("T", bound=LifeCycle)
R = TypeVar("R")


class LoadCrashes:
    """The marks of one worker slot, under `root`, beside those that all slots share: `well.*` and `refused.*`."""

    def __init__(self, root: Path, slot: int, ended_by: str = "") -> None:
        """`ended_by` is how the earlier life of the slot ended, in the supervisor's words; "" if nobody has said so."""
        self._root, self._slot = root, slot
        self._told: dict[str, float] = {}
        """Refusals that this life has told, with the time of each."""
        self._deaths: dict[str, int] = {}
        self._running: set[str] = set()
        self._lock, self._closed = threading.Lock(), False
        self._found_at = time.monotonic()
        for path in root.glob(f"{slot}.*"):
            model, _, count = path.read_text().rpartition(" ")
            if model and count.isdigit():
                self._deaths[model] = int(count)
                log.warning("the worker died (%s) while it loaded %s", ended_by or "nobody says how", model)
                if ended_by not in _FROM_OUTSIDE:
                    self._shared("well", model).unlink(missing_ok=True)

    def may_begin(self, model: str) -> bool:
        """Whether this load may begin. Two loads of which an earlier life may have died never run at the same time."""
        with self._lock:
            return model not in self._known() or self._running.isdisjoint(self._deaths)

    def verdict(self, model: str) -> LoadFailure | None:
        """Why this model is not to be loaded now, None if it may be; each refusal is given once."""
        refused = self._shared("refused", model)
        with self._lock:
            deaths = self._known().get(model, 0)
            is_guilty = deaths >= (MOST_KILLS if self._shared("well", model).exists() else MOST_DEATHS)
            is_told = _written(refused) in (self._told.get(model, 0.0), 0.0)
            if not is_guilty and (is_told or time.time() - _written(refused) > RETRY_AFTER_S):
                return None
        self.end(model)
        if is_guilty:
            with contextlib.suppress(OSError):
                refused.write_text(f"{deaths}")
        self._told[model] = _written(refused)
        times = "twice" if deaths <= MOST_DEATHS else f"{deaths} times"
        return LoadFailure(
            error_class="UNKNOWN",
            permanent=False,
            retry_after_s=RETRY_AFTER_S,
            message=f"the worker process died {times} while it loaded this model",
        )

    def forgiven(self, model: str) -> bool:
        """Whether a refusal of this life is over, since some worker has loaded the model well meanwhile."""
        if model not in self._told or _written(self._shared("refused", model)) >= self._told[model]:
            return False
        del self._told[model]
        return True

    def begin(self, model: str) -> None:
        """A load begins. On a full disk the load goes on without a mark."""
        with self._lock:
            if self._closed:
                return
            self._running.add(model)
            try:
                self._root.mkdir(exist_ok=True, mode=0o700)
                self._path(model).write_text(f"{model} {self._deaths.get(model, 0) + 1}")
            except OSError as error:
                log.warning("the load of %s is not marked: %s", model, error)

    def end(self, model: str, *, well: bool = False) -> None:
        """The load has ended, `well` or not, and the process lives."""
        with self._lock:
            self._forget(model)
        if well:
            self._shared("refused", model).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._root.mkdir(exist_ok=True, mode=0o700)
                self._shared("well", model).touch()

    def close(self) -> None:
        """The process ends in order: remove the marks of loads that still run, and mark no others."""
        with self._lock:
            self._closed = True
            for model in list(self._running):
                self._forget(model)

    def _known(self) -> dict[str, int]:
        """Deaths by model. Marks that were found too long ago are forgotten, unless the model is being loaded."""
        if time.monotonic() - self._found_at >= KEPT_S:
            for model in self._deaths.keys() - self._running:
                self._forget(model)
        return self._deaths

    def _forget(self, model: str) -> None:
        self._deaths.pop(model, None)
        self._running.discard(model)
        self._path(model).unlink(missing_ok=True)

    def _path(self, model: str) -> Path:
        return self._shared(f"{self._slot}", model)

    def _shared(self, kind: str, model: str) -> Path:
        digest = hashlib.blake2b(model.encode(), digest_size=8).hexdigest()
        return self._root / f"{kind}.{digest}"


def _written(path: Path) -> float:
    """When a file was written (Unix seconds); 0 if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


class Loads(ABC, Generic[T, R]):
    """The loads of one kind; R is the result of a load. Methods that say so want the lock of `states`."""

    expected: ClassVar[tuple[type[Exception], ...]] = ()
    """Errors that are logged without a stack, also where their class is unknown."""

    def __init__(self, states: ModelStates, line: LoadLine[T], crashes: LoadCrashes, most: int) -> None:
        """`most` loads of this kind run at a time."""
        self.states, self.line, self.running = states, line, 0
        self._crashes, self._most = crashes, most

    @abstractmethod
    def carry_out(self, item: T) -> R:
        """One load, in a thread of its own. Raises any error, `LoadAbandoned` and `NoRoom`."""

    @abstractmethod
    def succeeded(self, item: T, result: R, seconds: float) -> None:
        """Take in the result of a load. Wants the lock."""

    @abstractmethod
    def failed(self, item: T, reason: LoadFailure | None) -> None:
        """A load ended badly, or was given up (None). Wants the lock."""

    def refused(self, item: T, verdict: LoadFailure) -> None:
        """Fail a load without a try, since worker processes died of such a load twice. Wants the lock."""
        self.failed(item, verdict)

    def may_begin(self, item: T) -> bool:
        """Whether a load that is due may begin now. Wants the lock."""
        return self._crashes.may_begin(item.name)

    def begin(self, item: T) -> None:
        """Change the state of a model or adapter whose load begins. Wants the lock."""

    def start(self) -> None:
        """Begin the loads that are due. Wants the lock."""
        while self.running < self._most and (item := self.line.next(self.may_begin)) is not None:
            self.begin(item)
            verdict = self._verdict(item)
            if verdict is not None:
                self.refused(item, verdict)
                continue
            self.running += 1
            self._crashes.begin(item.name)
            # PERF: a thread of its own, whose OpenMP team ends with it: idle teams would make the device thread's team
            # sleep between its steps.
            vital_thread(f"load-{item.name}", partial(self._run, item)).start()

    def run_here(self, item: T, work: Callable[[], R]) -> None:
        """Run a load that has begun in this thread, as a part of another load. `work` carries out the load."""
        outcome: R | LoadFailure | None = self._verdict(item)
        began = time.monotonic()
        if outcome is None:
            self._crashes.begin(item.name)
            outcome = self._attempt(item, work)
        self._end(item, outcome, time.monotonic() - began)

    def _run(self, item: T) -> None:
        began = time.monotonic()
        outcome = self._attempt(item, partial(self.carry_out, item))
        if outcome is None or isinstance(outcome, LoadFailure):
            # NOTE: only here, after the exception with all that its frames held is gone, memory can be given back.
            memory_budget.give_back()
        with self.states.lock:
            self.running -= 1
            self._end(item, outcome, time.monotonic() - began)
            self.states.lock.notify_all()

    def _end(self, item: T, outcome: R | LoadFailure | None, seconds: float) -> None:
        self._crashes.end(item.name, well=not (outcome is None or isinstance(outcome, LoadFailure)))
        with self.states.lock:
            if outcome is None or isinstance(outcome, LoadFailure):
                self.failed(item, outcome)
            else:
                self.succeeded(item, outcome, seconds)

    def _verdict(self, item: T) -> LoadFailure | None:
        """Why the load is not tried, if this process died of it twice."""
        verdict = self._crashes.verdict(item.name)
        if verdict is not None:
            log.error("%s is not loaded: %s", item.title, verdict.message)
        return verdict

    def _attempt(self, item: T, work: Callable[[], R]) -> R | LoadFailure | None:
        """The outcome of one load; None when the load was given up."""
        try:
            return work()
        except (LoadAbandoned, NoRoom) as ending:
            log.info("%s is not loaded: %s", item.title, ending)
            return None
        except BaseException as raised:
            oom.end_if_broken(raised)
            error = foreign.error_of(raised)
            reason = failure.classify(error)
            text = "%s failed to load: %s: %s"
            unknown = reason.error_class == "UNKNOWN" and not isinstance(error, self.expected)
            stack = error if unknown else None
            log.warning(text, item.title, reason.error_class, reason.message, exc_info=stack)
            return reason
        finally:
            foreign.settle_warnings()


class ModelLoads(Loads[Instance, Loaded]):
    """The loads of models on one worker."""

    expected = (SourceError, DownloadFailed, ModelRefused, ProtocolError)

    def __init__(
        self,
        states: ModelStates,
        settings: Settings,
        crashes: LoadCrashes,
        device: Device,
        run: Callable[[Callable[[], Any]], Any],
        load_loras: Callable[[Instance, Adapter], None],
        metrics: WorkerMetrics,
    ) -> None:
        """`run` executes a function on the device thread; `load_loras` loads the adapters that profiles name."""
        super().__init__(states, states.due, crashes, settings.worker.load_threads)
        self._loader, self._load_loras = Loader(settings, device, run), load_loras
        self._device, self._metrics = device, metrics
        self._closed = False

    def close(self) -> None:
        """Loads that run end soon. Loaded models stay. Wants the lock."""
        self._closed = True
        for instance in self.states.instances():
            instance.abandoned = True

    def carry_out(self, item: Instance) -> Loaded:
        """Load one model, and the LoRA adapters that its profiles name."""
        self._give_way(item)
        loaded = self._loader.load(item, self._room, partial(self.states.progressed, item))
        self._load_loras(item, loaded.adapter)
        return loaded

    def _give_way(self, item: Instance) -> None:
        """Lower the priority of this thread, and of the threads that it starts, where only the start wants the load.

        Requests for models that are there go before. Without such models nothing is lowered, nor for a model that keeps
        threads of its load: a thread without privileges never gets its priority back.
        """
        with self.states.lock:
            serves = any(other.state == "loaded" for other in self.states.instances())
        if serves and not (item.demanded or keeps_threads(item.entry)):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + LOWER)

    def succeeded(self, item: Instance, result: Loaded, seconds: float) -> None:
        """The model serves, unless somebody has unloaded it meanwhile."""
        log.info("%s loaded on %s in %.1f s", item.title, self._device.name, seconds)
        self._metrics.loads.labels(item.name, self._metrics.worker, "loaded").inc()
        how = partial(item.succeed, result.adapter, result.memory_bytes, seconds, time.monotonic())
        self.states.end(item, how)
        # NOTE: a start reads which models were unloaded by name before it can be told of another unload.
        unwanted = not item.demanded and self.states.was_unloaded(item.entry)
        if (item.abandoned or unwanted) and not self._closed:
            self.states.begin_unload(item, "admin")

    def failed(self, item: Instance, reason: LoadFailure | None) -> None:
        """The model is failed; after lack of memory another model goes first, and the load is tried once more."""
        if reason is None:
            self.states.end(item, item.rest)
            return
        self._metrics.loads.labels(item.name, self._metrics.worker, "failed").inc()
        if reason.error_class == "OOM" and not (item.relieved or item.abandoned):
            item.relieved = True
            if self.states.make_way(item) or self.states.evict(1, "oom", last_may_go=True):
                self.states.again(item)
                return
        self.states.end(item, partial(item.fail, reason, time.monotonic()))

    def refused(self, item: Instance, verdict: LoadFailure) -> None:
        """The model is failed for a while. The refusal does not count as a load."""
        self.states.end(item, partial(item.fail, verdict, time.monotonic()))

    def _room(self, instance: Instance, nbytes: int) -> None:
        """Wait until the budget has room for a load, and make room; see `Loader.load`."""
        states = self.states
        with states.lock:
            instance.reserved_bytes = nbytes
            while not (self._closed or instance.abandoned):
                leaving = any(other.state == "unloading" for other in states.instances())
                excess = states.used_bytes() - states.budget.nbytes
                if excess <= 0 and not (instance.relieved and leaving):
                    return
                if not leaving and not states.make_way(instance):
                    if not instance.demanded and not states.is_pinned(instance):
                        raise NoRoom("it does not fit beside the others and no request has asked for it")
                    if not states.evict(excess, "memory", last_may_go=self._last_may_go(instance)):
                        return
                states.lock.wait(EVERY_S)
        raise LoadAbandoned("nobody wants it any more")

    def _last_may_go(self, instance: Instance) -> bool:
        """Whether even the last loaded model goes: the device lacks memory, or other models are coming."""
        coming = (i for i in self.states.instances() if i is not instance and i.state == "loading")
        return self.states.used_bytes() > self.states.budget.total_nbytes or any(
            i.reserved_bytes for i in coming
        )
