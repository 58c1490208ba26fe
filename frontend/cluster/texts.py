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

import logging
import time
from collections.abc import Callable

from frontend.cluster.broker import readable
from frontend.cluster.items import BoxLost, Sent
from frontend.cluster.runs import Office, Run, Runs
from frontend.engine.events import Pace, Past
from frontend.engine.streams import homes
from frontend.engine.streams.carrying import CarriedText
from frontend.engine.streams.delta_stream import DeltaStream, KeptIds
from frontend.engine.streams.incoming import TEXT_KINDS, TextTaker
from frontend.scope import RequestScope
from ipc.errors import (
    Draining,
    PenstockError,
    ProtocolError,
)
from ipc.settings import Generation
from ipc.wire.cluster import (
    TEXT,
    VERSION,
    encode,
)
from ipc.wire.cluster_text import Before, Origin, Pieces, read_pieces
from ipc.wire.messages import GenerateCall, Work
from ipc.wire.streams import Deltas, nbytes_of

log = logging.getLogger(__name__)

MOST_OPEN_NBYTES = 8 << 20
"""Most bytes of a text that wait for the ids of its tokens."""
ENTRY_NBYTES = 48
"""About what an entry takes beside its text."""
MOST_MOVES = 5
"""So often a text may go on elsewhere beyond `generation.continuations`: a box that gives a text back has not died."""


class TextRun(Run):
    """One run of a text at one box, the `Source` of a stream of text."""

    def __init__(self, texts: Texts, held: Sent, on_origin: Callable[[Origin], None]) -> None:
        super().__init__(texts, held)  # type: ignore[arg-type]
        self.on_origin = on_origin
        self.choices = held.plan.call.n if isinstance(held.plan.call, GenerateCall) else 0
        self.texts: dict[int, TextTaker] = {}
        self._open: list[tuple[Deltas, int]] = []
        self._open_nbytes = 0

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
        self.took(nbytes)

    def look(self, now_ns: int) -> None:
        """Some time has passed."""
        for taker in list(self.texts.values()):
            taker.look(now_ns)


class Texts(Runs[TextRun]):
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
        super().__init__(office, now_ns)
        self.on_carried = on_carried
        self.kept_ids = KeptIds(settings.continuations, settings.continuation_bytes, on_kept)

    async def begin(self, sent: Sent, on_origin: Callable[[Origin], None]) -> TextRun:
        """Send an item; returns its run. Raises as `Office.post` does."""
        run = TextRun(self, sent, on_origin)
        await self.post(run)
        return run

    def hear(self, data: bytes) -> bool:
        """Pieces of texts have arrived; false for bytes that are none."""
        pieces = readable(read_pieces, data, self._seldom, "text of a box was dropped")
        if pieces is not None:
            self._take(pieces)
        return pieces is not None

    def _take(self, pieces: Pieces) -> None:
        box = self.box_of(pieces.life, pieces.box)
        if box is None:
            return
        now_ns = self._now_ns()
        deltas, opened = pieces.deltas, frozenset(pieces.open)
        waits = bool(opened)
        runs, takers, counts = list[TextRun | None](), list[TextTaker | None](), list[int]()
        for name, number in zip(pieces.names, pieces.numbers, strict=True):
            run = self.next(box, name, number, now_ns)
            runs.append(run)
            if run is None:
                takers.append(None)
                counts.append(0)
                continue
            takers.append(run.texts.get(0))
            counts.append(run.choices)
            waits = waits or run.has_open
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

    def tick(self) -> None:
        """Some time has passed."""
        now_ns = self._now_ns()
        for run in list(self._runs.values()):
            run.look(now_ns)

    def leaves(self, run: TextRun) -> bool:
        """Whether the box of a run drains, and another one could go on with the text."""
        boxes = (self._office.boxes.by_life.get(life) for life in run.held.boxes)
        draining = any(box is not None and box.alive and box.draining for box in boxes)
        return draining and self._office.dispatch.has_other(run.held)

    def item(self, work: Work, before: Before | None, scope: RequestScope, start_by_ns: int) -> Sent:
        """A new item for a text."""
        payload = b"" if before is None else encode(before)
        sent = self._office.item(TEXT, work, payload, scope.deadline_ns, start_by_ns, choice=scope.choice)
        sent.in_pieces = True
        return sent


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
