"""What runs with tools do now, of all frontends, for the live page.

1. A run has a place in the small file of its frontend from its beginning to its end. The file begins with the first run
   of a frontend and ends with the frontend.
2. The run replaces its record when it begins something else: a turn of the model, a call, a wait for a decision. The
   record tells since when, so that nothing is written while time passes.
3. A frontend has `PLACES` places. Of more runs those without a place are counted in the metrics only.
4. Arguments of a call are in the record while the call waits or runs, cut to `MAX_ARGUMENTS_NBYTES`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import msgspec

from frontend.records.recent import RecordFile, numbers_in, payload_in
from ipc.processes.liveness import is_running, own_identity
from ipc.processes.paths import RunPaths

log = logging.getLogger(__name__)

PLACES = 64
PLACE_NBYTES = 4096
MAX_ARGUMENTS_NBYTES = 2560
MAX_NAME = 64
"""Characters of the name of a model or tool."""
_LOOKS = 3
"""How often a reader looks for records that were being written."""
_ENDING = ".runs"

Doing = Literal["model", "tool", "approval"]
"""The model writes; a tool runs; the run waits for a decision about a call."""


class LiveRun(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One run; `began` and `since` are Unix seconds, `runner` is the `own_identity` of its frontend.

    `owner` is the public id of the key, empty without a key. `tool` is the label of the tool of the present call, empty
    while the model writes. `arguments` are the text of its arguments, which had `arguments_chars` characters, and
    `approval_id` names the decision for which the run waits.
    """

    request_id: str
    model: str
    owner: str
    began: float
    doing: Doing
    since: float
    round: int = 0
    files: int = 0
    tool: str = ""
    arguments: str = ""
    arguments_chars: int = 0
    approval_id: str = ""
    runner: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[LiveRun] = msgspec.msgpack.Decoder(LiveRun)


def cut(text: str) -> str:
    """The beginning of arguments, as a record may have them."""
    return text.encode(errors="replace")[:MAX_ARGUMENTS_NBYTES].decode(errors="ignore")


class LiveRuns:
    """The runs of this frontend. A lack of room on the disk leaves the page without them, and nothing else."""

    def __init__(self, paths: RunPaths, name: str) -> None:
        """`name` is the slot of the frontend. Opens nothing yet."""
        self._path = paths.metrics() / f"{name}{_ENDING}"
        # What an earlier life of the slot has left is of no run.
        self._path.unlink(missing_ok=True)
        self._file: RecordFile | None = None
        self._runner = ""
        self._free = list(range(PLACES))
        self._number = 0

    def take(self) -> int | None:
        """A place for a run; None while all places are taken."""
        if self._file is None and self._free:
            try:
                self._file = RecordFile(self._path, PLACES, PLACE_NBYTES)
                self._runner = own_identity()
            except OSError as error:
                log.error("the live page shows no runs of this frontend: %s", error)
                self._free = []
        return self._free.pop(0) if self._free else None

    def show(self, place: int, run: LiveRun) -> None:
        """Replace the record of a run."""
        if self._file is None:
            return
        names = {name: getattr(run, name)[:MAX_NAME] for name in ("model", "tool")}
        payload = _encoder.encode(msgspec.structs.replace(run, runner=self._runner, **names))
        assert len(payload) <= self._file.room, "every field of a record is bounded"
        self._number += 1
        self._file.put(place, self._number, payload)

    def give_back(self, place: int) -> None:
        """A run has ended."""
        if self._file is not None:
            self._file.clear(place)
            self._free.append(place)

    def close(self) -> None:
        """Forget all runs, and show none from now on: a run may end later than its frontend begins to end."""
        self._free = []
        if self._file is not None:
            self._file.close()
            self._file = None
            self._path.unlink(missing_ok=True)


class RunReader:
    """Reads the runs of all frontends that live."""

    def __init__(self, paths: RunPaths) -> None:
        self._directory = paths.metrics()

    def read(self) -> list[LiveRun]:
        """All runs that have a place, in the order of their beginning. Blocks on files."""
        runs = [run for path in self._directory.glob(f"*{_ENDING}") for run in _runs_in(path)]
        alive = {runner for runner in {run.runner for run in runs} if is_running(runner)}
        return sorted((run for run in runs if run.runner in alive), key=lambda run: run.began)


def _runs_in(path: Path) -> list[LiveRun]:
    runs: list[LiveRun] = []
    for _ in range(_LOOKS):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return []
        if len(data) != PLACES * PLACE_NBYTES:
            # Its frontend is making the file, or found no room for the file.
            return []
        decoded = [_decoded(data, place) for place in numbers_in(data, PLACE_NBYTES).nonzero()[0].tolist()]
        runs = [run for run in decoded if run is not None]
        if len(runs) == len(decoded):
            break
    return runs


def _decoded(data: bytes, place: int) -> LiveRun | None:
    """The record of a place; None while its frontend writes the place."""
    payload = payload_in(data, place, PLACE_NBYTES)
    try:
        return None if payload is None else _decoder.decode(payload)
    except msgspec.DecodeError:
        return None
