"""Sequences between a gateway and boxes: one home, one at a time, never twice. A test plays engines of the boxes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from frontend.bridge.sequences import MOST_SEQUENCES, BegunSequences
from frontend.cluster.sequences import MOST_CHANGES, MOST_MODELS, Homes
from frontend.engine.answer import Answer
from frontend.engine.streams import homes
from frontend.scope import ANY_BOX, Choice
from ipc.errors import (
    DeadlineExceeded,
    Draining,
    NoReplica,
    PenstockError,
    QueueFull,
    SequenceLost,
    SequenceUnknown,
)
from ipc.wire.cluster import (
    VERSION,
    Claims,
    Drop,
    Got,
    encode,
    read_item,
    read_result,
    read_to_box,
)
from ipc.wire.cluster_names import Names, results, words
from ipc.wire.cluster_rows import BoxRow
from ipc.wire.messages import InferCall, Step, Work
from tests.fakes.joined_cluster import MODEL, Joined, PlayedRun, play, turn


def home_of(name: int | str, *boxes: str, caller: str = "") -> str:
    """The box of a sequence, by the rule of the specification: over the boxes, each with one slot."""
    return homes.home([f"{box}/0" for box in boxes], MODEL, name, caller).partition("/")[0]


def name_for(box: str, *boxes: str) -> int:
    """An id whose home among `boxes` is `box`."""
    return next(name for name in range(1, 100) if home_of(name, *boxes) == box)


def step_of(name: int | str, *, start: bool = False, end: bool = False, caller: str = "") -> Work:
    """A request of a sequence."""
    call = InferCall([], [], 1, step=Step(name, start, end))
    return Work(MODEL, call, 0, 3, "req_1", caller=caller)


class Asked:
    """One request at the gateway, which runs beside the test."""

    def __init__(self, joined: Joined, work: Work) -> None:
        # A scene may last longer on a busy machine than boxes wait for a silent gateway.
        joined.beat_gateway()
        self.task = asyncio.ensure_future(joined.engine.run(joined.scope(), work))

    @property
    def number(self) -> int:
        """The number of the answer."""
        answer: Answer = self.task.result()
        return int(answer.tensors()["OUTPUT"][0, 0])

    @property
    def error(self) -> PenstockError:
        """The error of the request."""
        assert self.task.done(), "no answer yet"
        error = self.task.exception()
        assert isinstance(error, PenstockError)
        return error


async def ask(joined: Joined, name: int | str, *, start: bool = False, end: bool = False) -> Asked:
    """Send a request, and let it arrive."""
    asked = Asked(joined, step_of(name, start=start, end=end))
    await turn()
    return asked


def runs(joined: Joined, box: str) -> list[PlayedRun]:
    """What a box has run so far."""
    return joined.engines[box].runs


async def begun(joined: Joined, box: str, name: int | str, number: int = 1) -> None:
    """A sequence begins at a box."""
    asked = await ask(joined, name, start=True)
    runs(joined, box)[-1].say(number)
    await turn()
    assert asked.number == number
    # The word would leave by a timer, and be lost at a box that a test has ended by then.
    joined.gateway.dispatch.say_got()
    await turn()


def test_all_requests_of_a_sequence_go_to_its_home_by_the_direct_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(joined: Joined) -> None:
        names = [*range(1, 9), *(f"text-{at}" for at in range(8))]
        assert {home_of(name, "a", "b") for name in names} == {"a", "b"}
        for name in names:
            box = home_of(name, "a", "b")
            for at in range(3):
                asked = await ask(joined, name, start=not at, end=at == 2)
                runs(joined, box)[-1].say(at)
                await turn()
                assert asked.number == at
        sent = [subject for subject, data in joined.sent if subject.endswith(".work")]
        assert len(sent) == 3 * len(names), "each request is sent once, to one box"
        assert sum(len(engine.runs) for engine in joined.engines.values()) == 3 * len(names)
        assert not joined.gateway.dispatch.counts["lane", "queue"]

    play(monkeypatch, scene, "a", "b")


def test_callers_have_sequences_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    callers = [f"key-{at}" for at in range(16)]

    async def scene(joined: Joined) -> None:
        boxes = set()
        for caller in callers:
            work = msgspec.structs.replace(step_of(7, start=True, caller=caller), share=2.5)
            asked = Asked(joined, work)
            await turn()
            box = home_of(7, "a", "b", caller=caller)
            ran = runs(joined, box)[-1].work
            assert (ran.caller, ran.share) == (caller, 2.5), "boxes give turns by the caller's share"
            runs(joined, box)[-1].say(1)
            await turn()
            boxes.add(box)
            assert asked.number == 1
        assert boxes == {"a", "b"}
        stranger = Asked(joined, step_of(7, caller="stranger"))
        await turn()
        assert isinstance(stranger.error, SequenceUnknown)

    play(monkeypatch, scene, "a", "b")


def test_a_box_with_more_workers_has_more_sequences() -> None:
    names = range(2000)
    places = ("a/0", "b/0", "b/1", "b/2")
    at_a = sum(homes.home(places, MODEL, name).startswith("a/") for name in names)
    assert 400 < at_a < 600, "a quarter"


def test_requests_of_one_sequence_leave_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        asked = [Asked(joined, step_of(1, start=not at)) for at in range(4)]
        other = Asked(joined, step_of(2, start=True))
        await turn()
        assert [run.work.step.id for run in runs(joined, "a")] == [1, 2], "other sequences do not wait"
        for at in range(4):
            own = [run for run in runs(joined, "a") if run.work.step.id == 1]
            assert len(own) == at + 1, "the next one waits for the answer"
            assert own[-1].work.step.start == (at == 0)
            own[-1].say(at)
            await turn()
        assert [each.number for each in asked] == [0, 1, 2, 3]
        runs(joined, "a")[1].say(9)
        await turn()
        assert other.number == 9

    play(monkeypatch, scene, "a")


def test_a_request_that_leaves_while_it_waits_for_its_turn_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(joined: Joined) -> None:
        first, gone, last = (Asked(joined, step_of(1, start=not at)) for at in range(3))
        await turn()
        gone.task.cancel()
        runs(joined, "a")[0].say(0)
        await turn()
        runs(joined, "a")[1].say(1)
        await turn()
        assert (first.number, last.number) == (0, 1) and len(runs(joined, "a")) == 2

    play(monkeypatch, scene, "a")


def test_a_sequence_whose_box_dies_with_a_request_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        name = name_for("a", "a", "b")
        await begun(joined, "a", name)
        asked = await ask(joined, name)
        joined.die("a")
        await turn()
        assert isinstance(asked.error, SequenceLost)
        assert asked.error.message == (
            f"the worker was lost, and with it the state of sequence {name}, which must begin again"
        )
        # The home is down: nothing goes on, and no other box begins what has its home there.
        later = await ask(joined, name)
        assert isinstance(later.error, SequenceUnknown) and later.error.status == 400
        assert "must specify the START flag" in later.error.message
        assert "its worker has gone, and its state with it" in later.error.message
        assert not runs(joined, "b") and len(runs(joined, "a")) == 2
        assert joined.gateway.poison.is_suspect(MODEL, step_of(name).call)

    play(monkeypatch, scene, "a", "b")


def test_the_death_of_a_box_ends_no_sequence_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        name = name_for("b", "a", "b")
        await begun(joined, "b", name)
        joined.die("a")
        asked = await ask(joined, name, end=True)
        runs(joined, "b")[-1].say(2)
        await turn()
        assert asked.number == 2

    play(monkeypatch, scene, "a", "b")


def test_a_start_waits_for_the_next_life_of_its_box(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        name = name_for("a", "a", "b")
        joined.die("a")
        asked = await ask(joined, name, start=True)
        assert not asked.task.done() and not runs(joined, "b")
        joined.begin("a")
        joined.tick(1)
        await turn()
        runs(joined, "a")[-1].say(5)
        await turn()
        assert asked.number == 5

    play(monkeypatch, scene, "a", "b")


def test_a_start_whose_box_stays_away_fails_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        joined.die("a")
        asked = await ask(joined, name_for("a", "a", "b"), start=True)
        [held] = joined.gateway.dispatch.items.values()
        held.stranded_ns -= joined.gateway.dispatch._wait_ns
        joined.tick(1)
        await turn()
        assert isinstance(asked.error, NoReplica) and asked.error.status == 503
        assert asked.error.message == "the worker of this sequence is not up"

    play(monkeypatch, scene, "a", "b")


def test_another_life_of_the_bridge_goes_on_with_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        await begun(joined, "a", 1)
        joined.cut_off("a")
        joined.begin("a")
        asked = await ask(joined, 1)
        assert isinstance(asked.error, SequenceUnknown)
        assert asked.error.message.endswith("it did not begin here, or it has ended")
        assert len(runs(joined, "a")) == 1, "no worker was asked"
        await begun(joined, "a", 1)

    play(monkeypatch, scene, "a")


def test_a_box_that_drains_takes_no_start_and_ends_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        name = name_for("a", "a", "b")
        await begun(joined, "a", name)
        joined.beat("a", draining=True)
        later = await ask(joined, name)
        assert isinstance(later.error, SequenceUnknown)
        start = await ask(joined, name, start=True)
        assert not start.task.done()
        joined.begin("a")
        joined.tick(1)
        await turn()
        runs(joined, "a")[-1].say(1)
        await turn()
        assert start.number == 1

    play(monkeypatch, scene, "a", "b")


@pytest.mark.parametrize("start", [True, False])
def test_a_box_that_begins_to_drain_gives_back_what_it_has_not_run(
    monkeypatch: pytest.MonkeyPatch, start: bool
) -> None:
    async def scene(joined: Joined) -> None:
        await begun(joined, "a", 1)
        joined.engines["a"].refusals.append(Draining("this box is shutting down"))
        asked = await ask(joined, 1, start=start)
        if not start:
            assert isinstance(asked.error, SequenceUnknown)
            return
        assert not asked.task.done()
        joined.begin("a")
        joined.tick(1)
        await turn()
        runs(joined, "a")[-1].say(3)
        await turn()
        assert asked.number == 3

    play(monkeypatch, scene, "a")


@pytest.mark.parametrize(
    "error", [QueueFull("full", retry_after_s=3), NoReplica("no worker"), SequenceLost("x")]
)
def test_errors_of_the_home_are_the_answer(monkeypatch: pytest.MonkeyPatch, error: PenstockError) -> None:
    async def scene(joined: Joined) -> None:
        name = name_for("a", "a", "b")
        joined.engines["a"].refusals.append(error)
        asked = await ask(joined, name, start=True)
        assert type(asked.error) is type(error) and asked.error.message == error.message
        assert asked.error.retry_after_s == error.retry_after_s
        assert not runs(joined, "b")

    play(monkeypatch, scene, "a", "b")


def test_a_lost_result_is_kept_and_told_again_without_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        await begun(joined, "a", 1)
        asked = await ask(joined, 1)
        joined.lose = lambda subject, data: subject.endswith(".results")
        runs(joined, "a")[-1].say(2)
        await turn()
        assert not asked.task.done()
        joined.lose = lambda subject, data: False
        joined.tick(joined.gateway.dispatch._ask_ns / 1e9)
        await turn()
        assert asked.number == 2 and len(runs(joined, "a")) == 2

    play(monkeypatch, scene, "a")


def test_a_request_that_did_not_arrive_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        joined.lose = lambda subject, data: subject.endswith(".work")
        asked = await ask(joined, 1, start=True)
        joined.lose = lambda subject, data: False
        joined.tick(joined.gateway.dispatch._ask_ns / 1e9)
        await turn()
        [run] = runs(joined, "a")
        run.say(1)
        await turn()
        assert asked.number == 1

    play(monkeypatch, scene, "a")


@pytest.mark.parametrize("loses_claims", [True, False])
def test_a_request_whose_result_was_forgotten_is_lost_and_not_run_again(
    monkeypatch: pytest.MonkeyPatch, loses_claims: bool
) -> None:
    async def scene(joined: Joined) -> None:
        await begun(joined, "a", 1)
        joined.lose = lambda subject, data: subject.endswith((".results", ".words")[: 1 + loses_claims])
        asked = await ask(joined, 1)
        runs(joined, "a")[-1].say(2)
        await turn()
        intake = joined.bridges["a"].intake
        intake._forget(next(reversed(intake._kept)))
        joined.lose = lambda subject, data: False
        joined.tick(joined.gateway.dispatch._ask_ns / 1e9)
        await turn()
        assert isinstance(asked.error, SequenceLost) and len(runs(joined, "a")) == 2
        joined.tick()
        await turn()

    play(monkeypatch, scene, "a")


def test_what_clients_believe_lost_ends_the_sequence_at_a_box_that_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(joined: Joined) -> None:
        await begun(joined, "a", 1)
        await begun(joined, "a", 2)
        asked = await ask(joined, 1)
        joined.die("a")
        await turn()
        assert isinstance(asked.error, SequenceLost)
        runs(joined, "a")[-1].say(2)
        joined.bridges["a"].broker.up = True
        joined.beat("a")
        later, other = await ask(joined, 1), await ask(joined, 2, end=True)
        assert isinstance(later.error, SequenceUnknown)
        assert later.error.message.endswith("one of its requests was lost")
        runs(joined, "a")[-1].say(3)
        await turn()
        assert other.number == 3, "a sequence without a lost request goes on"
        lost = [
            word
            for subject, data in joined.sent
            if subject.endswith(".word") and isinstance(word := read_to_box(data), Drop) and word.lost
        ]
        assert len(lost) == 1

    play(monkeypatch, scene, "a")


def lost_words(joined: Joined) -> list[Drop]:
    """All words that have told boxes which requests are lost."""
    words_ = [read_to_box(data) for subject, data in joined.sent if subject.endswith(".word")]
    return [word for word in words_ if isinstance(word, Drop) and word.lost]


def test_a_box_hears_what_clients_believe_lost_until_it_confirms(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        dispatch = joined.gateway.dispatch
        await begun(joined, "a", 1)
        asked = await ask(joined, 1)
        joined.die("a")
        await turn()
        assert isinstance(asked.error, SequenceLost)
        runs(joined, "a")[-1].say(2)
        joined.bridges["a"].broker.up = True
        joined.lose = lambda subject, data: subject.endswith(".word")
        joined.beat("a")
        joined.tick()
        joined.tick()
        await turn()
        assert len(lost_words(joined)) == 1, "not with each tick"
        [life] = dispatch._lost.by_life
        dispatch._lost._said[life] = 1, 1
        joined.tick()
        await turn()
        assert len(lost_words(joined)) == 2
        joined.lose = lambda subject, data: False
        later = await ask(joined, 1)
        assert isinstance(later.error, SequenceUnknown), "the word leaves before the request"
        assert later.error.message.endswith("one of its requests was lost")
        assert len(lost_words(joined)) == 3 and not dispatch._lost.by_life
        joined.tick(60)
        assert len(lost_words(joined)) == 3, "the box has confirmed"

    play(monkeypatch, scene, "a")


def bring_from_another(joined: Joined, box: str) -> str:
    """The last request arrives at a box once more, from a gateway that nobody plays; returns the id of that gateway."""
    bridge, other = joined.bridges[box], "f" * 24
    item, carried = read_item(
        next(data for subject, data in reversed(joined.sent) if subject.endswith(".work"))
    )
    assert carried is not None
    bridge.intake.heard(other)
    joined.bring(
        Names().box_work(box, bridge.life),
        encode(
            msgspec.structs.replace(
                item,
                work_item_id=f"{other}.1",
                router_id=other,
                reply_subject=results(other),
                penstock=msgspec.structs.replace(carried, router=other),
            )
        ),
    )
    return other


def test_a_request_of_a_gateway_that_died_runs_at_no_other_gateway_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client asks for the same step elsewhere, while the box still runs the step."""

    async def scene(joined: Joined) -> None:
        await begun(joined, "a", 1)
        asked = await ask(joined, 1)
        intake, router = joined.bridges["a"].intake, joined.gateway.router
        other = bring_from_another(joined, "a")
        await turn()
        assert len(runs(joined, "a")) == 2, "the step of the other gateway waits"
        intake._gateways[router].heard_ns -= int(60e9)
        intake.tick(connected=True)
        await turn()
        assert len(runs(joined, "a")) == 2 and runs(joined, "a")[-1].was_cancelled
        [answer] = [read_result(data)[0] for subject, data in joined.sent if subject == results(other)]
        assert answer.error_code == SequenceUnknown.code
        assert answer.error.endswith("one of its requests was lost")
        joined.tick(60)
        await turn()
        assert isinstance(asked.error, SequenceLost), "the gateway was cut off alone"
        await turn()
        intake.word(encode(Got(VERSION, other, [f"{other}.1"])))

    play(monkeypatch, scene, "a")


