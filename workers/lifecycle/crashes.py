"""Remembers which models were being loaded when this worker's process died, so that none can kill it for ever.

1. A file per load is written before it begins and removed when it ends, well or not; it holds how often that was tried.
   A worker that ends in order removes the files of its loads too.
2. What a starting worker finds was being loaded when an earlier life of its slot died. Of those models only one at a
   time is loaded, so that a second death names the guilty one; others are loaded beside it.
3. A model that was being loaded at two deaths in a row is not loaded again for a while, by no worker, unless some
   worker loads the model well meanwhile.
4. A process may be killed from outside. SIGKILL does not tell who sent the signal: an operator, the kernel for want of
   memory, the model itself. A model that has loaded well before is trusted for `MOST_KILLS` such deaths, and likewise
   where nobody says how the process ended (systemd). A death by another signal or an exit code ends the trust.
5. What nobody tries for `KEPT_S` of a life is forgotten.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import signal
import threading
import time
from pathlib import Path

from workers.loading.failure import LoadFailure

log = logging.getLogger(__name__)

MOST_DEATHS = 2
MOST_KILLS = 5
_FROM_OUTSIDE = ("", f"signal-{signal.SIGKILL:d}")
"""Ends of a process that need not be its own fault."""
RETRY_AFTER_S = 300.0
KEPT_S = 300.0
"""How long a life remembers a mark that it has found."""


class LoadCrashes:
    """The marks of one worker slot, under `root`, beside those that all slots share: `well.*` and `refused.*`."""

    def __init__(self, root: Path, slot: int, ended_by: str = "") -> None:
        """`ended_by` is how the earlier life of the slot ended, in the supervisor's words; "" where nobody says it."""
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
        """Whether this load may begin beside those that run: no two of which an earlier life may have died."""
        with self._lock:
            return model not in self._known() or self._running.isdisjoint(self._deaths)

    def verdict(self, model: str) -> LoadFailure | None:
        """Why this model is not to be loaded now, if so; the next time it may be."""
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
        """Whether a refusal of this life is over, as some worker has loaded the model well since."""
        if model not in self._told or _written(self._shared("refused", model)) >= self._told[model]:
            return False
        del self._told[model]
        return True

    def begin(self, model: str) -> None:
        """A load begins. A full disk costs the mark and not the load."""
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
        """The process ends in order: loads that still run are no deaths, and none is marked any more."""
        with self._lock:
            self._closed = True
            for model in list(self._running):
                self._forget(model)

    def _known(self) -> dict[str, int]:
        """Deaths by model, those that were found too long ago and are not being tried forgotten."""
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
