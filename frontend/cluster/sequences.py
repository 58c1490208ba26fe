"""The homes of sequences among the boxes, as each gateway finds them without asking anybody.

1. Boxes of the roster have rows in the bucket of models, also while they are down: so the death of a box moves no
   sequence. A box has a place for each of its configured workers, and the home is the place with the highest hash.
2. A sequence whose home is down cannot go on, as its state went with the box. A START waits for the next life.
3. Boxes and pools come and go. A gateway remembers the places of models with sequences, and tells the home since when
   it has been the home: a sequence that began before goes on nowhere (`frontend.bridge.sequences`).
4. Requests of one sequence leave the gateway one after the other (`Turns`): a lost message is sent again, and no later
   request may run before it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from frontend.engine.streams import homes
from frontend.scope import Choice
from ipc import deadline
from ipc.errors import DeadlineExceeded
from ipc.wire.messages import Step, Work

MOST_MODELS = 256
"""Models whose places are remembered, with the pool and the bundle of a request."""
MOST_CHANGES = 16
"""Changes of the places of a model that are remembered."""
Places = tuple[str, ...]


class Homes:
    """The homes of the sequences of one gateway."""

    def __init__(
        self,
        places: Callable[[str, Choice], Places],
        pool_of: Callable[[Choice], str] = lambda choice: choice.pool,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`places` are those of a model for a request, in a fixed order: the box, a slash and a number.

        They follow from the pool and the bundle of a request alone. `pool_of` names the pool.
        """
        self._places, self._pool_of, self._now_ns = places, pool_of, now_ns
        self._changes: OrderedDict[tuple[str, Choice], deque[tuple[int, Places]]] = OrderedDict()
        """By model and choice the places, each since an instant; 0 for those at the first look."""

    def look(self) -> None:
        """Boxes or pools may have changed."""
        for key in self._changes:
            self._note(key)

    def _note(self, key: tuple[str, Choice]) -> Sequence[tuple[int, Places]]:
        changes, places = self._changes.setdefault(key, deque(maxlen=MOST_CHANGES)), self._places(*key)
        if not changes or changes[-1][1] != places:
            changes.append((self._now_ns() if changes else 0, places))
        return changes

    def find(self, work: Work, choice: Choice) -> tuple[str, int | None]:
        """The box of a request of a sequence, and for how many milliseconds it has been the home, None for always.

        The box is empty where no box of the roster has the model.
        """
        step = work.step
        key = work.model, Choice(bundle=choice.bundle, pool=self._pool_of(choice))
        assert step is not None
        if key not in self._changes and not self._places(*key):
            # PERF: nothing is remembered of names that anybody may make up.
            return "", None
        changes = self._note(key)
        self._changes.move_to_end(key)
        if len(self._changes) > MOST_MODELS:
            self._changes.popitem(last=False)

        def home(places: Places) -> str:
            return homes.home(places, work.model, step.id, work.caller).rpartition("/")[0] if places else ""

        *before, (since_ns, places) = changes
        box = home(places)
        for earlier_ns, earlier in reversed(before):
            if home(earlier) != box:
                break
            since_ns = earlier_ns
        return box, (self._now_ns() - since_ns) // 1_000_000 if since_ns else None


class Turns:
    """The requests of each sequence at one gateway, one at a time in the order in which they came."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[tuple[str, str, int | str], asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def take(self, work: Work, step: Step, until_ns: int) -> AsyncIterator[None]:
        """The turn of a request at this step of a sequence. Raises `DeadlineExceeded`."""
        lock = self._locks.setdefault((work.model, work.caller, step.id), asyncio.Lock())
        try:
            async with asyncio.timeout(deadline.remaining_s(until_ns)):
                await lock.acquire()
        except TimeoutError:
            raise DeadlineExceeded(
                "requests of the same sequence that came before took too long", retry_after_s=1
            ) from None
        try:
            yield
        finally:
            lock.release()
