"""Items of a gateway that boxes answer in pieces: texts (`texts`) and answers in parts (`answers`).

1. A `Run` is one item at one box after the other until its first piece, and the source of a stream for the engine.
2. Pieces arrive in order. A piece behind a gap is dropped, and the box is asked for what lacks.
3. Boxes hear what has come and what clients have taken: words of `tell_after_s` together, once an item has
   `TELL_PIECES` more pieces or a client has taken half of a window. A word may be lost, so a box hears the same again
   before the box is asked.
4. The unit of what clients take is that of `ipc.wire.streams.Flow`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, Protocol, TypeVar

from frontend.cluster.boxes import Box, Boxes
from frontend.cluster.dispatch import Dispatch
from frontend.cluster.items import Held, Sent
from frontend.engine.streams.incoming import Delivery
from frontend.scope import Choice
from ipc.errors import PenstockError, ProtocolError, QueueUnavailable, WorkerCrashed
from ipc.logs import Seldom
from ipc.wire.cluster import IDS_EACH, VERSION, ItemResult, Outcome, Taken, ToBox, read_answer
from ipc.wire.messages import Work

log = logging.getLogger(__name__)

TELL_PIECES = 32


class Office(Protocol):
    """What runs need of their gateway."""

    router: str
    boxes: Boxes
    dispatch: Dispatch

    def item(
        self, kind: str, work: Work, payload: bytes, deadline_ns: int, start_by_ns: int, *, choice: Choice
    ) -> Sent:
        """A new item. Raises `InvalidInput` for work with a value that no message can hold.

        Raises `InputRefused` for an input on which workers or boxes have died.
        """

    async def post(self, sent: Sent) -> None:
        """Give an item to `dispatch`. Raises as `Dispatch.begin` does."""

    def close(self, sent: Sent) -> None:
        """Nobody waits for an item any more. Safe to call twice."""

    def judge(self, sent: Sent, payload: bytes) -> None:
        """Note the input of an item on which boxes have died, if they have."""

    def word(self, box: Box, word: ToBox) -> None:
        """Tell a box. Raises `QueueUnavailable` without a broker."""


class Run:
    """One item that is answered in pieces. `worker` names the box, at the end the worker."""

    def __init__(self, runs: Runs[Run], held: Sent, payload: bytes = b"") -> None:
        """`payload` is the input beside the plan, for a verdict on the input."""
        self._runs, self.held, self.payload = runs, held, payload
        self.worker, self.uuid = "", "cpu"
        self.final: asyncio.Future[Delivery] = held.future.get_loop().create_future()
        self.sent_ns = time.monotonic_ns()
        self.told_pieces = self.taken = 0
        held.future.add_done_callback(self._answered)

    def took(self, amount: int) -> None:
        """The client has taken so much more."""
        self.taken += amount
        self._runs.owe(self)

    def release(self, result: object, arena: object) -> None:
        """Nothing of a box is leased here."""

    def rest(self, request: int) -> None:
        """No queue counts the item here."""

    def resume(self, request: int) -> None:
        """No queue counts the item here."""

    def cancel(self, request: int) -> None:
        """The caller has gone."""
        self._runs.end(self)

    def abandon(self, request: int, future: asyncio.Future[Delivery]) -> None:
        """The caller was cancelled."""
        self._runs.end(self)

    def fail(self, error: PenstockError) -> None:
        """End the run with an error."""
        if not self.held.future.done():
            self.held.future.set_exception(error)

    def _answered(self, future: asyncio.Future[tuple[ItemResult, Outcome]]) -> None:
        if future.cancelled():
            return
        self._runs.end(self)
        error = future.exception()
        if error is None:
            result, outcome = future.result()
            try:
                answer = read_answer(outcome.result)
            except ProtocolError as unreadable:
                error = unreadable
            else:
                self.worker, self.uuid = result.worker_id, outcome.uuid
                self.final.set_result(Delivery(answer, None, b""))
        if error is not None:
            self.final.set_exception(error)
        if isinstance(error, WorkerCrashed):
            self._runs.judge(self)


R = TypeVar("R", bound=Run)


class Runs(Generic[R]):
    """All items of one gateway that are answered in pieces of one kind."""

    tell_after_s = 0.02

    def __init__(self, office: Office, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._office, self._now_ns = office, now_ns
        self._seldom = Seldom(log)
        self._runs: dict[Held, R] = {}
        self._owed: set[R] = set()
        office.dispatch.on_ask.append(self._asked)

    def __len__(self) -> int:
        return len(self._runs)

    async def post(self, run: R) -> None:
        """Send the item of a run. Raises as `Office.post` does."""
        self._runs[run.held] = run
        try:
            await self._office.post(run.held)
        except BaseException:
            self.end(run)
            raise

    def end(self, run: R) -> None:
        """Nobody reads the run any more. Safe to call twice."""
        self._runs.pop(run.held, None)
        self._owed.discard(run)
        self._office.close(run.held)
        run.held.future.cancel()

    def judge(self, run: R) -> None:
        """A run ends since workers or boxes have died on its input."""
        self._office.judge(run.held, run.payload)

    @property
    def at_boxes(self) -> Mapping[str, int]:
        """How many of these items each life of a box has."""
        return Counter(life for held in self._runs for life in held.boxes)

    def box_of(self, life: str, name: str) -> Box | None:
        """The box that has sent a message; None for one that is not known, which counts."""
        box = self._office.boxes.by_life.get(life)
        if box is None or box.name != name:
            self._office.dispatch.counts["dropped", "unknown box"] += 1
            return None
        return box

    def next(self, box: Box, name: str, number: int, now_ns: int, *, whole: bool = True) -> R | None:
        """The run whose next piece has come; None for a piece that nobody reads, or that was read, or behind a gap.

        Unless the piece is `whole`, its bytes have yet to come: `came` says when they are there.
        """
        dispatch = self._office.dispatch
        held = dispatch.items.get(name)
        run = None if held is None else self._runs.get(held)
        if held is None or run is None or box.life not in held.boxes:
            dispatch.drop(box.life, name)
            return None
        if held.future.done():
            return None
        if number != held.pieces + 1:
            if number > held.pieces:
                self.owe(run)
                dispatch.counts["resent", "gap"] += dispatch.ask_soon(held)
            return None
        held.heard_ns = now_ns
        held.claimed.add(box.life)
        run.worker = box.name
        if whole:
            self.came(run, number)
        return run

    def came(self, run: R, number: int) -> None:
        """A piece is there."""
        run.held.pieces = number
        if number - run.told_pieces >= TELL_PIECES:
            self.owe(run)

    def owe(self, run: R) -> None:
        """The box of a run shall hear what has come and what was taken: soon, with others."""
        if not self._owed:
            run.final.get_loop().call_later(self.tell_after_s, self.say_taken)
        self._owed.add(run)

    def say_taken(self) -> None:
        """Tell all boxes what has come and what was taken since the last word."""
        owed, self._owed = self._owed, set()
        by_life: dict[str, list[R]] = {}
        for run in owed:
            run.told_pieces = run.held.pieces
            for life in run.held.boxes:
                by_life.setdefault(life, []).append(run)
        for life, runs in by_life.items():
            box = self._office.boxes.by_life.get(life)
            if box is None:
                continue
            for at in range(0, len(runs), IDS_EACH):
                some = runs[at : at + IDS_EACH]
                ids, numbers = [run.held.id for run in some], [run.held.pieces for run in some]
                word = Taken(VERSION, self._office.router, ids, numbers, [run.taken for run in some])
                try:
                    self._office.word(box, word)
                except QueueUnavailable:
                    # NOTE: `resume` tells again.
                    return

    def _asked(self, helds: Iterable[Held]) -> None:
        """Boxes of silent texts are asked: first tell them what has come, since they may wait for that word alone."""
        self._owed.update(run for held in helds if (run := self._runs.get(held)) is not None)
        if self._owed:
            self.say_taken()

    def resume(self) -> None:
        """A broker is there again: words may be lost."""
        for run in self._runs.values():
            self.owe(run)
