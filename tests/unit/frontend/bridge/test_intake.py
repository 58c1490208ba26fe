"""What a bridge does with an item at each copy, word and silence. The clock is moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from frontend.bridge import intake as module
from frontend.bridge.intake import ACK, NAK, TERM, WORKING, Intake
from frontend.bridge.meter import Meter
from frontend.bridge.results import MOST_ERROR_NCHARS
from frontend.cluster.transfers import Transfers
from frontend.engine.answer import Answer
from frontend.engine.interface import Payload
from frontend.generation.fields import MAX_CHOICES
from frontend.scope import RequestScope
from ipc.errors import QueueFull, WorkerCrashed
from ipc.memory.tensors import layout
from ipc.metrics.cluster import BridgeMetrics
from ipc.settings import Cluster, Settings
from ipc.wire.cluster import (
    ENSURE,
    IDS_EACH,
    RUN,
    STEP,
    TEXT,
    VERSION,
    Ask,
    Carried,
    Claims,
    Drop,
    Got,
    Item,
    Missing,
    Offer,
    encode,
    read_answer,
    read_from_box,
    read_result,
)
from ipc.wire.messages import (
    EncodeCall,
    GenerateCall,
    InferCall,
    InputItem,
    ModelStatus,
    Result,
    Step,
    Timing,
    Work,
)
from tests.harness.server import eventually

ROUTER = "r0uter"
SETTINGS = Settings(cluster=Cluster(box="a", keep_result_bytes=100_000))
WORK = Work("m", EncodeCall([InputItem("hello")], ["dense"]), 0, 3, "req_1")


class Engine:
    """Answers when it is let go; counts the runs."""

    def __init__(self) -> None:
        self.free, self.runs, self.cancelled = asyncio.Event(), 0, 0
        self.error: Exception | None = None
        self.scope: RequestScope | None = None
        self.nbytes = 16

    async def run(self, scope: RequestScope, work: Work, payload: Payload = None) -> Answer:
        self.runs, self.scope = self.runs + 1, scope
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        refs, nbytes = layout([("dense", "float32", [1, self.nbytes // 4])])
        return Answer(
            Result(1, None, refs, [3], [], [], Timing()), memoryview(bytes(nbytes)), worker="worker-0"
        )


class Stage:
    """An intake whose messages are kept."""

    def __init__(self, meter: Meter | None = None) -> None:
        self.now_ns, self.engine = 10**12, Engine()
        self.said: list[tuple[str, bytes]] = []
        self.inline = 50_000
        self.transfers = Transfers(Cluster(urls=("nats://127.0.0.1:1",)), "life", "test")
        self.intake = Intake(
            SETTINGS,
            "life",
            self.engine,
            self,
            self._send,
            lambda: self.inline,
            self.transfers,
            meter or Meter(BridgeMetrics(), ()),
            lambda: self.now_ns,  # type: ignore[arg-type]
        )
        self.ensured: list[str] = []
        self.is_told, self.catalog = True, {"m"}

    async def ensure_loaded(self, model: str, until_ns: int, others: Any) -> None:
        self.ensured.append(model)

    def _send(self, subject: str, data: bytes) -> bool:
        self.said.append((subject, data))
        return True

    def item(self, number: int = 1, work: Work = WORK, **changes: Any) -> bytes:
        carried = msgspec.structs.replace(
            Carried(VERSION, ROUTER, RUN, 1, 30_000, 30_000, encode(work)), **changes
        )
        return encode(
            Item(
                f"{ROUTER}.{number}",
                "q",
                "encode",
                "m",
                "default",
                ROUTER,
                f"_INBOX.{ROUTER}.results",
                penstock=carried,
            )
        )

    def is_loaded(self, model: str) -> bool:
        return False

    def status(self, model: str) -> ModelStatus:
        return ModelStatus(model, "loaded")

    @property
    def claims(self) -> list[Claims | Missing]:
        return [read_from_box(data) for subject, data in self.said if subject.endswith(".words")]  # type: ignore[misc]

    @property
    def results(self) -> list[Any]:
        return [read_result(data)[0] for subject, data in self.said if subject.endswith(".results")]

    async def turn(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    async def claimed(self, items: int) -> None:
        """Wait until so many items were claimed."""

        async def is_said() -> bool:
            return sum(len(claim.ids) for claim in self.claims) >= items

        await eventually(is_said, "claims")


def played(scene: Callable[[Stage], Awaitable[None]]) -> None:
    async def run() -> None:
        await scene(Stage())

    asyncio.run(run())


def test_an_item_is_claimed_at_once_and_its_answer_is_kept_until_the_gateway_has_it() -> None:
    async def scene(stage: Stage) -> None:
        stage.intake.take(stage.item(1))
        stage.intake.take(stage.item(2))
        await stage.claimed(2)
        assert [claim.ids for claim in stage.claims] == [[f"{ROUTER}.1", f"{ROUTER}.2"]]
        stage.engine.free.set()
        await stage.turn()
        first = stage.results[0]
        assert first.success and first.worker_id == "a/worker-0" and first.penstock.life == "life"
        assert read_answer(first.penstock.result).tokens == [3] and len(first.penstock.data) == 16
        assert stage.intake.kept_nbytes > 0
        stage.intake.word(encode(Got(VERSION, ROUTER, [f"{ROUTER}.1", f"{ROUTER}.2"])))
        assert stage.intake.kept_nbytes == 0

    played(scene)


def test_pure_work_that_ends_before_its_claim_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims leave when the test says so."""
    monkeypatch.setattr(module, "CLAIM_AFTER_S", 3600.0)

    async def scene(stage: Stage) -> None:
        stage.intake.take(stage.item(1))
        stage.intake.take(stage.item(2))
        stage.intake.word(encode(Drop(VERSION, ROUTER, [f"{ROUTER}.2"])))
        stage.engine.free.set()
        await stage.turn()
        stage.engine.free.clear()
        stage.intake._say_claims()
        stage.intake.take(stage.item(3))
        stage.intake._say_claims()
        assert [result.work_item_id for result in stage.results] == [f"{ROUTER}.1"]
        assert [claim.ids for claim in stage.claims] == [[f"{ROUTER}.3"]]

    played(scene)


