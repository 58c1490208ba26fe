"""Start and end of a worker process.

1. A spare first imports what workers need, and waits until the supervisor gives it a slot.
2. Settings, logging, slot lock; sweep what earlier lives of this slot left.
3. Metrics, device, arena; then the runtime serves until SIGTERM or until the life pipe of its supervisor ends.
4. Unlink the arena, give the slot back, exit 0. Exit 3: bad configuration. 4: device lost. 70: a bug or a hang.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import secrets
import signal
import sys
from typing import TYPE_CHECKING

from ipc import logs, settings, sweep
from ipc.errors import ConfigError, MachineUnfit
from ipc.memory.arena import Arena
from ipc.metrics import registry as metrics
from ipc.processes import starting as processes
from ipc.processes.liveness import SlotTaken, take_slot
from ipc.processes.paths import prepare_run_dir
from workers import foreign, spare
from workers.repository import catalog_files

if TYPE_CHECKING:
    from workers.runtime import Runtime

log = logging.getLogger(__name__)

EXIT_CONFIG = 3
EXIT_UNFIT = 5
EXIT_BUG = 70
SWITCH_S = 0.0002


def main(argv: list[str] | None = None) -> int:
    """Run one worker; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m workers", description="One Penstock worker process.")
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--slot", type=int, help="number of this worker, from 0")
    place.add_argument("--spare", action="store_true", help="wait for a slot, which the life pipe names")
    parser.add_argument(
        "--life-fd", type=int, default=-1, help="descriptor that ends when the supervisor dies"
    )
    options = parser.parse_args(argv)
    if options.spare:
        options.slot = spare.wait_for_slot(options.life_fd)
        if options.slot is None:
            return 0
    try:
        config = settings.load()
        logs.configure(config.log, f"worker-{options.slot}")
        processes.title(f"worker {options.slot}")
        prepare_run_dir(config.paths)
        with take_slot(config.paths.lock(f"worker-{options.slot}")):
            _serve(config, options.slot, options.life_fd)
    except (ConfigError, SlotTaken) as error:
        _refuse(f"worker {options.slot}: {error.message}")
        return EXIT_UNFIT if isinstance(error, MachineUnfit) else EXIT_CONFIG
    except Exception:
        log.exception("worker %d ends on an unexpected error", options.slot)
        logs.flush()
        return EXIT_BUG
    logs.flush()
    return 0


def _refuse(message: str) -> None:
    """Say why this process does not start: as a log line, or plainly while the form of log lines is not known."""
    if logging.getLogger().handlers:
        log.critical("%s", message)
        logs.flush()
    else:
        sys.stderr.write(f"{message}\n")


def _serve(config: settings.Settings, slot: int, life_fd: int) -> None:
    paths = config.paths
    catalog = catalog_files.open_for(config)
    for name in sweep.sweep_slot(paths, slot):
        log.info("removed %s, left by an earlier life of this slot", name)
    metrics.configure(paths, f"worker-{slot}")
    spare.prepare_libraries()
    # PERF: an answer is sent by another thread than the one that made it, which goes on computing meanwhile; at the
    # usual 5 ms every answer would wait until that thread rests.
    sys.setswitchinterval(SWITCH_S)
    # Imported here: torch takes a second, and a wrong configuration should be told before that.
    with processes.importing():
        from workers import images
        from workers.device import devices
        from workers.runtime import Runtime

    foreign.log_uncaught()
    # PERF: modules are never garbage, but every full collection, as after an unload, would look at all that torch has
    # made: 60 ms in which no other thread runs.
    gc.freeze()
    images.limit_pixels(config.limits.max_image_pixels)
    device = devices.select(config)
    processes.title(f"worker {slot} ({device.name})")
    families = metrics.WorkerMetrics(f"worker-{slot}")
    families.touch(catalog, device.uuid)
    epoch = secrets.token_hex(8)
    arena = Arena(paths.arena(slot, epoch), config.arena.bytes, epoch)
    try:
        devices.pin(arena.view, device)
        runtime = Runtime(config, catalog, slot, arena, device, families)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: runtime.endpoint.post(runtime.drain))
        if life_fd >= 0:
            os.set_blocking(life_fd, False)
            runtime.endpoint.watch(life_fd, lambda: _life_ended(runtime, life_fd))
        log.info(
            "worker %d on %s, %d threads, arena %d MiB", slot, device.name, device.threads, arena.nbytes >> 20
        )
        runtime.run()
        runtime.endpoint.close()
    finally:
        arena.close()
        paths.worker_socket(slot).unlink(missing_ok=True)
    log.info("worker %d has drained", slot)


def _life_ended(runtime: Runtime, life_fd: int) -> None:
    runtime.endpoint.unwatch(life_fd)
    log.warning("the supervisor is gone")
    runtime.drain()
