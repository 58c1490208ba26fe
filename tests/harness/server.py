"""A whole Penstock server as real processes, and the proof that nothing of it is left.

`serving(tmp_path, models=..., set=...)` starts `gunicorn -c gunicorn.conf.py` on a free port and waits until it is
ready. At the end it stops the server and asserts that no arena, socket, held lock or process is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipc.processes.liveness import is_held, is_running
from ipc.processes.paths import TOOLS
from tests.harness.accounting import count_apart, count_server
from tests.harness.ports import free_port

if TYPE_CHECKING:
    from tests.harness.lives import Worker
    from tests.harness.nursery import Forked

ROOT = Path(__file__).resolve().parents[2]
FAKE_CATALOG = ROOT / "tests" / "fakes" / "catalog"
CACHE_DIR = Path(tempfile.gettempdir()) / f"penstock-tests-{os.geteuid()}"
"""Of all servers of tests, so that linear layers of a tiny model are tried once."""
DEVICE, PRECISION = os.environ.get("TEST_DEVICE", "cpu"), os.environ.get("TEST_PRECISION", "float32")
"""Device of the workers, and the precision of models that choose none: results in float32 keep within all limits."""
START_TIMEOUT_S = 240.0
PATIENCE_S = 60.0
"""How long a test waits for what should come at once: only a failure takes so long, however busy the machine is."""
MAX_PAUSE_S, MAX_DEAR_PAUSE_S = 0.1, 0.25
"""The longest pause between two looks, and between two that take long, such as scrapes of metrics."""
RAW_HOSTS = "a,b,example.org,fuzz,h,other,server.example,t,test,x"
"""What clients of tests that write their own heads call the server; without keys it answers to listed names only."""


def wait_until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S, what: str = "condition") -> Any:
    """The first true value of `condition`; fails after `timeout_s`.

    Looks a hundred times a second at first and ten times later on. After a look that took long, such as a scrape of
    metrics, the pause is three times as long: a look costs the server as much as many requests.
    """
    began = time.monotonic()
    while True:
        looked = time.monotonic()
        value = condition()
        if value:
            return value
        now = time.monotonic()
        assert now - began < timeout_s, f"{what} did not hold within {timeout_s} s"
        pause_s = min(max(0.01, (now - began) / 10), MAX_PAUSE_S)
        time.sleep(max(pause_s, min(3 * (now - looked), MAX_DEAR_PAUSE_S)))


async def eventually(
    condition: Callable[[], Awaitable[Any]], what: str, timeout_s: float = PATIENCE_S
) -> None:
    """Wait until `condition`, which is awaited, is true; fails after `timeout_s`."""
    began = time.monotonic()
    while not await condition():
        assert time.monotonic() - began < timeout_s, f"{what} did not hold within {timeout_s} s"
        await asyncio.sleep(MAX_PAUSE_S)


_STACK = "Traceback (most recent call last):"
_OF_A_MODEL = re.compile(
    r"failed in the model|preparing failed for request|failed to load|the model failed when its stream was closed"
    r"|could not be taken|the device context is lost|an error that nobody could catch"
    # A stack that goes on: the error that led to one of these.
    r"|^During handling of the above exception|^The above exception was the direct cause"
)
"""What is logged before a stack that the code of a model, or its files, is the cause of."""


def state_of(pid: int) -> str:
    """State of a process as `ps` writes it; X for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def alive(pid: int) -> bool:
    """Whether a process runs (zombies do not)."""
    return state_of(pid) not in "ZX"


def dead_process() -> str:
    """The `own_identity` of a process that has ended."""
    code = "from ipc.processes.liveness import own_identity; print(own_identity())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not is_running(told.strip())
    return told.strip()


@contextlib.contextmanager
def stopped(*pids: int | None) -> Iterator[None]:
    """These processes stand still meanwhile; the server may have killed them before the end."""
    found = [pid for pid in pids if pid is not None]
    assert len(found) == len(pids), "a process is not there"
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(state_of(pid) in "TZX" for pid in found), what="the stop")
    try:
        yield
    finally:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def sum_of(scraped: str, *names: str, **labels: str) -> float:
    """Sum of the samples of `names` whose labels include `labels`, in an exposition of metrics."""
    total = 0.0
    for line in scraped.splitlines():
        if line.split("{")[0].split(" ")[0] in names and all(f'{k}="{v}"' in line for k, v in labels.items()):
            total += float(line.rpartition(" ")[2])
    return total


