"""A bound that callers and models share: one alone may fill it, and never keeps the others out."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from ipc.shares import MODELS_MOST, Shares


def price(model: str) -> float:
    """A second for a token, ten of the slow model."""
    return 10.0 if model == "slow" else 1.0


def fill(
    shares: Shares, limit_s: float, caller: str, share: float = 1.0, cost: int = 1, model: str = "m"
) -> int:
    """Add requests until no more is allowed; returns how many."""
    count = 0
    while shares.allows(limit_s, price, model, caller, share):
        shares.begin(cost, model, caller, share)
        count += 1
    return count


def test_a_caller_alone_may_fill_the_bound() -> None:
    assert fill(Shares(), 100, "a") == 100


def test_the_bound_is_time_and_not_tokens() -> None:
    assert fill(Shares(), 100, "", model="slow") == 10


def test_a_full_bound_still_lets_each_further_caller_fill_its_part() -> None:
    shares = Shares()
    assert [fill(shares, 100, "a"), fill(shares, 100, "b"), fill(shares, 100, "c", 2)] == [100, 50, 50]
    assert not any(shares.allows(100, price, "m", caller, 1) for caller in "ab")


def test_a_slow_model_keeps_no_other_out_and_all_together_stay_within_their_bound() -> None:
    shares = Shares()
    assert fill(shares, 100, "", model="slow") == 10
    assert fill(shares, 100, "") == 50
    assert fill(shares, 100, "", model="third") == 0, "one and a half of the bound is filled"
    assert shares.all.seconds(price) == MODELS_MOST * 100


def test_anonymous_callers_have_the_bound_together() -> None:
    shares = Shares()
    assert fill(shares, 100, "") == 100
    assert not shares.allows(100, price, "m", "", 1)
    assert fill(shares, 100, "a") == 100, "nobody else has a share"


def test_one_large_request_may_overshoot_and_its_caller_then_waits() -> None:
    shares = Shares()
    shares.begin(10_000, "m", "bulk", 1)
    assert not shares.allows(100, price, "m", "bulk", 1)
    assert shares.allows(100, price, "m", "query", 1)


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "b"]), st.sampled_from(["m", "n"]), st.integers(0, 50), st.integers(0, 50)
    ),
    max_size=40,
)


@given(REQUESTS)
def test_what_begins_changes_and_ends_adds_up_and_nobody_stays(
    requests: list[tuple[str, str, int, int]],
) -> None:
    shares, held = Shares(), defaultdict(int)
    for caller, model, cost, changed in requests:
        shares.begin(cost, model, caller, 1.0)
        shares.change(changed - cost, model, caller)
        held[model] += changed
    assert shares.cost == sum(held.values())
    assert shares.all.tokens == {model: tokens for model, tokens in held.items() if tokens}
    for caller, model, _, changed in requests:
        shares.end(changed, model, caller)
    assert shares.cost == 0 and not shares.all.tokens
    shares.begin(100, "m", "last", 1.0)
    assert shares.allows(100, price, "m", "a", 1.0) and fill(shares, 100, "a") == 50, (
        "those who ended have no part any more"
    )