def test_a_request_of_another_gateway_waits_until_the_one_before_has_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(joined: Joined) -> None:
        await begun(joined, "a", 1)
        asked = await ask(joined, 1)
        other = bring_from_another(joined, "a")
        await turn()
        assert len(runs(joined, "a")) == 2
        runs(joined, "a")[-1].say(2)
        await turn()
        assert asked.number == 2 and len(runs(joined, "a")) == 3
        runs(joined, "a")[-1].say(3)
        await turn()
        joined.bridges["a"].intake.word(encode(Got(VERSION, other, [f"{other}.1"])))

    play(monkeypatch, scene, "a")


def test_a_gateway_whose_word_that_it_has_the_answer_was_lost_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says the word once; without the answer it would ask for the answer as long as that is kept."""

    async def scene(joined: Joined) -> None:
        await begun(joined, "a", 1)
        asked = await ask(joined, 1)
        joined.lose = lambda subject, data: subject.endswith(".word")
        runs(joined, "a")[-1].say(2)
        await turn()
        joined.lose = lambda subject, data: False
        intake, other = joined.bridges["a"].intake, bring_from_another(joined, "a")
        await turn()
        [kept] = intake._kept.values()
        assert asked.number == 2 and len(runs(joined, "a")) == 2
        kept.ended_ns -= int(60e9)
        intake.tick(connected=True)
        await turn()
        assert len(runs(joined, "a")) == 3
        runs(joined, "a")[-1].say(3)
        await turn()
        intake.word(encode(Got(VERSION, other, [f"{other}.1"])))
        intake.word(encode(Got(VERSION, joined.gateway.router, [kept.name])))

    play(monkeypatch, scene, "a")


def test_a_gateway_that_dies_loses_also_requests_whose_results_a_box_has_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There was no room for the result."""

    async def scene(joined: Joined) -> None:
        await begun(joined, "a", 1)
        joined.lose = lambda subject, data: subject.endswith(".results")
        asked = await ask(joined, 1)
        runs(joined, "a")[-1].say(2)
        await turn()
        joined.lose = lambda subject, data: False
        intake = joined.bridges["a"].intake
        intake._forget(next(iter(intake._kept)))
        other = bring_from_another(joined, "a")
        await turn()
        assert len(runs(joined, "a")) == 2 and len(intake) == 1, "the step of the other gateway waits"
        intake._gateways[joined.gateway.router].heard_ns -= int(60e9)
        intake.tick(connected=True)
        await turn()
        [answer] = [read_result(data)[0] for subject, data in joined.sent if subject == results(other)]
        assert answer.error_code == SequenceUnknown.code
        assert answer.error.endswith("one of its requests was lost")
        intake.heard(joined.gateway.router)
        joined.tick(60)
        await turn()
        assert isinstance(asked.error, SequenceLost), "the gateway was cut off alone"
        await turn()
        intake.word(encode(Got(VERSION, other, [f"{other}.1"])))

    play(monkeypatch, scene, "a")


