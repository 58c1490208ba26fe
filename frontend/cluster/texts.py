"""Generated text at a gateway: a text is an item of a box, told in pieces. Another box writes the rest of a lost one.

1. `ClusterText` is the text of one request. Each run is an item of `dispatch`, with the beginning of the text, and goes
   directly to a box: the home of its conversation, among the boxes with about the fewest texts (`ClusterModels.home`).
2. Pieces arrive in order. A piece behind a gap is dropped, and the box is asked for what lacks. The entries of a piece
   are read as those of a worker (`frontend.engine.streams.delta_stream`). An open piece waits for the one that ends it,
   so that the text of a token is never told without the id by which another box would go on.
3. Boxes hear what has come and what clients have taken: words of `TELL_EVERY_S` together, once a text has
   `TELL_PIECES` more pieces or a client has taken half of a window. A word may be lost, so a box hears the same again
   before the box is asked.
4. A box that dies, gives the text back or drains is followed by another one with the same model. The text goes on
   behind the ids that have come, after deaths at most `generation.continuations` times. Before its first piece of text
   a request begins anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from frontend.cluster.boxes import Box, Boxes
from frontend.cluster.broker import readable
from frontend.cluster.dispatch import GRACE_NS, Dispatch
from frontend.cluster.items import BoxLost, Held, Sent
from frontend.engine.events import Pace, Past
from frontend.engine.streams import homes
from frontend.engine.streams.carrying import CarriedText
from frontend.engine.streams.delta_stream import DeltaStream
from frontend.engine.streams.incoming import TEXT_KINDS, Delivery, TextTaker
from frontend.engine.streams.progress import KeptIds
from frontend.scope import Choice, RequestScope
from ipc.errors import (
    DeadlineExceeded,
    Draining,
    PenstockError,
    ProtocolError,
    QueueUnavailable,
    WorkerCrashed,
)
from ipc.logs import Seldom
from ipc.settings import Generation
from ipc.wire.cluster import (
    IDS_EACH,
    TEXT,
    VERSION,
    ItemResult,
    Outcome,
    Taken,
    ToBox,
    encode,
    read_answer,
)
from ipc.wire.cluster_text import Before, Origin, Pieces, read_pieces
from ipc.wire.messages import GenerateCall, Work
from ipc.wire.streams import Deltas, nbytes_of

log = logging.getLogger(__name__)

TELL_EVERY_S = 0.02
TELL_PIECES = 32
MOST_OPEN_NBYTES = 8 << 20
"""Most bytes of a text that wait for the ids of its tokens."""
ENTRY_NBYTES = 48
"""About what an entry takes beside its text."""
MOST_MOVES = 5
"""So often a text may go on elsewhere beyond `generation.continuations`: a box that gives a text back has not died."""


class Office(Protocol):
    """What texts need of their gateway."""

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

    def judge(self, sent: Sent) -> None:
        """Note the input of an item on which boxes have died, if they have."""

    def word(self, box: Box, word: ToBox) -> None:
        """Tell a box. Raises `QueueUnavailable` without a broker."""


class TextRun:
    """One run of a text at one box, the `Source` of a stream of text. `worker` names the box, at the end the worker."""

    def __init__(self, texts: Texts, held: Sent, on_origin: Callable[[Origin], None]) -> None:
        self._texts, self.held, self.on_origin = texts, held, on_origin
        self.worker, self.uuid = "", "cpu"
        self.texts: dict[int, TextTaker] = {}
        self.final: asyncio.Future[Delivery] = held.future.get_loop().create_future()
        self.sent_ns = time.monotonic_ns()
        self.told_pieces = self.taken_nbytes = 0
        self._open: list[tuple[Deltas, int]] = []
        self._open_nbytes = 0
        held.future.add_done_callback(self._answered)

    def keep(self, deltas: Deltas, at: int) -> None:
        """An entry of an open piece has arrived: its text is told once the ids for it are there."""
        self._open.append((deltas, at))
        tokens = deltas.prompts.get(at) or deltas.logprobs.get(at)
        self._open_nbytes += nbytes_of(deltas.texts[at], tokens) + ENTRY_NBYTES
        if self._open_nbytes > MOST_OPEN_NBYTES:
            self.fail(
                ProtocolError(f"a box told more than {MOST_OPEN_NBYTES} bytes of a text without an end")
            )

    @property
    def has_open(self) -> bool:
        """Whether entries of open pieces wait."""
        return bool(self._open)

    def tell(self, now_ns: int) -> None:
        """Tell the entries of the open pieces, as the piece that ends them has come."""
        some, self._open, self._open_nbytes = self._open, [], 0
        for deltas, at in some:
            if (taker := self.texts.get(0)) is not None:
                taker.take(deltas, at, now_ns)

    @property
    def streams(self) -> TextRun:
        """The streams of text: this one."""
        return self

    def text_taken(self, request: int, nbytes: int) -> None:
        """The client has taken so many bytes more."""
        self.taken_nbytes += nbytes
        self._texts.owe(self)

    def release(self, result: object, arena: object) -> None:
        """A text leases nothing."""

    def rest(self, request: int) -> None:
        """No queue counts the text here."""

    def cancel(self, request: int) -> None:
        """The caller has gone."""
        self._texts.end(self)

    def abandon(self, request: int, future: asyncio.Future[Delivery]) -> None:
        """The caller was cancelled."""
        self._texts.end(self)

    def fail(self, error: PenstockError) -> None:
        """End the run with an error."""
        if not self.held.future.done():
            self.held.future.set_exception(error)

    def _answered(self, future: asyncio.Future[tuple[ItemResult, Outcome]]) -> None:
        if future.cancelled():
            return
        self._texts.end(self)
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
            self._texts.judge(self)


class Texts:
    """All texts of one gateway."""

    def __init__(
        self,
        office: Office,
        settings: Generation,
        on_carried: Callable[[str], None] = lambda outcome: None,
        on_kept: Callable[[int], None] = lambda change: None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`on_carried` is told how a text went on whose box was lost, `on_kept` of changes of `kept_ids` in bytes."""
        self._office, self.on_carried, self._now_ns = office, on_carried, now_ns
        self.kept_ids = KeptIds(settings.continuations, settings.continuation_bytes, on_kept)
        self._seldom = Seldom(log)
        self._runs: dict[Held, TextRun] = {}
        self._owed: set[TextRun] = set()
        office.dispatch.on_ask = self._asked

    def __len__(self) -> int:
        return len(self._runs)

    async def begin(self, sent: Sent, on_origin: Callable[[Origin], None]) -> TextRun:
        """Send an item; returns its run. Raises as `Office.post` does."""
        run = self._runs[sent] = TextRun(self, sent, on_origin)
        try:
            await self._office.post(sent)
        except BaseException:
            self.end(run)
            raise
        return run

    def end(self, run: TextRun) -> None:
        """Nobody reads the run any more. Safe to call twice."""
        self._runs.pop(run.held, None)
        self._owed.discard(run)
        self._office.close(run.held)
        run.held.future.cancel()

    def judge(self, run: TextRun) -> None:
        """A run ends since workers or boxes have died on its input."""
        self._office.judge(run.held)

    @property
    def at_boxes(self) -> Mapping[str, int]:
        """How many texts of this gateway each life of a box has."""
        return Counter(life for held in self._runs for life in held.boxes)

    def hear(self, data: bytes) -> bool:
        """Pieces of texts have arrived; false for bytes that are none."""
        pieces = readable(read_pieces, data, self._seldom, "text of a box was dropped")
        if pieces is not None:
            self._take(pieces)
        return pieces is not None

    def _take(self, pieces: Pieces) -> None:
        box, dispatch = self._office.boxes.by_life.get(pieces.life), self._office.dispatch
        if box is None or box.name != pieces.box:
            dispatch.counts["dropped", "unknown box"] += 1
            return
        now_ns = self._now_ns()
        runs = [
            self._next(box, name, number, now_ns)
            for name, number in zip(pieces.names, pieces.numbers, strict=True)
        ]
        takers = [None if run is None else run.texts.get(0) for run in runs]
        counts = [0 if run is None else _choices(run.held.plan) for run in runs]
        deltas, opened = pieces.deltas, frozenset(pieces.open)
        waits = bool(opened) or any(run is not None and run.has_open for run in runs)
        columns = deltas.ids, deltas.kinds, deltas.choices, deltas.texts, deltas.tokens
        written, logprobs = deltas.written or [b""] * len(deltas.ids), deltas.logprobs
        # PERF: as `Streams` of a worker's channel: most entries are plain text.
        for at, (place, kind, choice, text, tokens, ids) in enumerate(zip(*columns, written, strict=True)):
            taker = takers[place]
            if taker is None or choice >= counts[place]:
                continue
            if waits and (run := runs[place]) is not None:
                if place in opened:
                    run.keep(deltas, at)
                    continue
                run.tell(now_ns)
            if kind in TEXT_KINDS and at not in logprobs:
                taker.take_text(kind, choice, text, tokens, ids, now_ns)
            else:
                taker.take(deltas, at, now_ns)
        for place, origin in pieces.origins.items():
            if (run := runs[place]) is not None:
                run.on_origin(origin)

    def _next(self, box: Box, name: str, number: int, now_ns: int) -> TextRun | None:
        """The run whose next piece has come; None for a piece that nobody reads, or that was read, or behind a gap."""
        dispatch = self._office.dispatch
        held = dispatch.items.get(name)
        run = None if held is None else self._runs.get(held)
        if run is None or box.life not in run.held.boxes:
            dispatch.drop(box.life, name)
            return None
        held = run.held
        if held.future.done():
            return None
        if number != held.pieces + 1:
            if number > held.pieces:
                self.owe(run)
                dispatch.counts["resent", "gap"] += dispatch.ask_soon(held)
            return None
        held.pieces, held.heard_ns = number, now_ns
        held.claimed.add(box.life)
        run.worker = box.name
        if number - run.told_pieces >= TELL_PIECES:
            self.owe(run)
        return run

    def owe(self, run: TextRun) -> None:
        """The box of a run shall hear what has come and what was taken: soon, with others."""
        if not self._owed:
            run.final.get_loop().call_later(TELL_EVERY_S, self.say_taken)
        self._owed.add(run)

    def say_taken(self) -> None:
        """Tell all boxes what has come and what was taken since the last word."""
        owed, self._owed = self._owed, set()
        by_life: dict[str, list[TextRun]] = {}
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
                word = Taken(VERSION, self._office.router, ids, numbers, [run.taken_nbytes for run in some])
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

    def tick(self) -> None:
        """Some time has passed: end texts that are late."""
        now_ns = self._now_ns()
        for run in list(self._runs.values()):
            for taker in list(run.texts.values()):
                taker.look(now_ns)
            if now_ns > run.held.deadline_ns + GRACE_NS:
                run.fail(DeadlineExceeded("the deadline passed before the text had ended", retry_after_s=1))

    def leaves(self, run: TextRun) -> bool:
        """Whether the box of a run drains, and another one could go on with the text."""
        boxes = (self._office.boxes.by_life.get(life) for life in run.held.boxes)
        draining = any(box is not None and box.alive and box.draining for box in boxes)
        return draining and self._office.dispatch.has_other(run.held)

    def item(self, work: Work, before: Before | None, scope: RequestScope, start_by_ns: int) -> Sent:
        """A new item for a text."""
        payload = b"" if before is None else encode(before)
        sent = self._office.item(TEXT, work, payload, scope.deadline_ns, start_by_ns, choice=scope.choice)
        sent.is_text = True
        return sent


