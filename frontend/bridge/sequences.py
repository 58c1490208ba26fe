"""The sequences that one life of a bridge has begun: which requests may go on with their state.

The worker keeps the state, and knows what has ended or expired. This table adds what a worker cannot know:

1. The state may be older than this life of the bridge: requests that went to the life before may be lost. So a sequence
   begins anew after a start of the bridge.
2. The gateways may have had another home for the sequence since its last request here, as boxes and pools come and go.
   A gateway says for how long this box has been the home (`Carried.stays_ms`).
3. A gateway may have told the client that a request is lost which has run here (`Drop.lost`).
4. A request never runs twice in one life, also when its result is forgotten: the ids of requests that have begun are
   kept until their gateway has the answer.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from ipc.errors import NEVER_BEGUN, SequenceLost, SequenceUnknown, not_begun
from ipc.wire.messages import Step, Work

MOST_SEQUENCES = 1 << 16
"""Sequences, and requests, that are kept; the oldest go first."""
_ELSEWHERE = "the boxes or pools of the cluster have changed since its last request"
_LOST = "one of its requests was lost"
Key = tuple[str, str, int | str]
"""Model, caller and id."""


class BegunSequences:
    """All sequences of one life."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._used: OrderedDict[Key, int] = OrderedDict()
        """When each sequence was used last."""
        self._why: OrderedDict[Key, str] = OrderedDict()
        """Why sequences cannot go on that have begun here."""
        self._spent: OrderedDict[str, Key] = OrderedDict()
        """The sequences of requests that have begun, by the id of their item."""

    def __len__(self) -> int:
        return len(self._spent)

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
        else:
            used_ns = self._used.get(key)
            if used_ns is not None and stays_ms is not None and now_ns - used_ns > stays_ms * 1_000_000:
                self._end(key, _ELSEWHERE)
                used_ns = None
            if used_ns is None:
                raise SequenceUnknown(not_begun(step.id, shown, self._why.get(key, NEVER_BEGUN)))
        _keep(self._used, key, now_ns)
        _keep(self._spent, name, key)

    def confirmed(self, names: Iterable[str]) -> None:
        """The gateway has the answers to these items, or its client waits for none."""
        for name in names:
            self._spent.pop(name, None)

    def lost(self, names: Iterable[str]) -> None:
        """Clients were told that these items are lost: what has run of them ends its sequence."""
        for name in names:
            key = self._spent.pop(name, None)
            if key is not None:
                self._end(key, _LOST)

    def _end(self, key: Key, why: str) -> None:
        self._used.pop(key, None)
        _keep(self._why, key, why)


def _keep(table: OrderedDict, key: object, value: object) -> None:  # type: ignore[type-arg]
    table[key] = value
    table.move_to_end(key)
    if len(table) > MOST_SEQUENCES:
        table.popitem(last=False)
