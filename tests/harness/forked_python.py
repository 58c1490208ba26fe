"""An interpreter that has imported already: a stand-in for the `python` of pytest-xdist's test processes.

`python -m tests.harness.forked_python SOCKET -u -c PROGRAM` has the nursery at SOCKET (`tests/harness/nursery.py`) fork
a process, which runs PROGRAM with the standard streams, the environment and the directory of this one. This process
waits for the end of the other, and ends with the same code.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.harness.nursery import Forked, Order


def main(nursery: str, *command: str) -> int:
    """Run the program behind `-c`, which stands last; returns its exit code, as a shell tells it."""
    order = Order(dict(os.environ), [], str(Path.cwd()), program=command[-1], has_streams=True)
    code = Forked(nursery, order, 0, (1, 2)).wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
