"""`penstock serve` and `penstock worker`: this process becomes Gunicorn or a worker.

So signals and systemd see one main process. Settings travel as environment variables.
"""

from __future__ import annotations

import argparse
import os
import sys

from ipc import extras, settings
from ipc.errors import ConfigError
from ipc.processes import starting as processes
from ipc.processes.paths import asset


def serve(options: argparse.Namespace, flags: dict[str, str], config: settings.Settings) -> int:
    """Become the server. Raises `ConfigError` for a catalog that cannot be served, or without what workers need."""
    # Imported here: the module needs all of the frontend, a worker does not.
    from penstock import checking

    checking.read(config)
    if os.environ.get("PENSTOCK_SUPERVISE", "1") != "0":
        _require_workers()
    return _become(options, flags, "frontend.arbiter.program", "-c", str(asset("gunicorn.conf.py")))


def work(options: argparse.Namespace, flags: dict[str, str]) -> int:
    """Become the worker of a slot. Raises `ConfigError` for a slot that is none."""
    if options.slot < 0:
        raise ConfigError(f"worker: --slot {options.slot}: expected a number from 0")
    _require_workers()
    return _become(options, flags, "workers", "--slot", str(options.slot))


def _require_workers() -> None:
    if not extras.has_worker():
        raise ConfigError(f"workers need {extras.needed('worker')}")


def _become(options: argparse.Namespace, flags: dict[str, str], module: str, *arguments: str) -> int:
    """Replace this process by one of our modules, with the same settings."""
    environment = processes.environment() | settings.to_environ(flags)
    if options.config:
        environment["PENSTOCK_CONFIG"] = options.config
    os.execve(sys.executable, processes.command(module, *arguments), environment)
