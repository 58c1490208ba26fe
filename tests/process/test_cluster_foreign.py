"""Items that another producer puts into the queue in SIE's form, at boxes without any gateway."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import nats
import numpy as np
import pytest
import yaml

from tests.fakes.adapter import vector_of
from tests.fakes.holding import holding
from tests.harness.broker import PATIENCE_S, Broker
from tests.harness.cluster import Box, box
from tests.harness.server import eventually, wait_until
from tests.process.test_cluster_configs import document
from tests.unit.frontend.bridge.test_foreign import item

ANSWER_S = 60.0


@pytest.fixture(scope="module")
def boxes(place: Path, one_broker: Broker) -> Iterator[tuple[Box, Box]]:
    urls, models = [one_broker.url], ("fake/echo", "fake/score")
    with box(place / "a", "a", urls, models=models) as a, box(place / "b", "b", urls, models=models) as b:
        yield a, b


class Producer:
    """Publishes as SIE's gateway does: into the stream, with an inbox in the item."""

    def __init__(self, one: Broker) -> None:
        self._url = one.url

    def ask(self, *items: dict[str, Any], after: Any = None) -> list[dict[str, Any]]:
        """The answers to items in their order; `after` is called when all items are in the queue."""

        async def run() -> list[dict[str, Any]]:
            client = await nats.connect(self._url)
            try:
                inbox = await client.subscribe("_INBOX.foreign.>")
                stream = client.jetstream(timeout=PATIENCE_S)
                for number, fields in enumerate(items):
                    token = fields["model_id"].replace("/", "__")
                    sent = {**fields, "work_item_id": f"q.{number}", "reply_subject": "_INBOX.foreign.q"}
                    await stream.publish(f"sie.work.{token}.default", msgpack.packb(sent))
                if after is not None:
                    await asyncio.to_thread(after)
                found = [msgpack.unpackb((await inbox.next_msg(ANSWER_S)).data) for _ in items]
                return sorted(found, key=lambda each: each["work_item_id"])
            finally:
                await client.close()

        return asyncio.run(run())

    def waiting(self) -> int:
        """Items in the stream that nobody has acknowledged."""

        async def run() -> int:
            client = await nats.connect(self._url)
            try:
                found = await client.jetstream(timeout=PATIENCE_S).stream_info("WORK_POOL_default")
                return int(found.state.messages)
            finally:
                await client.close()

        return asyncio.run(run())


@pytest.fixture
def producer(one_broker: Broker, boxes: tuple[Box, Box]) -> Producer:
    """A producer; both boxes have joined the broker and made the queue."""
    for one in boxes:
        wait_until(lambda one=one: one.status.startswith("joined a broker, 0 items"), what="an idle box")
    found = Producer(one_broker)

    def is_made() -> bool:
        try:
            return found.waiting() == 0
        except nats.js.errors.NotFoundError:
            return False

    wait_until(is_made, what="the queue")
    return found


def echo(text: str, **fields: Any) -> dict[str, Any]:
    return item(model_id="fake/echo", item={"id": text[:8], "text": text}, **fields)


def dense_of(result: dict[str, Any]) -> np.ndarray:
    values = msgpack.unpackb(result["result_msgpack"], strict_map_key=False)["dense"]["values"]
    return np.frombuffer(values[b"data"], dtype=values[b"type"])


def test_items_are_answered_in_sies_form_and_acknowledged(producer: Producer) -> None:
    query, candidates = {"text": "q"}, [{"id": "x", "text": "a"}, {"id": "y", "text": "bb"}]
    score = item(
        operation="score", model_id="fake/score", item=None, query_item=query, score_items=candidates
    )
    first, second, third, unknown = producer.ask(
        echo("one"), echo("two", is_query=True), score, item(model_id="no/such")
    )
    np.testing.assert_allclose(dense_of(first), vector_of("one", 16), atol=1e-6)
    np.testing.assert_allclose(dense_of(second), vector_of("two", 16), atol=1e-6)
    assert first["success"] and first["worker_id"] in ("a/worker-0", "b/worker-0")
    assert [entry["rank"] for entry in msgpack.unpackb(third["result_msgpack"])] == [0, 1]
    assert (unknown["success"], unknown["error_code"]) == (False, "MODEL_NOT_FOUND")
    wait_until(lambda: producer.waiting() == 0, what="all acks")


def held_by(boxes: tuple[Box, Box]) -> Box:
    """The box that has the only item."""
    having = wait_until(lambda: [one for one in boxes if ", 1 items" in one.status], what="an item at a box")
    return having[0]  # type: ignore[no-any-return]


def test_an_item_of_a_box_that_dies_is_answered_by_another(
    producer: Producer, boxes: tuple[Box, Box], tmp_path: Path
) -> None:
    killed: list[Box] = []

    with holding(tmp_path) as hold:

        def kill() -> None:
            killed.append(held_by(boxes))
            killed[0].end(signal.SIGKILL)
            hold.unlink()

        (result,) = producer.ask(echo(f"#hold {hold} x"), after=kill)
    assert result["success"] is True and not result["worker_id"].startswith(killed[0].name)
    wait_until(lambda: producer.waiting() == 0, what="all acks")
    killed[0].start_bridge()


def test_a_bridge_that_leaves_finishes_such_an_item(
    producer: Producer, boxes: tuple[Box, Box], tmp_path: Path
) -> None:
    left: list[Box] = []

    with holding(tmp_path) as hold:

        def leave() -> None:
            left.append(held_by(boxes))
            left[0].tell(signal.SIGTERM)
            hold.unlink()

        (result,) = producer.ask(echo(f"#hold {hold} x"), after=leave)
    assert result["success"] is True and result["worker_id"].startswith(left[0].name)
    assert left[0].bridge is not None and left[0].bridge.wait(60) == 0
    wait_until(lambda: producer.waiting() == 0, what="all acks")
    left[0].start_bridge()


def test_a_message_that_is_no_item_becomes_a_dead_letter(producer: Producer, one_broker: Broker) -> None:
    async def run() -> dict[str, Any]:
        client = await nats.connect(one_broker.url)
        try:
            stream = client.jetstream(timeout=PATIENCE_S)
            await stream.publish("sie.work.fake__echo.default", b"\xc1 no item")

            found: list[bytes] = []

            async def is_there() -> bool:
                try:
                    message = await stream.get_last_msg("DEAD_LETTERS", "sie.dlq.unknown")
                except nats.js.errors.NotFoundError:
                    return False
                found.append(message.data or b"")
                return True

            await eventually(is_there, "a letter")
            return dict(json.loads(found[0]))
        finally:
            await client.close()

    letter = asyncio.run(run())
    assert letter["reason"] == "unreadable" and letter["box"] in "ab" and letter["nbytes"] == 9
    assert letter["body"] == ""
    wait_until(lambda: producer.waiting() == 0, what="the end of the message")


def test_a_model_that_a_configuration_service_tells_its_bundle_is_served_without_a_gateway(
    producer: Producer, one_broker: Broker
) -> None:
    model = document("acme/told")
    change = {"model_id": "acme/told", "model_config": yaml.safe_dump(model), "bundle_id": "default"}

    async def tell() -> None:
        client = await nats.connect(one_broker.url)
        await client.publish("sie.config.models.default", json.dumps(change).encode())
        await client.close()

    asyncio.run(tell())

    def answer() -> dict[str, Any]:
        (found,) = producer.ask(item(model_id="acme/told", item={"id": "1", "text": "x"}))
        return found if found["success"] else {}

    assert dense_of(wait_until(answer, what="the model of the message")).shape == (8,)
