"""The answer to one item of a bridge: its inputs, the run by the local engine, and what becomes of the answer.

1. Inputs that are too large for a message are got from the gateway.
2. The engine of the host runs the work: its rule of retries is that of any frontend. A text leaves in pieces
   (`texts`), an answer in parts part by part (`parts`). A request of a sequence runs if the state of the sequence is
   that of its last request (`sequences`).
3. An answer that is too large for a message is offered to the gateway.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from frontend.bridge.meter import Meter
from frontend.bridge.parts import Parts
from frontend.bridge.results import EMPTY, Results
from frontend.bridge.sequences import BegunSequences
from frontend.bridge.texts import Texts
from frontend.cluster.transfers import TransferFailed, Transfers
from frontend.engine.answer import shifted
from frontend.engine.interface import Engine, Models
from frontend.generation.fields import MAX_CHOICES
from frontend.scope import scope_of_ids
from ipc import deadline
from ipc.errors import DeadlineExceeded, InvalidInput, NoReplica, ResourceExhausted, Unsupported
from ipc.settings import Settings
from ipc.wire.cluster import (
    ENSURE,
    KINDS,
    MOST_MESSAGE_NBYTES,
    PARTS,
    STEP,
    TEXT,
    Carried,
    Item,
    ItemResult,
    Offer,
    Outcome,
    encode,
    read_work,
)
from ipc.wire.messages import GenerateCall, Work

SLACK_NBYTES = 4096
"""Room for the message beside the bytes of a kept answer."""


@dataclass(slots=True, eq=False)
class Running:
    """One item: its task while the work runs, then its result as it was sent, since `ended_ns`.

    `is_pure`: another run, of a copy that arrives late, has no effect. `acks` are the subjects of deliveries that the
    queue has yet to be told about.
    """

    name: str
    router: str
    task: asyncio.Task[None] | None = None
    result: bytes = b""
    ended_ns: int = 0
    is_pure: bool = True
    acks: list[str] = field(default_factory=list)
    large: Offer | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the kept result."""
        return len(self.result) + (self.large.nbytes if self.large is not None else 0)


