"""Worker processes alone, with programs of `tests.fakes.program`, and a client of them in the test's own process.

    with workers(tmp_path, {"add": ADD_SUB}, count=2) as running:
        async with running.client() as client: ...

At the end the workers are stopped; no arena, socket or process of theirs is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frontend.engine.local.client import Client
from ipc import deadline
from ipc.memory import copies
from ipc.metrics import registry as metrics
from ipc.processes.paths import RunPaths
from ipc.settings import Settings, load
from ipc.store.store import Store
from ipc.sweep import sweep
from tests.harness.accounting import count_server
from tests.harness.lives import Worker
from tests.harness.server import wait_until
from workers.reports import EVERY_S

Options = dict[str, Any]


def tensor(name: str, datatype: str, *dims: int, **facts: Any) -> dict[str, Any]:
    """An input or output of a configuration."""
    return {"name": name, "datatype": datatype, "dims": dims, **facts}


def program(
    kind: str,
    inputs: list[dict[str, Any]],
    outputs: list[dict[str, Any]],
    rows: int = 8,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> Options:
    """Options of a fake program; `rows` is its `max_batch_size`, `more` is of its configuration."""
    config = {"name": kind, "max_batch_size": rows, "inputs": inputs, "outputs": outputs, **(more or {})}
    return {"program": kind, "config": config, **options}


def totals(rows: int = 2, idle_s: float = 30.0, **options: Any) -> Options:
    """A program that adds up its sequences, with `rows` slots."""
    controls = [
        {"name": kind, "kind": kind, "datatype": "INT32", "off_on": [0, 1]} for kind in ("START", "READY")
    ]
    batching = {"max_idle_us": int(idle_s * 1e6), "controls": controls}
    more = {"sequence_batching": batching}
    return program(
        "totals", [tensor("INPUT0", "INT32", 1)], [tensor("OUTPUT0", "INT32", 1)], rows, more, **options
    )


def parts(**options: Any) -> Options:
    """A decoupled program that answers with as many parts as it is told."""
    return program(
        "parts",
        [tensor("INPUT0", "INT32", 1)],
        [tensor("OUTPUT0", "INT32", -1)],
        0,
        {"decoupled": True},
        **options,
    )


ADD_SUB = program(
    "add_sub",
    [tensor("INPUT0", "INT32", 16), tensor("INPUT1", "INT32", 16)],
    [tensor("OUTPUT0", "INT32", 16), tensor("OUTPUT1", "INT32", 16)],
)


@dataclass
class Workers:
    """Running workers of one run directory."""

    settings: Settings
    environment: dict[str, str]
    log_path: Path
    models: tuple[str, ...]
    processes: dict[int, Worker] = field(default_factory=dict)

    @property
    def paths(self) -> RunPaths:
        """Where they live."""
        return self.settings.paths

    def start(self, slot: int) -> None:
        """Start a worker, or start it again."""
        count_server()
        self.processes[slot] = Worker(slot, self.environment, self.log_path)

    def kill(self, slot: int) -> None:
        """SIGKILL."""
        self.processes[slot].kill()
        self.processes[slot].wait()

    @contextlib.asynccontextmanager
    async def client(self, slot: int = 0) -> AsyncIterator[Client]:
        """A frontend's client, once every model is loaded by every worker."""
        client = Client(self.paths, self.settings, f"frontend-{slot}", Store(self.paths))
        client.start()
        try:
            await client.wait(lambda: self._all_loaded(client), deadline.after(60))
            yield client
        finally:
            await client.close()

    def _all_loaded(self, client: Client) -> bool:
        up = [channel for channel in client.channels if channel.responsive]
        states = [c.models[name].state for c in up for name in self.models if name in c.models]
        assert "failed" not in states, self.log_path.read_text()[-4000:]
        return len(up) == len(self.processes) and states.count("loaded") == len(up) * len(self.models)

    def copied(self) -> dict[str, float]:
        """Bytes of tensors that the workers copied so far, by place, once the counters have come to rest."""
        seen, since = self._copied_now(), time.monotonic()

        def rested() -> bool:
            nonlocal seen, since
            now = self._copied_now()
            if now != seen:
                seen, since = now, time.monotonic()
            return time.monotonic() - since > 6 * EVERY_S

        wait_until(rested, what="rest of the counters")
        return seen

    def _copied_now(self) -> dict[str, float]:
        found = dict.fromkeys(copies.PLACES, 0.0)
        for line in metrics.render(self.paths).decode().splitlines():
            counted = re.match(r'penstock_tensor_copied_bytes_total\{.*place="(\w+)".*\} (\S+)', line)
            if counted:
                found[counted[1]] += float(counted[2])
        return found

    def stop(self) -> None:
        """Stop all of them in order."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(60)
        for slot in self.processes:
            assert not self.paths.arenas(slot), "an arena is left"


@contextlib.contextmanager
def workers(
    tmp_path: Path, models: Mapping[str, Options], count: int = 1, **settings: Any
) -> Iterator[Workers]:
    """`count` workers with these models; settings as `section__field=value`."""
    catalog = tmp_path / "catalog"
    catalog.mkdir()
    (tmp_path / "weights").mkdir()
    for name, options in models.items():
        entry = {
            "id": name,
            "source": {"kind": "adapter", "path": str(tmp_path / "weights")},
            "adapter": "tests.fakes.program:FakeProgram",
            "loadtime": options,
        }
        (catalog / f"{name}.yaml").write_text(json.dumps(entry))
    chosen = {
        "run__dir": str(tmp_path / "run"),
        "run__instance": f"t{secrets.token_hex(4)}",
        "catalog__dirs": str(catalog),
        "worker__device": "cpu",
        "worker__count": str(count),
        "worker__torch_threads": "1",
        "worker__hang_timeout_s": "20",
        "arena__bytes": str(32 << 20),
        "arena__input_bytes": str(32 << 20),
        "queue__max_wait_s": "120",
    } | {name: str(value) for name, value in settings.items()}
    variables = {f"PENSTOCK_{name.upper()}": value for name, value in chosen.items()}
    environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    running = Workers(load(environ=variables), environment, tmp_path / "workers.log", tuple(models))
    try:
        for slot in range(count):
            running.start(slot)
        wait_until(
            lambda: all(running.paths.worker_socket(slot).exists() for slot in range(count)), what="sockets"
        )
        yield running
    finally:
        try:
            running.stop()
        finally:
            sweep(running.paths)
