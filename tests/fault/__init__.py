"""Fault tests, named after the fault; real processes, real kills.

`TEST_FAULT_ROUNDS=long` runs many rounds, and a number in place of `long` as many of these at most.

Every server here has at least three models loaded, so that a fault that one model meets is met beside others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.harness import server as harness

BESIDE = ("fake/echo", "fake/slow", "fake/wide")


def rounds(short: int, long: int) -> int:
    """How often a fault is injected."""
    wanted = os.environ.get("TEST_FAULT_ROUNDS") or str(short)
    return long if wanted == "long" else max(short, min(long, int(wanted)))


def three(models: Sequence[str]) -> tuple[str, ...]:
    """`models`, and others up to three."""
    beside = [name for name in BESIDE if name not in models]
    return (*models, *beside[: max(0, 3 - len(models))])


def serving(
    tmp_path: Path, models: Sequence[str] = ("fake/echo",), **arguments: Any
) -> AbstractContextManager[harness.Server]:
    """`tests.harness.server.serving` with three models, unless the test brings a catalog of its own."""
    own = {"catalog", "config"} & {*arguments} or "catalog.dirs" in (arguments.get("settings") or {})
    return harness.serving(tmp_path, models=models if own else three(models), **arguments)
