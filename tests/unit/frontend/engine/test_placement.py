"""Where models are loaded: the cold ones once, the busy ones again, the replicated ones as often as wanted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.engine.local import demand as placement
from frontend.engine.local.demand import BusyWatch, View

STATES = ("available", "loading", "loaded", "unloading", "failed")
BUSY = {"wait_s": 2.0, "share": 0.9}


def test_a_cold_model_goes_to_the_worker_with_most_free_memory() -> None:
    views = [View(0, "available", 10), View(1, "available", 30), View(2, "available", 20)]
    assert placement.cold(views) == 1


def test_equal_workers_are_taken_in_the_order_of_their_slots() -> None:
    assert placement.cold([View(2, "available", 10), View(1, "available", 10)]) == 1


@pytest.mark.parametrize("state", ["loaded", "loading"])
def test_a_model_that_somebody_has_or_loads_stays_there(state: str) -> None:
    assert placement.cold([View(0, state, 0), View(1, "available", 100)]) is None


@pytest.mark.parametrize("state", ["unloading", "failed"])
def test_a_worker_that_cannot_load_now_is_not_asked(state: str) -> None:
    assert placement.cold([View(0, state, 100)]) is None
    assert placement.cold([View(0, state, 100), View(1, "available", 1)]) == 1


def test_another_copy_goes_only_where_it_fits_without_an_eviction() -> None:
    having = View(0, "loaded", 0, memory_bytes=50)
    assert placement.spare([having, View(1, "available", 49)]) is None
    assert placement.spare([having, View(1, "available", 50)]) == 1


def test_replicas_are_made_up_once_one_worker_has_the_model() -> None:
    assert placement.lacking([View(0, "available", 9), View(1, "available", 9)], 2) is None
    assert placement.lacking([View(0, "loaded", 9), View(1, "available", 9)], 2) == 1
    assert (
        placement.lacking([View(0, "loaded", 9), View(1, "loading", 9), View(2, "available", 9)], 2) is None
    )
    assert placement.lacking([View(0, "loaded", 9), View(1, "available", 9)], 1) is None


def ask(watch: BusyWatch, views: Sequence[View], *instants: float) -> list[int | None]:
    """What the watch says at each of these seconds."""
    return [watch.another("m", views, at) for at in instants]


def test_a_model_that_is_busy_for_some_time_gets_another_worker_and_then_time_to_use_it() -> None:
    views = [View(0, "loaded", 0, **BUSY), View(1, "available", 10)]
    assert ask(BusyWatch(), views, 0, 1, 2.9, 3, 3.1, 6.1) == [None, None, None, 1, None, 1]


def test_a_short_burst_is_not_enough() -> None:
    watch = BusyWatch()
    busy, calm = View(0, "loaded", 0, **BUSY), View(0, "loaded", 0)
    other = View(1, "available", 10)
    assert watch.another("m", [busy, other], 0) is None
    assert watch.another("m", [calm, other], 2) is None
    assert watch.another("m", [busy, other], 4) is None


@pytest.mark.parametrize(
    "views",
    [
        [View(0, "loaded", 0, wait_s=2, share=0.1), View(1, "available", 10)],
        [View(0, "loaded", 0, wait_s=0.1, share=1.0), View(1, "available", 10)],
        [View(0, "loaded", 0, **BUSY), View(1, "loaded", 0), View(2, "available", 10)],
        [View(0, "loaded", 0, **BUSY), View(1, "loading", 10), View(2, "available", 10)],
    ],
    ids=["another model keeps it busy", "it is not busy", "one worker is free", "one is being loaded"],
)
def test_who_is_not_kept_busy_by_the_model_needs_no_other_worker(views: list[View]) -> None:
    assert ask(BusyWatch(), views, 0, 10, 20) == [None, None, None]


VIEWS = st.lists(
    st.builds(View, st.integers(0, 7), st.sampled_from(STATES), st.integers(0, 100), st.floats(0, 9)),
    unique_by=lambda view: view.slot,
)


@given(VIEWS, st.randoms())
def test_frontends_that_see_the_same_workers_in_any_order_decide_the_same(
    views: list[View], random: object
) -> None:
    shuffled = sorted(views, key=lambda view: random.random())  # type: ignore[attr-defined]
    assert placement.cold(views) == placement.cold(shuffled)
    assert placement.spare(views) == placement.spare(shuffled)


@given(VIEWS)
def test_only_a_worker_where_the_model_is_available_is_ever_asked(views: list[View]) -> None:
    free = {view.slot for view in views if view.state == "available"}
    for slot in (placement.cold(views), placement.spare(views), placement.lacking(views, 8)):
        assert slot is None or slot in free
