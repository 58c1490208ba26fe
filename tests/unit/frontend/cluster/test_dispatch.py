"""What a gateway does with an item at each word, death and silence. The clock is moved by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from frontend.cluster.boxes import SHOWN_S, Box, Boxes
from frontend.cluster.dispatch import Dispatch
from frontend.cluster.items import GRACE_NS, MOST_LIVES, MOST_SAID, Held
from ipc import deadline
from ipc.errors import (
    DeadlineExceeded,
    Draining,
    NoReplica,
    PenstockError,
    Provisioning,
    QueueFull,
    QueueUnavailable,
    SequenceLost,
    WorkerCrashed,
)
from ipc.settings import Cluster
from ipc.wire.cluster import (
    IDS_EACH,
    VERSION,
    Ask,
    BoxBeat,
    Claims,
    Drop,
    Got,
    ItemResult,
    Offer,
    Outcome,
    ToBox,
    encode,
)
from ipc.wire.messages import Step

CLUSTER = Cluster()
WAIT_S = 5.0


class Stage:
    """A dispatch whose messages are kept, with boxes that have every model."""

    def __init__(self, *boxes: str) -> None:
        self.now_ns = 10**12
        self.boxes = Boxes(CLUSTER, lambda: self.now_ns)
        self.dispatch = Dispatch(
            CLUSTER,
            "r",
            self.boxes,
            self,
            self._choose,
            lambda held: Provisioning("none"),
            WAIT_S,
            lambda: self.now_ns,
        )
        self.sent: list[tuple[str, str]] = []
        self.words: list[tuple[str, ToBox]] = []
        self.returned: list[str] = []
        self.up, self.queue, self.words_fail = True, False, False
        for name in boxes:
            self.beat(name)

    def _choose(self, held: Held) -> Box | None:
        able = [box for box in self.boxes if box.open and box.life not in held.tried]
        return min(able, key=lambda box: (len(box.items), box.name), default=None)

    def beat(self, name: str, life: str = "1", *, draining: bool = False) -> None:
        self.boxes.take(BoxBeat(VERSION, name, f"{name}{life}", "default", 1, draining, 1.0, 0.0))

    def to_box(self, held: Held, box: Box) -> None:
        if not self.up:
            raise QueueUnavailable("down")
        self.sent.append((held.id, box.life))

    def to_queue(self, held: Held) -> bool:
        return self.queue

    def word(self, box: Box, word: ToBox) -> None:
        if self.words_fail:
            raise QueueUnavailable("down")
        self.words.append((box.life, word))

    def give_back(self, ack: str) -> None:
        if not self.up:
            raise QueueUnavailable("down")
        self.returned.append(ack)

    def begin(self, name: str = "r.1") -> Held:
        held = Held(name, "m", self.now_ns + 10**10, asyncio.get_running_loop().create_future())
        self.dispatch.begin(held)
        return held

    def claim(self, life: str, *names: str, ack: str = "") -> None:
        self.dispatch.claims(Claims(VERSION, life[:-1], life, list(names), [ack] * len(names)))

    def answer(self, life: str, name: str = "r.1", error: PenstockError | None = None) -> None:
        outcome = Outcome(VERSION, life[:-1], life, 1)
        code, message = (error.code, error.message) if error else ("", "")
        result = ItemResult(name, "q", error is None, life, error=message, error_code=code, penstock=outcome)
        self.dispatch.answered(result, outcome)

    def pass_s(self, seconds: float, *alive: str) -> None:
        """Time passes in steps of a beat; these lives beat on."""
        for _ in range(round(seconds / CLUSTER.beat_s)):
            self.now_ns += int(CLUSTER.beat_s * 1e9)
            for life in alive:
                self.beat(life[:-1], life[-1])
            self.boxes.tick()
            self.dispatch.tick()


def played(scene: Callable[[], None]) -> None:
    """Run a scene on a loop, words included."""

    async def run() -> None:
        scene()
        await asyncio.sleep(0)

    asyncio.run(run())


@pytest.mark.parametrize("up", [True, False])
def test_an_item_ends_soon_after_its_deadline_with_and_without_a_broker(up: bool) -> None:
    async def scene() -> None:
        stage = Stage("a")
        held, text = stage.begin("r.1"), stage.begin("r.2")
        text.in_pieces = True
        done = stage.begin("r.3")
        stage.answer("a1", "r.3")
        stage.up = up
        stage.now_ns = held.deadline_ns
        stage.dispatch.deadlines.expire()
        assert not held.future.done()
        stage.now_ns += GRACE_NS + 1
        stage.dispatch.deadlines.expire()
        errors = [str(one.future.exception()) for one in (held, text) if one.future.done()]
        assert errors == [
            "the deadline passed before a box answered",
            "the deadline passed before the answer had ended",
        ]
        assert done.future.result()

    asyncio.run(scene())


def test_one_timer_ends_all_items_by_their_deadlines_whichever_began_first() -> None:
    async def scene() -> None:
        stage = Stage("a")
        stage.dispatch.deadlines._now_ns = time.monotonic_ns
        early, helds = list[Held](), list[Held]()
        for number, after_s in enumerate((0.06, 0.03, 3600.0, 0.0, 0.03)):
            future = asyncio.get_running_loop().create_future()
            held = Held(f"r.{number}", "m", deadline.after(after_s), future)
            helds.append(held)
            stage.dispatch.begin(held)
            assert stage.dispatch.deadlines.next_ns == min(each.deadline_ns for each in helds) + GRACE_NS

            def ended(_: object, held: Held = held) -> None:
                early.extend([held] if time.monotonic_ns() < held.deadline_ns + GRACE_NS else [])

            future.add_done_callback(ended)
        lasting = helds.pop(2)
        async with asyncio.timeout(30):
            errors = await asyncio.gather(*(held.future for held in helds), return_exceptions=True)
        assert all(isinstance(error, DeadlineExceeded) for error in errors)
        assert not early and not lasting.future.done()
        assert stage.dispatch.deadlines.next_ns == lasting.deadline_ns + GRACE_NS

    asyncio.run(scene())


def test_an_item_whose_answer_did_not_come_has_its_deadline_again() -> None:
    async def scene() -> None:
        stage = Stage("a", "b")
        held = stage.begin()
        stage.answer("a1")
        stage.now_ns = held.deadline_ns + GRACE_NS
        stage.dispatch.deadlines.expire()
        assert held.future.result() and stage.dispatch.deadlines.next_ns > held.deadline_ns + GRACE_NS
        stage.dispatch.retake(held, "a1", NoReplica("the answer did not come"))
        async with asyncio.timeout(30):
            with pytest.raises(DeadlineExceeded):
                await held.future

    asyncio.run(scene())


def test_the_first_answer_counts_and_later_ones_are_counted_and_dropped() -> None:
    async def scene() -> None:
        stage = Stage("a", "b")
        held = stage.begin()
        assert stage.sent == [("r.1", "a1")]
        stage.claim("a1", "r.1")
        stage.answer("a1")
        assert held.future.result()[1].life == "a1"
        stage.answer("b1")
        stage.dispatch.end(held)
        assert stage.dispatch.counts["duplicate", ""] == 1 and not stage.words
        stage.dispatch.say_got()
        assert {(life, type(word)) for life, word in stage.words} == {("a1", Got), ("b1", Got)}
        assert not stage.dispatch.items and not any(box.items for box in stage.boxes)

    asyncio.run(scene())


@pytest.mark.parametrize("step", [Step(1), None])
def test_work_with_a_home_is_claimed_and_answered_by_its_home_alone(step: Step | None) -> None:
    async def scene() -> None:
        stage = Stage("a", "b")
        held = Held("r.1", "m", stage.now_ns + 10**10, asyncio.get_running_loop().create_future())
        held.step, held.in_pieces = step, step is None
        stage.dispatch.begin(held)
        assert held.boxes == {"a1"}
        stage.claim("b1", "r.1")
        stage.answer("b1")
        assert held.boxes == {"a1"} and not held.future.done()
        stage.answer("a1")
        assert held.future.result()[1].life == "a1"
        stage.dispatch.end(held)

    asyncio.run(scene())


def test_a_box_hears_what_is_lost_also_after_a_while_without_a_broker_or_a_sign_of_life() -> None:
    async def scene() -> None:
        stage = Stage("a")
        held = Held("r.1", "m", stage.now_ns + 10**12, asyncio.get_running_loop().create_future())
        held.step = Step(1)
        stage.dispatch.begin(held)
        stage.pass_s(SHOWN_S + 2)
        assert isinstance(held.future.exception(), SequenceLost) and not stage.boxes.by_life
        stage.dispatch.end(held)
        stage.beat("a")
        stage.words_fail = True
        stage.dispatch.tick()
        stage.words_fail = False
        stage.dispatch.tick()
        stage.dispatch.tick()
        assert stage.words == [("a1", Drop(VERSION, "r", ["r.1"], lost=True))]
        for at in range(MOST_LIVES + 1):
            stage.dispatch._lose(
                Held("x", "m", 0, asyncio.get_running_loop().create_future(), step=Step(1)), f"l{at}"
            )
        assert len(stage.dispatch._lost.by_life) == MOST_LIVES

    asyncio.run(scene())


def test_a_box_that_confirms_nothing_is_told_what_is_lost_more_and_more_seldom_and_then_no_more() -> None:
    """A bridge of an earlier version knows no word for it."""

    async def scene() -> None:
        stage = Stage("a")
        lost = stage.dispatch._lost
        for name in ("r.1", "r.2"):
            lost.add("a1", name)
        stage.pass_s(MOST_SAID, "a1")
        told = len(stage.words)
        assert 2 < told < MOST_SAID
        # A box that answers at all is told again what it has not confirmed.
        stage.dispatch.missing("a1", ["r.1"], lost=True)
        stage.pass_s(2**MOST_SAID, "a1")
        assert stage.words[-1] == ("a1", Drop(VERSION, "r", ["r.2"], lost=True))
        assert told < len(stage.words) <= told + MOST_SAID and not lost.by_life and not lost._said
        stage.words.clear()
        stage.pass_s(2**MOST_SAID, "a1")
        stage.begin("r.3")
        assert not stage.words
        stage.dispatch.missing("a1", ["r.2"], lost=True)

    asyncio.run(scene())


def test_words_before_each_item_are_no_reason_to_give_up_a_box() -> None:
    async def scene() -> None:
        stage = Stage("a")
        stage.dispatch._lost.add("a1", "r.0")
        for number in range(MOST_SAID + 1):
            stage.begin(f"r.{number}")
        assert len(stage.words) == MOST_SAID + 1 and stage.dispatch._lost.has("a1", "r.0")

    asyncio.run(scene())


def test_many_losses_at_once_are_no_reason_to_give_up_a_box() -> None:
    async def scene() -> None:
        stage = Stage("a")
        names = [f"r.{number}" for number in range(MOST_SAID + 1)]
        for name in names:
            stage.dispatch._lost.add("a1", name)
            stage.dispatch.tick()
        assert stage.words[-1] == ("a1", Drop(VERSION, "r", names, lost=True))
        assert all(stage.dispatch._lost.has("a1", name) for name in names)

    asyncio.run(scene())


def test_a_box_that_dies_loses_its_items_to_another_and_only_those() -> None:
    def scene() -> None:
        stage = Stage("a", "b")
        first, second = stage.begin("r.1"), stage.begin("r.2")
        stage.claim("a1", "r.1")
        stage.claim("b1", "r.2")
        stage.pass_s(1.0, "b1")
        assert stage.sent == [("r.1", "a1"), ("r.2", "b1"), ("r.1", "b1")]
        stage.answer("b1", "r.1")
        assert first.future.done() and not second.future.done()

    played(scene)


def test_a_new_life_of_a_box_ends_the_life_before_at_once() -> None:
    def scene() -> None:
        stage = Stage("a")
        stage.begin()
        stage.claim("a1", "r.1")
        stage.beat("a", "2")
        assert stage.sent[-1] == ("r.1", "a2") and stage.dispatch.counts["resent", "box died"] == 1
        stage.answer("a1")
        assert stage.dispatch.counts["dropped", "unknown box"] == 1

    played(scene)


def test_an_item_that_lost_two_boxes_is_not_given_to_a_third() -> None:
    def scene() -> None:
        stage = Stage("a", "b", "c")
        held = stage.begin()
        stage.claim("a1", "r.1")
        stage.pass_s(1.0, "b1", "c1")
        stage.claim("b1", "r.1")
        stage.pass_s(1.0, "c1")
        assert isinstance(held.future.exception(), WorkerCrashed)
        assert [life for _, life in stage.sent] == ["a1", "b1"]

    played(scene)


def test_boxes_that_die_with_an_item_alone_are_told_from_those_that_had_others() -> None:
    def scene() -> None:
        stage = Stage("a", "b", "c", "d")
        first, second = stage.begin("r.1"), stage.begin("r.2")
        stage.claim("a1", "r.1", "r.2")
        stage.pass_s(1.0, "b1", "c1", "d1")
        assert [(held.deaths, held.deaths_alone) for held in (first, second)] == [(1, 0), (1, 0)]
        stage.claim("c1", "r.1")
        stage.claim("d1", "r.2")
        stage.pass_s(1.0, "b1", "d1")
        assert isinstance(first.future.exception(), WorkerCrashed)
        assert (first.deaths, first.deaths_alone, second.deaths) == (2, 1, 1)

    played(scene)


def test_an_item_that_nobody_had_claimed_is_no_loss() -> None:
    def scene() -> None:
        stage = Stage("a", "b", "c")
        held = stage.begin()
        stage.pass_s(1.0, "b1", "c1")
        stage.pass_s(1.0, "c1")
        assert not held.future.done() and [life for _, life in stage.sent] == ["a1", "b1", "c1"]

    played(scene)


def test_an_item_that_a_box_was_sent_and_has_yet_to_claim_is_company() -> None:
    """Boxes claim pure work a moment after it came: the newest item may be what kills the box."""

    def scene() -> None:
        stage = Stage("a")
        claimed, newest = stage.begin("r.1"), stage.begin("r.2")
        stage.claim("a1", "r.1")
        stage.pass_s(1.0)
        assert (claimed.deaths, claimed.deaths_alone, newest.deaths) == (1, 0, 0)

    played(scene)


def test_a_claimed_delivery_of_the_queue_goes_back_when_its_box_dies_and_any_box_may_pull_the_item() -> None:
    async def scene() -> None:
        stage = Stage("a", "b", "c")
        stage.queue = True
        held = stage.begin()
        stage.claim("a1", "r.1", ack="$JS.ACK.1")
        stage.pass_s(1.0, "b1", "c1")
        assert stage.returned == ["$JS.ACK.1"] and stage.sent == []
        stage.dispatch.end(held)
        await asyncio.sleep(0)
        assert {life for life, word in stage.words if isinstance(word, Drop)} == {"b1", "c1"}

    asyncio.run(scene())


def test_a_silent_box_that_lives_is_asked_and_a_missing_item_goes_elsewhere() -> None:
    async def scene() -> None:
        stage = Stage("a", "b")
        held = stage.begin()
        stage.claim("a1", "r.1")
        stage.pass_s(1.0, "a1", "b1")
        assert stage.words == [("a1", Ask(VERSION, "r", ["r.1"]))]
        stage.dispatch.missing("a1", ["r.1"])
        assert len(stage.sent) == 2 and stage.dispatch.counts["resent", "missing"] == 1
        stage.dispatch.missing("zz", ["r.1"])
        assert not held.future.done() and len(stage.sent) == 2

    asyncio.run(scene())


def test_everything_is_asked_for_after_a_reconnect_and_no_box_counts_as_silent() -> None:
    def scene() -> None:
        stage = Stage("a")
        stage.begin()
        stage.claim("a1", "r.1")
        stage.now_ns += 60 * 10**9
        stage.dispatch.resume()
        stage.boxes.tick()
        assert stage.words == [("a1", Ask(VERSION, "r", ["r.1"]))] and stage.boxes.by_name["a"].alive

    played(scene)


def test_an_answer_that_a_dying_broker_lost_is_asked_for_at_once_after_a_short_loss() -> None:
    def scene() -> None:
        stage = Stage("a")
        stage.begin()
        stage.claim("a1", "r.1")
        stage.now_ns += 10**8
        stage.dispatch.resume()
        assert stage.words == [("a1", Ask(VERSION, "r", ["r.1"]))]

    played(scene)


def test_an_item_waits_for_a_broker_and_is_sent_when_there_is_one() -> None:
    def scene() -> None:
        stage = Stage("a", "b")
        held = stage.begin()
        stage.up = False
        stage.pass_s(1.0, "b1")
        assert not held.future.done() and stage.sent == [("r.1", "a1")]
        stage.up = True
        stage.dispatch.resume()
        assert stage.sent[-1] == ("r.1", "b1")

    played(scene)


def test_a_new_item_without_a_broker_is_refused_at_once() -> None:
    def scene() -> None:
        stage = Stage("a")
        stage.up = False
        with pytest.raises(QueueUnavailable):
            stage.begin()
        assert not stage.dispatch.items

    played(scene)


def test_a_busy_box_hands_on_to_another_and_the_last_refusal_is_the_answer() -> None:
    def scene() -> None:
        stage = Stage("a", "b")
        held = stage.begin()
        stage.answer("a1", error=QueueFull("full", retry_after_s=3))
        assert stage.sent[-1] == ("r.1", "b1")
        stage.answer("b1", error=NoReplica("no worker"))
        assert isinstance(held.future.exception(), NoReplica)

    played(scene)


def test_a_draining_box_gets_nothing_new_and_finishes_what_it_has() -> None:
    def scene() -> None:
        stage = Stage("a", "b")
        first = stage.begin("r.1")
        stage.beat("a", draining=True)
        stage.begin("r.2")
        stage.begin("r.3")
        assert [life for _, life in stage.sent] == ["a1", "b1", "b1"]
        stage.answer("a1", "r.1")
        assert first.future.done()

    played(scene)


def test_an_item_for_a_subject_without_listeners_goes_elsewhere_at_once() -> None:
    def scene() -> None:
        stage = Stage("a", "b")
        stage.begin()
        stage.dispatch.gone("a1", "r.1")
        assert stage.sent == [("r.1", "a1"), ("r.1", "b1")]
        assert stage.dispatch.counts["resent", "nobody"] == 1
        stage.dispatch.gone("a1", "r.1")
        stage.claim("b1", "r.1")
        stage.dispatch.gone("b1", "r.1")
        stage.dispatch.gone("nobody", "r.1")
        assert len(stage.sent) == 2

    played(scene)


def test_a_box_where_nobody_listens_gets_nothing_before_its_next_sign_of_life() -> None:
    def scene() -> None:
        stage = Stage("a")
        held = stage.begin()
        stage.dispatch.gone("a1", "r.1")
        stage.pass_s(0.4)
        assert stage.sent == [("r.1", "a1")] and not held.future.done()
        stage.beat("a")
        stage.pass_s(0.4, "a1")
        assert stage.sent == [("r.1", "a1"), ("r.1", "a1")]

    played(scene)


def test_a_word_is_no_larger_than_the_smallest_messages_of_brokers() -> None:
    def scene() -> None:
        stage = Stage("a")
        for number in range(2 * IDS_EACH + 1):
            stage.begin(f"{'f' * 24}.{number:09}.2")
        stage.pass_s(1.5, "a1")
        asked = [word for _, word in stage.words if isinstance(word, Ask)][:3]
        assert [len(word.ids) for word in asked] == [IDS_EACH, IDS_EACH, 1]
        assert {item for word in asked for item in word.ids} == set(stage.dispatch.items)
        assert max(len(encode(word)) for word in asked) < 64 << 10

    played(scene)


def test_a_request_that_nobody_waits_for_is_dropped_at_all_of_its_boxes() -> None:
    async def scene() -> None:
        stage = Stage("a", "b")
        held = stage.begin()
        stage.claim("a1", "r.1")
        stage.claim("b1", "r.1")
        stage.dispatch.end(held)
        stage.claim("b1", "r.1")
        await asyncio.sleep(0)
        dropped = [(life, word.ids) for life, word in stage.words if isinstance(word, Drop)]
        assert ("a1", ["r.1"]) in dropped and any(life == "b1" for life, _ in dropped)
        assert not any(box.items for box in stage.boxes)

    asyncio.run(scene())


def test_words_of_boxes_that_nobody_knows_are_counted_and_dropped() -> None:
    def scene() -> None:
        stage = Stage("a")
        held = stage.begin()
        stage.claim("x9", "r.1")
        stage.answer("x9")
        outcome = Outcome(VERSION, "b", "a1", 1)
        stage.dispatch.answered(ItemResult("r.1", "q", True, "w", penstock=outcome), outcome)
        assert not held.future.done() and stage.dispatch.counts["dropped", "unknown box"] == 3

    played(scene)


def test_a_gateway_that_stood_still_takes_no_box_for_dead() -> None:
    def scene() -> None:
        stage = Stage("a")
        stage.boxes.tick()
        stage.now_ns += 60 * 10**9
        stage.boxes.tick()
        assert stage.boxes.by_name["a"].alive
        stage.pass_s(1.0)
        assert not stage.boxes.by_name["a"].alive and stage.boxes.beats_missed >= 4
        stage.pass_s(61.0)
        assert not stage.boxes.by_name and not stage.boxes.by_life

    played(scene)


def test_a_broker_that_stands_still_is_the_death_of_no_box() -> None:
    """The gateway does not hear itself either. Afterwards a box has as long as ever to be heard."""

    def scene() -> None:
        stage = Stage("a", "b")
        stage.begin()
        stage.claim("a1", "r.1")

        def pass_s(seconds: float, *alive: str) -> None:
            for _ in range(round(seconds / CLUSTER.beat_s)):
                stage.boxes.echo()
                stage.pass_s(CLUSTER.beat_s, *alive)

        pass_s(1.0, "a1", "b1")
        stage.pass_s(3.0)
        assert stage.boxes.is_alive("a1") and stage.boxes.is_alive("b1")
        stage.boxes.echo()
        stage.pass_s(CLUSTER.beat_s)
        assert stage.boxes.is_alive("a1") and stage.boxes.is_alive("b1"), "both had no time to be heard"
        pass_s(0.6, "b1")
        assert stage.boxes.is_alive("a1")
        pass_s(0.4, "b1")
        assert not stage.boxes.is_alive("a1") and stage.boxes.is_alive("b1")
        assert stage.sent[-1] == ("r.1", "b1")

    played(scene)


def test_an_item_without_any_box_left_waits_for_one_and_fails_in_the_end() -> None:
    def scene() -> None:
        stage = Stage("a")
        first = stage.begin()
        stage.claim("a1", "r.1")
        stage.pass_s(2.0)
        assert not first.future.done() and len(stage.sent) == 1
        stage.beat("a", "2")
        stage.pass_s(0.4, "a2")
        assert stage.sent[-1] == ("r.1", "a2")
        second = stage.begin("r.2")
        stage.pass_s(WAIT_S + 2.0)
        assert isinstance(second.future.exception(), Provisioning)

    played(scene)


def test_what_no_box_has_claimed_leaves_a_queue_in_trouble() -> None:
    def scene() -> None:
        stage = Stage("a", "b")
        stage.queue = True
        stage.begin("r.1")
        stage.begin("r.2")
        stage.claim("a1", "r.1", ack="$JS.ACK.1")
        stage.dispatch.leave_queue("unconfirmed")
        assert [name for name, _ in stage.sent] == ["r.2"]
        assert (
            stage.dispatch.counts["resent", "unconfirmed"] == 1
            and stage.dispatch.counts["lane", "queue"] == 2
        )

    played(scene)


def test_an_old_item_of_the_queue_goes_to_a_box_with_room() -> None:
    def scene() -> None:
        stage = Stage("a")
        stage.queue = True
        stage.begin()
        stage.boxes.by_name["a"].room_s = 0.0
        stage.now_ns += 10**9
        stage.dispatch.tick()
        assert not stage.sent
        stage.beat("a")
        stage.dispatch.tick()
        assert stage.sent == [("r.1", "a1")]

    played(scene)


def test_an_item_that_a_box_of_another_version_took_goes_elsewhere_at_once() -> None:
    def scene() -> None:
        stage = Stage("a")
        stage.queue = True
        stage.begin()
        stage.dispatch.refused("r.1")
        assert stage.sent == [("r.1", "a1")] and stage.dispatch.counts["resent", "version"] == 1
        stage.claim("a1", "r.1")
        for name in ("r.1", "r.2"):
            stage.dispatch.refused(name)
        assert len(stage.sent) == 1, "a box has it, or nobody waits for it"

    played(scene)


def test_what_waits_in_the_queue_is_known_without_asking_the_broker() -> None:
    def scene() -> None:
        stage = Stage("a", "b")
        stage.queue = True
        held = [stage.begin(f"r.{number}") for number in range(4)]
        assert stage.dispatch.unclaimed == {"r.0", "r.1", "r.2", "r.3"}
        stage.claim("a1", "r.0", "r.1", ack="$JS.ACK.1")
        assert stage.dispatch.unclaimed == {"r.2", "r.3"}
        stage.pass_s(1.0, "b1")
        assert stage.dispatch.unclaimed == {"r.0", "r.1"}, "back in the queue; the others went to box b"
        for each in held:
            stage.dispatch.end(each)
        assert not stage.dispatch.unclaimed

    played(scene)


def test_a_claim_by_two_boxes_is_no_second_answer() -> None:
    async def scene() -> None:
        stage = Stage("a", "b")
        held = stage.begin()
        for life in ("a1", "b1"):
            stage.claim(life, "r.1")
        stage.answer("b1")
        assert held.future.result()[1].life == "b1"
        stage.dispatch.end(held)
        await asyncio.sleep(0)
        assert [(life, type(word)) for life, word in stage.words] == [("a1", Drop)]
        stage.answer("a1")
        assert stage.dispatch.counts["duplicate", ""] == 1 and not any(box.items for box in stage.boxes)

    asyncio.run(scene())


def test_an_item_of_a_queue_that_no_box_pulls_from_fails_in_the_end() -> None:
    def scene() -> None:
        stage = Stage("a")
        stage.queue = True
        held = stage.begin()
        stage.boxes.by_name["a"].draining = True
        for _ in range(2):
            stage.pass_s(WAIT_S - 1.0)
            assert not held.future.done()
            # A box begins the wait anew, even one without room, which pulls sooner or later.
            stage.beat("a")
            stage.boxes.by_name["a"].room_s = 0.0
            stage.dispatch.tick()
        assert not stage.sent
        stage.pass_s(WAIT_S + 2.0)
        assert isinstance(held.future.exception(), Provisioning)

    played(scene)


def test_an_unclaimed_item_of_the_queue_is_dropped_at_every_box_that_may_pull_it() -> None:
    async def scene() -> None:
        stage = Stage("a", "b")
        stage.queue = True
        held = stage.begin()
        stage.dispatch.end(held)
        await asyncio.sleep(0)
        dropped = {life: word.ids for life, word in stage.words if isinstance(word, Drop)}
        assert dropped == {"a1": ["r.1"], "b1": ["r.1"]}

    asyncio.run(scene())


def test_an_item_of_the_queue_that_is_answered_without_a_claim_is_dropped_nowhere() -> None:
    async def scene() -> None:
        stage = Stage("a", "b")
        stage.queue = True
        held = stage.begin()
        stage.answer("b1")
        assert held.future.result()[1].life == "b1" and not stage.dispatch.unclaimed
        stage.dispatch.end(held)
        await asyncio.sleep(0)
        assert not stage.words

    asyncio.run(scene())


def test_an_item_of_the_queue_that_was_sent_directly_is_dropped_at_every_box_that_may_pull_it() -> None:
    async def scene() -> None:
        stage = Stage("a", "b")
        stage.queue = True
        held = stage.begin()
        stage.dispatch.leave_queue("unconfirmed")
        stage.answer("a1")
        stage.dispatch.end(held)
        await asyncio.sleep(0)
        assert {life for life, word in stage.words if isinstance(word, Drop)} == {"a1", "b1"}

    asyncio.run(scene())


def test_an_answer_whose_bytes_do_not_come_is_no_answer() -> None:
    async def scene() -> None:
        stage = Stage("a", "b")
        held = stage.begin()
        outcome = Outcome(VERSION, "a", "a1", 1, large=Offer("s", 9, b""))
        stage.dispatch.answered(ItemResult("r.1", "q", True, "w", penstock=outcome), outcome)
        await asyncio.sleep(0)
        assert held.future.done() and not stage.words
        stage.boxes.by_name["a"].draining = True
        stage.dispatch.retake(held, "a1", NoReplica("no bytes"))
        assert stage.sent[-1] == ("r.1", "b1") and stage.dispatch.counts["resent", "transfer"] == 1
        stage.answer("b1")
        assert held.future.result()[1].life == "b1"
        stage.dispatch.retake(held, "a1", NoReplica("no bytes again"))
        assert isinstance(held.future.exception(), NoReplica) and len(stage.sent) == 2

    asyncio.run(scene())


def test_the_refusal_of_a_box_that_leaves_is_not_final() -> None:
    def scene() -> None:
        stage = Stage("a")
        held = stage.begin()
        stage.answer("a1", error=Draining("this box is shutting down"))
        stage.beat("a", draining=True)
        stage.pass_s(1.0, "a1")
        assert not held.future.done() and len(stage.sent) == 1
        stage.beat("a", "2")
        stage.pass_s(0.4, "a2")
        assert stage.sent[-1] == ("r.1", "a2")

    played(scene)


def test_a_box_that_joins_dies_or_comes_back_is_written_once(caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[str]:
        return [record.message for record in caplog.records if record.name == "frontend.cluster.boxes"]

    caplog.set_level("INFO", "frontend.cluster.boxes")
    stage = Stage("a")
    stage.pass_s(1.0, "a1")
    assert lines() == ["box a has joined, life a1"]
    stage.pass_s(3.0)
    assert len(lines()) == 2 and lines()[1].startswith("box a, life a1, has been silent for")
    stage.pass_s(1.0, "a1")
    stage.pass_s(1.0, "a2")
    assert lines()[2:] == ["box a is heard again, life a1", "box a has joined, life a2"]


def test_a_box_that_stood_still_for_longer_than_it_is_remembered_is_a_box_again_in_the_same_life() -> None:
    def scene() -> None:
        stage = Stage("a", "b")
        held = stage.begin()
        stage.claim("a1", "r.1")
        stage.pass_s(SHOWN_S + 1, "b1")
        assert set(stage.boxes.by_name) == {"b"} and not stage.boxes.is_alive("a1")
        assert stage.sent == [("r.1", "a1"), ("r.1", "b1")]
        # The box goes on, and answers what it had before anybody hears that it lives.
        stage.answer("a1")
        assert not held.future.done() and stage.dispatch.counts["dropped", "unknown box"] == 1
        stage.beat("a")
        assert stage.boxes.is_alive("a1") and not stage.boxes.by_name["a"].items
        stage.answer("b1")
        assert held.future.done()
        stage.answer("a1")
        assert stage.dispatch.counts["duplicate", ""] == 1
        second = stage.begin("r.2")
        stage.answer(stage.sent[-1][1], "r.2")
        assert stage.sent[-1] == ("r.2", "a1") and second.future.done()

    played(scene)
