"""`penstock status`: the processes of a running server, what each of them serves, and how busy each is.

The command asks the workers over their own sockets (`penstock.processes`), and so works while frontends are stuck.
Exit codes: 0 all processes serve, 1 a process is dead, stuck or silent, 4 no server runs.

`penstock sweep` removes what dead processes left behind. Exit code 1: the slot has a live process.
"""

from __future__ import annotations

import argparse
import http.client
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ipc import sweep
from ipc.catalog.ids import profiled
from ipc.errors import ConfigError
from ipc.processes.liveness import SlotLock, SlotTaken
from ipc.processes.paths import RunPaths
from ipc.settings import Settings
from ipc.wire.stats import Folded, folded
from penstock import processes, target, terminal
from penstock.processes import Frontend, Lanes, Process, View, Worker

EXIT_NONE = 4
WAIT_S = 2.0
"""How long a worker may take to answer."""
_HEAD = ("PROCESS", "STATE", "PID", "UP", "DEVICE", "RESTARTS", "REQUESTS", "QUEUE", "MEMORY", "ARENA")
_MODEL_HEAD = ("MODEL", "STATE", "WORKER", "DEVICE", "MEMORY", "WAITING")
_STYLES = {
    "STATE": "strong",
    "draining": "warn",
    "starting": "warn",
    "alone": "warn",
    "none": "warn",
    "stopped": "bad",
    "stuck": "bad",
    "silent": "bad",
    "dead": "bad",
}
"""Styles of the first table's lines by state."""