def test_work_with_a_home_is_claimed_before_it_begins() -> None:
    step = Work("m", InferCall([], [], step=Step(1, True)), 0, 1, "q")

    async def scene(stage: Stage) -> None:
        stage.engine.free.set()
        stage.intake.take(stage.item(work=step, kind=STEP))
        await stage.turn()
        assert [subject.rpartition(".")[2] for subject, _ in stage.said] == ["words", "results"]

    played(scene)


def test_claims_of_many_deliveries_fit_into_the_smallest_messages_of_brokers() -> None:
    async def scene(stage: Stage) -> None:
        for number in range(2 * IDS_EACH + 1):
            stage.intake.take(stage.item(number), f"$JS.ACK.{'h' * 100}.1.{number:09}.{number:09}.1.0")
        await stage.claimed(2 * IDS_EACH + 1)
        sizes = [len(data) for subject, data in stage.said if subject.endswith(".words")]
        assert len(sizes) == 3 and max(sizes) < 64 << 10
        assert sum(len(claims.ids) for claims in stage.claims) == 2 * IDS_EACH + 1

    played(scene)


def test_a_copy_of_an_item_never_runs_a_second_time() -> None:
    async def scene(stage: Stage) -> None:
        for claims in (1, 2):
            stage.intake.take(stage.item())
            await stage.claimed(claims)
        assert len(stage.claims) == 2 and stage.engine.runs == 1
        stage.engine.free.set()
        await stage.turn()
        stage.intake.take(stage.item())
        await stage.turn()
        assert len(stage.results) == 2 and stage.engine.runs == 1 and stage.results[0] == stage.results[1]

    played(scene)


