"""`python -m penstock`, and what the command `penstock` of an installation runs."""

from __future__ import annotations

import gc
import sys

from penstock.cli import main as run


def main() -> int:
    """Run the command line of this process; returns the exit code."""
    try:
        return run()
    finally:
        # NOTE: msgspec 0.21 may crash when the interpreter's last collection frees the types of messages.
        gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