def _choices(work: Work) -> int:
    return work.call.n if isinstance(work.call, GenerateCall) else 0


class ClusterText(CarriedText):
    """The text of one request, over any number of boxes."""

    def __init__(self, texts: Texts, scope: RequestScope, work: Work, pace: Pace, past: Past | None) -> None:
        """`begun` must follow. `past`: another process has begun the text."""
        assert isinstance(work.call, GenerateCall)
        super().__init__(work.call, texts.kept_ids, pace, past, texts.on_carried)
        self._texts, self._scope, self._work = texts, scope, work
        self._beginning = homes.beginning_of(work.call)
        self._worker_deaths = self._box_deaths = self._moved = 0
        self._lost: Sent | None = None
        """The item that was lost last."""
        self._tried: set[str] = set()

    @property
    def _deaths(self) -> int:
        return self._worker_deaths + self._box_deaths

    @property
    def sent_ns(self) -> int:
        """When the last run was sent, in CLOCK_MONOTONIC nanoseconds."""
        return self._box.sent_ns

    def _take_up(self, past: Past) -> None:
        super()._take_up(past)
        if self._progress.has_begun:
            self._worker_deaths = past.mark.deaths

    async def _start(self) -> DeltaStream:
        start_by_ns = self._scope.deadline_ns if self._moved else self._scope.waits_until_ns
        sent = self._texts.item(self._work, self._before(), self._scope, start_by_ns)
        sent.beginning, before = self._beginning, self._lost
        if before is not None and not self._progress.has_begun:
            sent.losses, sent.deaths, sent.deaths_alone = before.losses, before.deaths, before.deaths_alone
        sent.identity = self._identity if self._progress.has_begun else ""
        sent.tried |= self._tried
        self._box = run = await self._texts.begin(sent, self._note_origin)
        if self._progress.gap is not None:
            self._progress.gap.sent(time.monotonic_ns())
        stream = DeltaStream(
            run,
            0,
            run.final,
            self._pace,
            self._progress,
            lambda error: self._suspect(run),
            lambda: self._why_move(run),
        )
        return await stream.begun()

    def _before(self) -> Before | None:
        """What a box needs to write the text, or its rest; None if nobody could go on with the text."""
        progress = self._progress
        written = progress.written()
        if written is None:
            return None
        calls = [progress.calls[choice] for choice in range(self._call.n)] if progress.has_begun else []
        return Before(
            VERSION,
            written,
            self._identity,
            self._worker_deaths,
            self._moves + self._box_deaths,
            self._pictures,
            calls,
            progress.has_text,
        )

    def _note_origin(self, origin: Origin) -> None:
        """The box tells what writes."""
        self._identity, self._worker_deaths = origin.identity, origin.deaths
        # The text moves to a box with the same model alone.
        self._box.held.identity = origin.identity
        self._progress.weights = origin.weights
        if not origin.is_kept:
            self._progress.drop()

    def _why_move(self, run: TextRun) -> PenstockError | None:
        """The reason to go on elsewhere: the box drains, and another one has the model."""
        if not self._progress.can_go_on or self._progress.has_ended or not self._texts.leaves(run):
            return None
        return Draining("this box is stopping", retry_after_s=1)

    def _suspect(self, run: TextRun) -> None:
        """A box has died on the text. A text that may go on is judged once nobody goes on (`_follow`)."""
        if not self._progress.can_go_on:
            self._texts.judge(run)

    async def _begin_anew(self, error: PenstockError) -> None:
        self._run.close()
        if not self._may_follow(error):
            raise error
        await self.begun()

    async def _follow(self, error: PenstockError) -> bool:
        follows = self._may_follow(error)
        if not follows and isinstance(error, BoxLost) and error.suspect:
            self._texts.judge(self._box)
        return follows

    def _may_follow(self, error: PenstockError) -> bool:
        """Note that a box has lost the text; whether another one may have it."""
        if not isinstance(error, (BoxLost, Draining)):
            return False
        held, progress = self._box.held, self._progress
        self._lost, self._tried = held, held.tried
        self._moved += 1
        if isinstance(error, BoxLost) and error.suspect and progress.has_begun:
            self._box_deaths += 1
        most = self._texts.kept_ids.most
        return self._deaths + self._moves <= most and self._moved <= most + MOST_MOVES
