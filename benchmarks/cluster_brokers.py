"""Requests over three brokers whose ends are apart, items that one broker carries, and a box whose brokers are away.

1. Three brokers: the gateways know the first, the bridge the second. A lone client sends 1 KiB to a server of its own
   and to a gateway of each lane in turn; two processes with nats-py alone do the same over the same two brokers.
2. One broker: `CALLERS` callers send items of one piece through `ClusterEngine`, without HTTP, to one bridge. In the
   same rounds bare ends exchange as many items through a stream in memory. All share the processors of the machine, so
   the processor time of an item decides: the process that needs most can do so many items a second at most.
3. A box with frontends of its own: a lone client asks these while the only broker is there, and while it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.cluster import (
    BARE,
    BODY,
    DIRECT,
    LOCAL,
    PATH,
    QUEUE,
    SMALL,
    Place,
    Sample,
    added_ms,
    alone,
    apart,
    bare_sample,
    each_us,
    far_end,
    is_answered,
    used,
)
from benchmarks.load import percentile, post
from benchmarks.options import parser
from benchmarks.report import Report, Row
from benchmarks.serving import frontend_pids, penstock, worker_pids
from frontend.cluster.engine import engine_of
from frontend.cluster.gateway import Gateway
from frontend.engine.interface import Engine
from frontend.scope import scope_of_ids
from frontend.server.drain import Drain
from ipc.catalog.entries import Catalog
from ipc.settings import Cluster, Settings
from ipc.wire.messages import EncodeCall, InputItem, Work
from tests.harness.broker import broker, three_brokers
from tests.harness.cluster import box, bridge_beside, gateway
from tests.harness.server import eventually, serving, wait_until

CALLERS = 64
CARRIED_PER_S = 15_000
"""Items that one broker has to carry; the product half as many."""
PRODUCT, ENDS = "gateway and bridge", "nats-py queue"


@dataclass(frozen=True, slots=True)
class Carried:
    """One load of items. `us`: processor time for one item by process."""

    way: str
    per_s: float
    us: Mapping[str, float]


def apart_samples(report: Report, rounds: int, requests: int) -> list[Sample]:
    """A lone client over three brokers, each end at a broker of its own, beside a server of the same model."""
    settings = {"server.frontends": 1, "worker.count": 1, "worker.torch_threads": 1}
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        near_broker, far_broker, _ = stack.enter_context(three_brokers(root))
        far = stack.enter_context(box(root / "box", "box", [far_broker.url], models=(SMALL,)))
        local = stack.enter_context(penstock(SMALL, settings, fakes=True))
        end = stack.enter_context(apart(far_end, far_broker.url))
        assert far.bridge is not None
        shared = {"bridge": [far.bridge.pid], "worker": [far.server.worker_pid() or 0]}
        own = {"near": frontend_pids(local), "worker": worker_pids(local)}
        places = {LOCAL: Place(local.address, own)}
        for lane in (DIRECT, QUEUE):
            near = stack.enter_context(
                gateway(root / lane, [near_broker.url], {"cluster.lane": lane, "log.level": "warning"})
            )
            wait_until(lambda near=near: near.encode(SMALL, ["x"]).status == 200, what="the box")  # type: ignore[misc]
            places[lane] = Place(("127.0.0.1", near.port), {"near": near.frontend_pids(), **shared})
        wait_until(lambda: uvloop.run(is_answered(near_broker.url)), what="the end of nats-py alone")
        request, samples = post(PATH, BODY), list[Sample]()
        for way, place in places.items():
            alone(way, place, [request] * 100)
        for turn in range(rounds):
            samples += [alone(way, place, [request] * requests) for way, place in places.items()]
            samples += [bare_sample(near_broker.url, {"bridge": [end]}, way, 1, requests) for way in BARE]
            report.say(f"ends apart, round {turn + 1}/{rounds}")
    return samples


@contextlib.asynccontextmanager
async def _joined(url: str) -> AsyncIterator[tuple[Engine, Settings]]:
    """The engine of a gateway that knows the model."""
    settings = Settings(cluster=Cluster(urls=(url,), lane="queue"))
    one = Gateway(settings, Catalog(()))
    engine = engine_of(one, settings, Drain())
    one.begin()

    async def knows() -> bool:
        return one.models.is_loaded(SMALL)

    try:
        await eventually(knows, "the model of the box")
        yield engine, settings
    finally:
        await one.leave()


async def _load(engine: Engine, settings: Settings, items: int) -> None:
    left, text = iter(range(items)), "x" * 1024

    async def caller() -> None:
        for _ in left:
            scope = scope_of_ids("", "", settings.limits)
            work = Work(SMALL, EncodeCall([InputItem(text)], ["dense"]), 0, 256, scope.request_id)
            with await engine.run(scope, work) as answer:
                answer.tensors()

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def _carried(url: str, pids: Mapping[str, list[int]], items: int) -> Carried:
    async with _joined(url) as (engine, settings):
        await _load(engine, settings, items // 4)
        began, before = time.perf_counter(), used(pids)
        await _load(engine, settings, items)
        wall_s, after = time.perf_counter() - began, used(pids)
    return Carried(PRODUCT, items / wall_s, each_us(before, after, items))


def carried_samples(report: Report, rounds: int, items: int) -> list[Carried]:
    """Items of one piece over one broker: through gateway and bridge, and by bare ends, in turn."""
    found = list[Carried]()
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        one = stack.enter_context(broker(root / "broker"))
        far = stack.enter_context(box(root / "box", "box", [one.url], models=(SMALL,)))
        end = stack.enter_context(apart(far_end, one.url))
        assert far.bridge is not None
        wait_until(lambda: uvloop.run(is_answered(one.url)), what="the end of nats-py alone")
        pids = {
            "near": [os.getpid()],
            "bridge": [far.bridge.pid],
            "worker": [far.server.worker_pid() or 0],
            "broker": [one.pid],
        }
        for turn in range(rounds):
            found.append(uvloop.run(_carried(one.url, pids, items)))
            bare = bare_sample(one.url, {"bridge": [end], "broker": [one.pid]}, QUEUE, CALLERS, items * 2)
            found.append(Carried(ENDS, bare.per_s, bare.us))
            report.say(f"one broker, round {turn + 1}/{rounds}")
    return found


def away_samples(report: Report, rounds: int, requests: int) -> list[Sample]:
    """A lone client of a box's own frontends, `with` and `without` the broker in turn."""
    found, request = list[Sample](), post(PATH, BODY)
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        one = stack.enter_context(broker(root / "broker"))
        server = stack.enter_context(serving(root, (SMALL,), {"log.level": "warning"}))
        stack.enter_context(bridge_beside(server, one.url))
        place = Place(("127.0.0.1", server.port), {"near": server.frontend_pids()})
        alone("warm", place, [request] * 100)
        for turn in range(rounds):
            found.append(alone("with", place, [request] * requests))
            one.kill()
            found.append(alone("without", place, [request] * requests))
            one.start()
            report.say(f"brokers away, round {turn + 1}/{rounds}")
    return found


