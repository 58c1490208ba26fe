"""What a gateway costs generated text: time to the first token and tokens a second, beside the box's own frontend.

1. One broker; one box with a tiny model that computes on the CPU, and a frontend of its own; one gateway.
2. In every round a lone client asks for a token, from both ways in turn; then `STREAMS` clients stream texts of
   `TOKENS` tokens each from one way, and from the other.
3. Messages with text are counted at the broker, with the tokens of each: a step of all streams should be one message.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import nats

from benchmarks.options import parser
from benchmarks.report import Report
from ipc.wire.cluster_text import read_pieces
from tests.harness.broker import broker
from tests.harness.chat import MODEL, ChatStream, chat_catalogs
from tests.harness.cluster import box, gateway, living
from tests.harness.server import Server, wait_until

LOCAL, GATEWAY = "local", "gateway"
STREAMS, TOKENS, LONE = 64, 100, 20


@dataclass
class Way:
    """What was measured through one server."""

    server: Server
    firsts_ms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


@contextmanager
def ways(place: Path) -> Iterator[tuple[dict[str, Way], str]]:
    """Both ways to one box, and the address of the broker."""
    settings = {"catalog.dirs": chat_catalogs(place)}
    with (
        broker(place / "broker") as one,
        box(place / "a", "a", [one.url], models=(MODEL,), settings=settings) as a,
        gateway(place / "near", [one.url]) as near,
    ):
        local = a.server
        local.environment["PENSTOCK_SUPERVISE"] = "0"
        local.start()
        try:
            local.wait_ready()
            wait_until(lambda: living(near) == {"a"}, what="the box")
            yield {LOCAL: Way(local), GATEWAY: Way(near)}, one.url
        finally:
            assert local.process is not None
            local.process.terminate()
            local.process.wait(60)


def first_ms(server: Server, number: int) -> float:
    """Milliseconds until a lone client has the first piece of a text."""
    began = time.perf_counter()
    with ChatStream(server.port, f"hello {number}", 2) as stream:
        stream.more()
        took = time.perf_counter() - began
        stream.rest()
    return took * 1e3


def rate(server: Server, round_: int) -> float:
    """Tokens a second of all streams together."""
    with ThreadPoolExecutor(STREAMS) as pool:
        began = time.perf_counter()

        def one(number: int) -> None:
            with ChatStream(server.port, f"story {round_} {number}", TOKENS, timeout_s=300) as stream:
                assert stream.rest().is_whole

        list(pool.map(one, range(STREAMS)))
        return STREAMS * TOKENS / (time.perf_counter() - began)


async def counted(url: str, server: Server) -> list[int]:
    """The tokens of each message with text while all clients stream."""
    client = await nats.connect(url)
    tokens: list[int] = []

    async def note(message: nats.aio.msg.Msg) -> None:
        if count := sum(read_pieces(message.data).deltas.tokens):
            tokens.append(count)

    await client.subscribe("_INBOX.*.texts", cb=note)
    await client.flush()
    await asyncio.to_thread(rate, server, -1)
    await client.close()
    return tokens


def run(rounds: int) -> Report:
    """Measure and save the report."""
    settings = {"rounds": rounds, "streams": STREAMS, "tokens": TOKENS, "texts of a lone client": LONE}
    report = Report("cluster_text", "Text through a gateway", settings)
    with tempfile.TemporaryDirectory() as place, ways(Path(place)) as (found, url):
        for way in found.values():
            first_ms(way.server, -1)
        for round_ in range(rounds):
            for number in range(LONE):
                for way in found.values():
                    way.firsts_ms.append(first_ms(way.server, round_ * LONE + number))
            for way in found.values():
                way.rates.append(rate(way.server, round_))
            report.say(f"round {round_}: {', '.join(f'{n} {w.rates[-1]:.0f}/s' for n, w in found.items())}")
        tokens = asyncio.run(counted(url, found[GATEWAY].server))
    near, local = found[GATEWAY], found[LOCAL]
    headers = ["way", "first token, p50 ms", "tokens/s of all streams, p50"]
    rows = [[name, median(way.firsts_ms), median(way.rates)] for name, way in found.items()]
    report.table("One box, asked directly and through a gateway", headers, rows)
    added_ms = median(near.firsts_ms) - median(local.firsts_ms)
    share = median(mine / other for mine, other in zip(near.rates, local.rates, strict=True))
    report.note(f"Target: time to the first token + <= 2 ms: {added_ms:.2f}: {_met(added_ms <= 2)}.")
    report.note(f"Target: rate of {STREAMS} streams >= 0.97 of the box: {share:.2f}: {_met(share >= 0.97)}.")
    report.note(f"Target: one message a step: {len(tokens)} messages with text for texts of {TOKENS} tokens.")
    report.save(
        {
            **{name: {"firsts_ms": way.firsts_ms, "rates": way.rates} for name, way in found.items()},
            "messages": tokens,
        }
    )
    return report


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def main() -> None:
    """Read the command line and run."""
    run(9 if parser(__doc__).parse_args().full else 5)


if __name__ == "__main__":
    main()