def test_who_asks_gets_a_claim_a_result_or_the_word_that_the_item_is_missing() -> None:
    async def scene(stage: Stage) -> None:
        ask = encode(Ask(VERSION, ROUTER, [f"{ROUTER}.1", f"{ROUTER}.7"]))
        stage.intake.take(stage.item())
        await stage.turn()
        stage.intake.word(ask)
        await stage.turn()
        assert isinstance(stage.claims[-2], Missing) and stage.claims[-2].ids == [f"{ROUTER}.7"]
        assert stage.claims[-1].ids == [f"{ROUTER}.1"]
        stage.engine.free.set()
        await stage.turn()
        stage.intake.word(ask)
        assert len(stage.results) == 2

    played(scene)


def test_an_item_that_nobody_waits_for_is_cancelled_and_its_late_copy_is_dropped() -> None:
    async def scene(stage: Stage) -> None:
        stage.intake.take(stage.item())
        await stage.turn()
        stage.intake.word(encode(Drop(VERSION, ROUTER, [f"{ROUTER}.1", f"{ROUTER}.2"])))
        stage.intake.take(stage.item(2))
        await stage.turn()
        assert stage.engine.cancelled == 1 and stage.engine.runs == 1 and not len(stage.intake)
        assert not stage.results and stage.intake.counts["dropped"] == 1

    played(scene)


def test_an_item_that_is_dropped_before_its_first_step_leaves_nothing() -> None:
    async def scene(stage: Stage) -> None:
        stage.intake.take(stage.item(), "$JS.ACK.1")
        stage.intake.word(encode(Drop(VERSION, ROUTER, [f"{ROUTER}.1"])))
        await stage.turn()
        assert not stage.engine.runs and not len(stage.intake) and ("$JS.ACK.1", ACK) in stage.said
        stage.intake.word(encode(Ask(VERSION, ROUTER, [f"{ROUTER}.1"])))
        assert isinstance(stage.claims[-1], Missing)

    played(scene)


def test_an_answer_that_no_message_can_hold_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        stage.engine.error = QueueFull("lone surrogate \ud800")
        stage.engine.free.set()
        stage.intake.take(stage.item())
        await stage.turn()
        assert stage.engine.runs == 1 and not len(stage.intake)

    played(scene)
    assert "no answer that can be sent" in caplog.text


def test_large_inputs_are_waited_for_until_the_deadline_and_no_longer() -> None:
    async def scene(stage: Stage) -> None:
        whole = encode(WORK)

        async def get(*_: Any) -> bytes:
            await asyncio.Event().wait()
            return whole

        stage.transfers.get = get  # type: ignore[method-assign]
        large = Offer("0" * 64, len(whole), b"")
        stage.intake.take(
            stage.item(work=WORK, large=large, work_nbytes=len(whole), left_ms=20, start_left_ms=20)
        )
        await stage.intake.ended(30.0, 0.0)
        [result] = stage.results
        assert result.error_code == "DEADLINE_EXCEEDED" and not stage.engine.runs

    played(scene)


def test_an_orderly_stop_does_not_wait_for_who_dropped_the_answer() -> None:
    async def scene(stage: Stage) -> None:
        stage.engine.free.set()
        stage.intake.take(stage.item())
        await stage.turn()
        ended = asyncio.ensure_future(stage.intake.ended(60, 60))
        await stage.turn()
        assert not ended.done()
        stage.intake.word(encode(Drop(VERSION, ROUTER, [f"{ROUTER}.1"])))
        await stage.turn()
        assert ended.done()

    played(scene)


def test_a_gateway_speaks_of_its_own_items_alone() -> None:
    async def scene(stage: Stage) -> None:
        stage.intake.take(stage.item())
        await stage.turn()
        stage.intake.word(encode(Drop(VERSION, "stranger", [f"{ROUTER}.1"])))
        await stage.turn()
        assert not stage.engine.cancelled and len(stage.intake) == 1

    played(scene)


