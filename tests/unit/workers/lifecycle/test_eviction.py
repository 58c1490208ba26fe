"""Who leaves the memory: least recently used first, idle before busy, pinned never, the last one seldom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.lifecycle.memory_budget import Resident, victims


def chosen(residents: list[Resident], excess_bytes: int, *, last_may_go: bool = False) -> list[int]:
    """Serials of those that go."""
    return [r.serial for r in victims(residents, excess_bytes, last_may_go=last_may_go)]


def test_the_one_used_longest_ago_goes_and_no_more_than_needed() -> None:
    residents = [Resident(1, 10, 3.0), Resident(2, 10, 1.0), Resident(3, 10, 2.0)]
    assert chosen(residents, 1) == [2]
    assert chosen(residents, 11) == [2, 3]
    assert chosen(residents, 0) == []


def test_a_model_with_open_work_goes_after_idle_ones() -> None:
    assert chosen([Resident(1, 10, 1.0, busy=True), Resident(2, 10, 9.0)], 1) == [2]


def test_pinned_models_stay_whatever_is_missing() -> None:
    assert chosen([Resident(1, 10, 1.0, pinned=True), Resident(2, 10, 2.0)], 100) == [2]


def test_the_last_loaded_model_goes_only_when_the_caller_says_so() -> None:
    assert chosen([Resident(1, 10, 1.0)], 100) == []
    assert chosen([Resident(1, 10, 1.0)], 100, last_may_go=True) == [1]


RESIDENTS = st.lists(
    st.builds(
        Resident, st.integers(0, 50), st.integers(0, 99), st.floats(0, 9), st.booleans(), st.booleans()
    ),
    unique_by=lambda resident: resident.serial,
)


@given(RESIDENTS, st.integers(-10, 500), st.booleans())
def test_what_goes_is_enough_or_all_that_may_and_never_more_than_needed(
    residents: list[Resident], excess: int, last_may_go: bool
) -> None:
    gone = victims(residents, excess, last_may_go=last_may_go)
    free = [resident for resident in residents if not resident.pinned]
    most = min(len(free), len(residents) if last_may_go else max(0, len(residents) - 1))
    assert sum(resident.nbytes for resident in gone) >= excess or len(gone) == most
    assert not any(resident.pinned for resident in gone)
    assert sum(resident.nbytes for resident in gone[:-1]) < max(excess, 1)
