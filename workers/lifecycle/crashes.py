"""Remembers which models were being loaded when this worker's process died, so that none can kill it for ever.

1. A file per load is written before it begins and removed when it ends, well or not; it holds how often that was tried.
2. What a starting worker finds was being loaded when an earlier life of its slot died. Those models are loaded one at a
   time, so that a second death names the guilty one.
3. A model that was being loaded at two deaths in a row is not loaded again for a while.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from workers.loading.failure import LoadFailure

log = logging.getLogger(__name__)

MOST_DEATHS = 2
RETRY_AFTER_S = 300.0


class LoadMarks:
    """The marks of one worker slot, under `root`."""

    def __init__(self, root: Path, slot: int) -> None:
        self._root, self._slot = root, slot
        self._deaths: dict[str, int] = {}
        for path in root.glob(f"{slot}.*"):
            model, _, count = path.read_text().rpartition(" ")
            if model and count.isdigit():
                self._deaths[model] = int(count)
                log.warning("the worker died while it loaded %s", model)

    @property
    def suspects(self) -> bool:
        """Whether a model is still to be tried that an earlier life may have died of."""
        return any(deaths < MOST_DEATHS for deaths in self._deaths.values())

    def verdict(self, model: str) -> LoadFailure | None:
        """Why this model is not to be loaded now, if so; the next time it may be."""
        if self._deaths.get(model, 0) < MOST_DEATHS:
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
        try:
            self._root.mkdir(exist_ok=True, mode=0o700)
            self._path(model).write_text(f"{model} {self._deaths.get(model, 0) + 1}")
        except OSError as error:
            log.warning("the load of %s is not marked: %s", model, error)

    def end(self, model: str) -> None:
        """The load has ended and the process lives."""
        self._deaths.pop(model, None)
        self._path(model).unlink(missing_ok=True)

    def _path(self, model: str) -> Path:
        digest = hashlib.blake2b(model.encode(), digest_size=8).hexdigest()
        return self._root / f"{self._slot}.{digest}"