def test_a_request_that_waits_for_another_gateway_fails_at_its_deadline() -> None:
    async def scene() -> None:
        table, _ = begun_sequences()
        take(table, "r.1", step_of(1, start=True))
        with pytest.raises(DeadlineExceeded, match="another gateway"):
            await table.turn("s", step_of(1), 0)
        await table.turn("r", step_of(1), 0)
        await table.turn("s", step_of(1, start=True), 0)
        await table.turn("s", step_of(2), 0)

    asyncio.run(scene())


def test_a_request_that_is_told_lost_after_the_sequence_began_anew_ends_nothing() -> None:
    table, _ = begun_sequences()
    take(table, "r.1", step_of(1, start=True))
    take(table, "s.1", step_of(1, start=True))
    table.lost(["r.1"])
    take(table, "s.2", step_of(1))
    table.lost(["s.1"])
    with pytest.raises(SequenceUnknown, match="one of its requests was lost"):
        take(table, "s.3", step_of(1))


def test_what_is_believed_lost_ends_the_sequence_whatever_its_box_says_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A box that stood still says that it has the request, and the result, with its first sign of life."""

    async def scene(joined: Joined) -> None:
        await begun(joined, "a", 1)
        asked = await ask(joined, 1)
        gateway, bridge = joined.gateway, joined.bridges["a"]
        [item] = bridge.intake._running
        gateway.boxes._end(gateway.boxes.by_name["a"])
        await turn()
        assert isinstance(asked.error, SequenceLost)
        joined.beat("a")
        joined.bring(words(gateway.router), encode(Claims(VERSION, "a", bridge.life, [item], [""])))
        runs(joined, "a")[-1].say(2)
        await turn()
        gateway.dispatch.say_got()
        await turn()
        later = await ask(joined, 1)
        assert isinstance(later.error, SequenceUnknown)
        assert later.error.message.endswith("one of its requests was lost")

    play(monkeypatch, scene, "a")


def test_a_box_that_changes_its_broker_keeps_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment nobody listens at the subject of the box, which is no death."""

    async def scene(joined: Joined) -> None:
        await begun(joined, "a", 1)
        joined.lose = lambda subject, data: subject.endswith(".work")
        asked = await ask(joined, 1)
        [item] = joined.gateway.dispatch.items
        joined.gateway.dispatch.gone(joined.bridges["a"].life, item)
        await turn()
        assert not asked.task.done()
        joined.lose = lambda subject, data: False
        joined.beat("a")
        joined.tick(1)
        await turn()
        runs(joined, "a")[-1].say(2)
        await turn()
        assert asked.number == 2 and len(runs(joined, "a")) == 2

    play(monkeypatch, scene, "a")


