"""Which items run next: budget, fairness between callers, lanes, ageing; and that every item runs exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.wire.messages import EncodeCall, InputItem
from tests.fakes.jobs import adapter, make_job, replan
from workers.adapters.base import Gathering, Prepared
from workers.scheduling.batcher import ATTENTION_NS, TURN_PARTS, Batcher
from workers.scheduling.job import Batch, Job, Piece

SECOND_NS = 1_000_000_000
NOW_NS = 1000 * SECOND_NS
_ids = count(1)


def job(
    costs: Sequence[int],
    caller: bytes = b"a",
    lane: str = "interactive",
    group: str = "model",
    solo: bool = False,
    age_s: float = 0.0,
) -> Job:
    """A prepared job of items with these costs."""
    made = make_job(
        EncodeCall([InputItem("text")] * len(costs), ["dense"]),
        session=caller,
        number=next(_ids),
        model=group,
        cost=sum(costs),
        deadline_ns=NOW_NS + 60 * SECOND_NS,
        of=adapter(),
        solo=solo,
        lane=lane,
    )
    made.prepared, made.group = [Prepared(None, cost, False) for cost in costs], group
    made.queued_ns = int(NOW_NS - age_s * SECOND_NS)
    return made


def filled(*jobs: Job, starve_after_s: float = 2.0) -> Batcher:
    """A batcher with all items of these jobs."""
    batcher = Batcher(int(starve_after_s * SECOND_NS))
    for one in jobs:
        batcher.add(one, 0, len(one.prepared))
    return batcher


def tokens(pieces: Sequence[Piece]) -> int:
    """Cost of a batch."""
    return sum(piece.prepared.cost for piece in pieces)


def callers(pieces: Sequence[Piece]) -> Counter[bytes]:
    """Tokens per caller."""
    found: Counter[bytes] = Counter()
    for piece in pieces:
        found[piece.job.session] += piece.prepared.cost
    return found


JOBS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 40), min_size=1, max_size=12),
        st.sampled_from([b"a", b"b", b"c"]),
        st.sampled_from(["interactive", "bulk"]),
        st.sampled_from(["model", "other"]),
        st.booleans(),
        st.floats(0, 5),
    ),
    max_size=12,
)


@given(JOBS, st.integers(1, 60), st.integers(1, 8))
def test_every_item_runs_exactly_once_and_no_batch_exceeds_its_budget(
    descriptions: list[tuple[list[int], bytes, str, str, bool, float]], max_tokens: int, max_items: int
) -> None:
    jobs = [job(*description) for description in descriptions]
    batcher = filled(*jobs)
    ran: Counter[tuple[int, int]] = Counter()
    while batch := batcher.take(max_tokens, max_items, NOW_NS):
        assert len(batch) <= max_items
        assert len(batch) == 1 or tokens(batch) <= max_tokens
        assert len({piece.job.group for piece in batch}) == 1
        if any(piece.job.solo for piece in batch):
            assert len({id(piece.job) for piece in batch}) == 1
        ran.update((id(piece.job), piece.index) for piece in batch)
        assert batcher.items == sum(len(one.prepared) for one in jobs) - ran.total()
    assert ran == Counter({(id(one), n): 1 for one in jobs for n in range(len(one.prepared))})
    assert batcher.items == batcher.tokens == 0


@given(JOBS, st.data())
def test_removed_jobs_never_run_and_the_others_all_do(
    descriptions: list[tuple[list[int], bytes, str, str, bool, float]], data: st.DataObject
) -> None:
    jobs = [job(*description) for description in descriptions]
    batcher = filled(*jobs)
    gone = [one for one in jobs if data.draw(st.booleans())]
    for one in gone:
        assert batcher.remove(one) == len(one.prepared)
        assert batcher.remove(one) == 0
    left = [one for one in jobs if one not in gone]
    assert batcher.items == sum(len(one.prepared) for one in left)
    assert batcher.tokens == sum(one.cost for one in left)
    ran: Counter[int] = Counter()
    while batch := batcher.take(64, 8, NOW_NS):
        ran.update(id(piece.job) for piece in batch)
    assert ran == Counter({id(one): len(one.prepared) for one in left})


def test_an_item_over_the_budget_runs_alone() -> None:
    batcher = filled(job([100]), job([1, 1], caller=b"b"))
    sizes = [[piece.prepared.cost for piece in batcher.take(10, 512, NOW_NS)] for _ in range(2)]
    assert sorted(sizes) == [[1, 1], [100]]


def test_callers_share_the_device_by_cost_and_not_by_number_of_items() -> None:
    many_small, few_large = job([1] * 600, caller=b"small"), job([20] * 30, caller=b"large")
    batcher = filled(many_small, few_large)
    shares: Counter[bytes] = Counter()
    for _ in range(10):
        shares += callers(batcher.take(40, 512, NOW_NS))
    assert abs(shares[b"small"] - shares[b"large"]) <= 40


def test_a_caller_with_one_short_request_does_not_wait_behind_a_long_one() -> None:
    batcher = filled(job([10] * 1000, caller=b"hog"))
    for _ in range(5):
        batcher.take(100, 512, NOW_NS)
    late = job([10], caller=b"late")
    batcher.add(late, 0, 1)
    assert any(piece.job is late for piece in batcher.take(100, 512, NOW_NS))


def test_a_caller_that_was_away_gets_no_credit_for_its_absence() -> None:
    batcher = filled(job([10] * 200, caller=b"steady"))
    for _ in range(10):
        batcher.take(100, 512, NOW_NS)
    batcher.add(job([10] * 200, caller=b"new"), 0, 200)
    shares: Counter[bytes] = Counter()
    for _ in range(6):
        shares += callers(batcher.take(100, 512, NOW_NS))
    assert shares[b"steady"] >= 0.4 * shares.total()


def of_key(key: str, share: float, costs: Sequence[int], session: bytes = b"s") -> Job:
    """A job that was sent with an API key."""
    made = job(costs, caller=session)
    replan(made, caller=key, share=share)
    return made


def shares_of_keys(pieces: Sequence[Piece]) -> Counter[str]:
    """Tokens per API key."""
    found: Counter[str] = Counter()
    for piece in pieces:
        found[piece.job.work.caller] += piece.prepared.cost
    return found


def test_keys_share_the_device_by_their_weights() -> None:
    batcher = filled(of_key("three", 3, [10] * 400), of_key("one", 1, [5] * 800))
    used: Counter[str] = Counter()
    for _ in range(20):
        used += shares_of_keys(batcher.take(100, 512, NOW_NS))
    assert 2.9 <= used["three"] / used["one"] <= 3.1


def test_a_key_that_calls_through_many_frontends_has_one_turn() -> None:
    many = [of_key("many", 1, [10] * 100, session=bytes([n])) for n in range(4)]
    batcher = filled(*many, of_key("one", 1, [10] * 100))
    used: Counter[str] = Counter()
    for _ in range(10):
        used += shares_of_keys(batcher.take(100, 512, NOW_NS))
    assert 0.9 <= used["many"] / used["one"] <= 1.1


def test_a_key_whose_line_runs_empty_between_requests_does_not_get_more_for_it() -> None:
    """A client that waits for each answer has nothing in line when its request runs."""
    batcher = filled(of_key("steady", 1, [10] * 1000))
    used: Counter[str] = Counter()
    for _ in range(60):
        batcher.add(of_key("waiting", 1, [30]), 0, 1)
        while len(
            [1 for _, _, lane in batcher.lanes() for one in lane.jobs() if one.work.caller == "waiting"]
        ):
            used += shares_of_keys(batcher.take(30, 512, NOW_NS))
    assert 0.9 <= used["waiting"] / used["steady"] <= 1.1


def test_interactive_work_goes_before_bulk_work() -> None:
    batcher = filled(job([10] * 50, lane="bulk"), job([10] * 5, caller=b"b"))
    batch = batcher.take(50, 512, NOW_NS)
    assert [piece.job.work.lane for piece in batch] == ["interactive"] * 5


def test_bulk_fills_what_interactive_work_leaves() -> None:
    batcher = filled(job([10] * 50, lane="bulk"), job([10] * 2, caller=b"b"))
    assert Counter(piece.job.work.lane for piece in batcher.take(50, 512, NOW_NS)) == {
        "interactive": 2,
        "bulk": 3,
    }


def test_starving_bulk_work_gets_half_of_the_budget_and_no_more() -> None:
    batcher = filled(job([10] * 50, lane="bulk", age_s=3), job([10] * 50, caller=b"b"))
    assert Counter(piece.job.work.lane for piece in batcher.take(100, 512, NOW_NS)) == {
        "interactive": 5,
        "bulk": 5,
    }


def test_bulk_work_under_endless_interactive_load_still_ends() -> None:
    bulk = job([10] * 20, lane="bulk")
    batcher = filled(bulk)
    waiting = len(bulk.prepared)
    for turn in range(100):
        batcher.add(job([10] * 10, caller=b"b"), 0, 10)
        batch = batcher.take(100, 512, NOW_NS + turn * SECOND_NS // 10)
        waiting -= sum(piece.job is bulk for piece in batch)
    assert waiting == 0


def test_a_model_with_endless_bulk_work_does_not_hold_up_another_models_query() -> None:
    batcher = filled(job([10] * 1000, lane="bulk", group="indexing"))
    batcher.take(100, 512, NOW_NS)
    query = job([3], group="search", caller=b"b")
    batcher.add(query, 0, 1)
    assert [piece.job for piece in batcher.take(100, 512, NOW_NS)] == [query]


def test_two_busy_models_take_turns() -> None:
    batcher = filled(job([10] * 100, group="one"), job([10] * 100, group="two", caller=b"b"))
    turns = [batcher.take(50, 512, NOW_NS)[0].job.group for _ in range(10)]
    assert Counter(turns) == {"one": 5, "two": 5}


def test_a_solo_request_shares_its_batch_with_nobody() -> None:
    alone = job([10], solo=True, caller=b"s")
    batcher = filled(job([10] * 3), alone, job([10], solo=True, caller=b"t"))
    batches = [batcher.take(100, 512, NOW_NS) for _ in range(3)]
    assert [alone] in [[piece.job for piece in batch] for batch in batches]
    assert not batcher.take(100, 512, NOW_NS)


def test_a_job_may_arrive_in_chunks() -> None:
    chunked = job([10] * 6)
    batcher = Batcher()
    batcher.add(chunked, 0, 2)
    assert [piece.index for piece in batcher.take(100, 512, NOW_NS)] == [0, 1]
    batcher.add(chunked, 2, 6)
    assert [piece.index for piece in batcher.take(100, 512, NOW_NS)] == [2, 3, 4, 5]


def turning(*jobs: Job) -> Batcher:
    """A batcher whose turns last a second."""
    batcher = Batcher(turn_s=1.0)
    for one in jobs:
        batcher.add(one, 0, len(one.prepared))
    return batcher


def ten_a_second(model: str) -> float:
    """A pace at which a turn is 10 tokens."""
    return 10.0


def test_batches_of_others_last_a_turn_while_a_model_has_queries() -> None:
    batcher = turning(job([1] * 200, group="one"), job([1] * 2, group="two", caller=b"b"))
    sizes = {batch[0].job.group: tokens(batch) for batch in takes(batcher, 2, 100)}
    assert sizes == {"one": 10, "two": 2}


def test_bulk_work_lasts_a_turn_while_its_model_has_queries_and_the_queries_are_not_cut() -> None:
    query = job([1] * 30, caller=b"b")
    batcher = turning(job([1] * 500, lane="bulk"), query)
    assert [tokens(batch) for batch in takes(batcher, 3, 100)] == [30, 10, 10]


def test_batches_are_filled_again_some_time_after_the_last_query() -> None:
    batcher = turning(job([1] * 500, lane="bulk"), job([1], caller=b"b"))
    assert [tokens(batch) for batch in takes(batcher, 2, 100)] == [10, 10]
    late = batcher.take(100, 512, NOW_NS + ATTENTION_NS, ten_a_second)
    assert tokens(late) == 100


def test_a_turn_of_a_slow_model_is_not_shorter_than_a_part_of_the_budget() -> None:
    batcher = turning(job([1] * 500, lane="bulk"), job([1], group="other", caller=b"b"))
    batcher.take(1600, 512, NOW_NS, ten_a_second)
    assert tokens(batcher.take(1600, 512, NOW_NS, ten_a_second)) == 1600 // TURN_PARTS


def takes(batcher: Batcher, count: int, max_tokens: int) -> list[list[Piece]]:
    """The next batches."""
    return [batcher.take(max_tokens, 512, NOW_NS, ten_a_second) for _ in range(count)]


def test_bulk_work_does_not_ride_along_with_queries_twice_in_a_row() -> None:
    batcher = turning(job([1] * 500, lane="bulk", age_s=3))
    riding = []
    for _ in range(4):
        batcher.add(job([1] * 2, caller=b"b"), 0, 2)
        (batch,) = takes(batcher, 1, 100)
        assert {"interactive"} <= {piece.job.work.lane for piece in batch}
        riding.append(any(piece.job.work.lane == "bulk" for piece in batch))
    assert riding == [True, False, True, False]


def test_busy_models_share_the_time_of_the_device_and_not_the_tokens() -> None:
    batcher = filled(job([1] * 3000, group="fast"), job([1] * 3000, group="slow", caller=b"b"))
    used: Counter[str] = Counter()
    for _ in range(44):
        batch = batcher.take(50, 512, NOW_NS, {"fast": 1000.0, "slow": 100.0}.__getitem__)
        used[batch[0].job.model] += tokens(batch)
    assert 9 <= used["fast"] / used["slow"] <= 11


def test_a_model_whose_line_runs_empty_between_batches_does_not_get_more_for_it() -> None:
    """Clients that wait for their answers: while one half is on the device, the other half comes."""
    batcher = filled(job([10] * 1000, group="steady", caller=b"s"))
    used: Counter[str] = Counter()
    for _ in range(40):
        batcher.add(job([10] * 5, group="empty", caller=b"e"), 0, 5)
        while any(model == "empty" for model, _, _ in batcher.lanes()):
            batch = batcher.take(50, 512, NOW_NS)
            used[batch[0].job.model] += tokens(batch)
    assert 0.9 <= used["empty"] / used["steady"] <= 1.1


@pytest.mark.parametrize("left_over", [0, 50])
def test_a_batch_that_took_longer_than_predicted_is_paid_for(left_over: int) -> None:
    slow, quick = job([1] * (50 + left_over), group="slow"), job([1] * 5000, group="quick", caller=b"b")
    batcher = filled(slow, quick)
    (first, *_), second = (batcher.take(50, 512, NOW_NS, ten_a_second) for _ in range(2))
    assert {first.job.group, second[0].job.group} == {"slow", "quick"}
    batcher.settle(slow, 20.0)
    late = job([1] * 50, group="slow")
    batcher.add(late, 0, 50)
    turns = [batcher.take(50, 512, NOW_NS, ten_a_second)[0].job.group for _ in range(6)]
    assert turns == ["quick"] * 4 + turns[4:] and "slow" in turns[4:]


def test_a_query_overtakes_a_bulk_batch_and_one_of_a_model_that_has_used_more() -> None:
    batcher = turning(job([1] * 50, lane="bulk"))
    (bulk,) = takes(batcher, 1, 10)
    assert not batcher.overtakes(bulk)
    batcher.add(job([1], caller=b"b"), 0, 1)
    assert batcher.overtakes(bulk)
    batcher = turning(job([1] * 20, group="busy"))
    busy = takes(batcher, 2, 10)[1]
    batcher.add(job([1] * 20, group="busy"), 0, 20)
    assert not batcher.overtakes(busy), "its own kind waits in line"
    batcher.add(job([1], group="quiet", caller=b"b"), 0, 1)
    assert batcher.overtakes(busy)


def test_a_model_that_has_had_more_than_its_part_does_not_overtake() -> None:
    batcher = turning(job([1] * 50, group="one"), job([1] * 50, group="two", caller=b"b"))
    first, second = takes(batcher, 2, 10)
    assert {first[0].job.group, second[0].job.group} == {"one", "two"}
    assert not batcher.overtakes(second)


def suspended(lane: str = "interactive", seconds: float = 0.0, solo: bool = False) -> tuple[Batcher, Batch]:
    """A batcher whose long batch was suspended after so many seconds on the device."""
    batcher = filled(job([1000], group="long", lane=lane, solo=solo))
    pieces = batcher.take(10, 8, NOW_NS, lambda model: 100.0)
    batch = Batch(pieces, None, 1000, 10.0)
    batcher.suspend(batch)
    batcher.settle(batch.first, seconds - batch.predicted_s)
    return batcher, batch


def test_a_suspended_batch_goes_on_when_nothing_else_waits() -> None:
    batcher, batch = suspended(seconds=1.0)
    assert batcher.due_ns() == 0 and batcher.resume(NOW_NS, None) is batch
    assert batcher.resume(NOW_NS, None) is None and batcher.due_ns() is None


@pytest.mark.parametrize("solo", [False, True])
def test_waiting_work_and_a_suspended_batch_take_turns_by_the_time_they_have_used(solo: bool) -> None:
    batcher, batch = suspended(seconds=1.0, solo=solo)
    for _ in range(3):
        batcher.add(job([40], group="other"), 0, 1)
    order = []
    while batcher.items or batcher.suspended:
        if batcher.resume(NOW_NS, None) is batch:
            order.append("long")
            if order.count("long") < 3:
                batcher.suspend(batch)
                batcher.settle(batch.first, 1.0)
        else:
            order += [piece.job.group for piece in batcher.take(40, 8, NOW_NS, lambda model: 100.0)]
    assert order == ["other", "other", "other", "long", "long", "long"], "1.2 seconds against 1, then 2"


def test_the_time_of_a_solo_batch_counts_for_its_model_and_is_not_charged_twice() -> None:
    batcher, _ = suspended(seconds=3.0, solo=True)
    batcher.add(job([40], group="long"), 0, 1)
    for _ in range(3):
        batcher.add(job([100], group="other", caller=b"b"), 0, 1)
    batches = [batcher.take(100, 1, NOW_NS, lambda model: 50.0) for _ in range(4)]
    assert [pieces[0].job.group for pieces in batches] == ["other", "other", "long", "other"], (
        "2 seconds each"
    )


def test_nothing_of_the_same_weights_runs_while_a_batch_is_suspended() -> None:
    batcher, batch = suspended()
    same = job([1], group="same weights")
    same.adapter = batch.first.adapter
    batcher.add(same, 0, 1)
    assert batcher.holds(batch.first.adapter) and not batcher.take(10, 8, NOW_NS)
    assert not batcher.due_tokens(NOW_NS) and batcher.others_wait(object(), NOW_NS) is not False
    assert batcher.resume(NOW_NS, None) is batch
    assert not batcher.others_wait(batch.first.adapter, NOW_NS), "its own weights are no other work"
    assert len(batcher.take(10, 8, NOW_NS)) == 1


def test_a_suspended_bulk_batch_lets_queries_pass_and_a_suspended_query_passes_bulk_work() -> None:
    batcher, batch = suspended("bulk")
    batcher.add(job([4], group="other", age_s=-9), 0, 1)
    assert batcher.resume(NOW_NS, None) is None
    assert len(batcher.take(10, 8, NOW_NS)) == 1 and batcher.resume(NOW_NS, None) is batch
    batcher, batch = suspended(seconds=60.0)
    batcher.add(job([4], group="other", lane="bulk"), 0, 1)
    assert batcher.resume(NOW_NS, None) is batch


def test_a_suspended_bulk_batch_that_has_waited_too_long_takes_turns_with_queries() -> None:
    batcher, batch = suspended("bulk")
    batcher.add(job([4], group="other"), 0, 1)
    assert batcher.take(4, 8, NOW_NS, lambda model: 1.0), "the other model has used four seconds"
    batcher.add(job([4], group="other"), 0, 1)
    assert batcher.resume(NOW_NS, None) is None
    assert batcher.resume(NOW_NS + 3 * SECOND_NS, None) is batch


def test_a_suspended_bulk_batch_goes_on_for_a_query_of_its_own_model() -> None:
    batcher, batch = suspended("bulk")
    batcher.add(job([4], group="other"), 0, 1)
    batcher.take(4, 8, NOW_NS, lambda model: 1.0)
    batcher.add(job([4], group="other"), 0, 1)
    assert batcher.resume(NOW_NS, None) is None
    held = job([1], group="query of the long model")
    held.adapter = batch.first.adapter
    batcher.add(held, 0, 1)
    assert batcher.resume(NOW_NS, None) is batch


def test_a_suspended_batch_that_nobody_waits_for_goes_on_at_once_to_end() -> None:
    batcher, batch = suspended("bulk", seconds=60.0)
    batcher.add(job([4], group="other"), 0, 1)
    assert batcher.resume(NOW_NS, None) is None
    batch.first.state = "cancelled"
    assert batcher.resume(NOW_NS, None) is batch


def test_of_two_suspended_batches_the_one_with_queries_goes_on_first() -> None:
    batcher, bulk = suspended("bulk")
    batcher.add(job([4], group="other"), 0, 1)
    query = Batch(batcher.take(4, 8, NOW_NS, lambda model: 1.0), None, 4, 4.0)
    batcher.suspend(query)
    assert batcher.resume(NOW_NS, None) is query and batcher.resume(NOW_NS, None) is bulk


def test_a_query_passes_a_suspended_bulk_batch_also_when_bulk_work_was_taken_ahead() -> None:
    batcher, batch = suspended("bulk", seconds=3.0)
    for _ in range(2):
        batcher.add(job([4], group="other", lane="bulk"), 0, 1)
        ahead = Batch(batcher.take(4, 8, NOW_NS, lambda model: 1.0), None, 4, 4.0)
    assert batcher.resume(NOW_NS, ahead) is batch
    batcher.suspend(batch)
    batcher.add(job([4], group="query"), 0, 1)
    assert batcher.resume(NOW_NS, ahead) is None and batcher.overtakes(ahead.pieces)


def gathering(delay_s: float, full: int, *jobs: Job) -> Batcher:
    """A batcher with these jobs, of models that gather."""
    for one in jobs:
        one.adapter.gathering = Gathering(int(delay_s * SECOND_NS), full)
    return filled(*jobs)


def test_a_group_that_gathers_is_due_when_its_oldest_item_has_waited_for_the_delay() -> None:
    batcher = gathering(1.0, 64, job([16], age_s=0.4), job([16]))
    assert batcher.due_ns() == NOW_NS + int(0.6 * SECOND_NS)
    assert not batcher.take(128, 10, NOW_NS) and not batcher.due_tokens(NOW_NS)
    due = int(0.6 * SECOND_NS) + NOW_NS
    assert batcher.due_tokens(due) == 32
    assert tokens(batcher.take(128, 10, due)) == 32
    assert batcher.due_ns() is None


def test_a_group_that_gathers_is_due_once_a_batch_is_full_and_takes_no_more_than_that() -> None:
    jobs = [job([16]) for _ in range(6)]
    batcher = gathering(60.0, 64, *jobs)
    assert batcher.due_ns() == 0
    assert tokens(batcher.take(256, 10, NOW_NS)) == 64
    assert not batcher.take(256, 10, NOW_NS), "the rest gathers again"
    assert batcher.tokens == 32


def test_preferred_sizes_without_a_delay_bound_batches_and_nothing_waits() -> None:
    batcher = gathering(0.0, 64, *[job([16]) for _ in range(6)])
    assert [tokens(batcher.take(256, 10, NOW_NS)) for _ in range(2)] == [64, 32]


def preferring(delay_s: float, preferred: tuple[int, ...], *jobs: Job) -> Batcher:
    """A batcher with these jobs, of a model with preferred sizes; a batch has at most 128 tokens."""
    for one in jobs:
        one.adapter.gathering = Gathering(int(delay_s * SECOND_NS), preferred[-1], preferred)
        one.adapter.batch_tokens = 128
    return filled(*jobs)


def test_every_preferred_size_is_taken_as_soon_as_it_is_made_up() -> None:
    for number, taken in ((1, 0), (2, 32), (3, 32), (4, 64), (5, 64)):
        batcher = preferring(60.0, (32, 64), *[job([16]) for _ in range(number)])
        assert tokens(batcher.take(256, 10, NOW_NS)) == taken, number
        assert batcher.tokens == 16 * number - taken


def test_a_preferred_size_that_no_whole_requests_make_up_waits_for_the_delay() -> None:
    batcher = preferring(1.0, (32, 64), job([48]))
    assert batcher.due_ns() == NOW_NS + SECOND_NS and not batcher.take(256, 10, NOW_NS)
    batcher.add(batcher_job := job([16]), 0, 1)
    assert batcher_job.adapter.gathering is None and tokens(batcher.take(256, 10, NOW_NS)) == 64


def test_after_the_delay_everything_that_waits_is_taken_up_to_the_largest_batch() -> None:
    jobs = [job([48], age_s=2.0) for _ in range(3)]
    assert tokens(preferring(1.0, (32, 64), *jobs).take(256, 10, NOW_NS)) == 96
    assert tokens(preferring(60.0, (32, 64), *jobs).take(256, 10, NOW_NS)) == 48


def test_preferred_sizes_count_by_the_turns_of_callers() -> None:
    jobs = [job([48], caller=b"a"), job([16], caller=b"b"), job([16], caller=b"b")]
    batcher = preferring(60.0, (64,), *jobs)
    assert [piece.prepared.cost for piece in batcher.take(256, 10, NOW_NS)] == [48, 16]


def test_a_group_that_gathers_delays_no_other() -> None:
    patient = job([16], group="patient", age_s=0.5)
    patient.adapter.gathering = Gathering(SECOND_NS, 64)
    batcher = filled(patient, job([8], group="other"))
    assert batcher.due_ns() == 0 and batcher.due_tokens(NOW_NS) == 8
    assert [piece.job.group for piece in batcher.take(128, 10, NOW_NS)] == ["other"]
    assert not batcher.take(128, 10, NOW_NS)
    assert [piece.job.group for piece in batcher.take(128, 10, NOW_NS + SECOND_NS // 2)] == ["patient"]


def test_a_request_that_must_run_alone_gathers_nobody() -> None:
    batcher = gathering(60.0, 64, job([16], solo=True))
    assert batcher.due_ns() == 0 and len(batcher.take(128, 10, NOW_NS)) == 1


def test_a_request_that_is_gone_gathers_no_more() -> None:
    first, second = job([16], age_s=0.9), job([16])
    batcher = gathering(1.0, 64, first, second)
    batcher.remove(first)
    assert batcher.due_ns() == NOW_NS + SECOND_NS