def _of(samples: Sequence[Sample], way: str) -> list[float]:
    return [second for one in samples if one.way == way for second in one.latencies_s]


def _show_apart(report: Report, samples: Sequence[Sample]) -> None:
    ways = (LOCAL, DIRECT, QUEUE, *BARE.values())
    rows: list[Row] = [[way, *(percentile(_of(samples, way), at) * 1e3 for at in (50, 99))] for way in ways]
    report.table("Three brokers, the ends apart, one caller", ["way", "p50 ms", "p99 ms"], rows)
    for lane in (DIRECT, QUEUE):
        p50, _ = added_ms(samples, lane, LOCAL)
        bare = percentile(_of(samples, BARE[lane]), 50) * 1e3
        met = "met" if p50 <= 1 else "missed"
        report.note(f"Target: {lane} adds p50 <= 1 ms: {p50:.2f} (bare round trip {bare:.2f}): {met}.")


def _show_carried(report: Report, found: Sequence[Carried]) -> None:
    rows, parts = list[Row](), ("near", "bridge", "worker", "broker")
    for way in (PRODUCT, ENDS):
        chosen = [one for one in found if one.way == way]
        us = [median(one.us[part] for one in chosen) if part in chosen[0].us else None for part in parts]
        rows.append([way, median(one.per_s for one in chosen), *us])
        slowest = max(value for part, value in zip(parts, us, strict=True) if value and part != "worker")
        wanted = CARRIED_PER_S / (2 if way == PRODUCT else 1)
        met = "met" if 1e6 / slowest >= wanted else "missed"
        report.note(
            f"Target: {way} carry {wanted:.0f} items/s: the process that needs most, workers aside, allows"
            f" {1e6 / slowest:.0f}: {met}."
        )
    report.table(
        f"One broker, {CALLERS} callers, items of 1 KiB, processor time for one item",
        ["way", "items/s", *(f"{part} us" for part in parts)],
        rows,
    )


def _show_away(report: Report, samples: Sequence[Sample]) -> None:
    rows: list[Row] = [
        [way, *(percentile(_of(samples, way), at) * 1e3 for at in (50, 99))] for way in ("with", "without")
    ]
    report.table(
        "A box's own frontends, with and without brokers, one caller", ["way", "p50 ms", "p99 ms"], rows
    )
    failed = sum(one.failed for one in samples)
    report.note(f"Target: without brokers the p99 of local requests is unchanged; {failed} requests failed.")


def run(rounds: int, requests: int) -> Report:
    """Measure and save the report."""
    report = Report("cluster_brokers", "Brokers", {"rounds": rounds, "requests": requests})
    together = apart_samples(report, rounds, requests)
    _show_apart(report, together)
    carried = carried_samples(report, rounds, 10 * requests)
    _show_carried(report, carried)
    away = away_samples(report, rounds, 2 * requests)
    _show_away(report, away)
    report.save(
        {
            "apart": [asdict(one) for one in together],
            "carried": [asdict(one) for one in carried],
            "away": [asdict(one) for one in away],
        }
    )
    return report


def main() -> None:
    """Read the command line and run."""
    run(*((9, 1000) if parser(__doc__).parse_args().full else (5, 300)))


if __name__ == "__main__":
    main()
