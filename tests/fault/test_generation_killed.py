"""Workers and frontends that are killed or reloaded under streams of generated text, and clients that are no good.

Each stream that goes on ends with one terminal event, and in the end no sequence holds a block.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psutil
import pytest

from tests.fault import rounds
from tests.harness.chat import MODEL, ChatStream, chat_catalogs, held_blocks, prompts_of, sequences
from tests.harness.server import Server, alive, serving, stopped, wait_until

RUNNING = 4
"""Sequences that one worker computes together."""
LONG = 30_000
"""Tokens of a stream that does not end while nobody reads: more than sockets and the server hold for a client."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two frontends, and two workers that compute few sequences together."""
    root = tmp_path_factory.mktemp("generation")
    settings = {
        "server.frontends": 2,
        "server.drain_s": 5,
        "worker.count": 2,
        # Every life counts as a healthy one, or a slot that is killed in every round would be taken out of service.
        "worker.healthy_after_s": 0.5,
        "generation.max_sequences": RUNNING,
        "catalog.dirs": chat_catalogs(root, context=LONG + 1000),
        "limits.restart_wait_s": 60,
        "limits.load_wait_s": 60,
    }
    with serving(root, models=(MODEL, "fake/echo", "fake/slow"), settings=settings) as running:
        wait_until(lambda: running.starts(0) and running.starts(1), what="two workers")
        yield running


@pytest.fixture(autouse=True)
def clean(server: Server) -> Iterator[None]:
    """Two workers and two frontends before each test, and nothing held behind it."""
    wait_until(lambda: server.metric("penstock_worker_up") == 2, what="two workers")
    wait_until(lambda: len(server.frontend_pids()) == 2, what="two frontends")
    yield
    wait_until(lambda: is_idle(server), what="the end of all sequences")


def in_flight(server: Server) -> float:
    """Requests for text that go on."""
    return server.metric("penstock_requests_in_flight", model=MODEL)


def is_idle(server: Server) -> bool:
    """Whether no sequence is left, and none holds a block."""
    left = sequences(server, "running") + sequences(server, "waiting")
    return (
        not left and not held_blocks(server) and not server.metric("penstock_requests_in_flight", model=MODEL)
    )


def opened(
    stack: ExitStack, server: Server, slot: int, count: int, max_tokens: int = LONG
) -> list[ChatStream]:
    """Streams of the worker in `slot`."""
    prompts = prompts_of(slot, count)
    return [stack.enter_context(ChatStream(server.port, prompt, max_tokens)) for prompt in prompts]


def clients_of(pid: int) -> set[int]:
    """Ports of the clients that are connected to a process."""
    return {found.raddr.port for found in psutil.Process(pid).net_connections("tcp") if found.raddr}


def test_a_killed_frontend_frees_what_its_clients_had_and_no_other_stream(server: Server) -> None:
    with ExitStack() as stack:
        streams = [*opened(stack, server, 0, 3), *opened(stack, server, 1, 3)]
        for stream in streams:
            stream.more()
        ports = {pid: clients_of(pid) for pid in server.frontend_pids()}
        [victim] = [pid for pid in ports if streams[0].local_port in ports[pid]]
        lost = [stream for stream in streams if stream.local_port in ports[victim]]
        others = [stream for stream in streams if stream not in lost]
        os.kill(victim, signal.SIGKILL)
        for stream in lost:
            with pytest.raises((ConnectionError, AssertionError, ValueError, OSError)):
                stream.more(LONG)
            assert not stream.ending.done
        for stream in others:
            stream.more(5)
        wait_until(lambda: sequences(server, "running") <= len(others), what="the end of the lost ones")


def test_streams_go_on_to_their_end_while_frontends_are_reloaded(server: Server) -> None:
    before = set(server.frontend_pids())
    workers = [server.worker_pid(slot) for slot in (0, 1)]
    with ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        streams = [*opened(stack, server, 0, 3, 400), *opened(stack, server, 1, 3, 400)]
        for stream in streams:
            stream.more()
        server.process.send_signal(signal.SIGHUP)
        endings = list(pool.map(ChatStream.rest, streams))
        assert all(ending.is_whole for ending in endings), endings
    wait_until(lambda: not any(alive(pid) for pid in before), what="the end of the old frontends")
    with ChatStream(server.port, "and now?", 5) as stream:
        assert stream.rest().is_whole
    assert workers == [server.worker_pid(slot) for slot in (0, 1)]


