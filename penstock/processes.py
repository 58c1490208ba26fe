"""A look at the processes of a running server, which needs no frontend.

1. Lock files of the run directory tell which processes live; /proc tells since when, and whether a process is stopped.
2. Every living worker is asked over the worker's own socket (`ipc.wire.stats.Look`); all answers share one time limit.
3. The metric file of the supervisor has the restarts, those of a gateway's frontends have boxes and lanes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq

from ipc import settings
from ipc.catalog.ids import split_id
from ipc.errors import ConfigError, PenstockError, ProtocolError
from ipc.metrics.files import MetricFiles
from ipc.processes.liveness import age_ns, is_held
from ipc.processes.paths import SERVER, RunPaths
from ipc.wire import codec
from ipc.wire.messages import ModelStatus
from ipc.wire.stats import GenerationStats, Look, Looked, QueueState

SILENT_S = 5.0
"""A frontend pings every worker twice a second; a frontend that has been silent for so long is stuck."""
_SLOT = re.compile(r"(worker|frontend)-(\d+)")
BRIDGE = "bridge-0"
_STOPPED = ("T", "t")


class Process(msgspec.Struct, kw_only=True):
    """A process that holds a lock of the run directory; `stopped` by a signal or a debugger."""

    pid: int
    up_s: float
    stopped: bool = False


class Frontend(Process, kw_only=True):
    """A frontend. `requests` are open at workers; `silent_s` is None while no worker knows the frontend."""

    slot: int
    requests: int = 0
    silent_s: float | None = None

    @property
    def stuck(self) -> bool:
        """Whether the frontend answers nobody at present."""
        return self.stopped or (self.silent_s or 0.0) > SILENT_S


class Worker(msgspec.Struct, kw_only=True):
    """A worker slot.

    `state` is serving, draining, starting (no socket yet), silent (a process that gives no answer) or dead (no process
    holds the slot). Only serving and draining workers have more than `process` and `restarts`. `queued` of at most
    `bound` tokens wait.
    """

    slot: int
    state: str
    restarts: int = 0
    process: Process | None = None
    device: str = ""
    threads: int = 0
    requests: int = 0
    queued: int = 0
    bound: int = 0
    memory_used: int = 0
    memory_total: int = 0
    resident: int = 0
    arena_used: int = 0
    arena_total: int = 0
    leases: int = 0
    queues: list[QueueState] = msgspec.field(default_factory=list)
    generations: list[GenerationStats] = msgspec.field(default_factory=list)
    models: list[ModelStatus] = msgspec.field(default_factory=list)


class Lanes(msgspec.Struct, kw_only=True):
    """What the frontends of a gateway have counted: boxes now, and items since the start.

    `items` went to boxes by the lanes `queue` and `direct`, `resent` were sent again, by why.
    """

    joined: bool
    boxes: int
    others: int
    items: dict[str, int]
    resent: dict[str, int]


class View(msgspec.Struct, kw_only=True):
    """What runs with one run directory. `bridge` takes work of a cluster; a `gateway` has no workers of its own."""

    run_dir: str
    arbiter: Process | None
    supervisor: Process | None
    bridge: Process | None = None
    gateway: bool = False
    lanes: Lanes | None = None
    frontends: list[Frontend]
    workers: list[Worker]

    @property
    def runs(self) -> bool:
        """Whether any process of a server lives."""
        living = [worker for worker in self.workers if worker.process is not None]
        return any((self.arbiter, self.supervisor, self.bridge, self.frontends, living))

    @property
    def sound(self) -> bool:
        """Whether all workers and frontends do their work, and there is at least one of each."""
        return (
            bool((self.workers or self.gateway) and self.frontends)
            and all(worker.state == "serving" for worker in self.workers)
            and not any(frontend.stuck for frontend in self.frontends)
        )


class NotReadable(PenstockError):
    """The run directory belongs to another user."""


def look(paths: RunPaths, configured: int, timeout_s: float) -> View:
    """Look at the server of a run directory, for at most `timeout_s`. Raises `NotReadable`.

    `configured` is the number of worker slots where no supervisor tells the slots.
    """
    try:
        names = sorted(path.name for path in paths.root.iterdir()) if paths.root.is_dir() else []
        supervisor = _holder(paths, "supervisor")
    except PermissionError as error:
        raise NotReadable(
            f"the run directory {paths.root} belongs to another user: run the command as that user"
        ) from error
    locks = [name.removesuffix(".lock") for name in names if name.endswith(".lock")]
    living = {name: process for name in locks if (process := _holder(paths, name))}
    workers = _slots(living, "worker")
    slots = set(workers) | _expected(names, configured, supervised=supervisor is not None)
    answers = _ask(paths, sorted(workers), timeout_s)
    restarts = _restarts(paths)
    return View(
        run_dir=str(paths.root),
        arbiter=_holder(paths, SERVER),
        supervisor=supervisor,
        bridge=_holder(paths, BRIDGE),
        gateway=configured == 0,
        lanes=_lanes(paths) if configured == 0 and living else None,
        frontends=[
            _frontend(slot, process, answers) for slot, process in sorted(_slots(living, "frontend").items())
        ],
        workers=[
            _worker(slot, workers.get(slot), answers.get(slot), restarts.get(f"worker-{slot}", 0), paths)
            for slot in sorted(slots if living else ())
        ],
    )


def programs(paths: RunPaths, configured: int, model: str, timeout_s: float) -> list[ModelStatus]:
    """The loaded versions of a model of named tensors, by version; none where no server can be asked."""
    known = [status for status in _models(paths, configured, timeout_s) if status.config is not None]
    statuses = {status.name: status for status in known if model in (status.name, split_id(status.name)[0])}
    return [statuses[name] for name in sorted(statuses, key=split_id)]


def loaded(paths: RunPaths, configured: int, model: str, timeout_s: float) -> ModelStatus | None:
    """What a running server says of a model that is loaded there; None where no server can be asked."""
    known = _models(paths, configured, timeout_s)
    return next((status for status in known if (status.name, status.state) == (model, "loaded")), None)


def _models(paths: RunPaths, configured: int, timeout_s: float) -> list[ModelStatus]:
    """The models of all workers; none where the server belongs to another user."""
    try:
        workers = look(paths, configured, timeout_s).workers
    except NotReadable:
        return []
    return [status for worker in workers for status in worker.models]


def catalog_dirs(paths: RunPaths) -> tuple[str, ...]:
    """The catalog directories of the server that runs with this run directory; none where none can be told.

    Settings of a server come from its environment, which only its user can read.
    """
    server = _holder(paths, SERVER)
    if server is None:
        return ()
    process = Path(f"/proc/{server.pid}")
    try:
        pairs = (
            each.partition("=") for each in (process / "environ").read_text(errors="replace").split("\0")
        )
        environment = {name: value for name, _, value in pairs}
        place = (process / "cwd").readlink()
        return tuple(str(place / each) for each in settings.load(environ=environment).catalog.dirs)
    except (OSError, ConfigError):
        return ()


def servers_beside(paths: RunPaths) -> list[Path]:
    """Run directories beside this one in which a server runs."""
    try:
        return sorted(lock.parent for lock in paths.root.parent.glob(f"*/{SERVER}.lock") if is_held(lock))
    except OSError:
        return []


def _holder(paths: RunPaths, name: str) -> Process | None:
    """The process that holds the lock `name`, if a live process does."""
    path = paths.lock(name)
    if not is_held(path):
        return None
    try:
        pid = int(path.read_text())
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError, IndexError):
        # The holder has not written its pid yet, or ended since.
        return None
    return Process(pid=pid, up_s=age_ns(pid) / 1e9, stopped=state in _STOPPED)


def _slots(living: dict[str, Process], kind: str) -> dict[int, Process]:
    matches = ((_SLOT.fullmatch(name), process) for name, process in living.items())
    return {int(match[2]): process for match, process in matches if match and match[1] == kind}


def _expected(names: list[str], configured: int, *, supervised: bool) -> set[int]:
    """Slots that should have a worker. A supervisor has a notify socket for each of its slots."""
    if not supervised:
        return set(range(configured))
    matches = (re.fullmatch(r"notify-(\d+)\.sock", name) for name in names)
    return {int(match[1]) for match in matches if match}


def _restarts(paths: RunPaths) -> dict[str, int]:
    restarts: dict[str, int] = {}
    for series, value in MetricFiles(paths).series("penstock_worker_restarts_total").items():
        worker = dict(series.labels).get("worker", "")
        restarts[worker] = restarts.get(worker, 0) + int(value)
    return restarts


def _lanes(paths: RunPaths) -> Lanes:
    files, sums = MetricFiles(paths), dict[str, dict[str, int]]()
    for name, label in (
        ("sie_gateway_nats_connected", ""),
        ("sie_gateway_workers", "status"),
        ("penstock_cluster_lane_total", "lane"),
        ("penstock_cluster_resent_total", "reason"),
    ):
        sums[name] = {
            dict(series.labels).get(label, ""): int(value)
            for series, value in files.series(name).items()
            if series.name == name
        }
    joined, boxes, items, resent = sums.values()
    return Lanes(
        joined=bool(joined),
        boxes=boxes.get("healthy", 0),
        others=boxes.get("unhealthy", 0),
        items={lane: items.get(lane, 0) for lane in ("queue", "direct")},
        resent=dict(sorted(resent.items())),
    )


@contextmanager
def _asked(paths: RunPaths, slots: list[int]) -> Iterator[dict[zmq.Socket[bytes], int]]:
    """A socket for each worker, on which the question is."""
    context = zmq.Context()
    sockets = {context.socket(zmq.DEALER): slot for slot in slots}
    try:
        for socket, slot in sockets.items():
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"ipc://{paths.worker_socket(slot)}")
            bundle = codec.Bundle()
            bundle.add(Look())
            socket.send_multipart(bundle.take())
        yield sockets
    finally:
        for socket in sockets:
            socket.close(0)
        context.term()


def _ask(paths: RunPaths, slots: list[int], timeout_s: float) -> dict[int, Looked]:
    """The answers that arrive in time, by slot."""
    answers: dict[int, Looked] = {}
    until = time.monotonic() + timeout_s
    with _asked(paths, slots) as sockets:
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        while len(answers) < len(slots) and (left_s := until - time.monotonic()) > 0:
            for socket, _ in poller.poll(int(left_s * 1000) + 1):
                answer = _read(socket.recv_multipart())
                if answer is not None:
                    answers[sockets[socket]] = answer
    return answers


def _read(frames: list[bytes]) -> Looked | None:
    """The answer in a message. Workers of another version say something else."""
    try:
        messages = [codec.decode_to_frontend(text) for text, _ in codec.unpack(frames)]
    except ProtocolError:
        return None
    return next((message for message in messages if isinstance(message, Looked)), None)


def _frontend(slot: int, process: Process, answers: dict[int, Looked]) -> Frontend:
    sessions = [
        session for looked in answers.values() for session in looked.sessions if session.pid == process.pid
    ]
    return Frontend(
        **msgspec.structs.asdict(process),
        slot=slot,
        requests=sum(session.requests for session in sessions),
        silent_s=min((session.silent_s for session in sessions), default=None),
    )


def _worker(
    slot: int, process: Process | None, looked: Looked | None, restarts: int, paths: RunPaths
) -> Worker:
    if process is None:
        return Worker(slot=slot, state="dead", restarts=restarts)
    if looked is None:
        state = "silent" if paths.worker_socket(slot).exists() else "starting"
        return Worker(slot=slot, state=state, restarts=restarts, process=process)
    welcome, stats = looked.welcome, looked.stats
    return Worker(
        slot=slot,
        state="draining" if looked.draining else "serving",
        restarts=restarts,
        process=process,
        device=welcome.device,
        threads=welcome.threads,
        requests=sum(session.requests for session in looked.sessions),
        queued=stats.admitted,
        bound=stats.bound,
        memory_used=stats.memory_used,
        memory_total=stats.memory_total,
        resident=stats.resident,
        arena_used=stats.arena_used,
        arena_total=stats.arena_total,
        leases=stats.leases,
        queues=stats.queues,
        generations=stats.generations,
        models=welcome.models,
    )
