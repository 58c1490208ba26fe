"""Ten times more requests than the device can do: what is still done, how long that waits, and what refusals say.

Each case is a server of its own.

1. A lone client gives the service time; a closed loop gives the throughput at saturation, before the overload and again
   after it. The smaller of the two is the capacity.
2. An open loop sends ten times the capacity from processes of their own for some seconds. Requests that find
   `MOST_OPEN` others of their sender unanswered are not sent, and counted.
3. The answers that ended while the loop ran, against the capacity, are the goodput. The time above the service time of
   accepted requests is told in parts of `queue.max_wait_s`.
4. Some clients that were refused at the end come back after Retry-After, and ask once more. The told times are compared
   with the time until the last accepted request was done.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.load import BROKEN, percentile
from benchmarks.options import parser
from benchmarks.processes import Server, cpu_seconds
from benchmarks.report import Report
from benchmarks.serving import FAKE_CATALOG, MINILM, Settings, frontend_pids, penstock

FACTOR = 10
MAX_WAIT_S = 2.0
SENDERS = 2
MOST_OPEN = 4000
CLIENTS = 16
LONE = 10
COMEBACKS = 24
WORDS = (
    "a",
    "penstock",
    "carries",
    "the",
    "water",
    "of",
    "one",
    "river",
    "to",
    "turbines",
    "in",
    "a",
    "valley",
)
SLEEPER = "bench/sleeper"
SLEEPER_MS = 100
_PATIENCE_S = 300.0


@dataclass(frozen=True)
class Case:
    """A slow model under a queue of `MAX_WAIT_S`. `words` of a text."""

    name: str
    model: str
    words: int
    settings: Settings = field(default_factory=dict)


CASES = (
    Case("sleep", SLEEPER, 44, {"batch.max_items": 1}),
    Case("sleep, two frontends", SLEEPER, 44, {"batch.max_items": 1, "server.frontends": 2}),
    Case("MiniLM", MINILM, 220),
)


@dataclass(slots=True)
class Asked:
    """One request: when it was due and answered (seconds of CLOCK_MONOTONIC), its status, and its Retry-After."""

    due: float
    ended: float
    status: int
    retry_after_s: float

    @property
    def took_s(self) -> float:
        """Latency from the instant the request was due."""
        return self.ended - self.due


class Sender:
    """Requests of one event loop over kept connections."""

    def __init__(self, port: int, model: str, texts: Sequence[str]) -> None:
        self._port, self._model, self._texts = port, model, texts
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._number = 0
        self.unsent = 0

    def _request(self) -> bytes:
        self._number += 1
        text = f"{self._number} {self._texts[self._number % len(self._texts)]}"
        body = json.dumps({"items": [{"text": text}]}).encode()
        head = (
            f"POST /v1/encode/{self._model} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        )
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def ask(self, due: float) -> Asked:
        """One request on an idle connection or a new one."""
        try:
            pair = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
            pair[1].write(self._request())
            head = (await pair[0].readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            fields = dict(line.partition(": ")[::2] for line in head.split("\r\n")[1:])
            await pair[0].readexactly(int(fields.get("content-length", "0")))
        except (OSError, EOFError):
            return Asked(due, time.monotonic(), BROKEN, 0.0)
        self._idle.append(pair)
        return Asked(due, time.monotonic(), int(head.split()[1]), float(fields.get("retry-after", "0")))

    async def closed(self, clients: int, goes_on: Callable[[int], bool]) -> list[Asked]:
        """`clients` that each wait for an answer before they ask again, while `goes_on(answers)`."""
        found: list[Asked] = []

        async def client() -> None:
            while goes_on(len(found)):
                found.append(await self.ask(time.monotonic()))

        await asyncio.gather(*(client() for _ in range(clients)))
        return found

    async def open(self, per_s: float, seconds: float, seed: int) -> list[Asked]:
        """Requests at random instants, whatever becomes of those before; the last refused ones come back."""
        arrivals, due, found = random.Random(seed), time.monotonic(), list[Asked]()
        until, tasks = due + seconds, set[asyncio.Task[None]]()

        async def one(due: float) -> None:
            found.append(await self.ask(due))

        while (due := due + arrivals.expovariate(per_s)) < until:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if len(tasks) >= MOST_OPEN:
                self.unsent += 1
                continue
            task = asyncio.create_task(one(due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        return found


def _send(port: int, case: Case, per_s: float, seconds: float, seed: int, answers: Any) -> None:
    async def send() -> tuple[list[Asked], list[Asked], int]:
        sender = Sender(port, case.model, texts_of(case))
        load = asyncio.create_task(sender.open(per_s, seconds, seed))
        ended = time.monotonic() + seconds
        await asyncio.sleep(seconds - 0.05)
        again = await asyncio.gather(*(come_back(sender) for _ in range(COMEBACKS // SENDERS)))
        assert time.monotonic() >= ended
        return await load, [asked for asked in again if asked is not None], sender.unsent

    answers.put(asyncio.run(send()))


async def come_back(sender: Sender) -> Asked | None:
    """Ask, and after a refusal once more when Retry-After says; the second answer. None if the first was accepted."""
    first = await sender.ask(time.monotonic())
    if first.status == 200:
        return None
    await asyncio.sleep(max(0.0, first.ended + first.retry_after_s - time.monotonic()))
    return await sender.ask(time.monotonic())


def texts_of(case: Case) -> list[str]:
    """Texts of one length. The model computes as long for any words."""
    return [" ".join(random.Random(seed).choices(WORDS, k=case.words)) for seed in range(64)]


@dataclass(frozen=True)
class Sample:
    """One run of one case; times in seconds, `waits` of accepted requests above the service time."""

    case: str
    service_s: float
    capacity_per_s: float
    goodput: float
    sent: int
    refused: int
    broken: int
    unsent: int
    wait_p50_s: float
    wait_p99_s: float
    refusal_p50_s: float
    refusal_p99_s: float
    told_s: float
    drained_s: float
    came_back: int
    taken_then: int
    frontend_ms: float


@contextlib.contextmanager
def catalog() -> Iterator[Path]:
    """A catalog directory with a model that sleeps for each batch. Gone on exit."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as place:
        entry = {
            "id": SLEEPER,
            "source": {"kind": "directory", "path": str(FAKE_CATALOG.parent / "weights")},
            "adapter": "tests.fakes.adapter:FakeAdapter",
            "outputs": {"dense": {"dims": 16}},
            "max_sequence_length": 512,
            "loadtime": {"dims": 16, "batch_ms": SLEEPER_MS},
        }
        (Path(place) / "sleeper.yaml").write_text(json.dumps(entry))
        yield Path(place)


