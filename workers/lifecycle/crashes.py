"""Remembers which models were being loaded when this worker's process died, so that none can kill it for ever.

1. A file per load is written before it begins and removed when it ends, well or not; it holds how often that was tried.
   A worker that ends in order removes the files of its loads too.
2. What a starting worker finds was being loaded when an earlier life of its slot died. Of those models only one at a
   time is loaded, so that a second death names the guilty one; others are loaded beside it.
3. A model that was being loaded at two deaths in a row is not loaded again for a while.
4. What nobody tries for `KEPT_S` of a life is forgotten.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from pathlib import Path

from workers.loading.failure import LoadFailure

log = logging.getLogger(__name__)

MOST_DEATHS = 2
RETRY_AFTER_S = 300.0
KEPT_S = 300.0
"""How long a life remembers a mark that it has found."""


class LoadCrashes:
    """The marks of one worker slot, under `root`."""

    def __init__(self, root: Path, slot: int) -> None:
        self._root, self._slot = root, slot
        self._deaths: dict[str, int] = {}
        self._running: set[str] = set()
        self._lock, self._closed = threading.Lock(), False
        self._found_at = time.monotonic()
        for path in root.glob(f"{slot}.*"):
            model, _, count = path.read_text().rpartition(" ")
            if model and count.isdigit():
                self._deaths[model] = int(count)
                log.warning("the worker died while it loaded %s", model)

    def may_begin(self, model: str) -> bool:
        """Whether this load may begin beside those that run: no two of which an earlier life may have died."""
        with self._lock:
            return model not in self._known() or self._running.isdisjoint(self._deaths)

    def verdict(self, model: str) -> LoadFailure | None:
        """Why this model is not to be loaded now, if so; the next time it may be."""
        with self._lock:
            if self._known().get(model, 0) < MOST_DEATHS:
                return None
        self.end(model)
        return LoadFailure(
            error_class="UNKNOWN",
            permanent=False,
            retry_after_s=RETRY_AFTER_S,
            message="the worker process died twice while it loaded this model",
        )

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

    def end(self, model: str) -> None:
        """The load has ended and the process lives."""
        with self._lock:
            self._forget(model)

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
        digest = hashlib.blake2b(model.encode(), digest_size=8).hexdigest()
        return self._root / f"{self._slot}.{digest}"