class Answering:
    """Answers the items of one life of a bridge."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        models: Models,
        results: Results,
        texts: Texts,
        parts: Parts,
        sequences: BegunSequences,
        transfers: Transfers,
        meter: Meter,
        most_inline: Callable[[], int],
    ) -> None:
        """`most_inline`: bytes that a result may take inside a message."""
        self._settings, self._cluster = settings, settings.cluster
        self._engine, self._models, self._results = engine, models, results
        self._texts, self._parts, self._sequences, self._transfers = texts, parts, sequences, transfers
        self._meter, self._most_inline = meter, most_inline

    async def answer(self, running: Running, item: Item, carried: Carried, aged_s: float) -> ItemResult:
        """The answer of a worker, in the form of a result. Raises the error of the item."""
        arrived_ns = time.monotonic_ns()
        until_ns = deadline.after(carried.left_ms / 1e3 - aged_s)
        start_by_ns = deadline.after(carried.start_left_ms / 1e3 - aged_s)
        raw_work: bytes | memoryview = carried.work
        payload: bytes | memoryview = carried.payload
        fetched_ms = 0.0
        if carried.large is not None:
            raw_work, payload = await self._inputs(carried, carried.large, until_ns)
            fetched_ms = (time.monotonic_ns() - arrived_ns) / 1e6
        work = read_work(raw_work)
        scope = scope_of_ids(work.request_id, "", self._settings.limits)
        scope.deadline_ns = until_ns
        if carried.start_left_ms < carried.left_ms:
            scope.start_by_ns = start_by_ns
        deadline.check(scope.deadline_ns, "before a box had the request")
        if self._models.is_told and work.model not in self._models.catalog:
            # Boxes may differ in their models, and the queue gives an item to any of them.
            self._meter.lacks(work.model)
            raise NoReplica("the box does not serve this model", retry_after_s=1)
        if not self._models.is_loaded(work.model):
            self._meter.loads(work.model)
        if carried.kind == ENSURE:
            await self._models.ensure_loaded(work.model, scope.deadline_ns, carried.others)
            return self._results.answered(
                item, EMPTY, self._results.outcome(carried, "cpu", encode(EMPTY)), ""
            )
        _check(carried.kind, work)
        if work.step is not None:
            config = self._models.status(work.model).config
            shown = work.model if config is None else config.name
            await self._sequences.turn(running.router, work, scope.deadline_ns)
            self._sequences.take(running.name, work, work.step, shown, carried.stays_ms)
        if carried.kind == TEXT:
            run = self._texts.run(running.name, running.router, scope, work, payload)
        elif carried.kind == PARTS:
            run = self._parts.run(running.name, running.router, scope, work, payload or None)
        else:
            run = self._engine.run(scope, work, payload or None)
        with await run as answer:
            result, *views = answer.parts()
            trace = None if result.trace is None else shifted(result.trace, -arrived_ns)
            plain = msgspec.structs.replace(result, block=None, trace=trace)
            parts, sizes = self._copied([memoryview(encode(plain)), *views])
            answer.check()
        if len(parts) > 1:
            outcome = self._results.outcome(carried, answer.uuid, *parts)
        else:
            outcome = await self._offered(running, carried, parts, sizes, answer.uuid)
        return self._results.answered(item, plain, outcome, answer.worker, fetched_ms)

    def _copied(self, parts: list[memoryview]) -> tuple[list[bytes], list[int]]:
        """Copies of the parts of an answer, of large ones a single copy of all; and the sizes of the parts.

        Raises `ResourceExhausted` for more than this box keeps.
        """
        sizes, keeps = [part.nbytes for part in parts], self._cluster.keep_result_bytes
        if sum(sizes) <= self._most_inline():
            return list(map(bytes, parts)), sizes
        if sum(sizes) > keeps - SLACK_NBYTES:
            raise ResourceExhausted(
                f"the answer has {sum(sizes)} bytes; cluster.keep_result_bytes is {keeps}"
            )
        return [b"".join(parts)], sizes

    async def _inputs(self, carried: Carried, large: Offer, until_ns: int) -> tuple[memoryview, memoryview]:
        """(work, payload) of an item that no message holds.

        Raises `NoReplica` where they do not come, and `DeadlineExceeded`.
        """
        most_nbytes = self._settings.limits.max_body_bytes + MOST_MESSAGE_NBYTES
        if carried.kind == TEXT:
            most_nbytes += self._settings.generation.continuation_bytes
        try:
            async with asyncio.timeout(deadline.remaining_s(until_ns)):
                whole = await self._transfers.get(large, carried.router, most_nbytes)
        except TransferFailed as error:
            raise NoReplica(f"the inputs did not come: {error.message}", retry_after_s=1) from error
        except TimeoutError:
            raise DeadlineExceeded(
                "the deadline passed before a box had the inputs", retry_after_s=1
            ) from None
        return whole[: carried.work_nbytes], whole[carried.work_nbytes :]

    async def _offered(
        self, running: Running, carried: Carried, parts: list[bytes], sizes: list[int], uuid: str
    ) -> Outcome:
        """The answer, which is offered to the gateway: result, data and loose data in one part."""
        running.large = await self._transfers.offer(parts, running.router)
        bare = self._results.outcome(carried, uuid)
        return msgspec.structs.replace(
            bare, large=running.large, result_nbytes=sizes[0], data_nbytes=sizes[1]
        )


def _check(kind: str, work: Work) -> None:
    """Raise `Unsupported` for what a bridge does not run, and `InvalidInput` for texts of too many choices."""
    if kind not in KINDS:
        raise Unsupported(f"items of the kind {kind[:32]!a} are not known to this box")
    if isinstance(work.call, GenerateCall) != (kind == TEXT) or (work.step is not None) != (kind == STEP):
        raise Unsupported(f"an item of the kind {kind!a} asks for work of another kind")
    if (work.parts > 0) != (kind == PARTS):
        raise Unsupported(f"an item of the kind {kind!a} asks for {work.parts} parts ahead")
    if isinstance(work.call, GenerateCall) and not 1 <= work.call.n <= MAX_CHOICES:
        raise InvalidInput(f"n: {work.call.n} is not in 1 to {MAX_CHOICES}")
