"""Worker to frontend: one float32 array through the arena against copying limits and other ways of passing it.

1. Two real processes: a sender with the array ready, and this reader. A request names the way and the size.
2. The time runs from "array ready in the sender" to "the reader has touched every page of it".
3. The roofline is one `numpy.copyto` between warm private arrays of the same size, in the same round.

Ways: the arena with one copy in; the arena with the result computed in place (only the descriptor travels); msgpack
bytes over ZeroMQ; a new shared-memory file per message.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from benchmarks.options import parser
from benchmarks.report import Report, Row
from ipc.memory.arena import Arena, ArenaView, Block, LeaseTable
from ipc.processes.paths import SHM_ROOT

Floats = NDArray[np.float32]
EPOCH = "0123456789abcdef"
ARENA, IN_PLACE, MSGPACK, SEGMENT, ROOFLINE = "arena", "arena, in place", "msgpack", "new segment", "memcpy"
WAYS = (ARENA, IN_PLACE, MSGPACK, SEGMENT)
SIZES = tuple(kib << 10 for kib in (64, 256, 1024, 4096, 16384, 65536, 262144))
ARENA_NBYTES = SIZES[-1] + (16 << 20)
_SESSION = b"reader"
_SAMPLE_STRIDE = 512
_START_MS = 60_000


class Request(msgspec.Struct, array_like=True):
    """Reader to sender: send `nbytes` by `way`, after freeing the block of the message before, if it had one."""

    way: str
    nbytes: int
    release: tuple[int, int] | None = None


class Descriptor(msgspec.Struct, array_like=True):
    """Sender to reader: when the array was ready (monotonic ns), and where it is: in a block, a file, or inline."""

    ready_ns: int
    nbytes: int
    offset: int = 0
    generation: int = 0
    file: str = ""
    inline: bytes = b""


@functools.cache
def _array(nbytes: int) -> Floats:
    """The array to send: in memory and written, as a model's output is."""
    return np.random.default_rng(nbytes).random(nbytes // 4, np.float32)


def _write_segment(array: Floats) -> str:
    """Copy `array` into a new shared-memory file and return its path."""
    path = SHM_ROOT / f"penstock-bench.{os.getpid()}.{time.monotonic_ns()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, array.nbytes)
        with mmap.mmap(descriptor, array.nbytes) as mapping:
            target = np.frombuffer(mapping, np.float32)
            np.copyto(target, array)
            del target
    finally:
        os.close(descriptor)
    return str(path)


def _reserve(table: LeaseTable, nbytes: int) -> Block:
    block = table.reserve(nbytes)
    assert block is not None, "the arena holds one message at a time, so there is room"
    table.lease(block, _SESSION)
    return block


def _answer(request: Request, table: LeaseTable, encoder: msgspec.msgpack.Encoder) -> bytes:
    """Do the sender's part of one message."""
    array = _array(request.nbytes)
    if request.way == IN_PLACE:
        block = _reserve(table, request.nbytes)
        ready = time.perf_counter_ns()
    else:
        ready = time.perf_counter_ns()
        block = _reserve(table, request.nbytes) if request.way == ARENA else Block(0, 0, 0)
    found = Descriptor(ready, request.nbytes, block.offset, block.generation)
    if request.way == ARENA:
        np.copyto(np.frombuffer(table.data(block), np.float32), array)
    elif request.way == SEGMENT:
        found.file = _write_segment(array)
    elif request.way == MSGPACK:
        found.inline = array.tobytes()
    return encoder.encode(found)


def send_arrays(endpoint: str, arena_path: str) -> None:
    """The sender's process: answer requests until an empty one comes."""
    arena = Arena(Path(arena_path), ARENA_NBYTES, EPOCH)
    table, encoder = LeaseTable(arena), msgspec.msgpack.Encoder()
    try:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.bind(endpoint)
            while (message := socket.recv_multipart())[1]:
                request = msgspec.msgpack.decode(message[1], type=Request)
                if request.release:
                    table.release(_SESSION, *request.release)
                socket.send_multipart([message[0], _answer(request, table, encoder)])
    finally:
        arena.close()


class Reader:
    """The reader's side: asks for arrays and touches them."""

    def __init__(self, socket: zmq.Socket[bytes], view: ArenaView) -> None:
        self._socket, self._view = socket, view
        self._release: tuple[int, int] | None = None
        self._decoder = msgspec.msgpack.Decoder(Descriptor)

    def receive(self, way: str, nbytes: int) -> float:
        """Seconds from array ready to array read. Raises AssertionError when the data are not the sender's."""
        self._socket.send(msgspec.msgpack.encode(Request(way, nbytes, self._release)))
        self._release = None
        found = self._decoder.decode(self._socket.recv())
        if way in (ARENA, IN_PLACE):
            total = _touch(self._view.data(found.offset, found.nbytes, found.generation))
            self._view.check(found.offset, found.generation)
            self._release = (found.offset, found.generation)
        elif way == SEGMENT:
            total = _touch_segment(Path(found.file), nbytes)
        else:
            total = _touch(found.inline)
        elapsed_s = (time.perf_counter_ns() - found.ready_ns) / 1e9
        if way != IN_PLACE:
            assert total == _expected(nbytes), f"{way}: wrong data"
        return elapsed_s


def _touch(data: memoryview | bytes | mmap.mmap) -> float:
    """Sum of a sample with several values in each page."""
    return float(np.frombuffer(data, np.float32)[::_SAMPLE_STRIDE].sum())


def _touch_segment(path: Path, nbytes: int) -> float:
    """Map, touch, unmap and unlink the file of one message."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ) as mapping:
            return _touch(mapping)
    finally:
        os.close(descriptor)
        path.unlink()


@functools.cache
def _expected(nbytes: int) -> float:
    return float(_array(nbytes)[::_SAMPLE_STRIDE].sum())


@functools.cache
def _target(nbytes: int) -> Floats:
    return np.ones(nbytes // 4, np.float32)


def _copy(nbytes: int) -> float:
    """Seconds of one copy between warm private arrays."""
    source, target = _array(nbytes), _target(nbytes)
    since = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - since


@contextlib.contextmanager
def _sender() -> Iterator[Reader]:
    """A sender process and the reader that is connected to it."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory, zmq.Context() as context:
        endpoint, arena_path = f"ipc://{directory}/socket", SHM_ROOT / f"penstock-bench.{os.getpid()}"
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=send_arrays, args=(endpoint, str(arena_path)), daemon=True)
        process.start()
        with context.socket(zmq.DEALER) as socket:
            socket.connect(endpoint)
            try:
                _wait_sender(socket)
                yield Reader(socket, ArenaView(arena_path, EPOCH))
                socket.send(b"")
                process.join(10)
            finally:
                process.terminate()
                arena_path.unlink(missing_ok=True)


