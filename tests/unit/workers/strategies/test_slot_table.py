"""The slots of sequences: order, slots, backlog, ends, restarts, idle ones; against a plain model of the rules."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.errors import QueueFull, SequenceUnknown
from ipc.wire.messages import InferCall, Step
from tests.fakes.jobs import make_job
from workers.scheduling.job import Job
from workers.strategies.sequence import MAX_LOST, SlotTable, Turn

IDLE_NS = 1000
_ids = count(1)


def job(step: Step, caller: str = "") -> Job:
    """A request of a sequence."""
    call = InferCall([], [], step=step)
    return make_job(call, number=next(_ids), model="m@1", caller=caller)


class Table:
    """A table whose requests are ready at once; `running` are those whose turn it is."""

    def __init__(self, slots: int = 2, most_waiting: int = 100) -> None:
        self.slots = SlotTable("m", slots, IDLE_NS, most_waiting)
        self.running: list[Turn] = []
        self.failed: list[Job] = []
        self._turns: dict[int, Turn] = {}
        self.now = 0

    def ask(self, name: int | str, start: bool = False, end: bool = False, arrive: bool = True) -> Turn:
        step = Step(name, start, end)
        turn = self.slots.enrol(step, job(step))
        self._turns[turn.job.id] = turn
        if arrive:
            self.arrive(turn)
        return turn

    def arrive(self, turn: Turn) -> None:
        if self.slots.arrive(turn):
            self.running.append(turn)

    def finish(self, turn: Turn, succeeded: bool = True) -> None:
        if turn in self.running:
            self.running.remove(turn)
        outcome = self.slots.finish(turn, succeeded, self.now)
        self.running += [self._turns[one.id] for one in outcome.run]
        self.failed += outcome.void

    def expire(self) -> list[int | str]:
        late, outcome = self.slots.expire(self.now)
        self.running += [self._turns[one.id] for one in outcome.run]
        return late


def test_requests_of_an_id_run_one_after_the_other_in_one_slot() -> None:
    table = Table()
    turns = [table.ask(7, start=True), table.ask(7), table.ask(7, end=True)]
    for turn in turns:
        assert table.running == [turn] and turn.sequence.slot == 0
        table.finish(turn)
    assert table.slots.active == 0
    with pytest.raises(
        SequenceUnknown,
        match="for sequence 7 to model 'm' must specify the START flag on the first request of the sequence: ",
    ):
        table.ask(7)


def test_a_request_that_is_ready_before_an_earlier_one_waits_for_it() -> None:
    table = Table()
    first = table.ask(7, start=True, arrive=False)
    second = table.ask(7)
    assert not table.running
    table.arrive(first)
    assert table.running == [first]
    table.finish(first)
    assert table.running == [second]


def test_more_sequences_than_slots_get_them_in_the_order_of_their_starts() -> None:
    table = Table(slots=2)
    starts = [table.ask(name, start=True) for name in "abcd"]
    ends = [table.ask(name, end=True) for name in "abcd"]
    assert table.running == starts[:2] and (table.slots.active, table.slots.waiting) == (2, 2)
    table.finish(starts[1])
    table.finish(ends[1])
    assert starts[2] in table.running and starts[2].sequence.slot == 1
    table.finish(starts[0])
    assert starts[3] not in table.running
    table.finish(ends[0])
    assert starts[3] in table.running and starts[3].sequence.slot == 0


def test_a_full_backlog_refuses_another_start_and_nothing_else() -> None:
    table = Table(slots=1, most_waiting=1)
    table.ask(1, start=True)
    table.ask(2, start=True)
    with pytest.raises(QueueFull, match="1 sequences wait"):
        table.ask(3, start=True)
    table.ask(1)
    table.ask(2)


def test_start_on_an_open_sequence_begins_another_in_the_same_slot_behind_what_is_queued() -> None:
    table = Table(slots=1)
    first, second = table.ask(1, start=True), table.ask(1)
    waiting = table.ask(2, start=True)
    again = table.ask(1, start=True, end=True)
    assert again.restarts and not first.restarts and not waiting.restarts
    for turn in (first, second, again):
        assert table.running == [turn]
        table.finish(turn)
    assert table.running == [waiting]


def test_a_sequence_of_the_same_id_behind_an_end_lines_up_behind_the_backlog() -> None:
    table = Table(slots=1)
    whole = table.ask(1, start=True, end=True)
    waiting = table.ask(2, start=True, end=True)
    again = table.ask(1, start=True, end=True)
    assert not again.restarts
    table.finish(whole)
    assert table.running == [waiting]
    table.finish(waiting)
    assert table.running == [again]


@pytest.mark.parametrize("running", [True, False], ids=["in a slot", "in the backlog"])
def test_what_follows_a_start_that_failed_is_void_up_to_the_next_start(running: bool) -> None:
    table = Table(slots=1)
    other = None if running else table.ask("other", start=True)
    start, void, again, last = (
        table.ask(1, start=True),
        table.ask(1),
        table.ask(1, start=True),
        table.ask(1),
    )
    table.finish(start, succeeded=False)
    assert table.failed == [void.job]
    if other is not None:
        assert table.running == [other]
        table.ask("other", end=True)
        table.finish(other)
        table.finish(table.running[0])
    assert table.running == [again]
    table.finish(again, succeeded=False)
    assert table.failed == [void.job, last.job] and not table.slots.active
    with pytest.raises(SequenceUnknown, match="START request did not succeed"):
        table.ask(1)


def test_a_failure_in_the_middle_leaves_the_sequence_open() -> None:
    table = Table()
    start, middle, end = table.ask(1, start=True), table.ask(1), table.ask(1, end=True)
    table.finish(start)
    table.finish(middle, succeeded=False)
    assert table.running == [end] and not table.failed


def test_a_cancelled_request_gives_its_turn_up_before_it_comes() -> None:
    table = Table()
    start, middle, last = table.ask(1, start=True), table.ask(1), table.ask(1)
    table.finish(middle, succeeded=False)
    assert table.running == [start]
    table.finish(start)
    assert table.running == [last]
    table.finish(middle, succeeded=False)
    assert table.running == [last]


def test_an_idle_sequence_loses_its_slot_and_is_told_so() -> None:
    table = Table(slots=1)
    start = table.ask(1, start=True)
    waiting = table.ask(2, start=True)
    table.now = 5 * IDLE_NS
    assert table.expire() == [], "it has a request"
    table.finish(start)
    table.now += IDLE_NS
    assert table.expire() == []
    table.now += 1
    assert table.expire() == [1] and table.running == [waiting]
    with pytest.raises(SequenceUnknown, match="of the sequence: it expired after 1 microseconds"):
        table.ask(1)
    table.ask(1, start=True)
    table.ask(1)


def test_what_is_remembered_of_lost_sequences_is_bounded() -> None:
    table = Table(slots=MAX_LOST + 5)
    for name in range(1, MAX_LOST + 6):
        table.finish(table.ask(name, start=True))
    table.now = 2 * IDLE_NS
    assert len(table.expire()) == MAX_LOST + 5
    assert len(table.slots._lost) == MAX_LOST


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 6), st.booleans(), st.booleans(), st.booleans()),
        st.tuples(st.just("arrive"), st.integers(0, 30)),
        st.tuples(st.just("finish"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("pass"), st.integers(1, 2 * IDLE_NS)),
    ),
    max_size=50,
)


@given(EVENTS, st.integers(1, 3))
def test_order_slots_and_backlog_hold_whatever_happens(events: list[tuple[object, ...]], slots: int) -> None:
    table = Table(slots, most_waiting=2)
    asked: dict[int, list[Turn]] = {}
    late: list[Turn] = []
    done: set[int] = set()

    def waiting(turn: Turn) -> bool:
        return turn.job.id not in done and turn.job not in table.failed

    def check() -> None:
        names = [turn.sequence.id for turn in table.running]
        assert len(set(names)) == len(names), "two requests of one id"
        used = [turn.sequence.slot for turn in table.running]
        assert None not in used and len(set(used)) == len(used)
        assert all(slot is not None and slot < slots for slot in used)
        assert table.slots.active <= slots
        for turn in table.running:
            earlier = asked[int(turn.sequence.id)]
            before = earlier[: earlier.index(turn)]
            assert not any(waiting(one) for one in before), "an earlier request of the id is still open"

    for event in events:
        every = [turn for turns in asked.values() for turn in turns if waiting(turn)]
        if event[0] == "ask":
            _, name, start, end, arrive = event
            try:
                turn = table.ask(int(str(name)), bool(start), bool(end), arrive=bool(arrive))
            except (SequenceUnknown, QueueFull):
                continue
            asked.setdefault(int(str(name)), []).append(turn)
            if not arrive:
                late.append(turn)
        elif event[0] == "arrive" and late:
            turn = late.pop(int(str(event[1])) % len(late))
            if waiting(turn):
                table.arrive(turn)
        elif event[0] == "finish" and table.running:
            turn = table.running[int(str(event[1])) % len(table.running)]
            done.add(turn.job.id)
            table.finish(turn, bool(event[2]))
        elif event[0] == "cancel" and every:
            turn = every[int(str(event[1])) % len(every)]
            done.add(turn.job.id)
            table.finish(turn, succeeded=False)
        elif event[0] == "pass":
            table.now += int(str(event[1]))
            table.expire()
        check()
    for turn in late:
        if waiting(turn):
            table.arrive(turn)
            check()
    for _ in range(1000):
        if not any(waiting(turn) for turns in asked.values() for turn in turns):
            break
        if not table.running:
            # Those that have slots and nothing to do hold the others up until they are idle for too long.
            table.now += 2 * IDLE_NS
            assert table.expire(), "nothing runs, nothing is idle, and requests wait"
            check()
            continue
        turn = table.running[0]
        done.add(turn.job.id)
        table.finish(turn)
        check()
    assert not any(waiting(turn) for turns in asked.values() for turn in turns), "a request never ended"


@given(st.lists(st.integers(1, 12), unique=True, min_size=1, max_size=12), st.integers(1, 4), st.randoms())
def test_the_backlog_is_first_in_first_out(names: list[int], slots: int, random: object) -> None:
    table = Table(slots)
    starts = [table.ask(name, start=True, end=True) for name in names]
    began: list[Turn] = []
    while table.running:
        began += [turn for turn in table.running if turn not in began]
        table.finish(random.choice(table.running))  # type: ignore[attr-defined]
    assert began == starts


def test_the_same_id_of_two_callers_is_two_sequences() -> None:
    slots = SlotTable("m", 2, IDLE_NS, 0)
    ann, bob = (slots.enrol(Step(7, start=True), job(Step(7), caller)) for caller in ("ann", "bob"))
    assert (ann.sequence.slot, bob.sequence.slot) == (0, 1) and not bob.restarts
    with pytest.raises(SequenceUnknown):
        slots.enrol(Step(7), job(Step(7)))
    for turn in (ann, bob):
        assert slots.arrive(turn)
        slots.finish(turn, succeeded=True, now_ns=0)
    slots.finish(slots.enrol(Step(7, end=True), job(Step(7), "bob")), succeeded=True, now_ns=0)
    assert slots.enrol(Step(7), job(Step(7), "ann")).sequence is ann.sequence
    with pytest.raises(SequenceUnknown):
        slots.enrol(Step(7), job(Step(7), "bob"))
