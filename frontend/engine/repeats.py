"""Equal items of one request, which get equal results.

Rows of a batch differ in their last bits by their place in it. Items that are equal would so lose their order in a
ranking, and a vector that was asked for twice would come in two versions. All of them get the result of the first.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from ipc.wire.messages import InputItem


def firsts_of(items: Sequence[InputItem], failed: Collection[int]) -> list[int] | None:
    """For each item the place of the first one that is equal to it, or None where all differ.

    `failed` are the places of items without a result. Items with metadata count as different.
    """
    if len({item.text for item in items if item.text is not None}) == len(items):
        return None
    seen: dict[Hashable, int] = {}
    firsts = [
        at if at in failed or item.metadata else seen.setdefault(_key(item), at)
        for at, item in enumerate(items)
    ]
    return None if firsts == list(range(len(items))) else firsts


def _key(item: InputItem) -> Hashable:
    return item.text, tuple(item.ids or ()), tuple(item.images)
