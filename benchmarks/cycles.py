"""Memory of a worker after each cycle of loading, using and unloading a model: whether the memory grows.

1. Serve all-MiniLM-L6-v2 and, as a control, a fake model that keeps 1 MiB at every load; neither is preloaded.
2. Load, use once and unload through the admin routes, and read the worker's resident memory after each unload; on
   CUDA also what is in use on the device, which should serve nobody else.
3. The slope is the median of the slopes between all pairs of cycles (Theil, Sen), without the first fifth of them,
   in which caches fill; its interval of 95 % is Sen's.

The check: the interval reaches down to zero, which is noise. Growth that is not noise but under `TOLERATED` of the
model's weights a cycle is told apart from growth beyond that; the control must be found to grow.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.connection import Connection
from benchmarks.load import post
from benchmarks.options import parser
from benchmarks.peers.servers import MODEL_DIR
from benchmarks.processes import Server, memory_nbytes
from benchmarks.report import Report, Row
from benchmarks.serving import penstock, worker_pids
from tests.harness.lifecycle import MIB, Models

SOUND, LEAKY = "bench/sound", "bench/leaky"
TOLERATED = 0.001
_WARM_UP = 0.2
_CONFIDENT = 1.96


@dataclass(frozen=True, slots=True)
class Slope:
    """Bytes per cycle, with the interval of 95 %."""

    value: float
    low: float
    high: float


def slope(values: Sequence[float]) -> Slope:
    """Theil and Sen's slope of equidistant values, at least three."""
    count = len(values)
    first, second = np.triu_indices(count, 1)
    found = np.asarray(values, np.float64)
    slopes = np.sort((found[second] - found[first]) / (second - first))
    spread = _CONFIDENT * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low, high = (
        max(0, int((len(slopes) - spread) / 2)),
        min(len(slopes) - 1, int((len(slopes) + spread) / 2) + 1),
    )
    return Slope(float(np.median(slopes)), float(slopes[low]), float(slopes[high]))


def settled(values: Sequence[float]) -> Sequence[float]:
    """The values after the first cycles."""
    return values[int(_WARM_UP * len(values)) :]


@dataclass(frozen=True, slots=True)
class Cycles:
    """Bytes after each unload: `device` is empty on CPU."""

    model: str
    resident: list[float]
    device: list[float]
    seconds: float


def run_cycles(server: Server, model: str, count: int, on_cuda: bool) -> Cycles:
    """Load, use, unload. Raises RuntimeError when one of them is not answered 200."""
    (worker,) = worker_pids(server)
    asked = [post(f"/v1/admin/load/{model}", {"wait": True})]
    asked.append(post(f"/v1/encode/{model}", {"items": [{"text": "one short text"}]}))
    asked.append(post(f"/v1/admin/unload/{model}", {"wait": True}))
    found = Cycles(model, [], [], 0.0)
    began = time.perf_counter()
    with Connection(server.address) as connection:
        for _ in range(count):
            for one in asked:
                status, body = connection.fetch(one)
                if status != 200:
                    raise RuntimeError(f"{model}: status {status}: {body[:200]!r}")
            found.resident.append(memory_nbytes(worker)["rss"])
            if on_cuda:
                free, total = torch.cuda.mem_get_info()
                found.device.append(total - free)
    return Cycles(model, found.resident, found.device, time.perf_counter() - began)


def verdict(grown: Slope, tolerated_nbytes: float) -> str:
    """`noise`, `little` (not noise, but no more than is tolerated) or `grows`."""
    if grown.low <= 0:
        return "noise"
    return "little" if grown.low <= tolerated_nbytes else "grows"


def catalog(directory: Path) -> Models:
    """A catalog of both models."""
    models = Models(directory)
    entry = {
        "id": SOUND,
        "source": {"kind": "directory", "path": str(MODEL_DIR)},
        "adapter": "dense",
        "outputs": {"dense": {"dims": 384}},
        "max_sequence_length": 256,
    }
    models.write_text(SOUND, json.dumps(entry))
    models.write(LEAKY, hold_bytes=MIB, leak=True)
    return models


def show(report: Report, found: Sequence[Cycles], tolerated_nbytes: float) -> None:
    """One row for each model and kind of memory, and the verdicts."""
    rows: list[Row] = []
    verdicts: dict[tuple[str, str], str] = {}
    for cycles in found:
        for kind, values in (("resident", cycles.resident), ("device", cycles.device)):
            if not values:
                continue
            grown = slope(settled(values))
            verdicts[cycles.model, kind] = verdict(grown, tolerated_nbytes)
            span = [values[0] / MIB, settled(values)[0] / MIB, values[-1] / MIB]
            kib = [one / 1024 for one in (grown.value, grown.low, grown.high)]
            rows.append([f"{cycles.model}, {kind}", len(values), *span, *kib, verdicts[cycles.model, kind]])
    heads = [
        "memory",
        "cycles",
        "first MiB",
        "settled MiB",
        "last MiB",
        "KiB a cycle",
        "low",
        "high",
        "verdict",
    ]
    report.table("Memory after each unload", heads, rows)
    shown = {one.model: list(enumerate((nbytes / MIB for nbytes in one.resident), 1)) for one in found}
    report.lines("Memory after each unload", "cycle", "MiB", shown)
    sound = [text for (model, _), text in verdicts.items() if model == SOUND]
    little = f" ('little' is under {tolerated_nbytes / 1024:.0f} KiB a cycle)" if "little" in sound else ""
    told = f"{', '.join(sound)}{little}, {_met(set(sound) == {'noise'})}"
    report.note(f"Target: memory over {len(found[0].resident)} cycles within noise: {told}.")
    caught = verdicts[LEAKY, "resident"] == "grows"
    report.note(f"Target: the control that leaks 1 MiB a cycle fails the same check: {_met(caught)}.")


def _met(reached: bool) -> str:
    return "met" if reached else "missed"


def run(count: int, control: int, device: str) -> Report:
    """Measure and save the report."""
    report = Report(
        "cycles", "Loading and unloading", {"cycles": count, "control": control, "device": device}
    )
    tolerated = TOLERATED * sum(path.stat().st_size for path in MODEL_DIR.glob("*.safetensors"))
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as place:
        directory = catalog(Path(place) / "catalog").directory
        settings: dict[str, str | int | float] = {
            "catalog.dirs": str(directory),
            "catalog.preload": "",
            "worker.count": 1,
            "worker.device": device,
        }
        with penstock("", settings) as server:
            found = []
            for model, times in ((SOUND, count), (LEAKY, control)):
                found.append(run_cycles(server, model, times, device == "cuda"))
                report.say(f"{model}: {times} cycles in {found[-1].seconds:.0f} s")
    show(report, found, tolerated)
    report.save([{"model": one.model, "resident": one.resident, "device": one.device} for one in found])
    return report


def main() -> None:
    """Read the command line and run."""
    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument("--cycles", type=int, help="default 100, or 300 with --full")
    options.add_argument("--control", type=int, default=30, help="cycles of the control")
    options.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    chosen = options.parse_args()
    run(chosen.cycles or (300 if chosen.full else 100), chosen.control, chosen.device)


if __name__ == "__main__":
    main()
