"""Fault tests, named after the fault; real processes, real kills. `PENSTOCK_FAULT_ROUNDS=long` runs many rounds."""

from __future__ import annotations

import os


def rounds(short: int, long: int) -> int:
    """How often a fault is injected."""
    return long if os.environ.get("PENSTOCK_FAULT_ROUNDS") == "long" else short