def test_work_of_a_gateway_that_is_silent_ends_and_nothing_of_it_stays() -> None:
    async def scene(stage: Stage) -> None:
        stage.intake.heard(ROUTER)
        stage.intake.take(stage.item())
        await stage.turn()
        stage.now_ns += int(1.9e9)
        stage.intake.tick(connected=True)
        assert not stage.engine.cancelled
        stage.now_ns += int(0.2e9)
        stage.intake.tick(connected=True)
        await stage.turn()
        assert stage.engine.cancelled == 1 and not len(stage.intake) and not stage.intake.kept_nbytes
        stage.intake.take(stage.item(2))
        await stage.turn()
        assert stage.engine.runs == 1 and stage.intake.counts["orphaned"] == 2
        stage.intake.heard(ROUTER)
        stage.intake.take(stage.item())
        await stage.turn()
        assert stage.engine.runs == 2

    played(scene)


def test_nobody_is_silent_while_there_is_no_broker() -> None:
    async def scene(stage: Stage) -> None:
        stage.intake.take(stage.item())
        await stage.turn()
        for connected in (False, True):
            stage.now_ns += int(1.5e9)
            stage.intake.tick(connected=connected)
        assert not stage.engine.cancelled

    played(scene)


def test_answers_that_no_gateway_confirms_are_kept_within_their_time_and_memory() -> None:
    async def scene(stage: Stage) -> None:
        stage.engine.nbytes = 40_000
        stage.engine.free.set()
        for number in range(4):
            stage.intake.take(stage.item(number))
        await stage.turn()
        assert len(stage.results) == 4 and stage.intake.kept_nbytes <= SETTINGS.cluster.keep_result_bytes
        stage.intake.heard(ROUTER)
        stage.now_ns += int(31e9)
        stage.intake.heard(ROUTER)
        stage.intake.tick(connected=True)
        assert stage.intake.kept_nbytes == 0

    played(scene)


def test_an_error_that_no_broker_would_carry_is_cut() -> None:
    async def scene(stage: Stage) -> None:
        stage.engine.error = QueueFull("x" * (1 << 20), odd=["y" * 100] * 10_000)
        stage.engine.free.set()
        stage.intake.take(stage.item())
        await stage.turn()
        [failed] = stage.results
        assert failed.error == "x" * MOST_ERROR_NCHARS and failed.penstock.detail == {}

    played(scene)


def test_an_error_crosses_with_its_code_and_all_that_belongs_to_it() -> None:
    async def scene(stage: Stage) -> None:
        stage.engine.error = QueueFull("full", retry_after_s=3, odd={1 << 70})
        stage.engine.free.set()
        stage.intake.take(stage.item())
        await stage.turn()
        failed = stage.results[0]
        assert (failed.success, failed.error_code, failed.error) == (False, "QUEUE_FULL", "full")
        assert failed.penstock.retry_after_s == 3 and failed.penstock.detail == {}

    played(scene)


def test_time_that_is_left_becomes_a_deadline_of_this_host() -> None:
    async def scene(stage: Stage) -> None:
        stage.intake.take(stage.item(1, left_ms=30_000, start_left_ms=1_000))
        await stage.turn()
        scope = stage.engine.scope
        assert scope is not None and 28 < scope.left_s()[0] <= 30 and 0 < scope.left_s()[1] <= 1
        stage.intake.take(stage.item(2, left_ms=0))
        await stage.turn()
        assert stage.results[0].error_code == "DEADLINE_EXCEEDED" and stage.engine.runs == 1

    played(scene)


