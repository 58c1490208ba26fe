"""What a gateway, brokers and a bridge cost over one server, with nats-py alone beside.

1. One broker; one box with a worker of models that compute nothing; one gateway for each lane; and a server of the same
   models without a cluster. Each process of them is one loop.
2. In every round a lone client sends 1 KiB to the server and to both gateways in turn, then 64 connections do. Between
   these two nats-py processes exchange 1 KiB over the same broker: by core messages, and through a stream in memory of
   one replica with standing pulls. So all ways see the same minutes of the machine.
3. Processor time of frontend, gateway, bridge, workers and broker is read around each load.
4. A lone client gets results of 8 MiB from the server and through the gateway of the direct lane, whose bridge serves
   large bytes by HTTP; then small requests are measured while another process gets such results for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import nats
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StorageType, StreamConfig

from benchmarks.connection import Connection, one_by_one
from benchmarks.load import Address, percentile, post
from benchmarks.options import parser
from benchmarks.processes import cpu_seconds
from benchmarks.report import Report, Row
from benchmarks.serving import answers, frontend_pids, penstock, worker_pids
from benchmarks.wrk import TOOL, measure
from tests.harness.broker import broker
from tests.harness.cluster import box, gateway
from tests.harness.server import wait_until

CALLERS = 64
SMALL, WIDE = "fake/noop", "fake/wide"
LOCAL, DIRECT, QUEUE = "local", "direct", "queue"
BARE = {DIRECT: "nats-py core", QUEUE: "nats-py queue"}
_NBYTES = 1024
BODY = json.dumps({"items": [{"text": "x" * _NBYTES}]}).encode()
PATH = f"/v1/encode/{SMALL}"
_ITEMS = 8
"""Items of `fake/wide`, each answered with 1 MiB."""
_STREAM, _PULLED = "BARE", 256
_HEAD = 64
"""Bytes of a bare item that name where its answer goes."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One load. `us`: processor time for one item by process, near (frontend, gateway, caller), bridge, worker, broker.

    `bridge` is the far end of nats-py alone, which has no worker.
    """

    way: str
    callers: int
    per_s: float
    latencies_s: list[float]
    us: dict[str, float]
    failed: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a way is asked, and the processes that work for it."""

    address: Address
    pids: dict[str, list[int]]


def used(pids: Mapping[str, list[int]]) -> dict[str, float]:
    """Processor seconds so far, by process."""
    return {name: cpu_seconds(numbers) for name, numbers in pids.items()}


def each_us(before: Mapping[str, float], after: Mapping[str, float], items: int) -> dict[str, float]:
    """Processor time for one of `items`, in microseconds, by process."""
    return {name: (after[name] - before[name]) / max(items, 1) * 1e6 for name in before}


def alone(way: str, place: Place, requests: Sequence[bytes]) -> Sample:
    """A lone client sends requests one after another."""
    before = used(place.pids)
    result = one_by_one(place.address, requests)
    spent = each_us(before, used(place.pids), result.statuses.total())
    return Sample(way, 1, result.rate_per_s, result.latencies_s, spent, result.failed)


def _crowd(way: str, place: Place, seconds: int) -> Sample:
    before = used(place.pids)
    rate = measure(place.address, PATH, BODY, CALLERS, seconds)
    spent = each_us(before, used(place.pids), rate.requests)
    return Sample(way, CALLERS, rate.per_s, [rate.p50_ms / 1e3, rate.p99_ms / 1e3], spent, rate.failed)


def far_end(url: str) -> None:
    """Answer bare items for ever."""
    uvloop.run(_answer_for_ever(url))