def _rate(asked: Sequence[Asked], began: float, ended: float) -> float:
    return sum(each.status == 200 and began <= each.ended < ended for each in asked) / (ended - began)


def _saturated(port: int, case: Case, seconds: float) -> float:
    """Answers a second of a closed loop, without the first second."""

    async def load() -> float:
        sender, began = Sender(port, case.model, texts_of(case)), time.monotonic()
        found = await sender.closed(CLIENTS, lambda _: time.monotonic() < began + seconds + 1)
        return _rate(found, began + 1, began + seconds + 1)

    return asyncio.run(load())


def _lone(port: int, case: Case) -> float:
    async def ask() -> float:
        found = await Sender(port, case.model, texts_of(case)).closed(1, lambda count: count < LONE)
        return median(each.took_s for each in found)

    return asyncio.run(ask())


def measure(server: Server, case: Case, seconds: float) -> Sample:
    """One run."""
    port = server.address[1]
    service_s = _lone(port, case)
    capacity = _saturated(port, case, seconds / 2)
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    rate = FACTOR * capacity / SENDERS
    senders = [
        context.Process(target=_send, args=(port, case, rate, seconds, seed, answers))
        for seed in range(SENDERS)
    ]
    frontends = frontend_pids(server)
    used_s = cpu_seconds(frontends)
    for sender in senders:
        sender.start()
    parts = [answers.get() for _ in senders]
    for sender in senders:
        sender.join(_PATIENCE_S)
    used_s = cpu_seconds(frontends) - used_s
    asked = [each for part in parts for each in part[0]]
    again = [each for part in parts for each in part[1]]
    capacity = min(capacity, _saturated(port, case, seconds / 2))
    began, last = min(each.due for each in asked), max(each.due for each in asked)
    accepted = [each for each in asked if each.status == 200]
    refused = [each for each in asked if each.status == 503]
    waits = [each.took_s - service_s for each in accepted if each.due > began + seconds / 4]
    refusals = [each.took_s for each in refused] or [0.0]
    told = [each.retry_after_s for each in refused if each.ended > last - 1] or [0.0]
    return Sample(
        case.name,
        service_s,
        capacity,
        _rate(asked, began + seconds / 4, last) / capacity,
        len(asked),
        len(refused),
        len(asked) - len(accepted) - len(refused),
        sum(part[2] for part in parts),
        percentile(waits, 50),
        percentile(waits, 99),
        percentile(refusals, 50),
        percentile(refusals, 99),
        median(told),
        max(each.ended for each in accepted) - last,
        len(again),
        sum(each.status == 200 for each in again),
        used_s / len(asked) * 1e3,
    )


