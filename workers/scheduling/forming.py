"""Batches as the device thread gets them: taken from the queue, boarded and collated, one of them ahead of its time."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from workers.scheduling.batcher import UNKNOWN_PACE, Pace, Room
from workers.scheduling.job import Piece
from workers.scheduling.jobs import JobBook
from workers.scheduling.queue import WorkQueue


@dataclass(slots=True, eq=False)
class Batch:
    """Pieces of one group, collated for the adapter (None: collating failed and is tried again piecewise).

    `predicted_s` is the device time for which the queue has charged the group.
    """

    pieces: list[Piece]
    collated: Any
    tokens: int
    predicted_s: float
    overtaken: bool = False


def collate(pieces: list[Piece]) -> Any:
    """What the adapter makes of these pieces."""
    return pieces[0].job.adapter.collate([piece.prepared for piece in pieces])


class Former:
    """Forms batches for one device. `next` is the device thread's, `form_ahead` that of the thread beside it."""

    def __init__(
        self,
        queue: WorkQueue,
        book: JobBook,
        max_tokens: int,
        max_items: int,
        pace: Pace,
        room: Room,
    ) -> None:
        self._queue, self._book = queue, book
        self._max_tokens, self._max_items, self._pace, self._room = max_tokens, max_items, pace, room
        self._lock = threading.Lock()
        self._ahead: Batch | None = None

    @property
    def ahead(self) -> bool:
        """Whether a batch was formed ahead."""
        return self._ahead is not None

    def form_ahead(self) -> None:
        """Form the batch after the one that runs."""
        with self._lock:
            if self._ahead is None:
                self._ahead = self._form()

    def next(self) -> Batch | None:
        """The batch formed ahead, or one formed now; a query that came meanwhile passes the former, once."""
        with self._lock:
            ahead = self._ahead
            if ahead is None:
                return self._form()
            if not ahead.overtaken and self._queue.overtakes(ahead.pieces):
                ahead.overtaken = True
                if (batch := self._form()) is not None:
                    return batch
            self._ahead = None
            return ahead

    def beside(self, adapter: object, most_s: float) -> Batch | None:
        """Queries for other weights than `adapter`'s that take `most_s` at most, by what is known of their model."""
        with self._lock:
            ahead = self._ahead
            if ahead is not None and self._is_query(ahead, adapter, most_s):
                self._ahead = None
                return ahead
            return self._of(self._queue.take_beside(adapter, most_s, self._max_items, self._pace, self._room))

    def _is_query(self, batch: Batch, adapter: object, most_s: float) -> bool:
        job = batch.pieces[0].job
        quick = self._pace(job.model) > 0 and batch.predicted_s <= most_s
        return (
            quick
            and job.adapter is not adapter
            and all(piece.job.lane == "interactive" for piece in batch.pieces)
        )

    def _form(self) -> Batch | None:
        return self._of(self._queue.take(self._max_tokens, self._max_items, self._pace, self._room))

    def _of(self, taken: list[Piece]) -> Batch | None:
        """A batch of what was taken, as far as its jobs are still open."""
        pieces = self._book.board(taken)
        if not pieces:
            return None
        try:
            collated = collate(pieces)
        except Exception:
            collated = None
        tokens_per_s = self._pace(pieces[0].job.model) or UNKNOWN_PACE
        predicted_s = sum(piece.prepared.cost for piece in taken) / tokens_per_s
        return Batch(pieces, collated, sum(piece.prepared.cost for piece in pieces), predicted_s)