def _wait_sender(socket: zmq.Socket[bytes]) -> None:
    """Return when the sender has answered once; its arena exists then. Raises zmq.Again after `_START_MS`."""
    socket.setsockopt(zmq.RCVTIMEO, _START_MS)
    socket.send(msgspec.msgpack.encode(Request(MSGPACK, SIZES[0])))
    socket.recv()
    socket.setsockopt(zmq.RCVTIMEO, -1)


def run(rounds: int, sizes: tuple[int, ...]) -> Report:
    """Measure every way at every size in every round, and save the report."""
    report = Report("transfer", "Worker to frontend: one array between two processes", {"rounds": rounds})
    times: dict[tuple[str, int], list[float]] = {}
    with _sender() as reader:
        ways: dict[str, Callable[[int], float]] = {
            way: functools.partial(reader.receive, way) for way in WAYS
        }
        ways[ROOFLINE] = _copy
        for turn in range(rounds + 1):
            for nbytes in sizes:
                for way, measure in ways.items():
                    elapsed_s = measure(nbytes)
                    if turn:
                        times.setdefault((way, nbytes), []).append(elapsed_s)
            report.say(f"round {turn}/{rounds}" + ("" if turn else " (warm-up)"))
    _show(report, times, sizes)
    report.save([[way, nbytes, values] for (way, nbytes), values in times.items()])
    return report


def _show(report: Report, times: dict[tuple[str, int], list[float]], sizes: tuple[int, ...]) -> None:
    """Times, rates and ratios by size."""
    every = (*WAYS, ROOFLINE)
    rows: list[Row] = [[_size(n), *(median(times[way, n]) * 1e3 for way in every)] for n in sizes]
    report.table("Array ready to array read, ms", ["size", *every], rows)
    rows = [[_size(n), *(n / median(times[way, n]) / 1e9 for way in every)] for n in sizes]
    report.table("The same, GB/s", ["size", *every], rows)
    rows = []
    for nbytes in sizes:
        against = (ROOFLINE, MSGPACK, SEGMENT)
        rows.append(
            [_size(nbytes), *(median_ratio(times[way, nbytes], times[ARENA, nbytes]) for way in against)]
        )
    report.table("Arena with one copy: rate as a multiple of", ["size", *(ROOFLINE, MSGPACK, SEGMENT)], rows)
    series = {way: [(n / 2**20, n / median(times[way, n]) / 1e9) for n in sizes] for way in (*WAYS, ROOFLINE)}
    del series[IN_PLACE]
    report.lines("Worker to frontend", "MiB", "GB/s", series)


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over rounds of `ours[r] / theirs[r]`: both were measured in the same round, so slow rounds cancel."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    """Read the command line and run."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, help="default 7, or 25 with --full")
    chosen = options.parse_args()
    run(chosen.rounds or (25 if chosen.full else 7), SIZES)


if __name__ == "__main__":
    main()
