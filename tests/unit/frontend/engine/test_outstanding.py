"""What a frontend counts of its requests, and how much more it may send by the credits of a worker."""

from __future__ import annotations

import pytest

from frontend.engine.local.outstanding import Outstanding
from ipc.wire.messages import Credits, GenerateCall, InferCall, Submit, Work

PRICES = {"m": 0.01, "fast": 0.0001}
"""Seconds for a token."""


def work(cost: int, caller: str = "", model: str = "m", lane: str = "interactive") -> Work:
    """A planned request."""
    return Work(model, InferCall([], []), 2**62, cost, "req", caller=caller, lane=lane)


def request(number: int, cost: int, caller: str = "", model: str = "m", lane: str = "interactive") -> Submit:
    """One request."""
    return Submit(number, work(cost, caller, model, lane))


def with_credit(room_s: float, *sent: Submit, floor: int = 0, bulk_room_s: float = 0.0) -> Outstanding:
    """Requests in flight, of which the worker knew when it told this room."""
    outstanding = Outstanding()
    for each in sent:
        outstanding.begin(each)
    outstanding.credit(Credits(room_s, 0.0, 0.0, bulk_room_s=bulk_room_s, prices=PRICES, floor=floor))
    return outstanding


def test_a_stream_that_nobody_reads_leaves_the_credits_to_others() -> None:
    unread, other = request(1, 1000, "key"), request(2, 10)
    outstanding = with_credit(10.1)
    outstanding.begin(unread)
    outstanding.begin(other)
    assert outstanding.cost == 1010 and outstanding.seconds == pytest.approx(10.1)
    assert not outstanding.allows(work(1))
    for _ in range(2):
        outstanding.rest(unread)
        assert outstanding.cost == 10 and outstanding.allows(work(1))
    for _ in range(2):
        outstanding.resume(unread)
        assert outstanding.cost == 1010
    outstanding.end(other)
    outstanding.end(unread)
    assert outstanding.cost == 0


@pytest.mark.parametrize("rests", [True, False])
def test_what_ends_counts_no_more_wherever_it_was(rests: bool) -> None:
    outstanding = Outstanding()
    stream = request(1, 100, "key")
    outstanding.begin(stream)
    if rests:
        outstanding.rest(stream)
    outstanding.end(stream)
    assert outstanding.cost == 0
    # What is told late is of nobody.
    outstanding.resume(stream)
    assert outstanding.cost == 0


def test_what_is_sent_fills_the_room_that_the_worker_told_and_what_ends_gives_it_back() -> None:
    first = request(1, 200)
    outstanding = with_credit(1.0, first)
    outstanding.begin(request(2, 99))
    assert outstanding.allows(work(5000)), "one large request may overshoot"
    outstanding.begin(request(3, 1))
    assert not outstanding.allows(work(1))
    outstanding.end(first)
    assert outstanding.allows(work(1)), "the first request was no part of the room"


def test_the_room_follows_the_worker_and_may_be_taken_back() -> None:
    outstanding = with_credit(5.0, request(1, 200))
    outstanding.credit(Credits(-1.5, 0.0, 0.0, prices=PRICES))
    assert not outstanding.allows(work(1)), "other sessions need their part"
    outstanding.credit(Credits(0.5, 0.0, 0.0, prices={"m": 0.02}))
    outstanding.begin(request(2, 25))
    assert not outstanding.allows(work(1)), "the device became slower: 25 tokens are half a second"


def test_a_burst_counts_before_the_worker_has_told_of_it() -> None:
    outstanding = with_credit(2.0)
    outstanding.begin(request(1, 150))
    outstanding.begin(request(2, 200, lane="bulk"))
    assert (outstanding.before("interactive"), outstanding.before("bulk")) == pytest.approx((1.5, 3.5))


def test_each_lane_has_a_room_of_its_own() -> None:
    outstanding = with_credit(0.0, request(1, 200), request(2, 200, lane="bulk"), bulk_room_s=1.0)
    assert not outstanding.allows(work(1)) and outstanding.allows(work(1, lane="bulk"))


def test_a_model_that_has_nothing_here_may_ask_the_worker_whatever_the_room() -> None:
    outstanding = with_credit(0.0, request(1, 200))
    assert outstanding.allows(work(1, model="fast")) and outstanding.allows(work(1, model="new"))
    outstanding.begin(request(2, 1, model="new"))
    assert not outstanding.allows(work(1))


def test_tokens_up_to_the_floor_are_left_to_the_worker() -> None:
    outstanding = with_credit(-1.0, request(1, 31), floor=32)
    assert outstanding.allows(work(1))
    outstanding.begin(request(2, 2))
    assert not outstanding.allows(work(1))


def test_a_caller_below_its_part_may_ask_while_others_fill_the_room() -> None:
    outstanding = with_credit(2.0)
    outstanding.begin(request(1, 200, "flood"))
    assert not outstanding.allows(work(1, "flood")) and not outstanding.allows(work(1))
    assert outstanding.allows(work(1, "quiet"))


def test_generated_text_needs_no_credit_and_takes_none() -> None:
    text = Work("m", GenerateCall(text="hi"), 2**62, 1000, "req", lane="interactive")
    outstanding = with_credit(1.0)
    burst = [Submit(number, text) for number in range(1000)]
    for each in burst:
        assert outstanding.allows(text)
        outstanding.begin(each)
    assert outstanding.seconds == outstanding.before("interactive") == 0.0, "the worker has no such line"
    assert outstanding.allows(work(1))
    for each in burst:
        outstanding.end(each)
    assert outstanding.cost == 0
