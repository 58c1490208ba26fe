"""Models that somebody loaded or unloaded by name, remembered until the server starts again.

One file per model in the run directory, seen by all processes: frontends load for no request what was unloaded, and a
worker that starts again loads what was loaded and leaves what was not.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Iterable
from pathlib import Path

from ipc.metrics.infer_families import split_id
from ipc.processes.paths import RunPaths

log = logging.getLogger(__name__)

_LOADED, _UNLOADED = b"loaded", b"unloaded"


class Marks:
    """The marks of one server; models are named without their versions."""

    def __init__(self, paths: RunPaths) -> None:
        self._directory = paths.control()

    def put(self, model: str, *, loaded: bool) -> None:
        """Somebody loaded the model by name, or unloaded it."""
        draft = self._directory / f".{secrets.token_hex(8)}"
        draft.write_bytes(_LOADED if loaded else _UNLOADED)
        draft.replace(self._path(model))

    def restore(self, model: str, loaded: bool | None) -> None:
        """Let the mark be again what `get` gave before."""
        if loaded is None:
            self._path(model).unlink(missing_ok=True)
        else:
            self.put(model, loaded=loaded)

    def get(self, model: str) -> bool | None:
        """Whether the model was loaded (true) or unloaded (false) last; None: neither."""
        try:
            return self._path(model).read_bytes() == _LOADED
        except FileNotFoundError:
            return None

    def adjust(self, chosen: Iterable[str], served: Iterable[str]) -> list[str]:
        """Catalog ids to load at the start: the `chosen` ones that were not unloaded, and those that were loaded.

        None of those of which that cannot be read.
        """
        names, found = set(chosen), []
        for entry in served:
            try:
                mark = self.get(split_id(entry)[0])
            except OSError as error:
                log.error("whether model %s was loaded by name cannot be read: %s", entry, error.strerror)
                continue
            if mark or (mark is None and entry in names):
                found.append(entry)
        return found

    def _path(self, model: str) -> Path:
        digest = hashlib.blake2b(model.encode(errors="surrogatepass"), digest_size=16)
        return self._directory / f"model-{digest.hexdigest()}"
