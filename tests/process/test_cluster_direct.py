"""A gateway, a broker and boxes as real processes: answers of a box, refusals, and the deaths of each of them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nats
import numpy as np
import pytest

from frontend.cluster.pieces import MOST_ITEMS
from ipc.wire.cluster import read_judged
from tests.fakes.adapter import vector_of
from tests.fakes.holding import holding
from tests.harness.broker import PATIENCE_S, Broker
from tests.harness.cluster import Box, box, gateway, gateway_over, held, in_flight, is_cut_off, living, serves
from tests.harness.load import Load
from tests.harness.server import Answer, Server, wait_until

MODELS = ("fake/echo", "fake/score", "fake/tokens")


@pytest.fixture(scope="module")
def boxes(place: Path, one_broker: Broker) -> Iterator[tuple[Box, Box]]:
    urls = [one_broker.url]
    http = {"cluster.transfer_bind": "127.0.0.1:0"}
    with (
        box(place / "a", "a", urls, models=MODELS, settings=http) as a,
        box(place / "b", "b", urls, models=MODELS) as b,
    ):
        yield a, b


@pytest.fixture(scope="module")
def near(place: Path, one_broker: Broker, boxes: tuple[Box, Box]) -> Iterator[Server]:
    settings = {"cluster.lane": "direct"}
    with gateway_over(place / "near", [one_broker.url], {"a", "b"}, settings) as server:
        yield server


def vector(answer: Answer, at: int = 0) -> Any:
    """A dense row of an answer that is no error."""
    assert answer.status == 200, answer.body
    return np.asarray(answer.json()["items"][at]["dense"]["values"], np.float32)


def test_an_answer_of_a_box_is_that_of_a_server(near: Server) -> None:
    answer = near.encode("fake/echo", ["one", "two", "one"])
    for at, text in enumerate(("one", "two", "one")):
        assert np.allclose(vector(answer, at), vector_of(text, 16), atol=1e-6)
    assert {"X-Request-ID".lower(), "x-trace-id"} <= set(answer.headers)


def test_scores_embeddings_and_rows_of_tokens_come_from_boxes(near: Server) -> None:
    asked = {"query": {"text": "q"}, "items": [{"text": "a"}, {"text": "bb"}]}
    scored = near.post("/v1/score/fake/score", asked)
    assert scored.status == 200 and len(scored.json()["scores"]) == 2
    found = near.post("/v1/embeddings", {"model": "fake/echo", "input": ["x", "y"]})
    assert found.status == 200 and len(found.json()["data"]) == 2
    rows = near.encode("fake/tokens", ["a b c"], output_types=["multivector"])
    assert rows.status == 200 and rows.json()["items"][0]["multivector"]["values"]


def test_an_error_of_a_box_is_told_as_a_server_tells_it(near: Server) -> None:
    failed = near.encode("fake/echo", ["#raise"])
    assert failed.status == 500 and failed.json()["detail"]["code"] == "INFERENCE_ERROR"
    assert "fake model failure" not in failed.body.decode()
    unknown = near.encode("no/such", ["x"])
    assert unknown.status == 404 and unknown.json()["detail"]["code"] == "MODEL_NOT_FOUND"


def test_a_row_that_is_not_finite_is_an_error_of_its_item(near: Server) -> None:
    body = {"items": [{"text": "fine"}, {"text": "#nan"}], "params": {"item_errors": True}}
    fine, failed = near.post("/v1/encode/fake/echo", body).json()["items"]
    assert np.allclose(fine["dense"]["values"], vector_of("fine", 16), atol=1e-6)
    assert failed["error"]["code"] == "INFERENCE_ERROR" and "dense" not in failed
    whole = near.encode("fake/echo", ["#nan"])
    assert whole.status == 500 and whole.json()["detail"]["code"] == "INFERENCE_ERROR"


def test_a_deadline_passes_while_a_box_works_and_the_box_gives_up(near: Server, tmp_path: Path) -> None:
    with holding(tmp_path) as hold:
        answer = near.post("/v1/encode/fake/echo", held(hold), x_request_timeout="0.5")
        assert answer.status in (503, 504) and answer.json()["detail"]["code"] == "DEADLINE_EXCEEDED"
    assert serves(near)


def test_text_without_a_home_is_refused_by_name(near: Server) -> None:
    body = {"id": "s", "inputs": [], "parameters": {"sequence_id": 7, "sequence_start": True}}
    answer = near.post("/v2/models/fake%2Fecho/infer", body)
    assert answer.status in (400, 404, 501), answer.body
    load = near.post("/v1/admin/load/fake/echo", {})
    assert load.status == 501 and "models run elsewhere" in load.body.decode()


def test_bytes_of_strangers_harm_nobody(near: Server, one_broker: Broker, boxes: tuple[Box, Box]) -> None:
    async def flood() -> None:
        client = await nats.connect(one_broker.url)
        heard: list[str] = []

        async def note(message: Any) -> None:
            heard.append(message.subject)

        await client.subscribe("penstock.>", cb=note)
        await client.subscribe("_INBOX.>", cb=note)
        answer = asyncio.create_task(asyncio.to_thread(near.encode, "fake/echo", ["listen"]))
        await answer
        await client.flush()
        subjects = {subject for subject in heard if not subject.endswith(".sent")}
        assert any(subject.endswith(".results") for subject in subjects)
        for subject in subjects:
            for data in (b"", b"\xc1", b"\x91" * 10_000, b"\xdf\x3f\xff\xff\xff", b"x" * 900_000):
                await client.publish(subject, data)
        await client.flush()
        await client.close()

    asyncio.run(flood())
    assert np.allclose(vector(near.encode("fake/echo", ["still"])), vector_of("still", 16), atol=1e-6)
    wait_until(lambda: living(near) == {"a", "b"}, what="both boxes")


def test_one_large_request_is_computed_by_several_boxes(
    near: Server, boxes: tuple[Box, Box], tmp_path: Path
) -> None:
    with holding(tmp_path) as hold, ThreadPoolExecutor(1) as pool:
        # One text of each piece holds its box, so that both boxes are seen with a piece of the request.
        texts = [f"#hold {hold} {at}" if at % MOST_ITEMS == 0 else f"{at}" for at in range(4 * MOST_ITEMS)]
        asked = pool.submit(near.encode, "fake/echo", texts)
        wait_until(lambda: all(one.items > 0 for one in boxes), what="pieces at both boxes")
        hold.unlink()
        answer = asked.result()
    for at, text in enumerate(texts):
        assert np.allclose(vector(answer, at), vector_of(text, 16), atol=1e-6)
    failed = near.encode("fake/echo", [*texts[1:MOST_ITEMS], *texts[1:MOST_ITEMS], "#raise"])
    # The message names the place in the request, not in a piece.
    assert failed.status == 500 and f"item {2 * MOST_ITEMS - 2}:" in failed.body.decode()


def test_a_killed_box_costs_no_request(near: Server, boxes: tuple[Box, Box], tmp_path: Path) -> None:
    """Each box holds a request when box a dies: both are answered, the one of box a by box b."""
    with holding(tmp_path) as hold, ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(near.post, "/v1/encode/fake/echo", held(hold, f"{at}"), x_request_id=f"held-{at}")
            for at in range(4)
        ]
        wait_until(lambda: sum(one.items for one in boxes) >= 4, what="requests at boxes")
        assert boxes[0].end(signal.SIGKILL) == -signal.SIGKILL
        wait_until(lambda: living(near) == {"b"}, what="the death of box a")
        hold.unlink()
        answers = [each.result() for each in asked]
    assert [answer.status for answer in answers] == [200] * 4
    for at, answer in enumerate(answers):
        assert np.allclose(vector(answer), vector_of(f"#hold {hold} {at}", 16), atol=1e-6)
    boxes[0].start_bridge()
    wait_until(lambda: living(near) == {"a", "b"}, what="the next life of box a")


def test_an_input_alone_at_two_boxes_that_died_is_refused_and_others_are_served(
    near: Server, boxes: tuple[Box, Box], one_broker: Broker, tmp_path: Path
) -> None:
    async def verdicts() -> list[str]:
        client = await nats.connect(one_broker.url)
        try:
            bucket = await client.jetstream(timeout=PATIENCE_S).key_value("penstock_shared")
            values = [(await bucket.get(key)).value or b"" for key in await bucket.keys()]
            return [read_judged(value).verdict for value in values]
        except nats.js.errors.NoKeysError:
            return []
        finally:
            await client.close()

    wait_until(lambda: not any(one.items for one in boxes), what="boxes without items")
    with holding(tmp_path) as hold, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(near.post, "/v1/encode/fake/echo", held(hold, "deadly"))
        for _ in boxes:
            wait_until(lambda: any(one.items for one in boxes if one.name in living(near)), what="the item")
            holder = next(one for one in boxes if one.name in living(near) and one.items)
            holder.end(signal.SIGKILL)
            wait_until(lambda one=holder: one.name not in living(near), what="the death of the box")  # type: ignore[misc]
        crashed = asked.result()
        assert crashed.status == 500 and crashed.json()["detail"]["code"] == "WORKER_CRASHED", crashed.body
        for one in boxes:
            one.start_bridge()
        refused = near.post("/v1/encode/fake/echo", held(hold, "deadly"))
        assert refused.status == 500 and "is refused for a while" in refused.body.decode(), refused.body
    wait_until(lambda: living(near) == {"a", "b"}, what="both boxes again")
    # A reading of all keys may end before the broker has sent any.
    wait_until(lambda: asyncio.run(verdicts()) == ["poison"], what="the verdict of both gateways")
    assert serves(near)
    wait_until(lambda: near.metric("penstock_poison_total", reason="refused") == 1, what="the count")


@pytest.mark.long
def test_boxes_die_and_leave_under_load_and_every_answer_is_right(
    near: Server, boxes: tuple[Box, Box]
) -> None:
    a, b = boxes
    with Load(near.port, 6) as load:
        wait_until(lambda: load.done > 50, what="traffic")
        for one, number in ((a, signal.SIGKILL), (b, signal.SIGTERM), (b, signal.SIGKILL)):
            other = "b" if one is a else "a"
            one.end(number)
            wait_until(lambda other=other: living(near) == {other}, what="the end of a box")  # type: ignore[misc]
            before = load.done
            wait_until(lambda before=before: load.done > before + 30, what="traffic at the other box")  # type: ignore[misc]
            one.start_bridge()
            wait_until(lambda: living(near) == {"a", "b"}, what="the box again")
        outcome = load.stop()
    assert not outcome.failed, (outcome.statuses, outcome.broken, outcome.bodies, outcome.wrong)


def test_a_box_whose_workers_are_all_gone_costs_no_request_and_comes_back(
    near: Server, boxes: tuple[Box, Box]
) -> None:
    a = boxes[0].server
    with Load(near.port, 4) as load:
        wait_until(lambda: load.done > 10, what="traffic")
        for worker in a.workers:
            worker.kill()
        a.workers.clear()
        before = load.done
        wait_until(lambda: load.done > before + 40, what="traffic at box b")
        wait_until(lambda: "b" in living(near), what="box b")
        a.start_workers()
        wait_until(lambda: answers_of(near, "a"), what="an answer of the new worker")
        outcome = load.stop()
    assert not outcome.failed, (outcome.statuses, outcome.broken, outcome.bodies, outcome.wrong)


def answers_of(server: Server, name: str) -> bool:
    """Whether this box has answered."""
    return server.encode("fake/echo", ["x"]).headers.get("x-sie-worker", "").startswith(f"{name}/")


def test_a_box_that_stands_still_is_left_and_comes_back(near: Server, boxes: tuple[Box, Box]) -> None:
    with Load(near.port, 4) as load:
        boxes[0].tell(signal.SIGSTOP)
        wait_until(lambda: living(near) == {"b"}, what="the silence of box a")
        before = load.done
        wait_until(lambda: load.done > before + 20, what="traffic at box b")
        boxes[0].tell(signal.SIGCONT)
        wait_until(lambda: living(near) == {"a", "b"}, what="box a again")
        outcome = load.stop()
    assert not outcome.failed, (outcome.statuses, outcome.broken, outcome.bodies, outcome.wrong)


def test_a_second_host_with_the_name_of_a_box_is_refused_in_words(
    place: Path, one_broker: Broker, near: Server
) -> None:
    second = Box(place / "second-a", "a", [one_broker.url])
    try:
        second.start()
        assert second.bridge is not None
        assert second.bridge.wait(PATIENCE_S) == 3
        assert "cluster.box: another host joined these brokers as 'a' before" in second.log
        wait_until(lambda: living(near) == {"a", "b"}, what="both boxes")
        assert serves(near)
    finally:
        second.kill()


def test_requests_in_flight_outlive_the_broker_and_new_ones_are_told_to_come_again(
    near: Server, one_broker: Broker, tmp_path: Path
) -> None:
    with holding(tmp_path) as hold, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(near.post, "/v1/encode/fake/echo", held(hold, f"{at}")) for at in range(2)]
        wait_until(lambda: in_flight(near) >= 2, what="requests at boxes")
        one_broker.kill()
        wait_until(lambda: is_cut_off(near), what="the loss of the broker")
        refused = near.encode("fake/echo", ["x"])
        assert refused.json()["detail"]["code"] == "QUEUE_UNAVAILABLE", refused.body
        assert refused.headers["retry-after"] == "1"
        hold.unlink()
        one_broker.start()
        answers = [each.result() for each in asked]
    assert [answer.status for answer in answers] == [200, 200], [answer.body for answer in answers]
    wait_until(lambda: serves(near), what="service again")
    wait_until(lambda: living(near) == {"a", "b"}, what="both boxes again")


def test_work_of_a_killed_gateway_ends_at_the_boxes(
    place: Path, one_broker: Broker, boxes: tuple[Box, Box], near: Server, tmp_path: Path
) -> None:
    with gateway(place / "second", [one_broker.url]) as second, holding(tmp_path) as hold:
        wait_until(lambda: serves(second), what="a second gateway")
        wait_until(lambda: not any(one.items for one in boxes), what="boxes without items")
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(second.post, "/v1/encode/fake/echo", held(hold))
            wait_until(lambda: any(one.items for one in boxes), what="a request at a box")
            # What boxes gave up in tests before this one is in their logs as well.
            said = [len(each.log) for each in boxes]
            second.kill_all_processes()
            assert asked.exception() is not None
        wait_until(
            lambda: any("gave up 1 item" in each.log[at:] for each, at in zip(boxes, said, strict=True)),
            what="the end of its work",
        )
        second.start()
        second.wait_ready()
    assert serves(near)


def test_inputs_and_answers_that_fit_into_no_message_come_whole(near: Server) -> None:
    """600 KiB of text go to a box, and rows of tokens of more than 1 MiB come back."""
    texts = [f"{at} " + "w" * 20_000 for at in range(30)]
    answer = near.encode("fake/echo", texts)
    for at in (0, 29):
        assert np.allclose(vector(answer, at), vector_of(texts[at], 16), atol=1e-6)
    # One text is not cut into pieces, so the box gets the text beside the message.
    whole = near.encode("fake/echo", ["w" * (600 << 10)])
    assert np.allclose(vector(whole, 0), vector_of("w" * (600 << 10), 16), atol=1e-6)
    assert float(whole.headers["x-payload-fetch-time"]) > 0
    many = near.encode("fake/tokens", ["word " * 100] * 2, output_types=["multivector"])
    assert many.status == 200, many.body[:300]
    rows = [np.asarray(item["multivector"]["values"], np.float32) for item in many.json()["items"]]
    assert sum(each.nbytes for each in rows) > 1 << 20 and all(np.array_equal(rows[0], each) for each in rows)
