"""`python -m penstock`, and what the command `penstock` of an installation runs."""

from __future__ import annotations

import gc
import sys


def main() -> int:
    """Run the command line of this process; returns the exit code."""
    try:
        if sys.argv[1:] == ["completion", "names"]:
            # PERF: a shell waits for the names, and the parser of all commands takes longer than the names.
            from penstock.names import main as run
        else:
            from penstock.cli import main as run
        return run()
    finally:
        # NOTE: msgspec 0.21 may crash when the interpreter's last collection frees the types of messages.
        gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