async def _answer_for_ever(url: str) -> None:
    client = await nats.connect(url)
    stream = client.jetstream()
    await stream.add_stream(
        StreamConfig(
            name=_STREAM,
            subjects=["bare.queue"],
            storage=StorageType.MEMORY,
            retention=RetentionPolicy.WORK_QUEUE,
        )
    )
    await stream.add_consumer(
        _STREAM, ConsumerConfig(durable_name="ends", ack_policy=AckPolicy.EXPLICIT, max_ack_pending=10_000)
    )
    left = 0

    async def pull() -> None:
        nonlocal left
        left += _PULLED
        wanted = json.dumps({"batch": _PULLED, "expires": int(3600e9)}).encode()
        await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{_STREAM}.ends", wanted, "_INBOX.far.pulled")

    async def direct(message: Msg) -> None:
        await client.publish(message.reply, message.data)

    async def pulled(message: Msg) -> None:
        nonlocal left
        if message.headers:
            return
        await client.publish(message.data[:_HEAD].decode().strip(), message.data)
        await client.publish(message.reply, b"+ACK")
        left -= 1
        if left < _PULLED // 2:
            await pull()

    await client.subscribe("bare.direct", cb=direct)
    await client.subscribe("_INBOX.far.pulled", cb=pulled)
    await pull()
    await client.subscribe("bare.ready", cb=direct)
    await asyncio.Event().wait()


class _NearEnd:
    """The caller's side of nats-py alone."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._number = 0

    async def heard(self, message: Msg) -> None:
        """An answer has come; the broker's word that an item is in the stream is no answer."""
        waiting = self._waiting.pop(message.subject, None)
        if waiting is not None:
            waiting.set_result(None)

    async def call(self, way: str) -> float:
        """One item there and back; returns seconds."""
        began = time.perf_counter()
        self._number += 1
        reply = f"_INBOX.near.{self._number}"
        future = self._waiting[reply] = asyncio.get_running_loop().create_future()
        data = reply.encode().ljust(_HEAD) + b"x" * (_NBYTES - _HEAD)
        told = reply if way == DIRECT else "_INBOX.near.stored"
        await self._client.publish(f"bare.{way}", data, told)
        await future
        return time.perf_counter() - began


async def _bare(url: str, way: str, callers: int, items: int) -> tuple[float, list[float], float]:
    """(items a second, seconds of each, processor seconds of this process) of `items` bare items."""
    client = await nats.connect(url)
    near = _NearEnd(client)
    await client.subscribe("_INBOX.near.>", cb=near.heard)
    left, latencies = iter(range(items)), list[float]()

    async def caller() -> None:
        for _ in left:
            latencies.append(await near.call(way))

    began, used_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(caller() for _ in range(callers)))
    wall, used_s = time.perf_counter() - began, time.process_time() - used_s
    await client.close()
    return items / wall, latencies, used_s


def bare_sample(url: str, pids: Mapping[str, list[int]], way: str, callers: int, items: int) -> Sample:
    """Bare items from this process to `far_end`, whose broker may be another one of a cluster."""
    before = used(pids)
    per_s, latencies, seconds = uvloop.run(_bare(url, way, callers, items))
    spent = each_us(before, used(pids), items) | {"near": seconds / items * 1e6}
    return Sample(BARE[way], callers, per_s, latencies, spent, 0)


async def is_answered(url: str) -> bool:
    """Whether `far_end` answers at a broker."""
    client = await nats.connect(url)
    try:
        await client.request("bare.ready", b"", timeout=1)
    except (nats.errors.TimeoutError, nats.errors.NoRespondersError):
        return False
    finally:
        await client.close()
    return True


