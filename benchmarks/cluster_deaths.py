"""What the death of a box, a broker or a gateway costs the requests of a cluster, and what more boxes bring.

1. Three brokers, two boxes, and two gateways, one with the queue and one with the direct lane alone. Clients encode
   all the time, as those of the random schedules of faults (`tests.harness.history`).
2. Each death comes `rounds` times, and once a round nothing happens for as long. What it costs is the longest call of
   those that were under way or began until the cluster was whole again, less the median of the calls before. A call
   that fails in another way than its fault allows ends the run.
3. A gateway is killed while boxes have `HELD` requests of it. The time counts until the last box has given these up;
   afterwards no worker has a request, a block or a lease.
4. Boxes of a simulated device, which sleeps for each text, are asked by `CALLERS` callers: one box, two, three. Texts
   count that are answered between two instants while all callers call. How busy the processor was is told beside.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.options import parser
from benchmarks.report import Report
from ipc.metrics import registry as metrics
from ipc.processes.paths import RunPaths
from penstock.processes import look
from tests.fakes.holding import holding
from tests.harness.broker import Broker, three_brokers
from tests.harness.cluster import Box, box, gateway, held, is_cut_off, living, serves
from tests.harness.history import Clients, History
from tests.harness.server import Server, sum_of, wait_until

LANES = {"queue": "auto", "direct": "direct"}
SETTLED_S = 2.0
PATIENCE_S = 60.0
HELD = 24
"""Requests of a gateway that is killed."""
CALLERS, WARM_S, SECONDS = 48, 3.0, 10.0
WORDS = 150
"""Of a text, which keeps a simulated device busy for some 35 ms, and the processor for far less."""
REFUSED_S = 0.1
"""Pause of a caller whose request was refused."""


@dataclass
class Cluster:
    """All processes, the history of their calls, and what was found by fault and gateway."""

    brokers: Sequence[Broker]
    boxes: Mapping[str, Box]
    gateways: Mapping[str, Server]
    history: History = field(default_factory=History)

    def is_whole(self) -> bool:
        """Whether each gateway hears each box and is answered."""
        return all(living(one) == set(self.boxes) and serves(one) for one in self.gateways.values())


@contextmanager
def cluster(place: Path) -> Iterator[Cluster]:
    """A cluster that is whole."""
    with ExitStack() as stack:
        brokers = stack.enter_context(three_brokers(place))
        urls = [each.url for each in brokers]
        boxes = {name: stack.enter_context(box(place / name, name, urls)) for name in "ab"}
        gateways = {
            name: stack.enter_context(gateway(place / name, urls, {"cluster.lane": lane}))
            for name, lane in LANES.items()
        }
        found = Cluster(brokers, boxes, gateways)
        wait_until(found.is_whole, 120, "the whole cluster")
        yield found


def extra_s(all_: Cluster, fault: Callable[[], None]) -> dict[str, float]:
    """The longest call around a fault, less the median of the calls before, by gateway."""
    time.sleep(SETTLED_S)
    began_s = time.monotonic()
    fault()
    wait_until(all_.is_whole, 120, "the whole cluster")
    time.sleep(SETTLED_S)
    calls = [call for call in list(all_.history.calls) if call.ended_s]
    found = {}
    for name in all_.gateways:
        mine = [call for call in calls if call.gateway == name and call.status == 200]
        before = [call.ended_s - call.began_s for call in mine if call.ended_s < began_s][-200:]
        after = [call.ended_s - call.began_s for call in mine if call.ended_s >= began_s]
        found[name] = max(0.0, max(after) - median(before))
    return found


def faults_of(all_: Cluster, round_: int) -> dict[str, Callable[[], None]]:
    """The deaths of one round."""
    one, member = list(all_.boxes.values())[round_ % 2], all_.brokers[round_ % 3]

    def end(number: signal.Signals) -> None:
        one.end(number)
        one.start_bridge()

    def kill_broker() -> None:
        member.kill()
        time.sleep(SETTLED_S)
        member.start()

    def nothing() -> None:
        time.sleep(SETTLED_S)

    return {
        "nothing": nothing,
        "box killed": lambda: end(signal.SIGKILL),
        "box stopped": lambda: end(signal.SIGTERM),
        "broker of three killed": kill_broker,
    }


def refusal_ms(server: Server) -> float:
    """Milliseconds until a new request is refused where no broker is left."""
    body = json.dumps({"items": [{"text": "x"}]})
    found = []
    for _ in range(20):
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/v1/encode/fake/echo", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert b"QUEUE_UNAVAILABLE" in response.read()
        connection.close()
        found.append((time.perf_counter() - began) * 1e3)
    return median(found)


def without_brokers(all_: Cluster) -> tuple[float, float]:
    """(milliseconds of a refusal, seconds from the last broker's start until both gateways are answered)."""
    near = all_.gateways["direct"]
    for each in all_.brokers:
        each.kill()
    wait_until(lambda: is_cut_off(near), 60, "the loss of all brokers")
    time.sleep(SETTLED_S + 1)
    refused_ms = refusal_ms(near)
    for each in all_.brokers:
        each.start()
    began = time.monotonic()
    wait_until(lambda: all(serves(one) for one in all_.gateways.values()), 120, "service again")
    again_s = time.monotonic() - began
    wait_until(all_.is_whole, 120, "the whole cluster")
    return refused_ms, again_s


def gateway_killed_s(all_: Cluster, lane: str, place: Path) -> float:
    """Seconds from the death of a gateway until its work has ended at the boxes, and nothing of the work is left.

    `HELD` requests of the gateway are there: some run and hold their devices, the others wait behind these.
    """
    near = all_.gateways[lane]
    with holding(place) as hold:
        asked = [threading.Thread(target=_asked, args=(near, hold), daemon=True) for _ in range(HELD)]
        for thread in asked:
            thread.start()
        wait_until(lambda: sum(one.items for one in all_.boxes.values()) == HELD, 60, "the requests at boxes")
        having = [one for one in all_.boxes.values() if one.items]
        told = [_given_up(one) for one in having]
        began = time.monotonic()
        near.kill_all_processes()
        # Looked at without a pause that grows: the moment is what is measured.
        while any(_given_up(one) == before for one, before in zip(having, told, strict=True)):
            assert time.monotonic() - began < PATIENCE_S, "a box did not give up the work of a dead gateway"
            time.sleep(0.005)
        took_s = time.monotonic() - began
    for thread in asked:
        thread.join(PATIENCE_S)
    wait_until(lambda: not any(map(_has_work, all_.boxes.values())), PATIENCE_S, "empty boxes")
    near.start()
    near.wait_ready()
    wait_until(all_.is_whole, 120, "the whole cluster")
    return took_s


def _given_up(one: Box) -> int:
    """How often a bridge has given up the work of a gateway."""
    return one.log.count("is silent: gave up")


def _has_work(one: Box) -> bool:
    """Whether a bridge has items, or a worker requests, blocks or leases."""
    server = one.server
    paths = RunPaths(server.run_dir, server.environment["PENSTOCK_RUN__INSTANCE"])
    workers = look(paths, len(server.workers), 5).workers
    idle = one.status.endswith(" 0 items, 0 answers kept")
    return not idle or any(it.requests or it.arena_used or it.leases for it in workers)


def _asked(server: Server, hold: Path) -> None:
    try:
        server.post("/v1/encode/fake/echo", held(hold))
    except (OSError, http.client.HTTPException):
        return


@dataclass(frozen=True, slots=True)
class Rate:
    """Texts a second of so many boxes, and shares of the time: of processors in use, of each simulated device."""

    per_s: float
    processor: float
    devices: list[float]


def rates(place: Path) -> dict[int, Rate]:
    """What one, two and three boxes of simulated devices do."""
    found, boxes = dict[int, Rate](), list[Box]()
    with ExitStack() as stack:
        brokers = stack.enter_context(three_brokers(place / "brokers"))
        urls = [each.url for each in brokers]
        near = stack.enter_context(gateway(place / "near", urls))
        for name in "abc":
            # A text fills a batch, so that every text costs a device the same.
            settings = {"batch.max_tokens": 256}
            boxes.append(
                stack.enter_context(box(place / name, name, urls, models=("fake/slow",), settings=settings))
            )
            wait_until(lambda: _serves_slow(near, boxes), 120, "the boxes")
            found[len(boxes)] = _rate(near, boxes)
    return found


def _serves_slow(server: Server, boxes: Sequence[Box]) -> bool:
    return living(server) == {one.name for one in boxes} and serves(server, "fake/slow")


def _rate(server: Server, boxes: Sequence[Box]) -> Rate:
    done_s, until = list[float](), time.monotonic() + WARM_S + SECONDS

    def call(number: int) -> None:
        connection, turn = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60), 0
        headers = {"Content-Type": "application/json"}
        while time.monotonic() < until:
            turn += 1
            text = f"{number} {turn} " + "word " * WORDS
            connection.request(
                "POST", "/v1/encode/fake/slow", json.dumps({"items": [{"text": text}]}), headers
            )
            response = connection.getresponse()
            body = response.read()
            if response.status == 503:
                # The first burst may be more than the bound of a box that has yet to run a full batch.
                time.sleep(REFUSED_S)
                continue
            assert response.status == 200, body
            done_s.append(time.monotonic())
        connection.close()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(CALLERS)]
    for thread in threads:
        thread.start()
    time.sleep(WARM_S)
    began, idle, busy = time.monotonic(), _idle_s(), [_device_s(one) for one in boxes]
    time.sleep(max(0.0, until - time.monotonic()))
    ended, idle_after, busy_after = time.monotonic(), _idle_s(), [_device_s(one) for one in boxes]
    for thread in threads:
        thread.join()
    wall_s = ended - began
    return Rate(
        sum(began <= one < ended for one in done_s) / wall_s,
        1 - (idle_after - idle) / wall_s / (os.cpu_count() or 1),
        [(after - before) / wall_s for before, after in zip(busy, busy_after, strict=True)],
    )


