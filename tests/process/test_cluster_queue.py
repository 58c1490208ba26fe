"""Work through the queue of a real broker: boxes pull, deaths and a queue in trouble cost no request."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.api import StorageType, StreamConfig

from ipc.metrics.files import MetricFiles
from ipc.processes.paths import RunPaths
from penstock import processes
from penstock.processes import Lanes
from tests.fakes.holding import holding
from tests.harness.broker import PATIENCE_S, Broker, broker
from tests.harness.cluster import Box, box, gateway, gateway_over, held, in_flight, is_cut_off, living, serves
from tests.harness.load import Load
from tests.harness.server import Server, wait_until

STREAM = "WORK_POOL_default"
MOVED_AT_GATEWAY = (
    "sie_gateway_queue_publish_seconds_count",
    "sie_gateway_queue_result_wait_seconds_count",
    "sie_gateway_worker_memory_used_bytes",
)
MOVED_AT_BRIDGE = (
    "sie_pull_loop_items_fetched_sum",
    "sie_pull_loop_queue_wait_seconds_sum",
    "sie_pull_loop_batch_process_seconds_sum",
    "sie_worker_messages_received_total",
    "sie_worker_messages_acked_total",
)


@pytest.fixture(scope="module")
def one_broker(place: Path) -> Iterator[Broker]:
    with broker(place / "broker") as one:
        other = StreamConfig(
            name=STREAM, subjects=["sie.work.*.default"], storage=StorageType.FILE, max_age=60
        )
        asked(one, lambda stream: stream.add_stream(other))
        yield one


@pytest.fixture(scope="module")
def boxes(place: Path, one_broker: Broker) -> Iterator[tuple[Box, Box]]:
    urls = [one_broker.url]
    with box(place / "a", "a", urls) as a, box(place / "b", "b", urls) as b:
        yield a, b


@pytest.fixture(scope="module")
def near(place: Path, one_broker: Broker, boxes: tuple[Box, Box]) -> Iterator[Server]:
    settings = {"cluster.lane": "auto"}
    with gateway_over(place / "near", [one_broker.url], {"a", "b"}, settings) as server:
        yield server


def asked(one: Broker, ask: Callable[[JetStreamContext], Awaitable[Any]]) -> Any:
    """The answer of the broker's JetStream."""

    async def run() -> Any:
        client = await nats.connect(one.url)
        try:
            return await ask(client.jetstream(timeout=PATIENCE_S))
        finally:
            await client.close()

    return asyncio.run(run())


def published(one: Broker) -> int:
    """Items that went through the queue since its stream was made; 0 without a stream."""
    try:
        return int(asked(one, lambda stream: stream.stream_info(STREAM)).state.last_seq)
    except nats.js.errors.NotFoundError:
        return 0


def uses_queue(server: Server, one: Broker) -> bool:
    """Whether an item of a request goes through the queue."""
    before = published(one)
    return serves(server) and published(one) > before


def test_items_go_through_one_stream_in_memory_whatever_it_was_before(
    near: Server, one_broker: Broker
) -> None:
    wait_until(lambda: uses_queue(near, one_broker), what="an item in the queue")
    info = asked(one_broker, lambda stream: stream.stream_info(STREAM))
    assert (info.config.storage, info.config.retention) == ("memory", "workqueue")
    assert (info.config.max_age, info.config.num_replicas, info.config.discard) == (120, 1, "new")
    consumer = asked(one_broker, lambda stream: stream.consumer_info(STREAM, "default_default"))
    assert (consumer.config.ack_wait, consumer.config.max_deliver) == (2, 20)
    with Load(near.port, 4) as load:
        wait_until(lambda: load.done > 60, what="traffic")
        assert not load.stop().failed
    wait_until(lambda: not asked(one_broker, lambda s: s.stream_info(STREAM)).state.messages, what="all acks")


def test_counts_of_gateway_and_bridges_move_with_the_items(near: Server, boxes: tuple[Box, Box]) -> None:
    wait_until(
        lambda: all(near.metric(name) > 0 for name in MOVED_AT_GATEWAY), what="the counts of the gateway"
    )
    paths = [RunPaths(one.server.run_dir, "", Path("/dev/shm")) for one in boxes]
    wait_until(
        lambda: all(
            any(series.name == name for path in paths for series in MetricFiles(path).series("sie_"))
            for name in MOVED_AT_BRIDGE
        ),
        what="the counts of the bridges",
    )


