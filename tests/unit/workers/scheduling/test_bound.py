"""The bound of a queue: predicted seconds by lane, a floor of one full batch, and rooms that sessions divide."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.errors import QueueFull
from ipc.settings import Queue, Settings
from ipc.shares import MODELS_MOST
from tests.fakes.jobs import Plain, make_job
from workers.adapters.base import Prepared
from workers.scheduling import bound as bounds
from workers.scheduling.bound import Bound, Paces
from workers.scheduling.job import Batch, Job, Piece
from workers.scheduling.queue import WorkQueue

FULL = 100
PACES = {"m": 0.01, "slow": 0.2, "fast": 0.0001}
"""Seconds for a token. A full batch of the slow model takes 20 s, ten times the bound."""
FIRST_S = 1 / bounds.FIRST_TOKENS_PER_S
"""Seconds for a token of a model that has not run."""
_ids = count(1)


class Crowd(Plain):
    """Jobs of a kind that bounds itself."""

    bounds_itself = True


class Turns(Plain):
    """Jobs that take many turns."""

    in_turns = True


def bound_of(paces: dict[str, float] = PACES, batch_tokens: int = FULL, **settings: float) -> Bound:
    """A bound of two seconds for queries and ten for bulk work, with known paces."""
    known = Paces()
    for model, seconds in paces.items():
        known.record(model, FULL, FULL * seconds, full=True)
    limits = {"max_wait_s": 2.0, "bulk_max_wait_s": 10.0, **settings}
    return Bound(Queue(**limits), known, batch_tokens)  # type: ignore[arg-type]


def job(cost: int, model: str = "m", session: bytes = b"s", **more: object) -> Job:
    """A prepared job of one item."""
    made = make_job(number=next(_ids), model=model, cost=cost, session=session, **more)  # type: ignore[arg-type]
    made.prepared = [Prepared(None, cost)]
    return made


def run(bound: Bound, *jobs: Job) -> Batch:
    """The device begins a batch of these jobs."""
    pieces = [Piece(one, 0, one.prepared[0]) for one in jobs]
    batch = Batch(pieces, None, sum(piece.prepared.cost for piece in pieces), 0.0)
    bound.run(batch)
    return batch


def fill(bound: Bound, cost: int = 10, **more: object) -> list[Job]:
    """Admit jobs until one is refused."""
    held = []
    while len(held) < 10_000:
        one = job(cost, **more)  # type: ignore[arg-type]
        try:
            bound.admit(one)
        except QueueFull:
            return held
        held.append(one)
    raise AssertionError("there is no bound")


def test_queries_wait_for_the_predicted_time_and_bulk_work_for_a_time_of_its_own() -> None:
    bound = bound_of()
    assert len(fill(bound)) == 20, "200 tokens are two seconds"
    assert len(fill(bound, lane="bulk")) == 100, "a full lane of queries keeps no bulk work out"


def test_a_full_bulk_lane_keeps_no_query_out() -> None:
    bound = bound_of()
    fill(bound, lane="bulk")
    assert len(fill(bound)) == 20


def test_one_request_may_overshoot_and_the_next_is_refused_with_the_bound_and_its_setting() -> None:
    bound = bound_of()
    bound.admit(job(199))
    large = job(50_000)
    bound.admit(large)
    with pytest.raises(QueueFull, match=r"interactive lane .* holds 502\.0 s .* is 2 s \(queue.max_wait_s\)"):
        bound.admit(job(1))
    bound.end(large)
    bound.admit(job(1))
    assert bound.tokens == 200


def test_what_the_device_has_begun_waits_no_more() -> None:
    bound = bound_of()
    held = fill(bound)
    run(bound, *held[:10])
    assert bound.tokens == 100 and len(fill(bound)) == 10
    for one in held:
        bound.end(one)
    assert bound.tokens == 100


def test_of_a_large_request_only_what_has_not_begun_counts() -> None:
    bound, large = bound_of(), job(0)
    large.prepared = [Prepared(None, 100)] * 3
    large.cost = 280
    bound.admit(large)
    pieces = [Piece(large, at, large.prepared[at]) for at in range(2)]
    bound.run(Batch(pieces, None, 200, 0.0))
    assert bound.tokens == 80
    bound.change(large, 300 - large.begun)
    assert bound.tokens == 100, "the estimate was 20 too low"
    bound.end(large)
    assert bound.tokens == 0


def test_a_job_that_takes_many_turns_counts_until_it_ends_or_rests() -> None:
    bound, stream = bound_of(), job(16, strategy=Turns())
    bound.admit(stream)
    run(bound, stream)
    assert bound.tokens == 16
    bound.end(stream)
    bound.begin(stream)
    assert bound.tokens == 16
    bound.end(stream)
    assert bound.tokens == 0


def test_a_full_batch_may_always_wait_however_slow_its_model_is() -> None:
    bound = bound_of()
    held = fill(bound, model="slow")
    assert len(held) == FULL // 10
    run(bound, *held)
    assert len(fill(bound, model="slow")) == FULL // 10, "the next batch waits while one runs"


def test_a_full_batch_is_what_full_batches_held_lately() -> None:
    bound = bound_of({}, batch_tokens=100 * FULL)
    assert len(fill(bound)) == 1000
    bound = bound_of({"m": 0.2}, batch_tokens=100 * FULL)
    assert len(fill(bound)) == 20, "twice what full batches held, and by no means ten thousand tokens"


def test_a_slow_model_keeps_a_fast_one_not_out() -> None:
    bound = bound_of()
    fill(bound, model="slow")
    assert len(fill(bound, model="fast", cost=100)) == 100, "one second of it"


def test_a_model_that_has_not_run_counts_by_a_usual_pace_and_has_a_full_batch_in_any_case() -> None:
    usual = int(2.0 * bounds.FIRST_TOKENS_PER_S) // 10
    assert len(fill(bound_of({}))) == usual
    small = Bound(Queue(), Paces(), FULL, lambda model: 16)
    assert len(fill(small)) == usual, "a batch of one row is no bound of one request"
    assert len(fill(bound_of({}, batch_tokens=40_000))) == 4000


def test_a_burst_of_long_texts_is_let_in_after_one_short_text_as_if_nothing_had_run() -> None:
    queue = WorkQueue(Settings(), 256)
    text = job(188)
    for _ in range(3):
        alone = run(queue._bound, job(2))
        alone.seconds = 0.02
        queue.ran(alone, 2)
    held = fill(queue._bound, cost=188)
    assert len(held) == math.ceil(2.0 * bounds.FIRST_TOKENS_PER_S / 188)
    with pytest.raises(QueueFull) as caught:
        queue.admit(text)
    assert caught.value.retry_after_s == 3.0
    first = run(queue._bound, held[0])
    first.seconds, first.full = 2.0, True
    queue.ran(first, 188)
    for one in held[3:]:
        queue.settle(one)
    with pytest.raises(QueueFull):
        queue.admit(text)


def test_behind_a_held_request_a_full_batch_counts_by_its_tokens_until_one_was_full_by_its_items() -> None:
    queue = WorkQueue(Settings(queue=Queue(max_wait_s=0.001)), FULL)
    held = run(queue._bound, job(2))
    waiting = fill(queue._bound, cost=2)
    assert len(waiting) == FULL // 2, "however short the bound and however few items a batch may hold"
    held.seconds = 60.0
    queue.ran(held, 2)
    with pytest.raises(QueueFull):
        queue.admit(job(2))
    first = run(queue._bound, waiting[0])
    first.seconds, first.full = 0.02, True
    queue.ran(first, 2)
    for one in waiting:
        queue.settle(one)
    assert len(fill(queue._bound, cost=2)) == bounds.FULL_AGAIN


def test_the_floor_may_be_set() -> None:
    assert len(fill(bound_of(min_tokens=40), model="slow")) == 4
    assert len(fill(bound_of({}, min_tokens=40))) == 4
    assert len(fill(bound_of(min_tokens=1000))) == 100


def test_what_bounds_itself_is_let_in_and_fills_nothing() -> None:
    bound, crowd = bound_of(), Crowd()
    held = [job(1000, strategy=crowd) for _ in range(50)]
    for one in held:
        bound.admit(one)
    assert bound.tokens == 50_000 and bound.drain_s("interactive") == 0.0
    assert len(fill(bound)) == 20
    bound.admit(job(1000, strategy=crowd))


def test_retry_after_is_the_time_until_the_device_has_begun_what_is_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(bounds.time, "monotonic", lambda: clock[0])
    bound = bound_of()
    held = fill(bound)
    fill(bound, lane="bulk")
    assert bound.drain_s("interactive") == pytest.approx(2.0)
    assert bound.drain_s("bulk") == pytest.approx(12.0), "queries go before bulk work"
    run(bound, *held[:10])
    assert bound.drain_s("interactive") == pytest.approx(1.0 + 1.0)
    clock[0] += 0.75
    assert bound.drain_s("interactive") == pytest.approx(1.0 + 0.25)
    bound.ran()
    assert bound.drain_s("interactive") == pytest.approx(1.0)
    refused: list[float | None] = []
    fill(bound)
    with pytest.raises(QueueFull) as caught:
        bound.admit(job(1))
    refused.append(caught.value.retry_after_s)
    slow = fill(bound_of({"slow": 0.2}), model="slow")
    assert slow and refused == [2.0]


def test_a_slow_full_batch_is_told_as_long_as_it_takes() -> None:
    bound = bound_of()
    fill(bound, model="slow")
    with pytest.raises(QueueFull) as caught:
        bound.admit(job(1, model="slow"))
    assert caught.value.retry_after_s == 20.0


def test_a_session_alone_has_all_the_room_and_idle_ones_take_nothing() -> None:
    bound = bound_of()
    assert bound.rooms("interactive", [b"s", b"idle"]) == {b"s": 2.0, b"idle": 2.0}
    fill(bound)
    rooms = bound.rooms("interactive", [b"s", b"idle"])
    assert rooms[b"s"] == pytest.approx(0.0) and rooms[b"idle"] == pytest.approx(0.0)


def test_a_session_that_is_refused_gets_its_part_as_soon_as_the_device_has_drained_it() -> None:
    bound, keys = bound_of(), [b"s", b"late"]
    held = deque(fill(bound))
    with pytest.raises(QueueFull):
        bound.admit(job(10, session=b"late"))
    assert bound.rooms("interactive", keys)[b"s"] == pytest.approx(-1.0), "it may send nothing for a second"
    for _ in range(10):
        run(bound, held.popleft())
    rooms = bound.rooms("interactive", keys)
    assert rooms[b"s"] == pytest.approx(0.2, abs=0.25) and rooms[b"late"] == pytest.approx(1.0)
    fill(bound, session=b"late")
    assert sum(bound.rooms("interactive", keys).values()) == pytest.approx(0.0, abs=0.2)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_the_rooms_of_busy_sessions_and_what_they_hold_are_the_bound(counts: list[int]) -> None:
    bound = bound_of()
    keys = [bytes([at]) for at in range(len(counts))]
    for key, number in zip(keys, counts, strict=True):
        for _ in range(number):
            one = job(10, session=key)
            bound.begin(one)
    part = 2.0 / len(keys)
    held = {key: number * 0.1 for key, number in zip(keys, counts, strict=True)}
    rooms = bound.rooms("interactive", keys)
    for key in keys:
        others = sum(min(part, held[other]) for other in keys if other != key)
        free = 2.0 - sum(held.values())
        assert rooms[key] == pytest.approx(min(free, 2.0 - others - held[key]), abs=1e-6)
    if all(held[key] >= part for key in keys):
        assert sum(held.values()) + sum(max(0.0, room) for room in rooms.values()) <= max(
            2.0, sum(held.values()) + 1e-6
        )
    assert all(bound.others_s(key) == pytest.approx(sum(held.values()) - held[key]) for key in keys)


ARRIVALS = st.tuples(
    st.just("arrives"),
    st.sampled_from(sorted([*PACES, "new"])),
    st.integers(1, 150),
    st.sampled_from(["interactive", "bulk"]),
    st.sampled_from([b"a", b"b", b"c"]),
)
STEPS = st.lists(
    st.one_of(
        ARRIVALS,
        st.tuples(st.just("corrects"), st.integers(0, 50), st.integers(0, 200)),
        st.tuples(st.just("cancels"), st.integers(0, 50)),
        st.tuples(st.just("runs"), st.integers(1, 5)),
    ),
    max_size=150,
)


class Device:
    """A bound with what it should hold, kept by other means: a list of jobs."""

    def __init__(self) -> None:
        self.bound = bound_of()
        self.waiting: list[Job] = []
        self.running: list[Job] = []

    def arrives(self, model: str, cost: int, lane: str, session: bytes) -> None:
        """A request comes; the lane was below one and a half of its bound if it is let in."""
        limit_s = 2.0 if lane == "interactive" else 10.0
        before, of_model = self.seconds(lane, limit_s), self.seconds(lane, limit_s, model)
        one = job(cost, model=model, session=session, lane=lane)
        try:
            self.bound.admit(one)
        except QueueFull:
            assert before >= limit_s - 1e-9, "there was room"
            return
        self.waiting.append(one)
        assert before < MODELS_MOST * limit_s
        assert before < limit_s or of_model < limit_s / 2 + 1e-9, "a model above its part was let in"

    def seconds(self, lane: str, limit_s: float, model: str = "") -> float:
        """Predicted work of a lane, in which a full batch counts as the bound at most."""
        most = limit_s / FULL
        jobs = [one for one in self.waiting if one.work.lane == lane and model in ("", one.model)]
        return sum(one.cost * min(PACES.get(one.model, FIRST_S), most) for one in jobs)

    def corrects(self, at: int, cost: int) -> None:
        """The real cost of a waiting request."""
        if self.waiting:
            one = self.waiting[at % len(self.waiting)]
            one.cost, one.prepared = cost, [Prepared(None, cost)]
            self.bound.change(one, cost)

    def cancels(self, at: int) -> None:
        """A client leaves."""
        for jobs in (self.waiting, self.running):
            if jobs:
                self.bound.end(jobs.pop(at % len(jobs)))
                return

    def runs(self, number: int) -> None:
        """The batch on the device ends, and the oldest requests are the next."""
        for one in self.running:
            self.bound.end(one)
        self.running, self.waiting = self.waiting[:number], self.waiting[number:]
        if self.running:
            run(self.bound, *self.running)


@given(STEPS)
def test_in_every_schedule_a_lane_holds_its_bound_and_one_request_more_at_most(
    steps: list[tuple[object, ...]],
) -> None:
    device = Device()
    for name, *arguments in steps:
        step: Callable[..., None] = getattr(device, str(name))
        step(*arguments)
        assert device.bound.tokens == sum(one.cost for one in device.waiting)
    while device.waiting or device.running:
        device.runs(5)
    assert device.bound.tokens == 0 and device.bound.drain_s("bulk") >= 0.0
    assert not any(lane.sessions or lane.shares.all.tokens for lane in device.bound._lanes.values())
