"""Workers that are killed or stopped under streams of generated text: another worker writes the rest of each text."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.fault import rounds
from tests.harness.chat import MODEL, ChatStream, chat_catalogs, prompts_of
from tests.harness.server import Server, alive, serving, stopped, wait_until

STREAMS = rounds(short=8, long=24)
TOKENS = 120
WISHES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "top_p": 0.9, "seed": 8, "frequency_penalty": 0.5},
    {"temperature": 1.2, "seed": 9, "min_p": 0.02, "stop": ["#zz"]},
]
"""How texts are drawn, which the text of a request without a death tells again."""


def settings(root: Path, workers: int) -> dict[str, Any]:
    """Every life of a worker counts as a healthy one, or a slot with many deaths would be taken out of service."""
    return {
        "server.frontends": 2,
        "worker.count": workers,
        "worker.healthy_after_s": 0.5,
        "catalog.dirs": chat_catalogs(root, context=5000),
        "limits.restart_wait_s": 60,
        "limits.load_wait_s": 60,
        "worker.drain_timeout_s": 600,
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two frontends and two workers."""
    root = tmp_path_factory.mktemp("carried")
    with serving(root, models=(MODEL, "fake/echo", "fake/slow"), settings=settings(root, 2)) as running:
        # A worker answers before its models are loaded.
        wait_until(lambda: running.starts(0) and running.starts(1) and both_up(running), 120, "two workers")
        yield running


def both_up(server: Server) -> bool:
    """Whether both workers answer."""
    return server.metric("penstock_worker_up") == 2


def asked(number: int) -> tuple[str, dict[str, Any]]:
    """Prompt and fields of a stream; every second one belongs to the other worker."""
    return prompts_of(number % 2, STREAMS)[number // 2], WISHES[number % len(WISHES)]


def opened(
    stack: ExitStack, server: Server, numbers: Iterable[int], tokens: int = TOKENS
) -> list[ChatStream]:
    """Streams with these numbers, which were asked for."""
    streams = []
    for number in numbers:
        prompt, fields = asked(number)
        streams.append(stack.enter_context(ChatStream(server.port, prompt, tokens, timeout_s=240, **fields)))
    return streams


def texts(streams: Iterable[ChatStream], pool: ThreadPoolExecutor) -> list[str]:
    """The whole texts of streams, each ended once."""
    found = []
    for stream, ending in zip(streams, pool.map(ChatStream.rest, streams), strict=True):
        assert ending.is_whole, ending
        found.append(stream.text)
    return found


def carried(server: Server, outcome: str) -> float:
    """How many texts went on so."""
    return server.metric("penstock_continuations_total", outcome=outcome)


def end(server: Server, slot: int, number: int = signal.SIGKILL) -> int:
    """End the worker in a slot by a signal; returns how many of its lives had become ready."""
    starts = server.starts(slot)
    os.kill(wait_until(lambda: server.worker_pid(slot)), number)
    return starts


def returned(server: Server, slot: int, starts: int) -> None:
    """Wait for the next life of a worker, and for the frontends to have joined both."""
    wait_until(lambda: server.starts(slot) > starts, 240, "the worker's return")
    wait_until(lambda: both_up(server), 240, "two workers")


def test_killed_workers_cost_no_stream_and_change_no_text(server: Server) -> None:
    draw = random.Random(4)
    with ThreadPoolExecutor(STREAMS + 1) as pool:
        with ExitStack() as stack:
            expected = texts(opened(stack, server, range(STREAMS)), pool)
        pieces, longest_s = sum(map(len, expected)), 0.0
        wanted, hits = rounds(short=2, long=20), 0
        for kill in itertools.count():
            assert kill < 10 * wanted, f"{hits} of {kill} kills fell within a text"
            before = carried(server, "carried")
            with ExitStack() as stack:
                streams = opened(stack, server, range(STREAMS))
                found = pool.submit(texts, streams, pool)
                enough = draw.random() * 0.7 * pieces
                wait_until(lambda: sum(len(each.text) for each in streams) >= enough, 240, "some text")  # noqa: B023
                starts = end(server, kill % 2)
                assert found.result() == expected
                longest_s = max(longest_s, *(each.longest_s for each in streams))
            returned(server, kill % 2, starts)
            # NOTE: clients read behind the workers, so all texts of the killed worker may have ended before.
            hits += carried(server, "carried") > before
            if hits == wanted:
                break
    assert not any(carried(server, outcome) for outcome in ("refused", "unkept", "failed"))
    print(f"longest time between two pieces {longest_s:.2f} s")


def test_a_worker_that_is_told_to_stop_hands_its_streams_over_and_ends(server: Server) -> None:
    for tokens in (600, 4000):
        before, worker = carried(server, "moved"), server.worker_pid(0)
        with ThreadPoolExecutor(4) as pool, ExitStack() as stack:
            streams = opened(stack, server, (0, 2, 4), tokens)
            for stream in streams:
                stream.more()
            starts = end(server, 0, signal.SIGTERM)
            wait_until(lambda: not alive(worker), 240, "the end of the worker")  # noqa: B023
            texts(streams, pool)
        returned(server, 0, starts)
        # NOTE: short texts may have ended before the worker was told; then longer ones are asked for.
        if carried(server, "moved") == before + 3:
            return
    raise AssertionError("a worker that was told to stop kept a text")


@pytest.mark.long
def test_a_worker_that_stands_still_is_killed_and_its_streams_go_on(server: Server) -> None:
    starts, numbers = server.starts(0), (0, 2, 4)
    with ThreadPoolExecutor(4) as pool, ExitStack() as stack:
        expected = texts(opened(stack, server, numbers), pool)
        streams = opened(stack, server, numbers)
        for stream in streams:
            stream.more()
        with stopped(server.worker_pid(0)):
            assert texts(streams, pool) == expected
    returned(server, 0, starts)


@pytest.mark.long
def test_the_only_worker_goes_on_with_its_texts_when_it_is_back(tmp_path: Path) -> None:
    models = (MODEL, "fake/echo", "fake/slow")
    with (
        serving(tmp_path, models=models, settings=settings(tmp_path, 1)) as running,
        ThreadPoolExecutor(4) as pool,
        ExitStack() as stack,
    ):
        expected = texts(opened(stack, running, range(4)), pool)
        streams = opened(stack, running, range(4))
        for stream in streams:
            stream.more(3)
        end(running, 0)
        assert texts(streams, pool) == expected
        print(f"longest time between two pieces {max(stream.longest_s for stream in streams):.2f} s")
