"""`python -m penstock`, and what the command `penstock` of an installation runs."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path


def _open_streams() -> None:
    """Put an empty stream in the place of each standard stream that the caller has closed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  # open until the end


def main() -> int:
    """Run the command line of this process; returns the exit code."""
    _open_streams()
    try:
        if sys.argv[1:] == ["completion", "names"]:
            # PERF: a shell waits for the names, and the parser of all commands takes longer than the names.
            from penstock.names import main as run
        else:
            from penstock.cli import main as run
        return run()
    except KeyboardInterrupt:
        print("penstock: interrupted", file=sys.stderr)
        return 1
    finally:
        # NOTE: msgspec 0.21 may crash when the interpreter's last collection frees the types of messages.
        gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
