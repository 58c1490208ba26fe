"""A bound that callers share: one alone may fill it, and never keeps the others out."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from ipc.shares import Shares


def fill(shares: Shares, limit: int, caller: str, share: float = 1.0, cost: int = 1) -> int:
    """Add requests until no more is allowed; returns how many."""
    count = 0
    while shares.allows(limit, caller, share):
        shares.add(cost, caller, share)
        count += 1
    return count


def test_a_caller_alone_may_fill_the_bound() -> None:
    assert fill(Shares(), 100, "a") == 100


def test_a_full_bound_still_lets_each_further_caller_fill_its_part() -> None:
    shares = Shares()
    assert [fill(shares, 100, "a"), fill(shares, 100, "b"), fill(shares, 100, "c", 2)] == [100, 50, 50]
    assert not any(shares.allows(100, caller, 1) for caller in "ab")


def test_anonymous_callers_have_the_bound_together() -> None:
    shares = Shares()
    assert fill(shares, 100, "") == 100
    assert not shares.allows(100, "", 1)
    assert fill(shares, 100, "a") == 100, "nobody else has a share"


def test_one_large_request_may_overshoot_and_its_caller_then_waits() -> None:
    shares = Shares()
    shares.add(10_000, "bulk", 1)
    assert not shares.allows(100, "bulk", 1)
    assert shares.allows(100, "query", 1)


@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 50), st.integers(0, 50)), max_size=40)
)
def test_what_is_added_corrected_and_removed_adds_up_and_nobody_stays(
    requests: list[tuple[str, int, int]],
) -> None:
    shares, held = Shares(), defaultdict(int)
    for caller, cost, corrected in requests:
        shares.add(cost, caller, 1.0)
        shares.correct(corrected - cost, caller)
        held[caller] += corrected
    assert shares.cost == sum(held.values())
    for caller, _, corrected in requests:
        shares.remove(corrected, caller)
    assert shares.cost == 0
    shares.add(100, "last", 1.0)
    assert shares.allows(100, "a", 1.0) and fill(shares, 100, "a") == 50, (
        "those who ended have no part any more"
    )