@dataclass
class Answer:
    """One HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


@dataclass
class Server:
    """A running server; `run_dir` holds its sockets and locks, `log` everything its processes wrote.

    `named` are models for `penstock serve`; without any Gunicorn starts the server, `application` in place of its own.
    `workers` are those that no supervisor has started. Unless `fresh`, processes are forked from such as have imported
    what they need (`tests/harness/lives.py`).
    """

    port: int
    run_dir: Path
    log_path: Path
    environment: dict[str, str]
    named: Sequence[str] = ()
    application: str = ""
    fresh: bool = True
    process: subprocess.Popen[bytes] | Forked = field(init=False)
    workers: list[Worker] = field(init=False, default_factory=list)

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """Everything written so far."""
        return self.log_path.read_text(errors="replace")

    def start(self) -> None:
        """Start the arbiter."""
        count_server()
        # A process that is forked from one with torch cannot be relied on to have a device.
        self.fresh = self.fresh or bool(self.named) or DEVICE != "cpu" or "PYTHONPATH" in self.environment
        arguments = ["-c", "gunicorn.conf.py", *([self.application] if self.application else [])]
        program = ["penstock", "serve", *self.named] if self.named else ["gunicorn", *arguments]
        command = [sys.executable, "-m", *program]
        with self.log_path.open("ab") as log:
            if not self.fresh:
                from tests.harness import lives  # needs this module

                self.process = lives.arbiter(arguments, self.environment, log.fileno(), str(self.run_dir))
                return
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def start_workers(self) -> None:
        """Start the workers of frontends without a supervisor, forked from a process that has imported torch."""
        from tests.harness.lives import Worker  # needs this module

        for slot in range(int(self.environment["PENSTOCK_WORKER__COUNT"])):
            self.workers.append(Worker(slot, self.environment, self.log_path))

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for `/readyz`; without workers, which readiness needs, for `/livez`."""
        wait_until(self._ready_or_dead, timeout_s, "readiness")
        assert self.process.poll() is None, (
            f"the server ended with {self.process.returncode}:\n{self.log[-4000:]}"
        )

    def _ready_or_dead(self) -> bool:
        if self.process.poll() is not None:
            return True
        alone = self.environment.get("PENSTOCK_SUPERVISE") == "0" and not self.workers
        probe = "/livez" if alone else "/readyz"
        try:
            return self.get(probe, timeout_s=5).status == 200
        except OSError:
            return False

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60,
    ) -> Answer:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, timeout_s: float = 60) -> Answer:
        """GET."""
        return self.request("GET", path, timeout_s=timeout_s)

    def post(self, path: str, value: Any, timeout_s: float = 60, **headers: str) -> Answer:
        """POST of a JSON value, asking for JSON."""
        sent = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            **{k.replace("_", "-"): v for k, v in headers.items()},
        }
        return self.request("POST", path, json.dumps(value).encode(), sent, timeout_s)

    def encode(self, model: str, texts: Sequence[str], timeout_s: float = 60, **params: Any) -> Answer:
        """POST /v1/encode of texts."""
        body: dict[str, Any] = {"items": [{"text": text} for text in texts]}
        if params:
            body["params"] = params
        return self.post(f"/v1/encode/{model}", body, timeout_s)

    def metric(self, *names: str, **labels: str) -> float:
        """Sum of the samples of `names` whose labels include `labels`, all from one scrape."""
        return sum_of(self.get("/metrics").body.decode(), *names, **labels)

    def _lock_pid(self, name: str) -> int | None:
        path = self.run_dir / f"{name}.lock"
        if not is_held(path):
            return None
        text = path.read_text().strip()
        return int(text) if text else None

    def worker_pid(self, slot: int = 0) -> int | None:
        """Pid of the worker that holds the slot."""
        return self._lock_pid(f"worker-{slot}")

    def tool_host_pid(self) -> int | None:
        """Pid of the tool host."""
        return self._lock_pid(TOOLS)

    def starts(self, slot: int) -> int:
        """How often a worker of the slot has become ready, by what the supervisor wrote.

        Whether two workers answer (`penstock_worker_up`) is told twice a second, so it still says yes after a kill.
        """
        return self.log.count(f"worker {slot} is ready")

    def owner_pid(self) -> int | None:
        """Pid of the arbiter that owns the run directory."""
        return self._lock_pid("server")

    def supervisor_pid(self) -> int | None:
        """Pid of the supervisor."""
        return self._lock_pid("supervisor")

    def frontend_pids(self) -> list[int]:
        """Pids of the frontends that have taken a slot."""
        names = sorted(path.stem for path in self.run_dir.glob("frontend-*.lock"))
        return [pid for name in names if (pid := self._lock_pid(name)) is not None]

    def pids(self) -> list[int]:
        """Every live process that runs with this server's run directory."""
        mark, sessions = f"PENSTOCK_RUN__DIR={self.run_dir}".encode(), set[str]()
        if not self.fresh:
            from tests.harness import lives  # needs this module

            sessions = set(map(str, lives.sessions(str(self.run_dir))))
        found = [worker.pid for worker in self.workers if worker.poll() is None]
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and alive(int(entry.name)):
                    session = (entry / "stat").read_text().rpartition(")")[2].split()[3]
                    if session in sessions or mark in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def arenas(self) -> list[Path]:
        """Shared-memory files of this instance."""
        return list(
            Path(self.environment["PENSTOCK_RUN__SHM_DIR"]).glob(
                f"penstock.{self.environment['PENSTOCK_RUN__INSTANCE']}.*"
            )
        )

    def stop(self, timeout_s: float = PATIENCE_S) -> int:
        """SIGTERM; returns the arbiter's exit code once all processes are gone."""
        if self.fresh:
            count_apart(self.supervisor_pid())
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout_s)
        for worker in self.workers:
            worker.terminate()
        wait_until(lambda: not self.pids(), timeout_s, "the end of all processes")
        return code

    def kill_everything(self) -> None:
        """SIGKILL to every process of this server, and away with what it leaves in shared memory."""
        self.kill_all_processes()
        for arena in self.arenas():
            arena.unlink(missing_ok=True)

    def kill_all_processes(self) -> None:
        """SIGKILL to every process of this server before one sees another die: their arenas are left."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)

    def assert_no_stack(self) -> None:
        """The log has no stack of anything but the code of a model: no mistake of a client prints one."""
        lines = self.log.splitlines()
        for at, line in enumerate(lines):
            if line == _STACK:
                before = next(filter(None, reversed(lines[:at])), "")
                text = "\n".join(lines[max(at - 3, 0) : at + 40])
                assert _OF_A_MODEL.search(before), f"a stack in the log:\n{text}"

    def assert_nothing_left(self) -> None:
        """No process, no arena, no socket, no held lock."""
        assert not self.pids()
        assert not self.arenas()
        assert not list(self.run_dir.glob("*.sock"))
        assert not [path.name for path in self.run_dir.glob("*.lock") if is_held(path)]


def make_server(
    tmp_path: Path,
    models: Sequence[str] = ("fake/echo",),
    settings: Mapping[str, Any] | None = None,
    catalog: Path = FAKE_CATALOG,
    config: Path | None = None,
) -> Server:
    """A server that is not started yet; `settings` maps `section.field` to values, `config` is a settings file."""
    port = free_port()
    run_dir = tmp_path / "run"
    chosen: dict[str, Any] = {
        "server.bind": f"127.0.0.1:{port}",
        "server.frontends": 1,
        "server.drain_s": 0.5,
        "server.allowed_hosts": RAW_HOSTS,
        "run.dir": run_dir,
        "run.instance": f"t{port}",
        "run.shm_dir": "/dev/shm",
        "run.cache_dir": CACHE_DIR,
        "worker.count": 1,
        "worker.device": DEVICE,
        "worker.precision": PRECISION,
        "worker.torch_threads": 1,
        "worker.restart_backoff_s": 0.2,
        "worker.heartbeat_timeout_s": 20,
        "arena.bytes": 32 << 20,
        "catalog.dirs": catalog,
        "catalog.models": ",".join(models),
        "log.format": "text",
        "grpc.enabled": "false",
        # A machine that stands still for a moment must not refuse requests. Tests of the bound set their own.
        "queue.max_wait_s": 120,
        **(settings or {}),
    }
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
    environment |= {
        f"PENSTOCK_{name.replace('.', '__').upper()}": str(value) for name, value in chosen.items()
    }
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "SPT_NOENV": "1"}
    if config is not None:
        environment["PENSTOCK_CONFIG"] = str(config)
    return Server(port, run_dir, tmp_path / "server.log", environment)


@contextlib.contextmanager
def serving(
    tmp_path: Path,
    models: Sequence[str] = ("fake/echo",),
    settings: Mapping[str, Any] | None = None,
    catalog: Path = FAKE_CATALOG,
    leftovers: bool = False,
    config: Path | None = None,
    workers: bool = True,
    supervised: bool = True,
    named: Sequence[str] = (),
    ready_s: float = START_TIMEOUT_S,
    fresh: bool = False,
) -> Iterator[Server]:
    """A ready server; afterwards it is stopped, its log has no stack, and nothing may be left (unless `leftovers`).

    With `named`, `penstock serve` starts `models` and what these names mean, such as directories.
    Without `workers` only frontends start, which costs half: for tests of what no worker takes part in. Workers that
    are not `supervised` are started as by systemd: for tests that end no worker.
    A start may take `ready_s`. With `fresh` every process is executed anew as in production, which costs four processor
    seconds: for tests of the start itself, of memory, and of what the environment or descriptors of a process tell.
    """
    server = make_server(tmp_path, models, settings, catalog, config)
    server.named = (*models, *named) if named else ()
    server.fresh = fresh
    forked = workers and not supervised and DEVICE == "cpu"
    if forked or not workers:
        server.environment["PENSTOCK_SUPERVISE"] = "0"
    server.start()
    try:
        if forked:
            server.start_workers()
        server.wait_ready(ready_s)
        yield server
        if server.process.poll() is None:
            server.stop()
        if not leftovers:
            server.assert_nothing_left()
        server.assert_no_stack()
    except BaseException:
        sys.stderr.write(f"\nlast lines of the server's log:\n{server.log[-6000:]}\n")
        raise
    finally:
        server.kill_everything()