@contextlib.contextmanager
def apart(run: Callable[..., None], *arguments: object) -> Iterator[int]:
    """`run(*arguments)` in a process of its own, killed on exit; gives its pid."""
    process = multiprocessing.get_context("spawn").Process(target=run, args=arguments, daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield process.pid
    finally:
        process.kill()
        process.join()


def _wide() -> bytes:
    body = {"items": [{"text": str(at)} for at in range(_ITEMS)]}
    return post(f"/v1/encode/{WIDE}", body, accept="application/msgpack")


def _get_for_ever(address: Address) -> None:
    """Get large results one after another."""
    request = _wide()
    with Connection(address) as connection:
        while True:
            connection.drain(request)


def _rounds(
    report: Report,
    places: dict[str, Place],
    bare: Callable[[str, int, int], Sample],
    rounds: int,
    requests: int,
    seconds: int,
) -> list[Sample]:
    """All loads of 1 KiB, every way in every round."""
    request, samples = post(PATH, BODY), list[Sample]()
    for way, place in places.items():
        alone(way, place, [request] * 100)
        _crowd(way, place, 1)
    for turn in range(rounds):
        samples += [alone(way, place, [request] * requests) for way, place in places.items()]
        samples += [bare(way, 1, requests) for way in BARE]
        samples += [_crowd(way, place, seconds) for way, place in places.items()]
        samples += [bare(way, CALLERS, 4000 * seconds) for way in BARE]
        report.say(f"round {turn + 1}/{rounds}")
    return samples


def _large(places: dict[str, Place], rounds: int) -> list[Sample]:
    """Results of 8 MiB, then small requests beside them, `beside` in front of the way."""
    request, ways, samples = _wide(), (LOCAL, DIRECT), list[Sample]()
    for _ in range(rounds + 1):
        samples += [alone(f"8 MiB, {way}", places[way], [request] * 10) for way in ways]
    samples = samples[len(ways) :]
    for _ in range(rounds):
        for way in ways:
            with apart(_get_for_ever, places[way].address):
                # The other process imports and connects first.
                alone(way, places[way], [post(PATH, BODY)] * 300)
                samples.append(alone(f"beside 8 MiB, {way}", places[way], [post(PATH, BODY)] * 300))
    return samples


def _of(samples: Sequence[Sample], way: str, callers: int = 1) -> list[Sample]:
    return [one for one in samples if (one.way, one.callers) == (way, callers)]


def added_ms(samples: Sequence[Sample], way: str, base: str) -> tuple[float, float]:
    """(p50, p99): the median over rounds of the difference of p50 to `base`; the difference of p99 over all rounds."""
    pairs = list(zip(_of(samples, way), _of(samples, base), strict=True))
    p50 = median(
        percentile(mine.latencies_s, 50) - percentile(other.latencies_s, 50) for mine, other in pairs
    )
    all_mine, all_other = (
        [second for one in _of(samples, name) for second in one.latencies_s] for name in (way, base)
    )
    return p50 * 1e3, (percentile(all_mine, 99) - percentile(all_other, 99)) * 1e3


def _show(report: Report, samples: Sequence[Sample]) -> None:
    small = (LOCAL, DIRECT, QUEUE, *BARE.values())
    rows: list[Row] = []
    for way in (*small, "8 MiB, local", "8 MiB, direct", "beside 8 MiB, local", "beside 8 MiB, direct"):
        seconds = [second for one in _of(samples, way) for second in one.latencies_s]
        p50, p99 = percentile(seconds, 50) * 1e3, percentile(seconds, 99) * 1e3
        rows.append([way, p50, p99, sum(one.failed for one in _of(samples, way))])
    report.table("One caller", ["way", "p50 ms", "p99 ms", "failed"], rows)
    rows = []
    for way in small:
        chosen = _of(samples, way, CALLERS)
        spent: list[float | None] = [
            median(one.us[part] for one in chosen) if part in chosen[0].us else None
            for part in ("near", "bridge", "worker", "broker")
        ]
        rows.append([way, median(one.per_s for one in chosen), *spent, sum(one.failed for one in chosen)])
    headers = ["way", "items/s", "near us", "bridge us", "worker us", "broker us", "failed"]
    report.table(f"{CALLERS} callers, processor time for one item", headers, rows)
    for way, most_ms in ((DIRECT, 0.4), (QUEUE, 0.6)):
        p50, p99 = added_ms(samples, way, LOCAL)
        met = "met" if p50 <= most_ms and p99 <= 4 else "missed"
        report.note(
            f"Target: {way} adds p50 <= {most_ms} ms and p99 <= 4 ms to a local request: {p50:.2f}, {p99:.1f}: {met}."
        )
        _note_processor(report, samples, way)
    p50, _ = added_ms(samples, "8 MiB, direct", "8 MiB, local")
    whole_ms = median(percentile(one.latencies_s, 50) for one in _of(samples, "8 MiB, direct")) * 1e3
    rate = _ITEMS / (p50 / 1e3) if p50 > 0 else float("inf")
    met = "met" if p50 <= 12 and rate >= 800 else "missed"
    report.note(
        f"Target: a result of 8 MiB adds <= 12 ms and >= 800 MiB/s on the way: {p50:.1f} ms, {rate:.0f} MiB/s of"
        f" {whole_ms:.1f} ms in all: {met}."
    )
    p50, _ = added_ms(samples, "beside 8 MiB, direct", DIRECT)
    report.note(f"A small request beside such results: {p50:.1f} ms more than alone (target 2 ms).")


def _note_processor(report: Report, samples: Sequence[Sample], way: str) -> None:
    """Own processor time of gateway and bridge over a local frontend and worker, and the rate beside bare ends."""
    pairs = list(zip(_of(samples, way, CALLERS), _of(samples, LOCAL, CALLERS), strict=True))
    near = median(mine.us["near"] - local.us["near"] for mine, local in pairs)
    far = median(mine.us["bridge"] + mine.us["worker"] - local.us["worker"] for mine, local in pairs)
    ends = zip(_of(samples, way, CALLERS), _of(samples, BARE[way], CALLERS), strict=True)
    share = median(mine.per_s / end.per_s for mine, end in ends)
    met = "met" if near <= 70 and far <= 60 else "missed"
    report.note(
        f"Target: {way}, processor time for one item: gateway <= 70 us over a frontend, bridge and worker <= 60 us"
        f" over a worker: {near:.0f}, {far:.0f}: {met}. Items/s are {share:.2f} of those of bare ends (target 0.5)."
    )


def run(rounds: int, requests: int, seconds: int) -> Report:
    """Measure and save the report: `requests` of the lone client, `seconds` of 64 callers, in every round."""
    settings = {"rounds": rounds, "requests alone": requests, "seconds": seconds, "tool": TOOL}
    report = Report("cluster", "A gateway, a broker and a box", settings)
    http = {"cluster.transfer_bind": "127.0.0.1:0"}
    models = (SMALL, WIDE)
    local_settings = {"server.frontends": 1, "worker.count": 1, "worker.torch_threads": 1}
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        one = stack.enter_context(broker(root / "broker"))
        far = stack.enter_context(box(root / "box", "box", [one.url], models=models, settings=http))
        local = stack.enter_context(penstock(",".join(models), local_settings, fakes=True))
        end = stack.enter_context(apart(far_end, one.url))
        assert far.bridge is not None
        shared = {"bridge": [far.bridge.pid], "worker": [far.server.worker_pid() or 0], "broker": [one.pid]}
        own = {"near": frontend_pids(local), "worker": worker_pids(local)}
        places = {LOCAL: Place(local.address, own)}
        for lane in (DIRECT, QUEUE):
            near = stack.enter_context(
                gateway(root / lane, [one.url], {**http, "cluster.lane": lane, "log.level": "warning"})
            )
            wait_until(lambda near=near: near.encode(SMALL, ["x"]).status == 200, what="the box")  # type: ignore[misc]
            places[lane] = Place(("127.0.0.1", near.port), {"near": near.frontend_pids(), **shared})
        wait_until(lambda: uvloop.run(is_answered(one.url)), what="the end of nats-py alone")
        assert answers(local.address, "/readyz")
        bare_pids = {"bridge": [end], "broker": [one.pid]}
        samples = _rounds(
            report,
            places,
            lambda way, callers, items: bare_sample(one.url, bare_pids, way, callers, items),
            rounds,
            requests,
            seconds,
        )
        samples += _large(places, rounds)
    _show(report, samples)
    report.save([asdict(sample) for sample in samples])
    return report


def main() -> None:
    """Read the command line and run."""
    chosen = parser(__doc__).parse_args()
    run(*((9, 1000, 3) if chosen.full else (5, 300, 1)))


if __name__ == "__main__":
    main()
