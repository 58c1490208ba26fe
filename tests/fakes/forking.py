"""`subprocess` for programs that start Python: processes are forked with torch imported, most of their start.

What a process so started measures are servers that are forked as well (`fork_servers`).
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from tests.harness import lives
from tests.harness.nursery import Forked


class Forking:
    """The part of the module `subprocess` that `benchmarks.gpu` uses. The nurseries have to be shared."""

    DEVNULL, STDOUT, TimeoutExpired = subprocess.DEVNULL, subprocess.STDOUT, subprocess.TimeoutExpired

    @staticmethod
    def Popen(command: Sequence[str], env: Mapping[str, str], stdout: IO[bytes], **_: Any) -> Forked:
        """Standard error goes where standard output goes, as that module wants."""
        prelude = f"{__name__}:{fork_servers.__name__}"
        return lives.python("workers", command[1:], env, stdout.fileno(), prelude)


def fork_servers() -> None:
    """From here on the servers that benchmarks start in this process are forked; workers are no children of theirs."""
    from benchmarks import processes, serving

    processes.subprocess = SimpleNamespace(Popen=_server, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]
    serving.worker_pids = _worker_pids


def _server(command: Sequence[str], env: Mapping[str, str], stdout: IO[bytes], **_: Any) -> Forked:
    arguments = command[list(command).index("gunicorn") + 1 :]
    return lives.arbiter(arguments, env, stdout.fileno(), env["PENSTOCK_RUN__DIR"])


def _worker_pids(server: Any) -> list[int]:
    """Those that the locks of the workers name."""
    locks = Path(server.environment["PENSTOCK_RUN__DIR"]).glob("worker-*.lock")
    return [int(lock.read_text()) for lock in locks]
