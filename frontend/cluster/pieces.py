"""One large request of pure work as pieces that several boxes compute at the same time, and their answers as one.

1. `cut` makes pieces of at most `MOST_ITEMS` inputs, `MOST_NBYTES` of them, and a batch of tokens. Only calls whose
   items are computed apart from each other are cut: encode, score, extract. Equal inputs have been found above this
   (`frontend.engine.caching`), as rows of different batches differ in their last bits.
2. `together` runs `PIECES_EACH` pieces for each box at a time, in the lane of the request. The first error ends the
   pieces that still run.
3. `joined` puts the answers together. Where that would change what the client sees, the request runs again as a whole:
   an item failed, whose message names a place in its piece, two boxes computed with different weights, or a piece found
   no room, which the request as a whole may find.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

import msgspec
import numpy as np

from frontend.engine.answer import Answer, AnswerStream
from frontend.engine.caching import ITEM_ERRORS
from frontend.engine.events import Generation, Pace, Past
from frontend.engine.interface import Engine, Payload
from frontend.engine.planning import is_long, part_of, tokens_of
from frontend.http.threads import off_loop_if
from frontend.scope import RequestScope
from ipc.errors import QueueFull
from ipc.settings import Settings
from ipc.wire.messages import EncodeCall, ExtractCall, InputItem, Result, ScoreCall, Timing, Work

MOST_ITEMS = 64
MOST_NBYTES = 256 << 10
PIECES_EACH = 2
BATCH_TOKENS = 8192
"""Tokens of a piece, unless `batch.max_tokens` says how many a batch has."""


def cut(work: Work, settings: Settings) -> list[Work]:
    """The pieces of work in the order of its items; the work alone where one piece holds all of it."""
    call = work.call
    if not isinstance(call, (EncodeCall, ScoreCall, ExtractCall)) or len(call.items) < 2:
        return [work]
    tokens, budget = tokens_of(call), settings.batch.max_tokens or BATCH_TOKENS
    sizes = [_nbytes(item) for item in call.items]
    if len(sizes) <= MOST_ITEMS and sum(sizes) <= MOST_NBYTES and sum(tokens) <= budget:
        return [work]
    pieces, left_nbytes, left_tokens = list[list[int]](), 0, 0
    for at, (nbytes, cost) in enumerate(zip(sizes, tokens, strict=True)):
        if not pieces or len(pieces[-1]) == MOST_ITEMS or nbytes > left_nbytes or cost > left_tokens:
            pieces.append([])
            left_nbytes, left_tokens = MOST_NBYTES, budget
        pieces[-1].append(at)
        left_nbytes, left_tokens = left_nbytes - nbytes, left_tokens - cost
    parts = [part_of(work, places, settings) for places in pieces]
    return [msgspec.structs.replace(part, lane=work.lane) for part in parts]


def _nbytes(item: InputItem) -> int:
    texts = (item.text or "", item.first or "")
    return (
        sum(len(text) if text.isascii() else len(text.encode(errors="replace")) for text in texts)
        + 8 * len(item.ids or ())
        + sum(map(len, item.images))
    )


async def together(
    run: Callable[[Work], Awaitable[Answer]], pieces: Sequence[Work], most: int
) -> list[Answer] | None:
    """The answers to all pieces in their order, `most` at a time; None if the request has to run as a whole.

    Raises the first error that says nothing of that.
    """
    turns = asyncio.Semaphore(most)

    async def one(piece: Work) -> Answer:
        async with turns:
            return await off_loop_if(is_long(piece), apart, await run(piece))

    tasks = [asyncio.ensure_future(one(piece)) for piece in pieces]
    try:
        answers = await asyncio.gather(*tasks)
    except (*ITEM_ERRORS, QueueFull):
        return None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return None if any(answer.errors for answer in answers) else answers


def apart(answer: Answer) -> Answer:
    """The same answer in arrays of its own: a piece that waits for others may not hold what those wait for.

    Large answers lie in memory of a bounded size (`frontend.cluster.transfers.Room`).
    """
    copies = {name: values.copy() for name, values in answer.tensors().items()}
    result, _, _ = answer.parts()
    return Answer.of(result, copies, worker=answer.worker, uuid=answer.uuid)


def joined(answers: Sequence[Answer]) -> Answer | None:
    """One answer of the answers to all pieces, in private memory; None if different weights computed them."""
    if len({answer.identity for answer in answers}) > 1:
        return None
    tokens = [count for answer in answers for count in answer.tokens]
    starts = np.cumsum([0, *(len(answer.tokens) for answer in answers)])
    truncated = [int(start) + at for start, one in zip(starts, answers, strict=False) for at in one.truncated]
    rows = {name: [count for one in answers for count in one.rows(name)] for name in answers[0].ragged}
    whole = Result(
        0, None, [], tokens, truncated, [], _longest(answers), rows=rows, identity=answers[0].identity
    )
    names = answers[0].tensors()
    arrays = [one.tensors() for one in answers]
    copies = {name: np.concatenate([own[name] for own in arrays]) for name in names}
    return Answer.of(whole, copies, worker=answers[-1].worker, uuid=answers[-1].uuid)


def _longest(answers: Sequence[Answer]) -> Timing:
    """Pieces run beside each other: the longest time of each phase, and the batches of all."""
    times = [answer.timing for answer in answers]
    return Timing(
        max(time.prepare_ns for time in times),
        max(time.queue_ns for time in times),
        max(time.device_ns for time in times),
        max(time.copy_ns for time in times),
        sum(time.batches for time in times),
        max(time.collate_ns for time in times),
    )


class CuttingEngine(Engine):
    """Runs large requests in pieces on the engine behind, and all else there as it is."""

    def __init__(self, engine: Engine, settings: Settings, boxes: Callable[[], int]) -> None:
        """`boxes`: how many boxes there are."""
        self._engine, self._settings, self._boxes = engine, settings, boxes
        self.blocks, self.reads_regions = engine.blocks, engine.reads_regions

    async def run(self, scope: RequestScope, work: Work, payload: Payload = None) -> Answer:
        """Run planned work; see `Engine.run`."""
        pieces = cut(work, self._settings)
        if len(pieces) > 1:
            most = PIECES_EACH * max(1, self._boxes())
            answers = await together(lambda piece: self._engine.run(scope, piece), pieces, most)
            whole = None if answers is None else await off_loop_if(is_long(work), joined, answers)
            if whole is not None:
                scope.ran(whole.worker, whole.timing, scope.span.trace if scope.span is not None else None)
                return whole
        return await self._engine.run(scope, work, payload)

    def stream(
        self, scope: RequestScope, work: Work, payload: Payload = None
    ) -> AbstractAsyncContextManager[AnswerStream]:
        """Run planned work that is answered in parts; see `Engine.stream`."""
        return self._engine.stream(scope, work, payload)

    def generate(
        self, scope: RequestScope, work: Work, pace: Pace, past: Past | None = None
    ) -> AbstractAsyncContextManager[Generation]:
        """Run planned work with a `GenerateCall`; see `Engine.generate`."""
        return self._engine.generate(scope, work, pace, past)

    def ready(self) -> tuple[bool, str]:
        """Whether traffic is accepted, and the reason."""
        return self._engine.ready()