def test_what_cannot_run_between_hosts_is_refused_by_name() -> None:
    async def scene(stage: Stage) -> None:
        step = Work("m", InferCall([], [], step=Step(1, True)), 0, 1, "q")
        refused = [
            stage.item(1, work=step),
            stage.item(9, kind=STEP),
            stage.item(2, work=msgspec.structs.replace(WORK, parts=8)),
            stage.item(3, kind="dance"),
            stage.item(4, kind="\x00"),
            *(
                stage.item(5 + at, kind=TEXT, work=Work("m", GenerateCall(text="a", n=n), 0, 1, "q"))
                for at, n in enumerate((-1, 0, MAX_CHOICES + 1, 1 << 62))
            ),
        ]
        for item in refused:
            stage.intake.take(item)
        await stage.turn()
        expected = ["UNSUPPORTED"] * 5 + ["INVALID_INPUT"] * 4
        assert [result.error_code for result in stage.results] == expected
        assert not stage.engine.runs

    played(scene)


def test_a_load_is_asked_of_the_local_models() -> None:
    async def scene(stage: Stage) -> None:
        stage.intake.take(stage.item(kind=ENSURE))
        await stage.turn()
        assert stage.ensured == ["m"] and stage.results[0].success and not stage.engine.runs

    played(scene)


def test_bad_bytes_are_counted_and_harm_no_neighbour() -> None:
    async def scene(stage: Stage) -> None:
        stage.engine.free.set()
        for data in (
            b"",
            b"\xc1",
            b"\x91" * 5000,
            encode(Item("x", "q", "encode", "m", "p", "z", "sie.work.x")),
        ):
            stage.intake.take(data)
            stage.intake.word(data)
        fields = msgspec.msgpack.decode(stage.item(9))
        fields["penstock"]["work"] = b"\xff"
        stage.intake.take(msgspec.msgpack.encode(fields))
        fields["penstock"]["v"] = 7
        stage.intake.take(msgspec.msgpack.encode(fields))
        stage.intake.take(stage.item(1))
        await stage.turn()
        codes = [result.error_code for result in stage.results]
        assert codes == ["DEPENDENCY_CONFLICT", "PROTOCOL_ERROR", ""]
        assert stage.intake.counts["unreadable"] == 8 and stage.intake.counts["foreign"] == 1

    played(scene)


def test_a_box_that_leaves_refuses_what_still_comes_and_waits_for_what_runs() -> None:
    async def scene(stage: Stage) -> None:
        stage.intake.take(stage.item(1))
        await stage.turn()
        stage.intake.draining = True
        stage.intake.take(stage.item(2))
        await stage.turn()
        assert stage.results[0].error_code == "DRAINING"
        ended = asyncio.ensure_future(stage.intake.ended(60, 60))
        await stage.turn()
        assert not ended.done()
        stage.engine.free.set()
        await stage.turn()
        stage.intake.word(encode(Got(VERSION, ROUTER, [f"{ROUTER}.1", f"{ROUTER}.2"])))
        await ended
        assert stage.results[1].success

    played(scene)


def test_the_queue_hears_of_a_delivery_after_its_answer_and_of_more_time_before() -> None:
    async def scene(stage: Stage) -> None:
        stage.intake.take(stage.item(), "$JS.ACK.1")
        stage.intake.take(stage.item(), "$JS.ACK.2")
        await stage.turn()
        assert stage.claims[0].acks == ["$JS.ACK.2"]  # type: ignore[union-attr]
        stage.intake.extend()
        stage.engine.free.set()
        await stage.turn()
        queue = [(subject, data) for subject, data in stage.said if subject.startswith("$JS.ACK.")]
        assert queue == [
            ("$JS.ACK.1", WORKING),
            ("$JS.ACK.2", WORKING),
            ("$JS.ACK.1", ACK),
            ("$JS.ACK.2", ACK),
        ]
        last = [subject for subject, _ in stage.said if not subject.endswith("words")]
        assert last[-3:] == [f"_INBOX.{ROUTER}.results", "$JS.ACK.1", "$JS.ACK.2"]

    played(scene)


