"""What a frontend counts of its requests: all of them while they go on, and no stream while its client has enough."""

from __future__ import annotations

import pytest

from frontend.engine.local.outstanding import Outstanding
from ipc.wire.messages import InferCall, Submit, Work


def request(number: int, cost: int, caller: str = "") -> Submit:
    """One request."""
    return Submit(number, Work("m", InferCall([], []), 2**62, cost, "req", caller=caller))


def test_a_stream_that_nobody_reads_leaves_the_credits_to_others() -> None:
    outstanding = Outstanding()
    unread, other = request(1, 1000, "key"), request(2, 10)
    outstanding.begin(unread)
    outstanding.begin(other)
    assert outstanding.cost == outstanding.cost_in("interactive") == 1010
    assert not outstanding.allows(1000, "interactive", "", 1.0)
    for _ in range(2):
        outstanding.rest(unread)
        assert outstanding.cost == 10 and outstanding.allows(1000, "interactive", "", 1.0)
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