def add_parsers(commands: Any, add_flags: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add `status` and `ps`; `add_flags` adds the flags that name settings, from which the run directory follows."""
    about = "show the processes of a running server and its models"
    _add_arguments(commands.add_parser("status", help=about), add_flags)
    _add_arguments(commands.add_parser("ps", help="the same as `status`"), add_flags)


def _add_arguments(
    parser: argparse.ArgumentParser, add_flags: Callable[[argparse.ArgumentParser], None]
) -> None:
    add_flags(parser)
    parser.add_argument(
        "--run-dir", metavar="DIR", help="run directory of the server (default: of the settings)"
    )
    terminal.with_json(parser)
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        type=float,
        nargs="?",
        const=1.0,
        help="look again so often, until Ctrl-C",
    )
    terminal.with_examples(
        parser,
        ("status", "the server on the default port"),
        ("status --port 9000 --watch 2", "the server on port 9000, every two seconds"),
        ("status --run-dir /run/penstock --json | jq .workers[].state", "for scripts"),
    )


def run(options: argparse.Namespace, config: Settings) -> int:
    """Print what runs; returns the exit code. Raises `ConfigError` for a pause that is none."""
    if options.watch is not None and not 0.1 <= options.watch <= 3600:
        raise ConfigError(f"--watch {options.watch:g}: expected 0.1 to 3600 seconds")
    paths, url = config.paths, f"http://{config.server.bind}"
    if options.run_dir:
        config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, dir=options.run_dir))
        paths, url = config.paths, ""
    try:
        if options.watch is None:
            return _once(paths, config.worker_count, options.json, url)
        return _watch(paths, config.worker_count, options, url)
    except processes.NotReadable as error:
        print(f"penstock: {error.message}", file=sys.stderr)
        return 1


def _watch(paths: RunPaths, configured: int, options: argparse.Namespace, url: str) -> int:
    """Look again and again; Ctrl-C is the usual end."""
    try:
        while True:
            view = processes.look(paths, configured, WAIT_S)
            if options.json:
                print(terminal.as_json(_fields(view), one_line=True), flush=True)
            else:
                clear = terminal.CLEAR if sys.stdout.isatty() else ""
                text = "\n".join(lines_of(view)) if view.runs else _nothing(paths, url)
                print(f"{clear}{time.strftime('%H:%M:%S')}\n{text}", flush=True)
            time.sleep(options.watch)
    except KeyboardInterrupt:
        return 0


def _once(paths: RunPaths, configured: int, as_json: bool, url: str) -> int:
    view = processes.look(paths, configured, WAIT_S)
    if as_json:
        print(terminal.as_json(_fields(view)))
    elif view.runs:
        print("\n".join(lines_of(view)))
    if not view.runs:
        print(f"penstock: {_nothing(paths, url)}", file=sys.stderr)
        return EXIT_NONE
    return 0 if view.sound else 1


def _fields(view: View) -> dict[str, Any]:
    return {"runs": view.runs, "sound": view.sound, **msgspec.structs.asdict(view)}


def _nothing(paths: RunPaths, url: str) -> str:
    """That no server runs, and where one does; `url` is the address of the settings, or empty."""
    text = f"no server runs with the run directory {paths.root}"
    others = processes.servers_beside(paths)
    text += "".join(f"\n  a server runs here: penstock status --run-dir {other}" for other in others)
    if not others and url and _answers(url):
        text += (
            f"\n  a server answers at {url}, whose processes are not to be seen: penstock list --url {url}"
        )
    return text


def _answers(url: str) -> bool:
    """Whether a server lives at the address: one in a container, or with another run directory."""
    try:
        target.fetched(f"{url}/livez", "", WAIT_S)
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return True


def lines_of(view: View) -> Iterator[str]:
    """The lines for people."""
    yield f"run directory {view.run_dir}"
    rows = [_HEAD, _own("arbiter", view.arbiter)]
    if view.supervisor is not None:
        rows.append(_own("supervisor", view.supervisor))
    if view.bridge is not None:
        rows.append(_own("bridge", view.bridge))
    rows += [_frontend(frontend) for frontend in view.frontends] or [_row("frontends", "none")]
    nobody = "on the boxes of the cluster" if view.gateway else "none"
    rows += [_worker(worker) for worker in view.workers] or [_row("workers", nobody)]
    for row, line in zip(rows, terminal.table(rows), strict=True):
        style = _STYLES.get(row[1].split(":")[0])
        yield terminal.styled(line, style) if style else line
    if view.lanes is not None:
        yield from _cluster(view.lanes)
    yield from _models(view.workers)


def _row(name: str, state: str, process: Process | None = None, *others: str) -> tuple[str, ...]:
    """A row of the first table; a process that stands still says so in place of its state."""
    if process is None:
        return (name, state, *["-"] * (len(_HEAD) - 2))
    known = (name, "stopped" if process.stopped else state, str(process.pid), terminal.span(process.up_s))
    return (*known, *others, *["-"] * (len(_HEAD) - len(known) - len(others)))


def _own(name: str, process: Process | None) -> tuple[str, ...]:
    return _row(name, "runs" if process else "none", process)


def _frontend(frontend: Frontend) -> tuple[str, ...]:
    state = "serving" if frontend.silent_s is not None else "alone"
    if frontend.stuck:
        state = f"stuck: silent for {terminal.span(frontend.silent_s or 0)}"
    return _row(f"frontend {frontend.slot}", state, frontend, "-", "-", str(frontend.requests))


def _worker(worker: Worker) -> tuple[str, ...]:
    restarts = str(worker.restarts)
    if not worker.device:
        row = _row(f"worker {worker.slot}", worker.state, worker.process)
        return (*row[:4], "-", restarts, *row[6:])
    return _row(
        f"worker {worker.slot}",
        worker.state,
        worker.process,
        worker.device,
        restarts,
        str(worker.requests),
        f"{worker.queued}/{worker.bound}",
        f"{terminal.size(worker.memory_used)} of {terminal.size(worker.memory_total)}",
        f"{terminal.size(worker.arena_used)} of {terminal.size(worker.arena_total)}",
    )


def _cluster(lanes: Lanes) -> Iterator[str]:
    """What a gateway has of its cluster, and the items that it has sent since its start."""
    yield ""
    broker = "a broker is joined" if lanes.joined else terminal.styled("no broker is joined", "bad")
    others = f", {lanes.others} do not" if lanes.others else ""
    yield f"cluster: {broker}; {lanes.boxes} boxes take work{others}"
    sent = ", ".join(f"{count} by the lane {lane}" for lane, count in lanes.items.items())
    again = ", ".join(f"{count} {reason}" for reason, count in lanes.resent.items())
    yield f"items: {sent}; sent again: {again or 'none'}"


def _models(workers: list[Worker]) -> Iterator[str]:
    """A table of the models that are not merely available, and the number of the others.

    A profile has a row of its own where the profile's state differs from that of the model.
    """
    served = [(worker, model) for worker in workers for model in folded(worker.models)]
    held = [(worker, model) for worker, model in served if model.status.state != "available"]
    names = {status.name for worker in workers for status in worker.models}
    rows = [_model(worker, model) for worker, model in sorted(held, key=lambda pair: pair[1].status.name)]
    if rows:
        yield ""
        yield from terminal.table([_MODEL_HEAD, *rows])
    for worker, model in held:
        status = model.status
        if status.error_message:
            note = f"{status.name} on worker {worker.slot}: {status.error_class}: {status.error_message}"
            yield terminal.styled(note, "bad")
    models = {profiled(name, names) for name in names}
    if others := len(models - {profiled(name, names) for _, model in held for name in model.names}):
        noun = "model is" if others == 1 else "models are"
        yield f"{others} more {noun} available and not loaded"


def _model(worker: Worker, model: Folded) -> tuple[str, ...]:
    status = model.status
    waiting = sum(queue.items for queue in worker.queues if queue.model in model.names)
    waiting += sum(each.waiting for each in worker.generations if each.model in model.names)
    state = f"{status.state} {status.progress:.0%}" if status.state == "loading" else status.state
    memory = terminal.size(status.memory_bytes) if status.memory_bytes else "-"
    return (status.name, state, str(worker.slot), status.device or worker.device, memory, str(waiting))


def add_sweep_parser(commands: Any, add_flags: Callable[[argparse.ArgumentParser], None]) -> None:
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


def sweep_slots(options: argparse.Namespace, config: Settings) -> int:
    """`penstock sweep`: remove leftovers and name them; returns the exit code. Raises `ConfigError`."""
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
