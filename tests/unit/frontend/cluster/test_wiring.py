"""What bridge and gateway do with the words of brokers, and what the bridge says to them, without a broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from frontend.bridge import bridge as bridges
from frontend.bridge.bridge import Bridge
from frontend.bridge.intake import WORKING
from frontend.bridge.meter import Meter
from frontend.cluster.broker import Broker
from frontend.cluster.engine import ClusterEngine
from frontend.cluster.gateway import MOST_UNCLAIMED, Gateway
from frontend.cluster.items import Sent
from frontend.engine.interface import WorkerView
from frontend.engine.poison import PoisonList
from frontend.scope import scope_of_ids
from frontend.server.drain import Drain
from ipc import deadline
from ipc.catalog.entries import Catalog, HubSource, ModelEntry
from ipc.errors import DeadlineExceeded, InputRefused, ProtocolError
from ipc.metrics.cluster import BridgeMetrics
from ipc.settings import Cluster, Settings
from ipc.wire.cluster import (
    RUN,
    VERSION,
    BoxBeat,
    Carried,
    GatewayBeat,
    Item,
    ItemResult,
    Outcome,
    encode,
    read_from_box,
)
from ipc.wire.cluster_configs import key_of
from ipc.wire.cluster_names import inbox, row_key
from ipc.wire.cluster_rows import BoxRow
from ipc.wire.messages import (
    Credits,
    EncodeCall,
    InputItem,
    ModelStatus,
    Result,
    TensorRef,
    Timing,
    Work,
)
from tests.harness.server import eventually

ROUTER = "r0uter"
WORKER = WorkerView(
    "worker-0",
    0,
    "ready",
    True,
    True,
    "cpu",
    1,
    {"m": ModelStatus("m", "loaded")},
    Credits(1, 0, 1.0),
    None,
)


class Post:
    """Every connection of a process: who listens on what, and what was sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handlers: dict[str, Any] = {}
        self.sent: list[tuple[str, bytes]] = []
        monkeypatch.setattr(
            Broker, "listen", lambda _, subject, handler: self.handlers.update({subject: handler})
        )
        monkeypatch.setattr(Broker, "send", lambda _, subject, data, *more: self.sent.append((subject, data)))

    def bring(self, listens_on: str, message: msgspec.Struct, subject: str = "", reply: str = "") -> None:
        """A message arrives for the one who listens."""
        self.handlers[listens_on](
            SimpleNamespace(subject=subject or listens_on, data=encode(message), reply=reply, headers=None)
        )


@pytest.fixture
def post(monkeypatch: pytest.MonkeyPatch) -> Post:
    return Post(monkeypatch)


class Holding:
    """An engine that never answers."""

    async def run(self, *_: Any) -> Any:
        await asyncio.Event().wait()


def bridge(workers: Callable[[], Any] = list, poison: PoisonList | None = None, **settings: Any) -> Bridge:
    models = SimpleNamespace(
        workers=workers, catalog=Catalog(()), version=1, is_told=False, is_loaded=lambda model: True
    )
    cluster = Cluster(urls=("nats://127.0.0.1:1",), **{"box": "a", **settings})
    meter = Meter(BridgeMetrics(), ())
    one = Bridge(
        Settings(cluster=cluster),
        Holding(),
        models,
        meter,
        PoisonList(None, 600.0) if poison is None else poison,
    )  # type: ignore[arg-type]
    one.broker.up = one._namesakes.is_alone = True
    return one


def item() -> Item:
    work = Work("m", EncodeCall([InputItem("hello")], ["dense"]), 0, 3, "req_1")
    carried = Carried(VERSION, ROUTER, RUN, 1, 30_000, 30_000, encode(work))
    results = f"_INBOX.{ROUTER}.results"
    return Item(f"{ROUTER}.1", "q", "encode", "m", "default", ROUTER, results, penstock=carried)


