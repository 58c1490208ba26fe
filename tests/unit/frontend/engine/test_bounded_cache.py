"""A cache of bounded size: what it holds after any calls, and what it counts."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from frontend.engine.caching import ENTRY_NBYTES, LARGEST_SHARE, BoundedCache

LIMIT = 16 * ENTRY_NBYTES
LARGEST = LIMIT // LARGEST_SHARE - ENTRY_NBYTES


class Count:
    """An amount that a test reads."""

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


def meter() -> Any:
    return SimpleNamespace(hits=Count(), misses=Count(), evictions=Count(), nbytes=Count())


CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("get"), st.integers(0, 24), st.just(0)),
        st.tuples(st.just("put"), st.integers(0, 24), st.integers(0, LARGEST + 2)),
    ),
    max_size=120,
)


@given(CALLS)
def test_any_calls_leave_the_most_recently_used_within_the_bound(calls: list[tuple[str, int, int]]) -> None:
    cache: BoundedCache[int] = BoundedCache(LIMIT)
    counted, kept, evicted = meter(), OrderedDict[bytes, tuple[int, int]](), 0
    for value, (what, number, nbytes) in enumerate(calls):
        key = b"%d" % number
        if what == "get":
            if key in kept:
                kept.move_to_end(key)
            assert cache.get(key) == (kept[key][0] if key in kept else None)
            continue
        cache.put(key, value, nbytes, counted)
        kept.pop(key, None)
        if nbytes <= LARGEST:
            kept[key] = value, nbytes + ENTRY_NBYTES
        while sum(size for _, size in kept.values()) > LIMIT:
            kept.popitem(last=False)
            evicted += 1
        assert cache.nbytes == counted.nbytes.value == sum(size for _, size in kept.values()) <= LIMIT
        assert len(cache) == len(kept)
    assert counted.evictions.value == evicted
    for key, (value, _) in kept.items():
        assert cache.get(key) == value


def test_a_value_that_would_push_out_many_others_is_not_kept() -> None:
    cache, counted = BoundedCache[str](LIMIT), meter()
    cache.put(b"key", "small", LARGEST, counted)
    cache.put(b"key", "large", LARGEST + 1, counted)
    assert cache.get(b"key") is None, "the earlier value is another one"
    assert cache.nbytes == counted.nbytes.value == counted.evictions.value == 0


def test_an_eviction_counts_for_the_model_whose_value_goes() -> None:
    cache, first, second = BoundedCache[int](LIMIT), meter(), meter()
    cache.put(b"first", 1, LARGEST, first)
    for number in range(LARGEST_SHARE):
        cache.put(b"%d" % number, number, LARGEST, second)
    assert (first.evictions.value, first.nbytes.value) == (1, 0)
    assert (second.evictions.value, second.nbytes.value) == (0, LIMIT)
