"""Processes of a server without the price of their imports: forked from two nurseries of the test process.

1. One nursery has imported the frontend's modules, and no torch: arbiters, their frontends and supervisors come from
   there. The other has imported torch and what workers need.
2. `arbiter` starts a whole server so. Arbiter and supervisor run with `Popen` of the nurseries in place of that of
   `subprocess`, for the processes that they start: all else is what `gunicorn -c gunicorn.conf.py` runs.
3. `Worker` is a worker without a supervisor, `live` the life of any program.
4. `share` makes nurseries for all test processes of a run, `fork_tests` forks these processes from another nursery.

A process that is forked here is what becomes of a spare: the libraries are there, and all else happens after the fork.
"""

from __future__ import annotations

import atexit
import functools
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from frontend import protocols
from tests import tiny
from tests.harness import accounting
from tests.harness.nursery import Forked, Order, marked, start
from tests.harness.server import PATIENCE_S, ROOT
from workers.spare import PRELOADED, QUIET

FRONTENDS = (
    "gunicorn.app.wsgiapp",
    "frontend.app",
    "frontend.arbiter.hooks",
    "frontend.lifespan",
    *(f"frontend.protocols.{found.name}" for found in pkgutil.iter_modules(protocols.__path__)),
    "uvicorn.loops.uvloop",
    "workers.supervisor.slots",
    "workers.repository.catalog_files",
    "tests.harness.lives",
)
WORKERS = (
    "frontend.records.statistics",
    "ipc.metrics.registry",
    *PRELOADED,
    "workers.adapters.causal",
    "workers.images",
    "tests.fakes.program",
)
TESTS = (*(f"tests.tiny.{found.name}" for found in pkgutil.iter_modules(tiny.__path__)), *FRONTENDS, *WORKERS)
"""What many test modules import; transformers comes whole, as a worker's import would leave parts out."""
MODULES = {"frontends": FRONTENDS, "workers": WORKERS, "tests": TESTS}
_PLACES = "TEST_NURSERIES"
"""Variable that names the directory of the sockets to arbiters and supervisors."""


@functools.cache
def _directory() -> Path:
    """Where the nurseries of this process listen, or of the test process that has started this one; they remove it."""
    return Path(os.environ.get(_PLACES) or tempfile.mkdtemp(prefix="penstock-nurseries-"))


@functools.cache
def _nursery(name: str) -> Path:
    """The socket of a nursery, which is started if this is a test process."""
    path = _directory() / name
    if _PLACES not in os.environ:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if name != "tests":
            environment |= {"HF_HUB_OFFLINE": "1", **QUIET}
        process = start(path, MODULES[name], environment)
        accounting.follow(process.pid)
        atexit.register(_close, process)
    return path


def _close(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait(PATIENCE_S)


def share() -> None:
    """The test processes that this process starts have their servers forked from its nurseries."""
    for name in ("frontends", "workers"):
        _nursery(name)
    os.environ[_PLACES] = str(_directory())


def fork_tests() -> str:
    """The command that stands in for `python` of test processes, which are forked with their imports."""
    return f"{sys.executable} -m tests.harness.forked_python {_nursery('tests')}"


def arbiter(arguments: Sequence[str], environment: Mapping[str, str], output: int, mark: str) -> Forked:
    """Run Gunicorn with `arguments`; what it starts is forked as well, and has its mark."""
    if environment.get("PENSTOCK_SUPERVISE") != "0":
        _nursery("workers")
    order = Order(
        {**environment, _PLACES: str(_directory())},
        list(arguments),
        str(ROOT),
        module="gunicorn",
        prelude="tests.harness.lives:fork_from_here_on",
        mark=mark,
    )
    return Forked(_nursery("frontends"), order, output)


def python(
    nursery: str, command: Sequence[str], environment: Mapping[str, str], output: int, prelude: str = ""
) -> Forked:
    """Run `python COMMAND` in the root of the repository: `-m` and a module or `-c` and a program, and arguments."""
    kind, subject, *arguments = command
    order = Order(dict(environment), arguments, str(ROOT), prelude=prelude)
    if kind == "-m":
        order.module = subject
    else:
        order.program = subject
    return Forked(_nursery(nursery), order, output)


def sessions(mark: str) -> set[int]:
    """The sessions of all processes with the mark, at the nurseries that there are."""
    places = [_directory() / name for name in ("frontends", "workers")]
    return {one for place in places if place.exists() for one in marked(place, mark)}


def fork_from_here_on() -> None:
    """Arbiters and supervisors that run in this process have their children forked."""
    from frontend.arbiter import hooks
    from frontend.server.drain import SUCCESSION, Succession
    from workers.supervisor import slots

    # NOTE: the memory of the nursery's is shared by all servers: the end of one would be the end of the next.
    vars(SUCCESSION).update(vars(Succession()))

    forking = SimpleNamespace(Popen=_popen, DEVNULL=subprocess.DEVNULL)
    for module in (hooks, slots):
        module.subprocess = forking  # type: ignore[attr-defined]


def _popen(command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int], **options: Any) -> Any:
    """`subprocess.Popen`, but supervisors and workers are forked."""
    *_, module = command[: command.index("-m") + 2]
    arguments = list(command[command.index("-m") + 2 :])
    mark, output = os.environ["PENSTOCK_RUN__DIR"], sys.stderr.fileno()
    if module == "workers":
        order = Order(dict(env), arguments, str(ROOT), module, mark=mark)
        return Forked(_nursery("workers"), order, output, pass_fds)
    if module == "workers.supervisor.process":
        order = Order(
            dict(env), arguments, str(ROOT), module, prelude=f"{__name__}:fork_from_here_on", mark=mark
        )
        return Forked(_nursery("frontends"), order, output, pass_fds)
    return subprocess.Popen(command, env=env, pass_fds=pass_fds, **options)


class Worker(Forked):
    """A running worker of a slot, which no supervisor has started."""

    def __init__(self, slot: int, environment: Mapping[str, str], log_path: Path) -> None:
        order = Order(dict(environment), ["--slot", str(slot)], str(ROOT), "workers")
        with log_path.open("ab") as log:
            super().__init__(_nursery("workers"), order, log.fileno())


def live(program: str, *arguments: str) -> None:
    """Run Python source to its end, with `arguments` in `sys.argv`; fails if the program does."""
    process = Forked(
        _nursery("workers"), Order(dict(os.environ), list(arguments), str(ROOT), program=program), 2
    )
    try:
        assert process.wait(PATIENCE_S) == 0, "the program failed"
    finally:
        process.kill()