def _idle_s() -> float:
    """Seconds for which the processors of this machine had nothing to do, all together."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


def _device_s(one: Box) -> float:
    """Seconds for which the devices of a box have run batches."""
    server = one.server
    paths = RunPaths(server.run_dir, server.environment["PENSTOCK_RUN__INSTANCE"])
    return sum_of(metrics.render(paths).decode(), "penstock_device_busy_seconds_total")


def run(rounds: int) -> Report:
    """Measure and save the report."""
    report = Report("cluster_deaths", "Deaths in a cluster", {"rounds": rounds, "callers": CALLERS})
    extras: dict[tuple[str, str], list[float]] = {}
    refused, again = list[float](), list[float]()
    ended: dict[str, list[float]] = {lane: [] for lane in LANES}
    with tempfile.TemporaryDirectory() as root, cluster(Path(root)) as all_:
        ports = {name: server.port for name, server in all_.gateways.items()}
        for round_ in range(rounds):
            with Clients(all_.history, ports, each=4, seed=round_):
                for fault, begin in faults_of(all_, round_).items():
                    for name, took_s in extra_s(all_, begin).items():
                        extras.setdefault((fault, name), []).append(took_s)
            assert not all_.history.violations(), all_.history.violations()[:5]
            report.say(f"round {round_}: { ({key: round(found[-1], 2) for key, found in extras.items()}) }")
            refused_ms, again_s = without_brokers(all_)
            refused.append(refused_ms)
            again.append(again_s)
            for lane, found in ended.items():
                found.append(gateway_killed_s(all_, lane, Path(root)))
            report.say(f"gateways killed: {ended}")
    with tempfile.TemporaryDirectory() as root:
        by_boxes = rates(Path(root))
    rows: list[list[str | float]] = [
        [fault, name, round(median(found), 2), round(max(found), 2)]
        for (fault, name), found in extras.items()
    ]
    report.table(
        "Longest call around a death, over the median before", ["death", "lane", "s, median", "s, most"], rows
    )
    report.note(
        "Targets: box killed <= 1.2 s claimed, <= 2.5 s unclaimed; box stopped 0; broker of three <= 1.5 s."
    )
    report.note(
        f"All brokers gone: a refusal takes {median(refused):.1f} ms (50); served again {max(again):.1f} s (2)."
    )
    for lane, found in ended.items():
        report.note(
            f"Gateway killed, {lane}: its work has ended at the boxes after {max(found):.2f} s at most (2.5)."
        )
    for count, rate in by_boxes.items():
        share = rate.per_s / by_boxes[1].per_s / count
        report.note(
            f"{count} boxes of simulated devices: {rate.per_s:.1f} texts/s, {share:.3f} of linear (0.95); devices busy"
            f" {', '.join(f'{busy:.2f}' for busy in rate.devices)}; processors busy {rate.processor:.2f}."
        )
    report.save(
        {
            "extras": {f"{fault}, {name}": found for (fault, name), found in extras.items()},
            "refused_ms": refused,
            "again_s": again,
            "gateway_killed_s": ended,
            "rates": {str(count): asdict(rate) for count, rate in by_boxes.items()},
        }
    )
    return report


def main() -> None:
    """Read the command line and run."""
    run(9 if parser(__doc__).parse_args().full else 3)


if __name__ == "__main__":
    main()
