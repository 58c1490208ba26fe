"""`subprocess` for programs that start Python: processes are forked with torch imported, most of their start."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Any

from tests.harness import lives
from tests.harness.nursery import Forked


class Forking:
    """The part of the module `subprocess` that `benchmarks.gpu` uses."""

    DEVNULL, STDOUT, TimeoutExpired = subprocess.DEVNULL, subprocess.STDOUT, subprocess.TimeoutExpired

    @staticmethod
    def Popen(command: Sequence[str], env: Mapping[str, str], stdout: IO[bytes], **_: Any) -> Forked:
        """Standard error goes where standard output goes, as that module wants."""
        return lives.python("workers", command[1:], env, stdout.fileno())
