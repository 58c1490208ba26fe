"""What recent batches tell of the time of the next ones."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from workers.scheduling.bound import EXTRAPOLATED, FIRST_TOKENS_PER_S, MOMENT_S, DrainRate, Pace, Paces

BATCH_S, TOKEN_S = 0.02, 0.0001
FULL = 2048


def seconds(tokens: int) -> float:
    """What a batch takes: a time of its own, and a time for each token."""
    return BATCH_S + TOKEN_S * tokens


def test_lone_queries_and_a_few_full_batches_tell_the_time_of_a_batch_apart_from_that_of_a_token() -> None:
    pace = Pace()
    for _ in range(200):
        pace.record(16, seconds(16))
    assert pace.seconds_for(16) == pytest.approx(seconds(16)), "equal sizes do not tell them apart"
    for tokens in (640, FULL, FULL):
        pace.record(tokens, seconds(tokens), full=tokens == FULL)
    assert pace.seconds_for(500) == pytest.approx(seconds(500))
    assert pace.per_token_s == pytest.approx(seconds(FULL) / FULL)


def test_batches_that_are_full_at_few_tokens_count_as_they_are() -> None:
    pace = Pace()
    for tokens in (10, 100, 30, 60, 50):
        pace.record(tokens, seconds(tokens), full=True)
    assert pace.per_token_s == pytest.approx(seconds(50) / 50, rel=0.25)


def test_before_a_batch_was_full_the_time_of_a_batch_is_spread_over_few_times_what_ran() -> None:
    pace = Pace()
    for tokens in (10, 20, 30):
        pace.record(tokens, BATCH_S)
    assert pace.per_token_s >= BATCH_S / 30 / EXTRAPOLATED


def test_one_short_text_says_nothing_of_full_batches_and_one_that_nearly_fills_a_batch_does() -> None:
    pace, heavy, fast = Pace(), Pace(), Pace()
    pace.record(2, seconds(2), budget=FULL)
    assert pace.per_token_s == pytest.approx(1 / FIRST_TOKENS_PER_S)
    heavy.record(FULL // 2, 10.0, budget=FULL)
    assert heavy.per_token_s == pytest.approx(10.0 / FULL), "a full batch takes at least as long"
    fast.record(1000, 0.01, budget=FULL)
    assert fast.per_token_s == pytest.approx(0.01 / 1000), "what is fast alone is fast in full batches"
    for slow in (pace, heavy):
        slow.record(100, 10.0)
        slow.record(100, 10.0, full=True)
        assert slow.per_token_s > 4 / FIRST_TOKENS_PER_S


@pytest.mark.parametrize(("batch_s", "most"), [(0.4, 12), (0.01, 500), (10.0, 6)])
def test_a_device_that_becomes_slower_is_believed_within_seconds_of_its_time(
    batch_s: float, most: int
) -> None:
    pace = Pace()
    for _ in range(50):
        pace.record(FULL, batch_s, full=True)
    for count in range(most):
        if pace.per_token_s * FULL >= 2.7 * batch_s:
            break
        assert count < most - 1, "still the old pace"
        pace.record(FULL, 3 * batch_s, full=True)


def test_one_batch_that_stood_still_does_not_decide() -> None:
    pace = Pace()
    for _ in range(50):
        pace.record(FULL, 0.1, full=True)
    pace.record(FULL, 30.0, full=True)
    assert pace.per_token_s * FULL <= 0.2
    for _ in range(50):
        pace.record(FULL, 0.1, full=True)
    assert pace.per_token_s * FULL == pytest.approx(0.1, rel=0.2)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 100), st.booleans()), min_size=1, max_size=60))
@example([(1, 1.0, True), (2, 2.0, False), (3, 1.0, False)])
def test_whatever_ran_the_pace_is_finite_and_nothing_takes_less_than_no_time(
    batches: list[tuple[int, float, bool]],
) -> None:
    pace = Pace()
    for batch in batches:
        pace.record(*batch)
    ran = [(tokens, took) for tokens, took, _ in batches if tokens > 0 and took >= MOMENT_S]
    if not ran:
        assert pace.per_token_s == 0.0
        return
    longest = max(took for _, took in ran)
    assert 0 <= pace.per_token_s <= longest / min(tokens for tokens, _ in ran) * (1 + 1e-6)
    assert pace.batch_s >= -1e-9 * longest and pace.token_s >= 0


def test_a_model_that_has_not_run_has_no_pace() -> None:
    paces = Paces()
    assert paces.per_token_s("m") == paces.tokens_per_s("m") == paces.seconds_for("m", 100) == 0.0
    paces.record("m", 1000, 0.5, full=True)
    assert paces.tokens_per_s("m") == pytest.approx(2000) and paces.models() == ["m"]


def test_the_drain_rate_follows_the_device_and_ignores_empty_batches() -> None:
    rate = DrainRate()
    assert rate.seconds_for(1000) == 0.0
    rate.record(1000, 1.0)
    assert rate.tokens_per_s == 1000
    rate.record(0, 0.0)
    assert rate.tokens_per_s == 1000
    for _ in range(50):
        rate.record(30_000, 10.0)
    assert 2900 < rate.tokens_per_s <= 3000
    assert rate.seconds_for(6000) == pytest.approx(2.0, rel=0.05)


def test_a_lone_query_moves_the_rate_less_than_a_full_batch() -> None:
    small, large = DrainRate(), DrainRate()
    for rate, tokens in ((small, 10), (large, 10_000)):
        rate.record(1000, 1.0)
        rate.record(tokens, tokens / 100)
    assert small.tokens_per_s > large.tokens_per_s
