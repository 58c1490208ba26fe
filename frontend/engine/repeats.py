"""Equal items of one request, which get equal results.

Rows of a batch differ in their last bits by their place in it. Items that are equal would so lose their order in a
ranking, and a vector that was asked for twice would come in two versions. All of them get the result of the first.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from frontend.engine.answer import Answer
from frontend.http.rendering import off_loop_if
from ipc.wire.messages import InputItem

PREFIX_CHARACTERS = 64


def may_repeat(items: Sequence[InputItem]) -> bool:
    """Whether some items may be equal: False at once where all begin differently, however long they are."""
    # PERF: every request asks. A slice of a short text is that text, and long ones are not hashed whole.
    return len({None if item.text is None else item.text[:PREFIX_CHARACTERS] for item in items}) < len(items)


async def unify(answer: Answer, items: Sequence[InputItem], *, large: bool) -> None:
    """Give equal items equal results, in private copies that end the lease; in a thread for a `large` request."""
    try:
        firsts = await off_loop_if(large, firsts_of, items, {error.index for error in answer.errors})
        if firsts is not None:
            await off_loop_if(large, answer.repeat, firsts)
            answer.release()
    except BaseException:
        answer.release()
        raise


def firsts_of(items: Sequence[InputItem], failed: Collection[int]) -> list[int] | None:
    """For each item the place of the first one that is equal to it, or None where all differ.

    `failed` are the places of items without a result. Items with metadata count as different.
    """
    seen: dict[Hashable, int] = {}
    firsts = [
        at if at in failed or item.metadata else seen.setdefault(_key(item), at)
        for at, item in enumerate(items)
    ]
    return None if firsts == list(range(len(items))) else firsts


def _key(item: InputItem) -> Hashable:
    return item.text, tuple(item.ids or ()), tuple(item.images)
