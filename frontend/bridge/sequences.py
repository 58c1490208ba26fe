"""The sequences that one life of a bridge has begun: which requests may go on with their state.

The worker keeps the state, and knows what has ended or expired. This table adds what a worker cannot know:

1. The state may be older than this life of the bridge: requests that went to the life before may be lost. So a sequence
   begins anew after a start of the bridge.
2. The gateways may have had another home for the sequence since its last request here, as boxes and pools come and go.
   A gateway says for how long this box has been the home (`Carried.stays_ms`).
3. A gateway may have told the client that a request is lost which has run here (`Drop.lost`), or have died before its
   client had the answer. Meanwhile a request of another gateway waits (`turn`), or the same might run twice.
4. A request never runs twice in one life, also when its result is forgotten: the ids of requests that have begun are
   kept until their gateway has the answer.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ipc import deadline
from ipc.errors import NEVER_BEGUN, DeadlineExceeded, SequenceLost, SequenceUnknown, not_begun
from ipc.wire.messages import Step, Work

MOST_SEQUENCES = 1 << 16
"""Sequences, and requests, that are kept; the oldest go first."""
_ELSEWHERE = "the boxes or pools of the cluster have changed since its last request"
_LOST = "one of its requests was lost"
Key = tuple[str, str, int | str]
"""Model, caller and id."""


class _Used(NamedTuple):
    """When a sequence was used last, by which item, and the number of its START."""

    at_ns: int
    item: str
    start: int


class BegunSequences:
    """All sequences of one life."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._used: OrderedDict[Key, _Used] = OrderedDict()
        self._why: OrderedDict[Key, str] = OrderedDict()
        """Why sequences cannot go on that have begun here."""
        self._spent: OrderedDict[str, tuple[Key, int]] = OrderedDict()
        """The sequences of requests that have begun, each with the number of its START, by the id of their item."""
        self._starts, self._moved = itertools.count(1), asyncio.Event()

    def __len__(self) -> int:
        return len(self._spent)

    async def turn(self, router: str, work: Work, until_ns: int) -> None:
        """Wait until the gateway of the request before has its answer, if that is another gateway, or is dead.

        Raises `DeadlineExceeded`.
        """
        step = work.step
        assert step is not None
        key = work.model, work.caller, step.id
        try:
            async with asyncio.timeout(deadline.remaining_s(until_ns)):
                while not step.start and self._is_with_another(key, router):
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            why = "another gateway did not say in time that it has the answer before"
            raise DeadlineExceeded(why, retry_after_s=1) from None

    def _is_with_another(self, key: Key, router: str) -> bool:
        used = self._used.get(key)
        return used is not None and used.item in self._spent and not used.item.startswith(f"{router}.")

    def take(self, name: str, work: Work, step: Step, shown: str, stays_ms: int | None) -> None:
        """The item `name` is about to run. `shown` is the name of the model in messages.

        `stays_ms`: for how long the gateway has known this box as the home, None for always.

        Raises `SequenceUnknown`, and `SequenceLost` for an item that has run before.
        """
        if name in self._spent:
            raise SequenceLost.of(step.id)
        key, now_ns = (work.model, work.caller, step.id), self._now_ns()
        if step.start:
            self._why.pop(key, None)
            start = next(self._starts)
        else:
            used = self._used.get(key)
            if used is not None and stays_ms is not None and now_ns - used.at_ns > stays_ms * 1_000_000:
                self._end(key, _ELSEWHERE)
                used = None
            if used is None:
                raise SequenceUnknown(not_begun(step.id, shown, self._why.get(key, NEVER_BEGUN)))
            start = used.start
        _keep(self._used, key, _Used(now_ns, name, start))
        _keep(self._spent, name, (key, start))

    def confirmed(self, names: Iterable[str]) -> None:
        """The gateway has the answers to these items, or its client waits for none."""
        for name in names:
            self._spent.pop(name, None)
        self._moved.set()

    def overdue(self, name: str) -> None:
        """The gateway of an item has not asked again while it could: no other gateway waits for its word any longer."""
        key, _ = self._spent.get(name, (None, 0))
        if key is not None and (used := self._used.get(key)) is not None and used.item == name:
            self._used[key] = used._replace(item="")
            self._moved.set()

    def of(self, router: str) -> list[str]:
        """The items of a gateway that it has not confirmed."""
        return [name for name in self._spent if name.startswith(f"{router}.")]

    def lost(self, names: Iterable[str]) -> None:
        """Clients were told that these items are lost: what has run of them ends its sequence."""
        for name in names:
            key, start = self._spent.pop(name, (None, 0))
            if key is not None and (used := self._used.get(key)) is not None and used.start == start:
                self._end(key, _LOST)
        self._moved.set()

    def _end(self, key: Key, why: str) -> None:
        self._used.pop(key, None)
        _keep(self._why, key, why)


def _keep(table: OrderedDict, key: object, value: object) -> None:  # type: ignore[type-arg]
    table[key] = value
    table.move_to_end(key)
    if len(table) > MOST_SEQUENCES:
        table.popitem(last=False)