def test_a_bridge_asks_the_queue_for_more_time_as_long_as_an_item_runs(post: Post) -> None:
    async def scene() -> None:
        one = bridge(extend_every_s=0.01)
        post.bring(f"_INBOX.bridge-{one.life}.*", item(), reply="$JS.ACK.1")
        extending = asyncio.create_task(one._extend())

        async def extended() -> bool:
            return post.sent.count(("$JS.ACK.1", WORKING)) >= 3

        await eventually(extended, "more time for a delivery")
        extending.cancel()

    asyncio.run(scene())


def test_a_bridge_asks_the_queue_for_more_time_for_items_of_other_producers(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        one, told = bridge(extend_every_s=0.01), list[bool]()
        monkeypatch.setattr(one._foreign, "extend", lambda: told.append(True))
        extending = asyncio.create_task(one._extend())

        async def extended() -> bool:
            return len(told) >= 3

        await eventually(extended, "more time for items of other producers")
        extending.cancel()

    asyncio.run(scene())


def test_an_item_of_the_queue_is_claimed_with_the_subject_of_its_delivery(post: Post) -> None:
    async def scene() -> None:
        one = bridge()
        post.bring(f"_INBOX.bridge-{one.life}.*", item(), reply="$JS.ACK.1")

        async def claimed() -> bool:
            return any(subject.endswith(".words") for subject, _ in post.sent)

        await eventually(claimed, "a claim")
        (claims,) = [read_from_box(data) for subject, data in post.sent if subject.endswith(".words")]
        assert claims.ids == [f"{ROUTER}.1"] and claims.acks == ["$JS.ACK.1"]  # type: ignore[union-attr]

    asyncio.run(scene())


def test_a_bridge_asks_again_where_the_broker_speaks_no_more_of_what_was_asked(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        worker = SimpleNamespace(responsive=True, credits=Credits(1, 0, 1.0))
        one, now_ns = bridge(lambda: [worker]), 10**12
        one._puller._now_ns = lambda: now_ns
        one._maker.there = True

        async def turns() -> int:
            """Requests for items after some turns of the bridge."""
            for _ in range(4):
                await asyncio.sleep(0)
            return sum(subject.startswith("$JS.API.CONSUMER.MSG.NEXT.") for subject, _ in post.sent)

        ticking = asyncio.create_task(one._tick())
        assert [await turns(), await turns()] == [1, 1]
        now_ns += 2 * 10**9
        assert await turns() == 2
        ticking.cancel()

    monkeypatch.setattr(bridges, "TICK_S", 0)
    asyncio.run(scene())


def test_a_box_marks_the_models_that_only_a_configuration_gives_it(post: Post) -> None:
    one = bridge()
    one._models.catalog = Catalog(  # type: ignore[misc]
        [ModelEntry(id=name, source=HubSource(repo=name), adapter="dense") for name in ("own", "given")]
    )
    one._models.chosen = lambda model: ()  # type: ignore[method-assign]
    one._configured.kept = {key_of("given")}
    rows = one._rows()
    assert {name: rows[row_key("a", name)].configured for name in ("own", "given")} == {  # type: ignore[union-attr]
        "own": False,
        "given": True,
    }


def test_bridge_and_gateway_hear_of_inputs_that_kill_and_tell_theirs(post: Post) -> None:
    async def scene() -> None:
        poison = PoisonList(None, 600.0)
        one = bridge(poison=poison)
        assert post.handlers.pop("$KV.penstock_shared.>") and poison.on_verdict == one._poison._judged
        near = Gateway(Settings(cluster=Cluster(urls=("nats://127.0.0.1:1",))), Catalog(()))
        assert post.handlers.pop("$KV.penstock_shared.>") and near.poison.on_verdict is not None
        work = Work("m", EncodeCall([InputItem("boom")], ["dense"]), deadline.after(60), 3, "req_1")
        near.poison.add(work.model, work.call)
        with pytest.raises(InputRefused):
            await ClusterEngine(near, Drain()).run(scope_of_ids("req_1", "", Settings().limits), work)
        near.queues.close()

    asyncio.run(scene())


def test_a_bridge_hears_a_gateway_on_the_subject_of_that_gateway_alone(post: Post) -> None:
    one, heard = bridge(), list[str]()
    one.intake.heard = heard.append  # type: ignore[method-assign]
    beat = GatewayBeat(VERSION, ROUTER, 1)
    post.bring("penstock.beat.gateway.*", beat, "penstock.beat.gateway.other")
    assert not heard
    post.bring("penstock.beat.gateway.*", beat, f"penstock.beat.gateway.{ROUTER}")
    assert heard == [ROUTER]


def test_a_bridge_says_nothing_under_its_name_before_nobody_else_was_heard(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        one, refused = bridge(beat_s=0.001, missing_beats=2), list[str]()
        one._namesakes.is_alone = False
        one.on_refusal = lambda: refused.append(one.refusal)
        one._live_now()
        assert not post.sent
        one._joined()

        async def lives() -> bool:
            return any(subject == "penstock.beat.box.a" for subject, _ in post.sent)

        await eventually(lives, "the first sign of life")
        assert not refused
        for number in (900, 901):
            post.bring(
                "penstock.beat.box.a", BoxBeat(VERSION, "a", "other", "default", number, False, 1.0, 0.0)
            )
        assert len(refused) == 1 and "cluster.box" in refused[0]
        post.sent.clear()
        one._live_now()
        assert not post.sent

    asyncio.run(scene())


def test_a_box_of_another_version_gets_no_work_and_says_so_in_the_log(
    post: Post, caplog: pytest.LogCaptureFixture
) -> None:
    """Boxes are upgraded one after the other: a gateway uses those of its own version."""
    one = Gateway(Settings(cluster=Cluster(urls=("nats://127.0.0.1:1",))), Catalog(()), Drain())
    for version in (VERSION - 1, VERSION + 1):
        beat = BoxBeat(version, "b", "b1", "default", 1, False, 1.0, 0.0)
        post.bring("penstock.beat.box.*", beat, "penstock.beat.box.b")
        box = BoxRow(version, "a", "a1", "default", "default", [], True, ["m"])
        post.handlers["$KV.penstock_models.>"](
            SimpleNamespace(subject="$KV.penstock_models.a", data=encode(box), headers=None)
        )
    assert not one.boxes.by_name and not one.models._rows
    assert "version" in caplog.text


def test_the_refusal_of_a_box_of_another_version_reaches_the_item(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("frontend.bridge.results.VERSION", VERSION + 1)
            patch.setattr("ipc.wire.cluster.VERSION", VERSION + 1)
            one = bridge()
            post.bring(f"_INBOX.bridge-{one.life}.*", item(), reply="$JS.ACK.1")
        [refusal] = [data for subject, data in post.sent if subject.endswith(".results")]
        gateway, told = Gateway(Settings(cluster=Cluster(urls=("nats://127.0.0.1:1",))), Catalog(())), []
        monkeypatch.setattr(gateway.dispatch, "refused", told.append)
        inbox = f"_INBOX.{gateway.router}.>"
        subject = f"_INBOX.{gateway.router}.results"
        post.handlers[inbox](SimpleNamespace(subject=subject, data=refusal, reply="", headers=None))
        assert told == [f"{ROUTER}.1"]
        gateway.queues.close()

    asyncio.run(scene())


def test_frontends_of_a_gateway_have_connections_inboxes_and_numbers_of_their_own(post: Post) -> None:
    settings = Settings(cluster=Cluster(urls=("nats://127.0.0.1:1",)))
    one, other = (Gateway(settings, Catalog(())) for _ in range(2))
    assert one.router != other.router and one.broker.client is not other.broker.client
    assert {inbox(one.router), inbox(other.router)} <= post.handlers.keys()
    for gateway in (one, other):
        gateway.queues.close()


def test_large_bytes_in_chunks_have_a_connection_of_their_own_at_both_ends(post: Post) -> None:
    gateway = Gateway(Settings(cluster=Cluster(urls=("nats://127.0.0.1:1",))), Catalog(()))
    box = bridge()
    for end in (gateway, box):
        assert end.transfers.broker is not end.broker
        assert end.transfers.broker.client is not end.broker.client
    gateway.queues.close()


@pytest.mark.parametrize("part", ["boxes", "queues", "dispatch"])
def test_items_end_by_their_deadlines_though_another_part_of_a_gateway_fails_at_each_tick(
    post: Post, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    async def scene() -> None:
        gateway = Gateway(Settings(cluster=Cluster(urls=("nats://127.0.0.1:1",))), Catalog(()))
        gateway.broker.up = True
        work = Work("m", EncodeCall([InputItem("hello")], ["dense"]), 0, 3, "req_1")
        sent = gateway.item(RUN, work, b"", deadline.after(10), deadline.after(10))
        sent.deadline_ns = 0
        monkeypatch.setattr(gateway, "to_queue", lambda held: True)
        gateway.dispatch.begin(sent)

        def fail() -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(getattr(gateway, part), "tick", fail)
        with pytest.raises(ZeroDivisionError):
            await gateway._tick()
        async with asyncio.timeout(30):
            with pytest.raises(DeadlineExceeded):
                await sent.future
        gateway.queues.close()

    asyncio.run(scene())


@pytest.mark.parametrize(("waiting", "room_s", "queued"), [(1, 0.0, False), (0, 0.0, True), (1, 1.0, True)])
def test_items_wait_in_the_queue_in_any_number_only_while_a_box_has_room(
    post: Post, monkeypatch: pytest.MonkeyPatch, waiting: int, room_s: float, queued: bool
) -> None:
    """Otherwise an item goes to a box, which refuses the item with the time after which to come again."""

    async def scene() -> None:
        gateway = Gateway(Settings(cluster=Cluster(urls=("nats://127.0.0.1:1",))), Catalog(()))
        catalog = Catalog((ModelEntry("m", HubSource("m")),))
        box = bridge(lambda: [WORKER])
        box._models.catalog = catalog  # type: ignore[attr-defined]
        gateway.models.read(box._rows())
        gateway.boxes.take(BoxBeat(VERSION, "a", box.life, "default", 1, False, room_s, 0.0))
        gateway.queues.lane("default", "default")._maker.there = True
        gateway.dispatch.unclaimed = {f"r.{number}" for number in range(waiting * MOST_UNCLAIMED)}
        work = Work("m", EncodeCall([InputItem("hello")], ["dense"]), 0, 3, "req_1")
        sent = gateway.item(RUN, work, b"", deadline.after(10), deadline.after(10))
        assert gateway.to_queue(sent) is queued
        gateway.queues.close()

    asyncio.run(scene())


@pytest.mark.parametrize(("lane", "queued"), [("auto", False), ("queue", True)])
def test_a_box_that_the_queue_leaves_without_work_gets_items_directly(
    post: Post, lane: str, queued: bool
) -> None:
    """Both boxes have the model; the setting `queue` keeps all pure work in the queue."""

    async def scene() -> None:
        cluster = Cluster(urls=("nats://127.0.0.1:1",), lane=lane)  # type: ignore[arg-type]
        gateway = Gateway(Settings(cluster=cluster), Catalog(()))
        for name in "ab":
            one = bridge(lambda: [WORKER], box=name)
            one._models.catalog = Catalog((ModelEntry("m", HubSource("m")),))  # type: ignore[attr-defined]
            for key, row in one._rows().items():
                gateway.models.take(key, row)
            gateway.boxes.take(BoxBeat(VERSION, name, one.life, "default", 1, False, 1.0, 0.0))
        gateway.queues.lane("default", "default")._maker.there = True
        work = Work("m", EncodeCall([InputItem("hello")], ["dense"]), 0, 3, "req_1")
        for counts, goes in (((9, 9), True), ((9, 2), queued)):
            for box, count in zip(gateway.boxes, counts, strict=True):
                box.items = {f"r.{number}" for number in range(count)}
            sent = gateway.item(RUN, work, b"", deadline.after(10), deadline.after(10))
            assert gateway.to_queue(sent) is goes
        gateway.queues.close()

    asyncio.run(scene())


@pytest.mark.parametrize(
    "refs",
    [
        [TensorRef("dense", "float32", [1, 4], 1)],
        [TensorRef("dense", "float32", [1, 5], 0)],
        [TensorRef("dense", "float32", [1, 4], -1)],
        [TensorRef("dense", "float32", [-1, 4], 0)],
        [TensorRef("dense", "float32", [1 << 40, 1 << 40], 0)],
        [TensorRef("dense", "object", [1], 0)],
        [TensorRef("dense", "no type", [1], 0)],
    ],
)
def test_a_result_whose_table_and_bytes_disagree_is_an_error_of_its_request_alone(
    post: Post, monkeypatch: pytest.MonkeyPatch, refs: list[TensorRef]
) -> None:
    async def scene() -> None:
        settings = Settings(cluster=Cluster(urls=("nats://127.0.0.1:1",)))
        gateway = Gateway(settings, Catalog(()))
        engine, tables = ClusterEngine(gateway, Drain()), [refs, [TensorRef("dense", "float32", [1, 4], 0)]]

        async def posted(sent: Sent) -> None:
            result = Result(0, None, tables.pop(0), [1], [], [], Timing())
            outcome = Outcome(VERSION, "a", "a1", 1, result=encode(result), data=bytes(16))
            sent.future.set_result((ItemResult(sent.id, "q", True, "a"), outcome))

        monkeypatch.setattr(gateway, "post", posted)
        work = Work("m", EncodeCall([InputItem("hello")], ["dense"]), 0, 3, "req_1")
        with pytest.raises(ProtocolError):
            await engine.run(scope_of_ids("req_1", "", settings.limits), work)
        answer = await engine.run(scope_of_ids("req_1", "", settings.limits), work)
        assert answer.tensors()["dense"].shape == (1, 4)
        gateway.queues.close()

    asyncio.run(scene())


def test_a_gateway_hears_a_box_on_the_subject_of_that_box_alone(post: Post) -> None:
    one = Gateway(Settings(cluster=Cluster(urls=("nats://127.0.0.1:1",))), Catalog(()))
    beat = BoxBeat(VERSION, "a", "a1", "default", 1, False, 1.0, 0.0)
    post.bring("penstock.beat.box.*", beat, "penstock.beat.box.b")
    assert not one.boxes.by_name
    post.bring("penstock.beat.box.*", beat, "penstock.beat.box.a")
    assert one.boxes.is_alive("a1")


def test_an_item_of_a_producer_with_other_configurations_is_counted_and_runs(
    monkeypatch: pytest.MonkeyPatch, post: Post
) -> None:
    async def scene() -> None:
        one = bridge()
        told: list[str] = []
        monkeypatch.setattr(one._foreign, "take", lambda item, *_: told.append(item.bundle_config_hash))
        digest = one._configured.told().digest
        for theirs in ("", digest, "other"):
            one._take_foreign(msgspec.structs.replace(item(), bundle_config_hash=theirs), b"", "", 0.0)
        assert told == ["", digest, "other"]
        found = [each for each in one._meter._metrics.mismatches.collect()[0].samples if each.value]
        assert [(each.name, each.value) for each in found if each.name.endswith("_total")] == [
            ("sie_pull_loop_config_hash_mismatches_total", 1.0)
        ]

    asyncio.run(scene())