def test_a_delivery_is_given_back_by_a_box_that_leaves_and_ended_where_nobody_waits() -> None:
    async def scene(stage: Stage) -> None:
        stage.intake.word(encode(Drop(VERSION, ROUTER, [f"{ROUTER}.1"])))
        stage.intake.take(stage.item(1), "$JS.ACK.1")
        stage.intake.take(b"\xc1", "$JS.ACK.2")
        foreign: list[tuple[Item, str, float]] = []
        stage.intake.on_foreign = lambda item, data, ack, aged_s: foreign.append((item, ack, aged_s))
        sent = Item("x", "q", "encode", "m", "p", "z", "_INBOX.sie.1")
        stage.intake.take(encode(sent), "$JS.ACK.3", 1.5)
        stage.intake.draining = True
        stage.intake.take(stage.item(4), "$JS.ACK.4")
        await stage.turn()
        assert [each for each in stage.said if each[0].startswith("$JS.ACK.")] == [
            ("$JS.ACK.1", ACK),
            ("$JS.ACK.2", TERM),
            ("$JS.ACK.4", NAK),
        ]
        assert not stage.engine.runs
        assert foreign == [(sent, "$JS.ACK.3", 1.5)], "who runs such items also tells the queue"

    played(scene)


def test_time_in_the_queue_is_no_time_for_the_work() -> None:
    async def scene(stage: Stage) -> None:
        stage.intake.take(stage.item(1, left_ms=4_000), "$JS.ACK.1", aged_s=5.0)
        await stage.turn()
        assert stage.results[0].error_code == "DEADLINE_EXCEEDED" and not stage.engine.runs

    played(scene)


def test_a_large_answer_is_offered_until_the_gateway_has_it_and_counts_as_kept() -> None:
    async def scene(stage: Stage) -> None:
        stage.engine.nbytes = 80_000
        stage.engine.free.set()
        stage.intake.take(stage.item())
        await stage.turn()
        outcome = stage.results[0].penstock
        assert outcome.large.nbytes > 80_000 and not outcome.data and outcome.data_nbytes == 80_000
        assert stage.transfers.offered == 1 and stage.intake.kept_nbytes > 80_000
        stage.intake.word(encode(Got(VERSION, ROUTER, [f"{ROUTER}.1"])))
        assert stage.transfers.offered == 0 and stage.intake.kept_nbytes == 0
        stage.engine.nbytes = 100_000
        stage.intake.take(stage.item(2))
        await stage.turn()
        assert stage.results[1].error_code == "RESOURCE_EXHAUSTED" and stage.transfers.offered == 0

    played(scene)


def test_what_is_no_item_and_what_kills_workers_is_told_as_given_up() -> None:
    async def scene(stage: Stage) -> None:
        told: list[tuple[str, str]] = []
        stage.intake.on_dead = lambda reason, data, item, error: told.append(
            (reason, (item and item.model_id) or "")
        )
        stage.intake.take(b"\xc1", "$JS.ACK.1")
        stage.engine.error = WorkerCrashed("two workers died")
        stage.engine.free.set()
        stage.intake.take(stage.item(1))
        await stage.turn()
        stage.engine.error = QueueFull("busy")
        stage.intake.take(stage.item(2))
        await stage.turn()
        assert told == [("unreadable", ""), ("poison", "m")]
        assert [result.error_code for result in stage.results] == ["WORKER_CRASHED", "QUEUE_FULL"]

    played(scene)


def test_an_item_whose_model_the_box_does_not_serve_is_for_another_box() -> None:
    async def scene() -> None:
        stage = Stage()
        stage.catalog = {"other"}
        stage.intake.take(stage.item(), "ack")
        await stage.turn()
        [answer] = [read_result(data) for subject, data in stage.said if subject.endswith(".results")]
        assert answer[0].error_code == "NO_REPLICA" and stage.engine.runs == 0
        # A box that has yet to hear of its workers' models waits for them.
        stage.is_told = False
        stage.intake.take(stage.item(2), "ack")
        await stage.turn()
        assert stage.engine.runs == 1

    asyncio.run(scene())
