"""The last requests of every frontend, and its runs under way, in small files that all frontends read.

1. A `RecordFile` lies in the run directory and has fixed places: one frontend writes records, all frontends read the
   records. A place is `number, length, checksum, payload`, and zeros behind. A place with the number 0 is empty.
2. The file of requests has two rings of places: answers and errors, so that many answers do not displace the errors.
3. If a checksum is wrong, the frontend may be writing the place: the reader waits for the place once. If the next
   reading finds the same, the writer was killed in the middle, and the reader skips the place.

Runs with tools have a `RecordFile` too, for the live page (`LiveRuns`):

1. A run has a place from its beginning to its end. The file begins with the first run of a frontend and ends with the
   frontend.
2. The run replaces its record when it begins something else: a turn of the model, a call, a wait for a decision. The
   record tells since when, so that nothing is written while time passes.
3. A frontend has `PLACES` places. Of more runs those without a place are counted in the metrics only.
4. Arguments of a call are in the record while the call waits or runs, cut to `MAX_ARGUMENTS_NBYTES`.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import struct
import zlib
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from ipc.processes.liveness import is_running, own_identity
from ipc.processes.paths import RunPaths

_HEADER = struct.Struct("<QII")


class RecordFile:
    """A mapped file of `count` places of `nbytes` bytes. Only the frontend that owns the file writes."""

    def __init__(self, path: Path, count: int, nbytes: int) -> None:
        """Open or create the file, with the records of an earlier life. Raises `OSError` without room on the disk."""
        self._nbytes = nbytes
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # A hole in the file would be a SIGBUS on the day on which the disk is full.
            os.posix_fallocate(fd, 0, count * nbytes)
            self._map = mmap.mmap(fd, count * nbytes)
        finally:
            os.close(fd)

    @property
    def room(self) -> int:
        """Bytes of the longest payload."""
        return self._nbytes - _HEADER.size

    def numbers(self) -> np.ndarray:
        """The number of each place, uint64 [count]."""
        return numbers_in(bytes(self._map), self._nbytes)

    def put(self, place: int, number: int, payload: bytes) -> None:
        """Replace a record, whose number is above 0."""
        header = _HEADER.pack(number, len(payload), zlib.crc32(payload))
        self._write(place, header + payload)

    def clear(self, place: int) -> None:
        """Make a place empty."""
        self._write(place, b"")

    def _write(self, place: int, record: bytes) -> None:
        start = place * self._nbytes
        self._map[start : start + self._nbytes] = record.ljust(self._nbytes, b"\0")

    def close(self) -> None:
        """Unmap the file, which stays."""
        self._map.close()


def numbers_in(data: bytes, nbytes: int) -> np.ndarray:
    """The number of each place of a file with places of `nbytes` bytes, uint64 [count]."""
    numbers = np.dtype({"names": ["number"], "formats": ["<u8"], "offsets": [0], "itemsize": nbytes})
    return np.frombuffer(data, numbers)["number"]


def payload_in(data: bytes, place: int, nbytes: int) -> bytes | None:
    """The payload of a place; None where the checksum is wrong."""
    start = place * nbytes
    _, length, checksum = _HEADER.unpack_from(data, start)
    if length > nbytes - _HEADER.size:
        return None
    start += _HEADER.size
    payload = data[start : start + length]
    return payload if zlib.crc32(payload) == checksum else None


log = logging.getLogger(__name__)

ANSWERS = 256
ERRORS = 64
SLOT_NBYTES = 1024
FILE_NBYTES = (ANSWERS + ERRORS) * SLOT_NBYTES
CLIENT_GONE = 499

_MAX_MODEL = 96
_MAX_MESSAGE_NBYTES = 200
_QUOTED = re.compile(r"""(?<!\w)b?(?:'(?:[^'\\]|\\.)*(?:'|\\?$)|"(?:[^"\\]|\\.)*(?:"|\\?$))""", re.DOTALL)
"""A value in a message, as `repr` or `ascii` writes values; without its end where the message was cut."""


class Recent(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One finished request: end (Unix seconds), ids, kind, outcome, milliseconds by phase, message of the error.

    `owner` is the public id of the key that sent the request, empty without a key.
    """

    at: float
    request_id: str
    trace_id: str
    protocol: str
    operation: str
    model: str
    status: int
    code: str
    phases: dict[str, float]
    message: str = ""
    owner: str = ""

    @property
    def failed(self) -> bool:
        """Whether the answer was an error; a client that went away is no error."""
        return self.status >= 400 and self.status != CLIENT_GONE


def shown_message(message: str, model: str) -> str:
    """A message for other people than the client: short, and without values of the request except the model's name.

    Messages quote each value of a request, so whatever is quoted goes.
    """
    shown = _QUOTED.sub(lambda found: found[0] if found[0][1:-1] == model else "…", message)
    nbytes = shown.encode(errors="replace")
    if len(nbytes) <= _MAX_MESSAGE_NBYTES:
        return nbytes.decode()
    return nbytes[:_MAX_MESSAGE_NBYTES].decode(errors="ignore") + "…"


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Recent] = msgspec.msgpack.Decoder(Recent)


def ring_path(paths: RunPaths, name: str) -> Path:
    """File of the frontend slot `name`; beside the metric files, and swept with them."""
    return paths.metrics() / f"{name}.recent"


class RecentWriter:
    """The rings of this frontend. They go on where an earlier life of the slot ended."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises `OSError` without room on the disk."""
        self._file = RecordFile(path, ANSWERS + ERRORS, SLOT_NBYTES)
        numbers = self._file.numbers()
        self._answers, self._errors = int(numbers[:ANSWERS].max()), int(numbers[ANSWERS:].max())

    def add(self, record: Recent) -> None:
        """Put `record` in the place of the oldest of its kind."""
        if len(record.model) > _MAX_MODEL:
            record = msgspec.structs.replace(record, model=record.model[:_MAX_MODEL] + "…")
        payload = _encoder.encode(record)
        if len(payload) > self._file.room:
            log.warning("request %s is too long for the list of recent requests", record.request_id)
            return
        if record.failed:
            self._errors += 1
            self._file.put(ANSWERS + self._errors % ERRORS, self._errors, payload)
        else:
            self._answers += 1
            self._file.put(self._answers % ANSWERS, self._answers, payload)

    def close(self) -> None:
        """Unmap the file. The file stays, so that other frontends still show these requests."""
        self._file.close()


def open_ring(paths: RunPaths, name: str) -> RecentWriter | None:
    """The ring of recent requests; None without room on the disk, which the server survives."""
    try:
        return RecentWriter(ring_path(paths, name))
    except OSError as error:
        log.error("recent requests are not kept: %s", error)
        return None


class _Seen(NamedTuple):
    """Last sequence numbers read of one file, and sequence numbers of places that were torn."""

    inode: int
    latest: tuple[int, int] = (0, 0)
    torn: tuple[int, int] = (0, 0)


class RecentReader:
    """Reads new requests from the rings of all frontends."""

    def __init__(self, paths: RunPaths) -> None:
        self._directory = paths.metrics()
        self._seen: dict[str, _Seen] = {}

    def read(self) -> list[Recent]:
        """Requests that ended since the last call (or are still in the rings), oldest first. Blocks on files."""
        requests: list[Recent] = []
        for path in self._directory.glob("*.recent"):
            try:
                with path.open("rb") as file:
                    inode, data = os.fstat(file.fileno()).st_ino, file.read(FILE_NBYTES)
            except FileNotFoundError:
                continue
            if len(data) == FILE_NBYTES:
                requests += self._new(path.name, inode, data)
        return sorted(requests, key=lambda record: record.at)

    def _new(self, name: str, inode: int, data: bytes) -> list[Recent]:
        seen = self._seen.get(name)
        if seen is None or seen.inode != inode:
            seen = _Seen(inode)
        sequences = numbers_in(data, SLOT_NBYTES)
        records: list[Recent] = []
        latest, torn = [], []
        for ring, (first, end) in enumerate(((0, ANSWERS), (ANSWERS, ANSWERS + ERRORS))):
            numbers = {int(sequences[place]): place for place in range(first, end)}
            reached, stopped = seen.latest[ring], 0
            for number in sorted(each for each in numbers if each > reached):
                record = _decode(data, numbers[number])
                if record is not None:
                    records.append(record)
                elif number != seen.torn[ring]:
                    stopped = number
                    break
                reached = number
            latest.append(reached)
            torn.append(stopped)
        self._seen[name] = _Seen(inode, (latest[0], latest[1]), (torn[0], torn[1]))
        return records


def _decode(data: bytes, place: int) -> Recent | None:
    """The record of a place; None while its frontend writes the place."""
    payload = payload_in(data, place, SLOT_NBYTES)
    try:
        return None if payload is None else _decoder.decode(payload)
    except msgspec.DecodeError:
        return None


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


_run_decoder: msgspec.msgpack.Decoder[LiveRun] = msgspec.msgpack.Decoder(LiveRun)


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
        return None if payload is None else _run_decoder.decode(payload)
    except msgspec.DecodeError:
        return None
