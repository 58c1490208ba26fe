"""Which cases of a test marked `sample` the default suite runs; the others get the mark `long`.

1. `@pytest.mark.sample` keeps each value of each parameter in one case or more, instead of every combination. The case
   with the most values that no case has yet comes next, so that few cases have them all.
2. `@pytest.mark.sample(count)` keeps so many cases, those with new values first.

The choice depends on the names of the cases alone: all processes of a run make the same one, and a case that is added
moves few others.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import pytest


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that are left out as `long`."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("long"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for found in cases.values():
        chosen = found[0].get_closest_marker("sample")
        assert chosen is not None
        values = [_values_of(item) for item in found]
        kept = choice([item.name for item in found], values, *chosen.args)
        for at, item in enumerate(found):
            if at not in kept:
                item.add_marker(pytest.mark.long)


def _values_of(item: pytest.Item) -> set[Hashable]:
    """The name of its value of each parameter, or of the parameters that have their values together."""
    callspec = getattr(item, "callspec", None)
    # NOTE: the indices of pytest 9 number the cases, and not the values of a parameter.
    return set(enumerate(callspec._idlist)) if callspec is not None else set()


def choice(names: Sequence[str], values: Sequence[set[Hashable]], count: int | None = None) -> set[int]:
    """The places of the cases that are kept, of which at least one; `values` are those of each case."""
    order = sorted(range(len(names)), key=lambda at: (zlib.crc32(names[at].encode()), at))
    kept, left, seen = list[int](), list(order), set[Hashable]()
    while left:
        best = max(left, key=lambda at: len(values[at] - seen))
        if kept and values[best] <= seen:
            break
        kept.append(best)
        left.remove(best)
        seen |= values[best]
    if count is not None:
        kept = [*kept, *left][:count]
    return set(kept)
