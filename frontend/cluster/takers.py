"""Which of the boxes that a gateway hears may take an item, and which of them shall.

1. `choose` names the box for an item that goes to a box directly, `home` the box for a text.
2. `queue_of` tells whether the queue may have an item, as any box of a pool takes items from there.
3. `is_starved` finds the box that the queue leaves without work while others have a lot.

What depends on rows and profiles is remembered until `forget`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from frontend.cluster.boxes import Box
from frontend.cluster.bucket import Rows
from frontend.engine.streams import homes
from frontend.scope import ANY_BOX, Choice
from ipc.wire.cluster import RUN, TEXT

MOST_REMEMBERED = 1024
"""Clients name machine profiles, pools and bundles, so that there may be any number of choices."""
WAIT_STEP_S = 0.2
"""A box tells its wait about so often. Until the next time a shorter wait is over, and what was sent there since counts
more: a box would else get all items of that time because the other one ran a batch when it spoke."""
ITEMS_EACH = 4
"""Boxes that have fewer items of a gateway in the mean are not compared."""


class Takers:
    """Chooses among the boxes of a gateway."""

    def __init__(
        self,
        live: Callable[[], Iterable[tuple[Box, Rows]]],
        profile: Callable[[Box, Rows], str],
        pool_of: Callable[[Choice], str],
    ) -> None:
        """`live` gives the boxes that live and their rows, `profile` the machine profile of one of these."""
        self._live, self._profile, self._pool_of = live, profile, pool_of
        self._found: dict[tuple[str, Choice, str], list[tuple[bool, bool, Box]]] = {}
        self._queues: dict[tuple[str, Choice], str] = {}

    def forget(self) -> None:
        """Rows, boxes or profiles may have changed."""
        self._found.clear()
        self._queues.clear()

    def queue_of(self, model: str, choice: Choice) -> str:
        """The bundle whose queue serves a request, empty where the gateway has to name the box.

        Any box of the pool takes an item from the queue, so all of them must be boxes that the request may go to, and
        that have or may load the model.
        """
        bundle = self._queues.get((model, choice))
        if bundle is None:
            if len(self._queues) >= MOST_REMEMBERED:
                self._queues.clear()
            bundle = self._queues[model, choice] = self._queue_of(model, choice)
        return bundle

    def _queue_of(self, model: str, choice: Choice) -> str:
        pool = self._pool_of(choice)
        found = [(box, rows) for box, rows in self._live() if box.pool == pool and box.open]
        bundles = {rows.box.bundle for _, rows in found if rows.box is not None}
        preferred = {choice.takes(self._profile(*each)) for each in found}
        if len(bundles) != 1 or len(preferred) != 1 or choice.bundle not in ("", *bundles):
            return ""
        if not all(model in rows.states for _, rows in found):
            return ""
        return bundles.pop()

    def choose(
        self, model: str, tried: Collection[str], choice: Choice = ANY_BOX, kind: str = RUN
    ) -> Box | None:
        """The open box for an item of a model outside of `tried`: one that has the model, else one that may load it.

        Among these the first to be free by its own word, in steps of `WAIT_STEP_S`, and by what this gateway has sent
        there. A box of the machine profile that the request chooses goes before all others.
        """
        found = [
            (other, unloaded, box.wait_s // WAIT_STEP_S, len(box.items), box.name, box)
            for other, unloaded, box in self._of(model, choice, kind)
            if box.open and box.life not in tried
        ]
        return min(found)[5] if found else None

    def _of(self, model: str, choice: Choice, kind: str) -> list[tuple[bool, bool, Box]]:
        """Boxes that take items of a kind: of another profile, lacks the model as yet, the box.

        PERF: rows, states and profiles change far less often than items come.
        """
        takers = self._found.get((model, choice, kind))
        if takers is None:
            if len(self._found) >= MOST_REMEMBERED:
                self._found.clear()
            takers = self._found[model, choice, kind] = [
                (
                    not choice.takes(self._profile(box, rows)),
                    "loaded" not in {state.state for state in rows.states[model].values()},
                    box,
                )
                for box, rows in self._open(model, (), choice, kind)
            ]
        return takers

    def is_starved(self, box: Box, model: str, choice: Choice) -> bool:
        """Whether a box has room, and less than half as many items of this gateway as boxes have in the mean.

        A queue gives each box that asks as many items as any other box. So the items of equal boxes drift apart, and
        those of unequal ones gather at the slowest.
        """
        counts = [len(each.items) for _, _, each in self._of(model, choice, RUN) if each.open]
        total = sum(counts)
        return (
            box.room_s > 0 and total >= ITEMS_EACH * len(counts) and 2 * len(box.items) * len(counts) < total
        )

    def _open(
        self, model: str, tried: Collection[str], choice: Choice, kind: str = RUN
    ) -> Iterator[tuple[Box, Rows]]:
        """The open boxes with a model that take items of a kind, outside of `tried`."""
        pool = self._pool_of(choice)
        for box, rows in self._live():
            if not box.open or box.life in tried or box.pool != pool:
                continue
            if kind not in rows.box.kinds:  # type: ignore[union-attr]
                continue
            if choice.bundle in ("", rows.box.bundle) and rows.states.get(model):  # type: ignore[union-attr]
                yield box, rows

    def has_room(self, model: str, choice: Choice) -> bool:
        """Whether a box that a request may go to has room for other work, by its last sign of life."""
        return any(box.room_s > 0 for box, _ in self._open(model, (), choice))

    def home(
        self,
        model: str,
        tried: Collection[str],
        choice: Choice,
        beginning: str,
        texts: Mapping[str, int],
        identity: str = "",
    ) -> Box | None:
        """The open box for a text outside of `tried`: by the beginning of its prompt, as turns of a conversation share.

        Only boxes count that have about the fewest `texts`, by life, and room for other work; the latter unless no box
        has room. Only a box goes on with the text of a model with an `identity` that has the same one loaded.
        """
        found: list[tuple[bool, Box]] = []
        for box, rows in self._open(model, tried, choice, TEXT):
            loaded = [state for state in rows.states[model].values() if state.state == "loaded"]
            if any(identity in ("", state.identity) for state in loaded):
                found.append((not choice.takes(self._profile(box, rows)), box))
        if not found:
            return None if identity else self.choose(model, tried, choice, TEXT)
        first = min(other for other, _ in found)
        boxes = [box for other, box in found if other == first]
        boxes = [box for box in boxes if box.room_s > 0] or boxes
        fewest = min(texts.get(box.life, 0) for box in boxes)
        near = {box.name: box for box in boxes if texts.get(box.life, 0) <= fewest + homes.STREAMS_APART}
        return near[homes.home(list(near), model, beginning)]
