"""Loads of one kind (models, or LoRA adapters), each in a thread of its own, and what becomes of them.

1. `start` begins what is due, a bounded number at a time. What this process may have died of is not loaded beside
   another such load, and not at all for a while after the second death (`lifecycle.crashes`).
2. A load succeeds, fails, or is given up (`LoadAbandoned`, `NoRoom`). A failure is classified, logged and kept.

What a load does, and what its outcome means for others, is said by the two kinds: `model_loads` and `loras`.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Generic, TypeVar

from workers import foreign
from workers.device.stepping import vital_thread
from workers.lifecycle import memory_budget
from workers.lifecycle.crashes import LoadCrashes
from workers.lifecycle.instance import LifeCycle, LoadAbandoned, NoRoom
from workers.lifecycle.model_states import LoadLine, ModelStates
from workers.loading import failure
from workers.loading.failure import LoadFailure

log = logging.getLogger(__name__)

T = TypeVar("T", bound=LifeCycle)
R = TypeVar("R")


class Loads(ABC, Generic[T, R]):
    """The loads of one kind; R is what a load gives. Methods that say so want the lock of `states`."""

    expected: ClassVar[tuple[type[Exception], ...]] = ()
    """Errors that are logged without a stack, also where their class is unknown."""

    def __init__(self, states: ModelStates, line: LoadLine[T], crashes: LoadCrashes, most: int) -> None:
        """`most` loads of this kind run at a time."""
        self.states, self.line, self.running = states, line, 0
        self._crashes, self._most = crashes, most

    @abstractmethod
    def load(self, item: T) -> R:
        """One load, in a thread of its own. Raises whatever goes wrong, `LoadAbandoned` and `NoRoom`."""

    @abstractmethod
    def succeeded(self, item: T, result: R, seconds: float) -> None:
        """A load ended well. Wants the lock."""

    @abstractmethod
    def failed(self, item: T, reason: LoadFailure | None) -> None:
        """A load ended badly, or was given up (None). Wants the lock."""

    def refused(self, item: T, verdict: LoadFailure) -> None:
        """A load is not tried, since this process died of it twice. Wants the lock."""
        self.failed(item, verdict)

    def may_begin(self, item: T) -> bool:
        """Whether a load that is due may begin now. Wants the lock."""
        return self._crashes.may_begin(item.name)

    def begin(self, item: T) -> None:
        """A load begins now. Wants the lock."""

    def start(self) -> None:
        """Begin what is due. Wants the lock."""
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

    def run_here(self, item: T, load: Callable[[], R]) -> None:
        """Run a load that has begun in this thread, as a part of another load."""
        outcome: R | LoadFailure | None = self._verdict(item)
        began = time.monotonic()
        if outcome is None:
            self._crashes.begin(item.name)
            outcome = self._attempt(item, load)
        self._end(item, outcome, time.monotonic() - began)

    def _run(self, item: T) -> None:
        began = time.monotonic()
        outcome = self._attempt(item, partial(self.load, item))
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

    def _attempt(self, item: T, load: Callable[[], R]) -> R | LoadFailure | None:
        """The outcome of one load; None when it was given up."""
        try:
            return load()
        except (LoadAbandoned, NoRoom) as reason:
            log.info("%s is not loaded: %s", item.title, reason)
            return None
        except BaseException as raised:
            error = foreign.error_of(raised)
            found = failure.classify(error)
            text = "%s failed to load: %s: %s"
            unknown = found.error_class == "UNKNOWN" and not isinstance(error, self.expected)
            stack = error if unknown else None
            log.warning(text, item.title, found.error_class, found.message, exc_info=stack)
            return found
        finally:
            foreign.settle_warnings()
