"""What the death of a box, a broker or a gateway costs the requests of a cluster, and what more boxes bring.

1. Three brokers, two boxes, and two gateways, one with the queue and one with the direct lane alone. Clients encode
   all the time, as those of the random schedules of faults (`tests.harness.history`).
2. Each death comes `rounds` times, and once a round nothing happens for as long. What it costs is the longest call of
   those that were under way or began until the cluster was whole again, less the median of the calls before. A call
   that fails in another way than its fault allows ends the run.
3. Boxes of a simulated device, which takes `DEVICE_MS` and more for a batch, are asked by `CALLERS` callers: one box,
   two, three.
"""

from __future__ import annotations

import http.client
import json
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.options import parser
from benchmarks.report import Report
from tests.fakes.holding import holding
from tests.harness.broker import Broker, three_brokers
from tests.harness.cluster import Box, box, gateway, held, is_cut_off, living, serves
from tests.harness.history import Clients, History
from tests.harness.server import Server, wait_until

LANES = {"queue": "auto", "direct": "direct"}
SETTLED_S = 2.0
DEVICE_MS, CALLERS, SECONDS = 20, 48, 5.0


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


def gateway_killed_s(all_: Cluster, place: Path) -> float:
    """Seconds from the death of a gateway until its work has ended at the boxes."""
    near = all_.gateways["direct"]
    with holding(place) as hold:
        asked = threading.Thread(target=_asked, args=(near, hold), daemon=True)
        asked.start()
        wait_until(lambda: any(one.items for one in all_.boxes.values()), 60, "the request at a box")
        began = time.monotonic()
        near.kill_all_processes()
        wait_until(lambda: not any(one.items for one in all_.boxes.values()), 60, "the end of the request")
        took_s = time.monotonic() - began
    asked.join(60)
    near.start()
    near.wait_ready()
    wait_until(all_.is_whole, 120, "the whole cluster")
    return took_s


def _asked(server: Server, hold: Path) -> None:
    try:
        server.post("/v1/encode/fake/echo", held(hold))
    except (OSError, http.client.HTTPException):
        return


def rates(place: Path) -> dict[int, float]:
    """Texts a second of one, two and three boxes of simulated devices."""
    found: dict[int, float] = {}
    with ExitStack() as stack:
        brokers = stack.enter_context(three_brokers(place / "brokers"))
        urls = [each.url for each in brokers]
        near = stack.enter_context(gateway(place / "near", urls))
        names = list[str]()
        for name in "abc":
            settings = {"batch.max_tokens": 64}
            stack.enter_context(box(place / name, name, urls, models=("fake/slow",), settings=settings))
            names.append(name)
            wait_until(lambda: living(near) == set(names) and serves(near, "fake/slow"), 120, "the boxes")
            _rate(near, 1.0)
            found[len(names)] = _rate(near, SECONDS)
    return found


def _rate(server: Server, seconds: float) -> float:
    counts, until = [0] * CALLERS, time.monotonic() + seconds

    def call(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        while time.monotonic() < until:
            texts = [{"text": f"{number} {counts[number]} {at} " + "word " * 8} for at in range(8)]
            connection.request(
                "POST",
                "/v1/encode/fake/slow",
                json.dumps({"items": texts}),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            assert response.status == 200, response.read()
            response.read()
            counts[number] += 1
        connection.close()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(CALLERS)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 8 * sum(counts) / (time.monotonic() - began)


def run(rounds: int) -> Report:
    """Measure and save the report."""
    report = Report("cluster_deaths", "Deaths in a cluster", {"rounds": rounds, "callers": CALLERS})
    extras: dict[tuple[str, str], list[float]] = {}
    refused, again, ended = list[float](), list[float](), list[float]()
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
            ended.append(gateway_killed_s(all_, Path(root)))
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
    report.note(f"Gateway killed: its work has ended at the boxes after {max(ended):.2f} s at most (2.5).")
    for count, rate in by_boxes.items():
        share = rate / by_boxes[1] / count
        report.note(f"{count} boxes of simulated devices: {rate:.0f} texts/s, {share:.2f} of linear (0.95).")
    report.save(
        {
            "extras": {f"{fault}, {name}": found for (fault, name), found in extras.items()},
            "refused_ms": refused,
            "again_s": again,
            "gateway_killed_s": ended,
            "texts_per_s": {str(count): rate for count, rate in by_boxes.items()},
        }
    )
    return report


def main() -> None:
    """Read the command line and run."""
    run(9 if parser(__doc__).parse_args().full else 3)


if __name__ == "__main__":
    main()
