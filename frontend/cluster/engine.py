"""The engine of a gateway: plans become items of the gateway, results become answers.

A request is one item; a large one has been cut before (`pieces`). Generated text (`texts`) and sequences (`sequences`)
have homes. Text and answers in parts (`answers`) come in pieces before their end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, nullcontext

from frontend.cluster.gateway import Gateway, operation_of
from frontend.cluster.items import GRACE_NS, Sent
from frontend.cluster.pieces import CuttingEngine
from frontend.cluster.sequences import Turns
from frontend.cluster.texts import ClusterText
from frontend.cluster.transfers import TransferFailed
from frontend.engine.answer import Answer, AnswerStream, shifted
from frontend.engine.events import Generation, Pace, Past
from frontend.engine.interface import Engine, NoBlocks, Payload, bytes_of
from frontend.scope import ANY_BOX, Choice, RequestScope
from frontend.server.drain import Drain
from ipc import deadline
from ipc.errors import NoReplica, SequenceLost, WorkerCrashed
from ipc.settings import Settings
from ipc.wire.cluster import ENSURE, MOST_NBYTES, RUN, STEP, ItemResult, Offer, Outcome, read_answer
from ipc.wire.messages import EncodeCall, Work

log = logging.getLogger(__name__)

AT_ONCE = nullcontext()
"""The turn of a request that waits for no other one."""


class ClusterEngine(Engine):
    """Runs work on the boxes."""

    def __init__(self, gateway: Gateway, drain: Drain) -> None:
        self._gateway, self._drain, self.blocks = gateway, drain, NoBlocks()
        self._turns = Turns()
        gateway.models.ensure = self.ensure

    async def _call(
        self,
        kind: str,
        work: Work,
        payload: bytes,
        deadline_ns: int,
        start_by_ns: int,
        others: Collection[str] = (),
        choice: Choice = ANY_BOX,
        scope: RequestScope | None = None,
    ) -> tuple[ItemResult, Outcome, memoryview | None]:
        """The answer to an item, and the bytes that its outcome offers; `scope` learns how long the item took to leave.

        Raises the error of the box, `DeadlineExceeded` soon after the deadline, and the errors of `Gateway.item`.
        """
        gateway = self._gateway
        sent = gateway.item(kind, work, payload, deadline_ns, start_by_ns, others, choice)
        try:
            began_ns = time.monotonic_ns()
            await gateway.post(sent)
            if scope is not None:
                posted_ms = (time.monotonic_ns() - began_ns) / 1e6
                scope.published_ms = max(scope.published_ms, posted_ms)
            while True:
                result, outcome = await sent.future
                if outcome.large is None:
                    return result, outcome, None
                async with asyncio.timeout(deadline.remaining_s(deadline_ns) + GRACE_NS / 1e9):
                    whole = await self._got(sent, outcome, outcome.large)
                if whole is not None:
                    return result, outcome, whole
        except (SequenceLost, WorkerCrashed):
            gateway.judge(sent, payload)
            raise
        except TimeoutError:
            raise sent.late() from None
        finally:
            gateway.close(sent)

    async def _got(self, sent: Sent, outcome: Outcome, large: Offer) -> memoryview | None:
        """The bytes that an outcome offers; None if the item has to run again, since they did not come."""
        gateway = self._gateway
        try:
            began_ns = time.monotonic_ns()
            whole = await gateway.transfers.get(large, outcome.life, MOST_NBYTES, gateway.boxes.is_alive)
            gateway.took("transfers", "", (time.monotonic_ns() - began_ns) / 1e9)
        except TransferFailed as error:
            log.warning("the answer to an item did not come: %s", error.message)
            missing = NoReplica(f"the answer did not come: {error.message}", retry_after_s=1)
            gateway.dispatch.retake(sent, outcome.life, missing)
            return None
        except asyncio.CancelledError:
            gateway.dispatch.got(outcome.life, sent.id, soon=True)
            raise
        gateway.dispatch.got(outcome.life, sent.id, soon=True)
        return whole

    async def run(self, scope: RequestScope, work: Work, payload: Payload = None) -> Answer:
        """Run planned work on a box; see `Engine.run`. The answer lies in private memory."""
        raw = bytes(bytes_of(payload))
        began_ns = time.monotonic_ns()
        kind = RUN if work.step is None else STEP
        turn = AT_ONCE if work.step is None else self._turns.take(work, work.step, scope.waits_until_ns)
        async with turn:
            result, outcome, whole = await self._call(
                kind, work, raw, scope.deadline_ns, scope.waits_until_ns, choice=scope.choice, scope=scope
            )
        scope.fetched_ms = max(scope.fetched_ms, result.payload_fetch_ms)
        at, end = outcome.result_nbytes, outcome.result_nbytes + outcome.data_nbytes
        if whole is None:
            found, data, loose = (memoryview(part) for part in (outcome.result, outcome.data, outcome.loose))
        else:
            found, data, loose = whole[:at], whole[at:end], whole[end:]
        answer = Answer(read_answer(found), data, loose, worker=result.worker_id, uuid=outcome.uuid)
        self._gateway.took("result_wait", operation_of(work), (time.monotonic_ns() - began_ns) / 1e9)
        answer.tensors()  # Raises for an answer whose table of tensors and bytes disagree.
        _note(scope, answer, began_ns)
        return answer

    async def ensure(self, model: str, deadline_ns: int, others: Collection[str], choice: Choice) -> None:
        """Have a box load a model, or one of `others`. Raises why the model cannot be had, or not in time."""
        plan = Work(model, EncodeCall([], []), 0, 0, "")
        await self._call(ENSURE, plan, b"", deadline_ns, deadline_ns, others, choice)

    @asynccontextmanager
    async def stream(
        self, scope: RequestScope, work: Work, payload: Payload = None
    ) -> AsyncIterator[AnswerStream]:
        """Run planned work that is answered in parts; see `Engine.stream` and `frontend.cluster.answers`."""
        parts, run = await self._gateway.parts.stream(scope, work, bytes(bytes_of(payload)))
        with parts:
            yield parts
            if (end := parts.result) is not None:
                _note(scope, end, run.sent_ns)

    @asynccontextmanager
    async def generate(
        self, scope: RequestScope, work: Work, pace: Pace, past: Past | None = None
    ) -> AsyncIterator[Generation]:
        """Run planned work with a `GenerateCall`; see `Engine.generate` and `frontend.cluster.texts`."""
        with await ClusterText(self._gateway.texts, scope, work, pace, past).begun() as text:
            yield text
            if (end := text.result) is not None:
                _note(scope, end, text.sent_ns)

    def ready(self) -> tuple[bool, str]:
        """Whether this process accepts requests: it waits neither for boxes nor for brokers."""
        return (False, "draining") if self._drain.draining else (True, "ok")


def engine_of(gateway: Gateway, settings: Settings, drain: Drain) -> Engine:
    """The engine of a gateway, which cuts large requests into pieces."""
    return CuttingEngine(ClusterEngine(gateway, drain), settings, lambda: len(gateway.boxes.by_name))


def _note(scope: RequestScope, answer: Answer, sent_ns: int) -> None:
    """Note in the scope where the work ran. Times of the trace began when the box had the item, about `sent_ns`."""
    trace = answer.trace
    if trace is not None and scope.span is not None:
        trace = shifted(trace, sent_ns - scope.span.began_ns)
    scope.ran(answer.worker, answer.timing, trace)