def show(report: Report, samples: Sequence[Sample]) -> None:
    """Medians over the rounds, and the targets."""
    rows: list[Sequence[str | float | int | None]] = []
    for name in dict.fromkeys(sample.case for sample in samples):
        runs = [sample for sample in samples if sample.case == name]

        def middle(value: Callable[[Sample], float], runs: Sequence[Sample] = runs) -> float:
            return median(map(value, runs))

        goodput = middle(lambda run: run.goodput)
        worst = middle(lambda run: run.wait_p99_s / MAX_WAIT_S)
        refusal_ms = middle(lambda run: run.refusal_p99_s * 1e3)
        taken = middle(lambda run: run.taken_then / max(1, run.came_back))
        rows.append(
            [
                name,
                middle(lambda run: run.capacity_per_s),
                goodput,
                middle(lambda run: run.wait_p50_s / MAX_WAIT_S),
                worst,
                middle(lambda run: run.refused / run.sent),
                middle(lambda run: run.refusal_p50_s * 1e3),
                refusal_ms,
                middle(lambda run: run.told_s),
                middle(lambda run: run.drained_s),
                taken,
                middle(lambda run: run.frontend_ms),
            ]
        )
        target(report, f"{name}: goodput at least 0.95 of the capacity", goodput, goodput >= 0.95)
        target(report, f"{name}: p99 of the wait at most 1.5 times queue.max_wait_s", worst, worst <= 1.5)
        target(report, f"{name}: p99 of refusals at most 50 ms", refusal_ms, refusal_ms <= 50)
        target(report, f"{name}: taken after Retry-After: more than half", taken, taken > 0.5)
    heads = ["model", "capacity/s", "goodput", "wait p50", "wait p99", "refused", "refusal p50 ms", "p99 ms"]
    report.table("Ten times the capacity", [*heads, "told s", "drained s", "taken then", "frontend ms"], rows)
    report.note(f"Waits in parts of queue.max_wait_s ({MAX_WAIT_S:g} s), above the time of a lone request.")


def target(report: Report, text: str, found: float, met: bool) -> None:
    """Say whether a target is met."""
    report.note(f"Target: {text}: {found:.2f}, {'met' if met else 'missed'}.")


def run(rounds: int, seconds: float, cases: Sequence[Case]) -> Report:
    """Measure and save the report."""
    settings = {"rounds": rounds, "seconds": seconds, "factor": FACTOR}
    report = Report("overload", "Ten times overload", settings)
    samples = []
    for case in cases:
        chosen: Settings = {
            "worker.count": 1,
            "worker.torch_threads": 1,
            "server.frontends": 1,
            "queue.max_wait_s": MAX_WAIT_S,
            **case.settings,
        }
        with catalog() as directory:
            own: Settings = {"catalog.dirs": str(directory)} if case.model == SLEEPER else {}
            with penstock(case.model, {**chosen, **own}) as server:
                for turn in range(rounds):
                    samples.append(found := measure(server, case, seconds))
                    report.say(f"round {turn + 1}: {found}")
    show(report, samples)
    report.save([{name: getattr(each, name) for name in Sample.__dataclass_fields__} for each in samples])
    return report


def main() -> None:
    """Read the command line and run."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, help="default 1, or 3 with --full")
    options.add_argument("--seconds", type=float, help="of overload; default 10, or 20 with --full")
    options.add_argument("--cases", default="", help="names of cases, between semicolons; default all")
    chosen = options.parse_args()
    rounds, seconds = (3, 20.0) if chosen.full else (1, 10.0)
    wanted = [name.strip() for name in chosen.cases.split(";") if name.strip()]
    cases = [case for case in CASES if not wanted or case.name in wanted]
    run(chosen.rounds or rounds, chosen.seconds or seconds, cases)


if __name__ == "__main__":
    main()
