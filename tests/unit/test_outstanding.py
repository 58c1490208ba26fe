"""What a frontend counts of its requests: all of them while they go on, and no stream while its client has enough."""

from __future__ import annotations

import pytest

from frontend.engine.local.channel import Outstanding
from ipc.wire.messages import InferCall, Submit, Work
from ipc.wire.streams import WINDOW


def request(number: int, cost: int, parts: int = 0, caller: str = "") -> Submit:
    """One request."""
    work = Work("m", InferCall([], []), 2**62, cost, "req", caller=caller, parts=parts)
    return Submit(number, work)


@pytest.mark.parametrize("in_block", [True, False])
def test_a_stream_that_nobody_reads_leaves_the_credits_to_others(in_block: bool) -> None:
    outstanding = Outstanding()
    unread, other = request(1, 1000, WINDOW, "key"), request(2, 10)
    outstanding.begin(unread)
    outstanding.begin(other)
    assert outstanding.cost == outstanding.cost_in("interactive") == 1010
    assert not outstanding.allows(1000, "interactive", "", 1.0)
    count = 1 if in_block else WINDOW
    for _ in range(count):
        assert outstanding.cost == 1010
        outstanding.received(1, in_block)
    assert outstanding.cost == 10 and outstanding.allows(1000, "interactive", "", 1.0)
    outstanding.taken(1, 1)
    assert outstanding.cost == 1010
    outstanding.end(other)
    outstanding.end(unread)
    assert outstanding.cost == 0


@pytest.mark.parametrize("received", [0, 1, WINDOW])
def test_what_ends_counts_no_more_wherever_it_was(received: int) -> None:
    outstanding = Outstanding()
    stream = request(1, 100, WINDOW, "key")
    outstanding.begin(stream)
    for _ in range(received):
        outstanding.received(1, False)
    outstanding.end(stream)
    assert outstanding.cost == 0
    # What arrives late, or is told late, is of nobody.
    outstanding.received(1, True)
    outstanding.taken(1, 1)
    assert outstanding.cost == 0
