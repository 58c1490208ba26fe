"""Inputs that crashed workers: their hashes are file names in the run directory, refused until they age out.

Files survive restarts of any process and are seen by all frontends; a frontend looks at the directory once a second.
"""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path

import msgspec

from ipc.wire.field_names import IN_PARAMS
from ipc.wire.messages import Call, InferCall

log = logging.getLogger(__name__)

MAX_SUSPECTS = 256


def fingerprint(model: str, call: Call, payload: bytes | memoryview = b"") -> str:
    """Hash of what would be run: model, call and raw tensors.

    What begins a sequence is the same under any id, and a call by whatever route it came.
    """
    if not isinstance(call, InferCall):
        call = msgspec.structs.replace(call, names=IN_PARAMS)
    elif call.step is not None and call.step.start:
        call = msgspec.structs.replace(call, step=msgspec.structs.replace(call.step, id=0))
    digest = hashlib.blake2b(msgspec.msgpack.encode((model, call)), digest_size=16)
    digest.update(payload)
    return digest.hexdigest()


class PoisonList:
    """Hashes younger than `ttl_s` in `directory`."""

    def __init__(self, directory: Path, ttl_s: float) -> None:
        self._directory, self._ttl_s = directory, ttl_s
        self._known: frozenset[str] = frozenset()
        self._suspects: dict[str, float] = {}

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

    def suspect(
        self, model: str, call: Call, payload: bytes | memoryview = b"", *, alone: bool = True
    ) -> None:
        """A worker died on this input, which was not run again; when that happens again on it `alone`, it is poison.

        This frontend alone remembers it, for `ttl_s`.
        """
        name, now = fingerprint(model, call, payload), time.monotonic()
        self._suspects = {each: at for each, at in self._suspects.items() if now - at < self._ttl_s}
        if name in self._suspects:
            if alone:
                self.add(model, call, payload)
        elif len(self._suspects) < MAX_SUSPECTS:
            self._suspects[name] = now

    def is_suspect(self, model: str, call: Call, payload: bytes | memoryview = b"") -> bool:
        """Whether a worker died on this input. Costs nothing while that has happened to none."""
        return bool(self._suspects) and fingerprint(model, call, payload) in self._suspects

    def holds(self, model: str, call: Call, payload: bytes | memoryview = b"") -> bool:
        """Whether this input is refused. Costs nothing while the list is empty."""
        return bool(self._known) and fingerprint(model, call, payload) in self._known