def test_a_late_copy_of_an_answered_request_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message may come by a second broker after the copy that was sent again, and after the word about its answer."""

    async def scene(joined: Joined) -> None:
        await begun(joined, "a", 1)
        asked = await ask(joined, 1)
        subject, data = next(each for each in reversed(joined.sent) if each[0].endswith(".work"))
        runs(joined, "a")[-1].say(2)
        await turn()
        joined.gateway.dispatch.say_got()
        await turn()
        assert asked.number == 2 and not joined.bridges["a"].intake.kept
        joined.bring(subject, data)
        await turn()
        assert len(runs(joined, "a")) == 2

    play(monkeypatch, scene, "a")


def test_a_client_that_leaves_cancels_its_step_and_keeps_its_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(joined: Joined) -> None:
        await begun(joined, "a", 1)
        asked = await ask(joined, 1)
        asked.task.cancel()
        await turn()
        assert runs(joined, "a")[-1].was_cancelled
        later = await ask(joined, 1)
        runs(joined, "a")[-1].say(4)
        await turn()
        assert later.number == 4

    play(monkeypatch, scene, "a")


def test_a_new_box_moves_its_share_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        moves = next(
            n for n in range(1, 99) if home_of(n, "a", "b") == "a" and home_of(n, "a", "b", "c") == "c"
        )
        stays = next(n for n in range(1, 99) if home_of(n, "a", "b") == home_of(n, "a", "b", "c") == "a")
        joined.add("c")
        joined.leave("c")
        for name in (moves, stays):
            await begun(joined, "a", name)
        joined.join("c")
        moved, other = await ask(joined, moves), await ask(joined, stays)
        assert isinstance(moved.error, SequenceUnknown)
        assert moved.error.message.endswith("it did not begin here, or it has ended")
        runs(joined, "a")[-1].say(2)
        await turn()
        assert other.number == 2
        # The box goes again: what began before it came is another sequence than the one that its client knows.
        joined.leave("c")
        back, other = await ask(joined, moves), await ask(joined, stays)
        assert isinstance(back.error, SequenceUnknown)
        assert "the boxes or pools of the cluster have changed" in back.error.message
        runs(joined, "a")[-1].say(3)
        await turn()
        assert other.number == 3

    play(monkeypatch, scene, "a", "b")


def test_two_gateways_find_the_same_home_also_of_a_box_that_is_down() -> None:
    rows = ("a/0", "a/1", "b/0")
    first, second = (Homes(lambda model, choice: rows) for _ in range(2))
    for name in range(50):
        work = step_of(name)
        assert first.find(work, ANY_BOX) == second.find(work, ANY_BOX)
        assert first.find(work, ANY_BOX)[1] is None, "the first look knows no change"


def test_homes_remember_the_changes_of_places() -> None:
    now_ns, places = 10**12, ("a/0",)

    def moved(to: tuple[str, ...], seconds: int = 10) -> None:
        nonlocal now_ns, places
        now_ns, places = now_ns + seconds * 10**9, to
        found.look()

    found = Homes(lambda model, choice: places, now_ns=lambda: now_ns)
    name = name_for("b", "a", "b")
    work, other = step_of(name), step_of(name_for("a", "a", "b"))
    assert found.find(work, ANY_BOX) == found.find(other, ANY_BOX) == ("a", None)
    moved(("a/0", "b/0"))
    assert found.find(work, ANY_BOX) == ("b", 0) and found.find(other, ANY_BOX) == ("a", None)
    moved(("a/0",))
    now_ns += 5 * 10**9
    assert found.find(work, ANY_BOX) == ("a", 5000) and found.find(other, ANY_BOX) == ("a", None)
    moved(())
    assert found.find(work, ANY_BOX)[0] == ""
    for _ in range(MOST_CHANGES):
        moved(("a/0", "c/0"))
        moved(("a/0",))
    assert found.find(step_of(5), Choice(pool="other"))[1] is None, "another choice has places of its own"
    box, stays_ms = found.find(other, ANY_BOX)
    assert box == "a" and stays_ms is not None, "what was forgotten counts as a change"


def test_homes_remember_nothing_of_names_that_clients_make_up() -> None:
    now_ns, places = 10**12, ("a/0",)
    found = Homes(
        lambda model, choice: places if choice.pool == "here" else (),
        lambda choice: choice.pool or "here",
        lambda: now_ns,
    )
    work = step_of(name_for("b", "a", "b"))
    assert found.find(work, ANY_BOX) == ("a", None)
    places = ("a/0", "b/0")
    found.look()
    for at in range(2 * MOST_MODELS):
        assert found.find(work, Choice(pool=f"p{at}")) == ("", None)
        assert found.find(work, Choice(profile=f"g{at}")) == ("b", 0), "one home for all machine profiles"
    assert found.find(work, ANY_BOX) == found.find(work, Choice(pool="here")) == ("b", 0)


def begun_sequences() -> tuple[BegunSequences, list[int]]:
    """The table of a box, and its clock."""
    clock = [10**12]
    return BegunSequences(lambda: clock[0]), clock


def take(table: BegunSequences, item: str, work: Work, stays_ms: int | None = None) -> None:
    """A request arrives at the table."""
    assert work.step is not None
    table.take(item, work, work.step, "shown", stays_ms)


def test_a_table_refuses_sequences_that_had_another_home_since_their_last_request() -> None:
    table, clock = begun_sequences()
    take(table, "r.1", step_of(1, start=True), 0)
    clock[0] += 10**10
    take(table, "r.2", step_of(1), 10_000)
    clock[0] += 10**10
    with pytest.raises(SequenceUnknown, match=r"to model 'shown' must .*have changed since its last request"):
        take(table, "r.3", step_of(1), 9_999)
    with pytest.raises(SequenceUnknown, match="have changed since"):
        take(table, "r.4", step_of(1))
    take(table, "r.5", step_of(1, start=True), 0)
    take(table, "r.6", step_of(1), 0)


def test_a_table_runs_no_item_twice_and_is_bounded() -> None:
    table, _ = begun_sequences()
    take(table, "r.1", step_of(1, start=True))
    with pytest.raises(SequenceLost):
        take(table, "r.1", step_of(1, start=True))
    table.confirmed(["r.1", "r.unknown"])
    table.lost(["r.unknown", "r.1"])
    take(table, "r.2", step_of(1))
    for at in range(MOST_SEQUENCES):
        take(table, f"x.{at}", step_of(f"n{at}", start=True))
    assert len(table) == len(table._used) == MOST_SEQUENCES
    with pytest.raises(SequenceUnknown, match="did not begin here"):
        take(table, "r.3", step_of(1))


def test_words_of_a_stranger_end_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        await begun(joined, "a", 1)
        asked = await ask(joined, 1)
        [name] = joined.gateway.dispatch.items
        intake = joined.bridges["a"].intake
        intake.word(encode(Drop(VERSION, "stranger", [name], lost=True)))
        intake.word(encode(Drop(VERSION, joined.gateway.router, ["x.1", name[:-1]], lost=True)))
        runs(joined, "a")[-1].say(2)
        await turn()
        assert asked.number == 2
        later = await ask(joined, 1)
        runs(joined, "a")[-1].say(3)
        await turn()
        assert later.number == 3

    play(monkeypatch, scene, "a")


def test_a_box_that_claims_what_it_was_not_sent_changes_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        name = name_for("a", "a", "b")
        asked = await ask(joined, name, start=True)
        [item] = joined.gateway.dispatch.items
        forged = Claims(VERSION, "b", joined.bridges["b"].life, [item], [""])
        joined.bring(words(joined.gateway.router), encode(forged))
        joined.die("b")
        await turn()
        assert not asked.task.done(), "the death of a box that was not asked costs nothing"
        runs(joined, "a")[-1].say(1)
        await turn()
        assert asked.number == 1

    play(monkeypatch, scene, "a", "b")


@pytest.mark.parametrize("stays_ms", [-1, "x", 2**70])
def test_an_item_with_a_time_that_is_none_is_dropped(monkeypatch: pytest.MonkeyPatch, stays_ms: Any) -> None:
    async def scene(joined: Joined) -> None:
        asked = await ask(joined, 1, start=True)
        [data] = [data for subject, data in joined.sent if subject.endswith(".work")]
        forged = msgspec.msgpack.decode(data)
        forged["work_item_id"] += "9"
        forged["penstock"]["stays_ms"] = stays_ms if stays_ms != 2**70 else float(stays_ms)
        intake = joined.bridges["a"].intake
        intake.take(msgspec.msgpack.encode(forged))
        await turn()
        assert intake.counts["unreadable"] == 1 and len(runs(joined, "a")) == 1
        assert read_item(data)[1].stays_ms is None
        runs(joined, "a")[-1].say(1)
        await turn()
        assert asked.number == 1

    play(monkeypatch, scene, "a")


def test_rows_of_a_box_say_how_many_workers_it_should_have(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        row = joined.bridges["a"]._rows()["a"]
        assert isinstance(row, BoxRow) and row.slots >= 1
        joined.gateway.models.take("a", msgspec.structs.replace(row, slots=3))
        assert joined.gateway.models._places(MODEL, ANY_BOX) == ("a/0", "a/1", "a/2")
        assert joined.gateway.models._places(MODEL, Choice(pool="bench")) == ()
        joined.gateway.models.reserved = {"a": "bench"}.get
        assert joined.gateway.models._places(MODEL, ANY_BOX) == ()
        assert len(joined.gateway.models._places(MODEL, Choice(pool="bench"))) == 3

    play(monkeypatch, scene, "a")
