"""kill -9 a worker under gRPC: unary rpcs survive, a stream tells each message that was lost, once, and goes on."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc.protos import kserve_v2_pb2 as pb
from tests.fault import rounds, serving
from tests.harness.quiet import wait_quiet
from tests.harness.rpc import Rpc, RpcLoad, address_of, grpc_settings, is_vector_of, text_request
from tests.harness.server import Server, wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two workers behind gRPC."""
    settings = grpc_settings(**{"worker.count": 2, "worker.healthy_after_s": 0.5})
    with serving(tmp_path_factory.mktemp("grpc"), models=("fake/slow",), settings=settings) as running:
        yield running


@pytest.mark.long
def test_unary_rpcs_survive_the_death_of_one_of_two_workers(server: Server) -> None:
    wait_until(lambda: server.starts(0) and server.starts(1), what="two workers")
    with RpcLoad(address_of(server), clients=8, model="fake/slow") as load:
        for kill in range(rounds(short=1, long=50)):
            before = load.done
            wait_until(lambda seen=before: load.done > seen + 30, what="traffic")
            slot = kill % 2
            victim, starts = server.worker_pid(slot), server.starts(slot)
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda at=slot, seen=starts: server.starts(at) > seen, what="its return")
            wait_until(lambda: server.metric("penstock_worker_up") == 2, what="both workers")
        assert set(load.stop()) == {"OK"}, (load.statuses, load.details[:3])


class Talk:
    """Messages for a stream, sent one by one."""

    def __init__(self) -> None:
        self._messages: queue.Queue[pb.ModelInferRequest | None] = queue.Queue()

    def __iter__(self) -> Iterator[pb.ModelInferRequest]:
        while (message := self._messages.get()) is not None:
            yield message

    def say(self, text: str) -> None:
        """Send a request whose id is its text."""
        self._messages.put(text_request("fake/slow", text, text))

    def end(self) -> None:
        """Hang up."""
        self._messages.put(None)


@pytest.mark.long
def test_a_stream_answers_each_message_once_though_the_only_worker_dies(tmp_path: Path) -> None:
    # Nothing waits for the worker's return, so that what it held is lost.
    settings = grpc_settings(**{"limits.restart_wait_s": 0, "worker.healthy_after_s": 0.5})
    with (
        serving(tmp_path, models=("fake/slow",), settings=settings) as server,
        Rpc(address_of(server)) as rpc,
    ):
        talk = Talk()
        answers = rpc.stream(talk)
        texts = [f"message {number} " + "word " * 300 for number in range(24)]
        for text in texts:
            talk.say(text)
        first = next(answers)
        assert is_vector_of(texts[0], first.infer_response)
        os.kill(wait_until(server.worker_pid), signal.SIGKILL)
        told = [first, *(next(answers) for _ in texts[1:])]
        assert [answer.infer_response.id for answer in told] == texts
        lost = [answer for answer in told if answer.error_message]
        assert lost
        assert all(
            answer.error_message or is_vector_of(text, answer.infer_response)
            for text, answer in zip(texts, told, strict=True)
        )
        wait_until(lambda: server.get("/readyz").status == 200, what="the worker's return")
        talk.say("after")
        assert is_vector_of("after", next(answers).infer_response)
        talk.end()
        assert list(answers) == []
        wait_quiet(server)


def test_a_client_that_dies_in_a_stream_leaves_nothing_behind(server: Server) -> None:
    rpc, talk = Rpc(address_of(server)), Talk()
    answers = rpc.stream(talk)
    for number in range(32):
        talk.say(f"message {number} " + "word " * 300)
    next(answers)
    rpc.channel.close()
    wait_until(lambda: server.metric("penstock_requests_in_flight") == 0, what="the end of its requests")
    wait_until(lambda: server.metric("penstock_queue_depth") == 0, what="an empty queue")
    talk.end()
