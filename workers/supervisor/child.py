"""A child process of the supervisor: a worker, or a spare that becomes one when it is given a slot.

The life pipe of a spare carries one line, the slot and its environment. From then on the process is a worker like any
other, and the end of the pipe tells it that the supervisor has died.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping

import msgspec

from ipc.processes import starting as processes
from workers.spare import Assignment


class Child:
    """One started process, its pidfd, and the write end of its life pipe."""

    def __init__(self, process: subprocess.Popen[bytes], pidfd: int, life_write: int) -> None:
        self._process, self.pidfd, self._life_write = process, pidfd, life_write

    @classmethod
    def start(cls, *arguments: str, environment: Mapping[str, str]) -> Child:
        """Run `python -m workers` with `arguments` and a life pipe. Raises `OSError`."""
        life_read, life_write = os.pipe()
        command = processes.command("workers", *arguments, "--life-fd", str(life_read))
        try:
            process = subprocess.Popen(
                command, env=environment, pass_fds=(life_read,), stdin=subprocess.DEVNULL
            )
            return cls(process, os.pidfd_open(process.pid), life_write)
        except OSError:
            # A process without its life pipe ends by itself.
            os.close(life_write)
            raise
        finally:
            os.close(life_read)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def assign(self, assignment: Assignment) -> None:
        """Give a spare its slot. Raises `OSError` when the spare has died."""
        os.write(self._life_write, msgspec.json.encode(assignment) + b"\n")

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has been waited for."""
        if self._process.returncode is None:
            signal.pidfd_send_signal(self.pidfd, number)

    def wait(self) -> int:
        """Wait for the end, close both descriptors; returns the exit code, negative for a signal."""
        code = self._process.wait()
        os.close(self.pidfd)
        os.close(self._life_write)
        return code
