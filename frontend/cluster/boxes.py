"""The boxes of a cluster as one gateway hears of them: signs of life, deaths, and how much work is on its way to each.

1. Every sign of life names the box, the life, its pool and its room. A new life of a box ends the life before.
2. `tick` finds the boxes that have been silent for too long. Time in which this gateway heard nobody, because it stood
   still or had no broker, is no silence of a box: `pardon` begins all silences anew. A gateway hears its own signs of
   life too (`echo`): where these do not come back, the broker is silent, and not the boxes.
3. A dead box stays known for `SHOWN_S`, for pages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from frontend.cluster.broker import LOST_ECHOES
from ipc.settings import Cluster
from ipc.wire.cluster import BoxBeat

log = logging.getLogger(__name__)

SHOWN_S = 60.0
ECHOES_BEHIND = 2
"""Beats by which a gateway has heard itself later than a box that is dead."""
STALL_S = 0.5
"""A gateway whose ticks are further apart stood still itself."""


@dataclass(slots=True)
class Box:
    """One box. `items` are the ids of this gateway's items that the present life has or was sent.

    `deaf`: a broker has said that nobody listens for items of this life, and no sign of life has come since.
    """

    name: str
    life: str
    pool: str
    heard_ns: int
    draining: bool = False
    alive: bool = True
    deaf: bool = False
    room_s: float = 0.0
    wait_s: float = 0.0
    missed: int = 0
    items: set[str] = field(default_factory=set)

    @property
    def open(self) -> bool:
        """Whether the box takes new work."""
        return self.alive and not self.draining and not self.deaf


class Boxes:
    """All boxes by name."""

    def __init__(self, cluster: Cluster, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._beat_ns, self._silence_ns = int(cluster.beat_s * 1e9), int(cluster.peer_silence_s * 1e9)
        self._now_ns, self._ticked_ns = now_ns, now_ns()
        self._echo_ns = 0
        """When the gateway heard itself last; 0: never yet."""
        self.by_name: dict[str, Box] = {}
        self.by_life: dict[str, Box] = {}
        self.on_death: Callable[[Box], None] = lambda box: None
        """Told of each death, while the box still names its items."""
        self.on_change: Callable[[], None] = lambda: None
        """A box came, went, or began to drain."""
        self.beats_missed = 0

    def __iter__(self) -> Iterator[Box]:
        return iter(self.by_name.values())

    def is_alive(self, life: str) -> bool:
        """Whether signs of life arrive of this life of a box."""
        box = self.by_life.get(life)
        return box is not None and box.alive

    def take(self, beat: BoxBeat) -> None:
        """A sign of life has arrived."""
        box, now_ns = self.by_name.get(beat.box), self._now_ns()
        before = box if box is not None and box.life != beat.life else None
        known = (
            before is None
            and box is not None
            and box.alive
            and not box.deaf
            and (box.draining, box.pool) == (beat.draining, beat.pool)
        )
        if box is None or before is not None:
            box = self.by_name[beat.box] = Box(beat.box, beat.life, beat.pool, now_ns)
            self.by_life[beat.life] = box
            log.info("box %s has joined, life %s", box.name, box.life)
        elif not box.alive:
            log.info("box %s is heard again, life %s", box.name, box.life)
        box.heard_ns, box.draining, box.alive, box.deaf = now_ns, beat.draining, True, False
        box.room_s, box.wait_s, box.pool, box.missed = beat.room_s, beat.wait_s, beat.pool, 0
        if not known:
            self.on_change()
        if before is not None:
            # The new life is there already to take what the old one had.
            self._end(before)
            del self.by_life[before.life]

    def unheard(self, box: Box) -> None:
        """A broker has said that nobody listens for items of this life of a box."""
        box.deaf = True
        self.on_change()

    def echo(self) -> None:
        """A sign of life of this gateway itself has come back from the broker."""
        now_ns = self._now_ns()
        if now_ns - self._echo_ns > LOST_ECHOES * self._beat_ns:
            self.pardon()
        self._echo_ns = now_ns

    def pardon(self) -> None:
        """This gateway could not hear anybody until now."""
        now_ns = self._now_ns()
        for box in self.by_name.values():
            if box.alive:
                box.heard_ns, box.missed = now_ns, 0

    def tick(self) -> None:
        """Some time has passed: end the boxes that are silent, forget those that are gone for long."""
        now_ns = self._now_ns()
        if now_ns - self._ticked_ns > STALL_S * 1e9:
            self.pardon()
        self._ticked_ns = now_ns
        for box in list(self.by_name.values()):
            silent_ns = now_ns - box.heard_ns
            if not box.alive:
                if silent_ns > SHOWN_S * 1e9:
                    del self.by_name[box.name]
                    self.by_life.pop(box.life, None)
                    self.on_change()
                continue
            missed = silent_ns // self._beat_ns
            self.beats_missed += max(0, missed - box.missed)
            box.missed = max(box.missed, missed)
            if silent_ns > self._silence_ns and self._hears_others_than(box):
                log.warning(
                    "box %s, life %s, has been silent for %.1f s and counts as dead with %d items of this gateway",
                    box.name,
                    box.life,
                    silent_ns / 1e9,
                    len(box.items),
                )
                self._end(box)
                self.on_change()

    def _hears_others_than(self, box: Box) -> bool:
        """Whether the broker still brought messages when nothing came of a box any more."""
        return not self._echo_ns or self._echo_ns - box.heard_ns > ECHOES_BEHIND * self._beat_ns

    def _end(self, box: Box) -> None:
        """The box is dead. A box that was only silent comes back in the same life, without items of this gateway."""
        if box.alive:
            box.alive = False
            self.on_death(box)
            box.items.clear()
