"""Answers in parts at a gateway: an answer is an item of a box, whose parts are read as those of a worker.

1. Before its first part an answer whose box is lost begins anew at another box; later it ends with one error.
2. A part that is too large for a message is got from its box (`transfers`) before the client sees it, and counts as
   come only then. If its bytes do not come, the box counts as lost for this answer.
3. No box may send more than the window of an answer (`Work.parts`) ahead: an answer with more ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from frontend.cluster.boxes import Box
from frontend.cluster.broker import readable
from frontend.cluster.items import Sent
from frontend.cluster.runs import Office, Run, Runs
from frontend.cluster.transfers import TransferFailed, Transfers
from frontend.engine.answer import CopyBudget
from frontend.engine.streams.incoming import Delivery
from frontend.engine.streams.part_stream import PartStream
from frontend.scope import RequestScope
from ipc.errors import NoReplica, ProtocolError
from ipc.wire.cluster import MOST_NBYTES, PARTS, read_answer
from ipc.wire.cluster_answers import PartBody, PartsTold, read_parts
from ipc.wire.messages import Work
from ipc.wire.streams import part_flow

log = logging.getLogger(__name__)

TELL_NBYTES = 64 << 10
"""A part of so many bytes is confirmed at once, since the box keeps it until then."""


class PartRun(Run):
    """One answer, the source of its stream of parts."""

    def __init__(self, parts: Parts, held: Sent, payload: bytes) -> None:
        super().__init__(parts, held, payload)  # type: ignore[arg-type]
        self.parts: dict[int, Callable[[Delivery], None]] = {}
        self._window = part_flow(held.plan.parts)
        self.fetching: asyncio.Task[None] | None = None
        """Gets the bytes of the next part, of the item with the id `fetched`."""
        self.fetched = ""

    @property
    def streams(self) -> PartRun:
        """The answers in parts: this one."""
        return self

    def parts_taken(self, request: int, count: int) -> None:
        """The client has taken so many parts more."""
        self._window.taken(count)
        self.took(count)

    def deliver(self, body: PartBody, whole: memoryview | None) -> None:
        """Give a part to the reader. Ends the answer for a part that is none, or that nobody has asked for."""
        at, end = body.result_nbytes, body.result_nbytes + body.data_nbytes
        if whole is None:
            found, data, loose = memoryview(body.result), memoryview(body.data), body.loose
        else:
            found, data, loose = whole[:at], whole[at:end], bytes(whole[end:])
        try:
            delivery = Delivery(read_answer(found), None, loose, data=data, large=whole is not None)
            delivery.answer(self).tensors()
            if not self._window.open:
                raise ProtocolError("a box sent more parts of an answer than were asked for")
            self._window.sent(1)
        except ProtocolError as error:
            self.fail(error)
            return
        for take in list(self.parts.values()):
            take(delivery)


class Parts(Runs[PartRun]):
    """All answers in parts of one gateway."""

    tell_after_s = 0.0

    def __init__(self, office: Office, transfers: Transfers) -> None:
        super().__init__(office)
        self._transfers = transfers

    async def stream(self, scope: RequestScope, work: Work, payload: bytes) -> tuple[PartStream, PartRun]:
        """The answer, once its first part or its end has arrived, and its run.

        Raises as `Gateway.item` and `Office.post` do, and the error of an answer without a part.
        """
        sent = self._office.item(
            PARTS, work, payload, scope.deadline_ns, scope.waits_until_ns, choice=scope.choice
        )
        sent.in_pieces = True
        run = PartRun(self, sent, payload)
        await self.post(run)
        stream = PartStream(run, 0, run.final, work.parts, CopyBudget(0), 0.0, lambda error: self.judge(run))
        return await stream.begun(), run

    def end(self, run: PartRun) -> None:
        """See `Runs.end`."""
        if run.fetching is not None and run.fetching is not asyncio.current_task():
            run.fetching.cancel()
        super().end(run)

    def hear(self, data: bytes) -> bool:
        """Parts of answers have arrived; false for bytes that are none."""
        told = readable(read_parts, data, self._seldom, "parts of a box were dropped")
        if told is not None and (box := self.box_of(told.life, told.box)) is not None:
            self._take(box, told)
        return told is not None

    def _take(self, box: Box, told: PartsTold) -> None:
        now_ns = self._now_ns()
        for name, number, body in zip(told.names, told.numbers, told.parts, strict=True):
            run = self.next(box, name, number, now_ns, whole=body.large is None)
            if run is None:
                continue
            if body.large is None:
                run.deliver(body, None)
                if len(body.data) >= TELL_NBYTES:
                    self.owe(run)
                continue
            if run.fetching is not None and run.fetched != name:
                # The box before is lost, and its bytes may never come.
                run.fetching.cancel()
                run.fetching = None
            if run.fetching is None:
                run.fetched = name
                run.fetching = asyncio.get_running_loop().create_task(self._fetch(run, box, number, body))

    async def _fetch(self, run: PartRun, box: Box, number: int, body: PartBody) -> None:
        """Get the bytes of a part, and give the part to the reader."""
        assert body.large is not None
        held = run.held
        try:
            whole = await self._transfers.get(body.large, box.life, MOST_NBYTES, self._office.boxes.is_alive)
        except TransferFailed as error:
            log.warning("a part of an answer did not come: %s", error.message)
            missing = NoReplica(f"a part of the answer did not come: {error.message}", retry_after_s=1)
            run.fetching = None
            if held.id == run.fetched:
                self._office.dispatch.leave(held, box.life, missing)
            return
        run.fetching = None
        if held.id == run.fetched and box.life in held.boxes and not held.future.done():
            self.came(run, number)
            run.deliver(body, whole)
            self.owe(run)
