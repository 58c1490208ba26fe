"""Inputs that crashed workers: their hashes are file names in the run directory, refused until they age out.

Files survive restarts of any process and are seen by all frontends; a frontend looks at the directory once a second.
"""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path

import msgspec

from ipc.messages import Call

log = logging.getLogger(__name__)


def fingerprint(model: str, call: Call, payload: bytes | memoryview = b"") -> str:
    """Hash of what would be run: model, call and raw tensors."""
    digest = hashlib.blake2b(msgspec.msgpack.encode((model, call)), digest_size=16)
    digest.update(payload)
    return digest.hexdigest()


class PoisonList:
    """Hashes younger than `ttl_s` in `directory`."""

    def __init__(self, directory: Path, ttl_s: float) -> None:
        self._directory, self._ttl_s = directory, ttl_s
        self._known: frozenset[str] = frozenset()

    def refresh(self) -> None:
        """Read the directory again; files past their age are removed."""
        known = set()
        oldest = time.time() - self._ttl_s
        for path in self._directory.iterdir() if self._directory.exists() else ():
            try:
                if path.stat().st_mtime < oldest:
                    path.unlink(missing_ok=True)
                else:
                    known.add(path.name)
            except FileNotFoundError:
                continue
        self._known = frozenset(known)

    def add(self, model: str, call: Call, payload: bytes | memoryview = b"") -> None:
        """Refuse this input from now on, in every frontend."""
        name = fingerprint(model, call, payload)
        self._known |= {name}
        try:
            (self._directory / name).touch(mode=0o600)
        except OSError as error:
            log.error("a poisonous input could not be noted for the other frontends: %s", error)

    def holds(self, model: str, call: Call, payload: bytes | memoryview = b"") -> bool:
        """Whether this input is refused. Costs nothing while the list is empty."""
        return bool(self._known) and fingerprint(model, call, payload) in self._known