def test_status_shows_boxes_and_lanes_of_a_gateway(near: Server) -> None:
    paths = RunPaths(near.run_dir, "", Path("/dev/shm"))

    def lanes() -> Lanes:
        found = processes.look(paths, 0, 5.0).lanes
        assert found is not None
        return found

    wait_until(lambda: lanes().items["queue"] > 60, what="the items of the tests before")
    assert (lanes().joined, lanes().boxes, lanes().others) == (True, 2, 0)


def test_a_killed_box_gives_its_items_to_another(
    near: Server, boxes: tuple[Box, Box], tmp_path: Path
) -> None:
    with holding(tmp_path) as hold, ThreadPoolExecutor(4) as pool:
        requests = [pool.submit(near.post, "/v1/encode/fake/echo", held(hold, f"{at}")) for at in range(4)]
        wait_until(lambda: in_flight(near) >= 4, what="requests at boxes")
        boxes[0].end(signal.SIGKILL)
        wait_until(lambda: living(near) == {"b"}, what="the death of box a")
        hold.unlink()
        assert [each.result().status for each in requests] == [200] * 4
    boxes[0].start_bridge()
    wait_until(lambda: living(near) == {"a", "b"}, what="the next life of box a")


@pytest.mark.long
def test_boxes_die_and_leave_under_load(near: Server, boxes: tuple[Box, Box]) -> None:
    with Load(near.port, 6) as load:
        wait_until(lambda: load.done > 50, what="traffic")
        for one, other, number in ((boxes[0], "b", signal.SIGKILL), (boxes[1], "a", signal.SIGTERM)):
            one.end(number)
            wait_until(lambda other=other: living(near) == {other}, what="the end of a box")  # type: ignore[misc]
            before = load.done
            wait_until(lambda before=before: load.done > before + 30, what="traffic at the other box")  # type: ignore[misc]
            one.start_bridge()
            wait_until(lambda: living(near) == {"a", "b"}, what="the box again")
        outcome = load.stop()
    assert not outcome.failed, (outcome.statuses, outcome.broken, outcome.bodies, outcome.wrong)


@pytest.mark.parametrize("what", ["consumer", "stream"])
def test_a_queue_that_is_deleted_while_used_is_made_again(
    near: Server, one_broker: Broker, what: str
) -> None:
    with Load(near.port, 4) as load:
        wait_until(lambda: load.done > 20, what="traffic")
        if what == "stream":
            asked(one_broker, lambda stream: stream.delete_stream(STREAM))
        else:
            asked(one_broker, lambda stream: stream.delete_consumer(STREAM, "default_default"))
        before = load.done
        wait_until(lambda: load.done > before + 40, what="traffic again")
        outcome = load.stop()
    assert not outcome.failed, (outcome.statuses, outcome.broken, outcome.bodies, outcome.wrong)
    wait_until(lambda: uses_queue(near, one_broker), what="the queue again")


def test_a_broker_that_comes_back_empty_serves_on(near: Server, one_broker: Broker, tmp_path: Path) -> None:
    with holding(tmp_path) as hold, ThreadPoolExecutor(2) as pool:
        requests = [pool.submit(near.post, "/v1/encode/fake/echo", held(hold, f"{at}")) for at in range(2)]
        wait_until(lambda: in_flight(near) >= 2, what="requests at boxes")
        one_broker.kill()
        wait_until(lambda: is_cut_off(near), what="the loss of the broker")
        hold.unlink()
        one_broker.start()
        assert [each.result().status for each in requests] == [200, 200]
    wait_until(lambda: uses_queue(near, one_broker), what="the queue again")


def test_without_jetstream_work_goes_directly(place: Path) -> None:
    with (
        broker(place / "plain", jetstream=False) as plain,
        box(place / "c", "c", [plain.url]),
        gateway(place / "other", [plain.url]) as server,
    ):
        wait_until(lambda: serves(server), what="the first answer of the box")
        with Load(server.port, 2) as load:
            wait_until(lambda: load.done > 20, what="traffic")
            assert not load.stop().failed
