"""What the loop of tools costs a frontend where the model calls nothing, beside plain chat, in turn.

A tiny generator with random weights makes no call. Blocks of requests with a shell of
the server alternate with blocks of plain requests over one connection. The processor time of the frontend is read
around each block, and what an idle frontend uses in the same time is subtracted. A request with the shell looks for a
session, runs one round, and saves the session.
"""

from __future__ import annotations

import time
from statistics import median

from benchmarks.chat_models import generator
from benchmarks.connection import Connection
from benchmarks.load import post
from benchmarks.options import parser
from benchmarks.processes import cpu_seconds
from benchmarks.report import Report
from benchmarks.serving import Settings, frontend_pids, penstock

MODEL = "bench/tiny"
BLOCK = 25
IDLE_S = 5.0
TARGET_MS = 0.3


def request(number: int, *, shell: bool) -> bytes:
    """One chat request; each conversation is a new one."""
    messages = [{"role": "user", "content": f"Say letters, {number}."}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 4}
    return post("/v1/chat/completions", body | ({"enable_shell": True} if shell else {}))


def main() -> None:
    """Measure, print and save."""
    options = parser(__doc__).parse_args()
    rounds = 80 if options.full else 24
    report = Report(
        "agent", "The loop of tools without a call", {"rounds": rounds, "requests a block": BLOCK}
    )
    samples: list[tuple[float, float]] = []
    with generator(MODEL, "tiny") as (_, catalog):
        settings: Settings = {
            "catalog.dirs": str(catalog),
            "server.frontends": 1,
            "worker.count": 1,
            "worker.torch_threads": 1,
            "agent.shell": "true",
        }
        with penstock(MODEL, settings) as server, Connection(server.address) as connection:
            pids = frontend_pids(server)
            before = cpu_seconds(pids)
            time.sleep(IDLE_S)
            idle = (cpu_seconds(pids) - before) / IDLE_S
            for turn in range(rounds + 1):
                used = []
                for shell in (False, True):
                    before, began = cpu_seconds(pids), time.monotonic()
                    for number in range(BLOCK):
                        status, body = connection.fetch(request(turn * BLOCK + number, shell=shell))
                        if status != 200 or (b"session_id" in body) != shell:
                            raise ValueError(f"status {status}: {body[:300]!r}")
                    spent_s = cpu_seconds(pids) - before - idle * (time.monotonic() - began)
                    used.append(spent_s / BLOCK * 1e3)
                if turn:
                    samples.append((used[0], used[1]))
                    report.say(f"round {turn}: plain {used[0]:.2f} ms, with the loop {used[1]:.2f} ms")
    plain, loop = (median(sample[side] for sample in samples) for side in (0, 1))
    more = median(sample[1] - sample[0] for sample in samples)
    heads = ["plain chat, ms", "with the loop, ms", "more, ms", "target at most, ms"]
    report.table("Processor time of the frontend for a request", heads, [[plain, loop, more, TARGET_MS]])
    report.save(samples)


if __name__ == "__main__":
    main()