def test_clients_that_leave_free_their_sequences(server: Server) -> None:
    for _ in range(rounds(short=1, long=100)):
        with ExitStack() as stack:
            # Some run, some wait, some have just been sent.
            running = [*opened(stack, server, 0, RUNNING), *opened(stack, server, 1, RUNNING)]
            running[0].more()
            opened(stack, server, 0, 3)
            opened(stack, server, 1, 3)
        wait_until(lambda: is_idle(server), what="the end of all sequences")


def test_clients_that_hardly_read_hold_up_nobody(server: Server) -> None:
    with ExitStack() as stack:
        slow = [*opened(stack, server, 0, 2), *opened(stack, server, 1, 2)]
        for stream in slow:
            stream._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            assert stream.response.read(1) == b"d"
        for slot in (0, 1):
            for stream in opened(stack, server, slot, 2, 60):
                assert stream.rest().is_whole
        for stream in slow:
            assert stream.response.read(1) == b"a"


def test_streams_of_a_killed_worker_and_what_has_not_begun_there_go_on_elsewhere(server: Server) -> None:
    for number in range(rounds(short=1, long=50)):
        # NOTE: an input that is on dying workers again and again is refused, so each round asks for another length.
        wait_until(lambda: server.metric("penstock_worker_up") == 2, what="two workers")
        retries = server.metric("penstock_retries_total")
        carried = server.metric("penstock_continuations_total", outcome="carried")
        starts = server.starts(0)
        with ExitStack() as stack:
            running = {slot: opened(stack, server, slot, RUNNING, LONG - number) for slot in (0, 1)}
            for stream in (*running[0], *running[1]):
                stream.more()
            with stopped(worker := server.worker_pid(0)):
                fresh = opened(stack, server, 0, 2, 30)
                wait_until(lambda: in_flight(server) == 2 * RUNNING + 2, what="all requests")
                assert worker is not None
                os.kill(worker, signal.SIGKILL)
            for stream in running[1]:
                stream.close()
            while server.metric("penstock_continuations_total", outcome="carried") < carried + RUNNING:
                # Each client reads on, until all of these texts have gone on.
                for stream in running[0]:
                    stream.more(50)
            for stream in running[0]:
                stream.close()
            for stream in fresh:
                ending = stream.rest()
                assert ending.is_whole and ending.finishes == ["length"]
                assert ending.usage is not None and ending.usage["completion_tokens"] == 30
        # A worker that stands still for long is not asked any more, so new requests may begin elsewhere at once.
        assert retries + RUNNING <= server.metric("penstock_retries_total") <= retries + RUNNING + 2
        wait_until(lambda before=starts: server.starts(0) > before, what="the next life of the worker")


def only_busy(server: Server) -> int | None:
    """The pid of the only worker that computes text."""
    busy = [slot for slot in (0, 1) if sequences(server, "running", slot)]
    return server.worker_pid(busy[0]) if len(busy) == 1 else None


def answers(server: Server) -> bool:
    """Whether another prompt is answered."""
    with ChatStream(server.port, "another prompt", 5) as stream:
        try:
            return stream.rest().is_whole
        except AssertionError:
            return False


@pytest.mark.long
def test_a_stream_on_which_workers_die_again_and_again_is_refused(server: Server) -> None:
    [prompt] = prompts_of(0, 1)
    # NOTE: a new input is carried on twice. What is known as suspect then is not carried on.
    for deaths in (3, 1):
        with ChatStream(server.port, prompt, LONG + 1) as stream:
            for _ in range(deaths):
                wait_until(lambda: server.metric("penstock_worker_up") == 2, what="two workers")
                wait_until(lambda: answers(server), what="a worker with the model")
                stream.more(100)
                worker = wait_until(lambda: only_busy(server), what="the report of the stream")
                starts = {slot: server.starts(slot) for slot in (0, 1)}
                os.kill(worker, signal.SIGKILL)
                wait_until(
                    lambda before=starts: any(server.starts(slot) > before[slot] for slot in before),
                    what="the next life of the worker",
                )
            assert stream.rest().is_failed
    wait_until(lambda: answers(server), what="a worker with the model")
    with (
        ChatStream(server.port, prompt, LONG + 1) as stream,
        pytest.raises(AssertionError, match="ends worker processes"),
    ):
        stream.more()
    assert answers(server)
