"""`penstock sweep`: removes what dead processes of an instance left behind. Exit 1: the slot has a live process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from ipc import sweep
from ipc.errors import ConfigError
from ipc.processes.liveness import SlotLock, SlotTaken
from ipc.settings import Settings
from penstock import terminal


def add_parser(commands: Any, add_flags: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add `sweep`; `add_flags` adds the flags that name settings."""
    parser = commands.add_parser("sweep", help="remove what dead processes of this instance left behind")
    add_flags(parser)
    parser.add_argument("--slot", type=int, help="only this worker slot")
    terminal.with_json(parser)
    terminal.with_examples(
        parser,
        ("sweep", "arenas, sockets and metric files of the server on the default port"),
        ("sweep --bind 127.0.0.1:9000 --slot 1", "of the second worker of another server"),
    )


def run(options: argparse.Namespace, config: Settings) -> int:
    """Remove leftovers and name them; returns the exit code. Raises `ConfigError`."""
    paths = config.paths
    if options.slot is not None and options.slot < 0:
        raise ConfigError(f"sweep: --slot {options.slot}: expected a number from 0")
    if options.slot is None:
        removed = sweep.sweep(paths)
    else:
        paths.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with SlotLock(paths.lock(f"worker-{options.slot}")):
                removed = sweep.sweep_slot(paths, options.slot)
        except SlotTaken as error:
            print(f"penstock: {error.message}", file=sys.stderr)
            return 1
    if options.json:
        print(terminal.as_json({"removed": removed}))
        return 0
    print(f"removed {len(removed)} leftovers" + "".join(f"\n  {name}" for name in removed))
    return 0
