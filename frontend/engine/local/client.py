"""How a frontend runs work on the workers of its host: chooses a worker, sends, and follows the rule of retries.

1. `call` and `stream` choose a channel and send. Without a worker they wait for a change, up to the restart or load
   wait, and ask for a model that no worker has (`frontend.engine.local.demand`).
2. After an error of the worker the table of `frontend.engine.local.retry` names the next action.
3. The answer is an `Answer`: numpy views on the arena, whose lease ends when its context is left. A stream is a
   `PartStream` of answers; after its first part nothing is retried. Generated text is carried on by another worker
   (`LocalGeneration`).

`LocalGeneration` is a text: which worker writes, and who follows one that is lost or leaves.

1. A run is sent to a worker by the rule of retries, with the tokens that earlier runs have written.
2. A death on a text is judged by the run that follows, or by the end without one.
3. A worker that leaves, or unloads the model, loses its streams to a worker that has the model. Without such a worker
   the streams stay.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from frontend.engine.answer import Answer, CopyBudget
from frontend.engine.events import Pace, Past
from frontend.engine.interface import Payload
from frontend.engine.local import routing
from frontend.engine.local.channel import Channel
from frontend.engine.local.demand import Demand
from frontend.engine.local.retry import Attempts, Retries
from frontend.engine.local.routing import TICK_S, Workers
from frontend.engine.poison import PoisonList
from frontend.engine.streams.carrying import CarriedText
from frontend.engine.streams.delta_stream import DeltaStream, KeptIds
from frontend.engine.streams.part_stream import PartStream
from ipc.errors import Draining, InputRefused, ModelNotLoaded, PenstockError, WorkerLost
from ipc.memory.input_arena import InputArena
from ipc.processes.paths import RunPaths
from ipc.settings import Settings
from ipc.store.store import Store
from ipc.wire.codec import UNSENDABLE, unsendable
from ipc.wire.messages import GenerateCall, Work

log = logging.getLogger(__name__)

T = TypeVar("T")

POISON_EVERY_TICKS = 10


class Client:
    """Runs the work of one frontend."""

    def __init__(
        self,
        paths: RunPaths,
        settings: Settings,
        name: str,
        store: Store,
        on_retry: Callable[[str], None] = lambda reason: None,
        copies: CopyBudget | None = None,
        on_carried: Callable[[str], None] = lambda outcome: None,
        on_kept: Callable[[int], None] = lambda change: None,
    ) -> None:
        """`name` is that of the slot whose lock this process holds, such as `frontend-0` or `bridge-0`.

        `copies` bounds the memory for parts that slow clients have not taken.

        `on_carried` is told how a text went on whose worker was lost, `on_kept` of changes of `kept_ids` in bytes.
        """
        generation = settings.generation
        self.kept_ids = KeptIds(generation.continuations, generation.continuation_bytes, on_kept)
        self.on_carried = on_carried
        self._copies = copies or CopyBudget(settings.arena.copy_out_bytes)
        self._copy_after_s = settings.arena.lease_copy_after_s
        self._on_demand, self._worker_count = settings.catalog.on_demand, settings.worker_count
        self.workers = Workers(paths, settings, name)
        self.demand = Demand(self.workers, self._on_demand)
        self.poison = PoisonList(store, settings.limits.poison_ttl_s)
        self.inputs = InputArena(paths, name, settings.arena.input_bytes)
        self.retries = Retries(self.workers, settings.limits, self.poison, on_retry)
        self.workers.on_suspect = self.retries.suspect_input
        self._ticker: asyncio.Task[None] | None = None

    @property
    def channels(self) -> list[Channel]:
        """Channels by slot."""
        return self.workers.channels

    def start(self) -> None:
        """Begin looking for workers."""
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def close(self) -> None:
        """Stop, say goodbye to all workers, close the sockets."""
        if self._ticker is not None:
            self._ticker.cancel()
        self.workers.close()
        self.inputs.close()
        await asyncio.sleep(0)
        self.workers.end()

    async def _tick(self) -> None:
        turn = 0
        while True:
            self.workers.tick()
            try:
                if turn % POISON_EVERY_TICKS == 0:
                    self.poison.refresh()
            except OSError as error:
                log.error("poison of other frontends cannot be read: %s", error)
            self.demand.tick()
            turn += 1
            await asyncio.sleep(TICK_S)

    async def wait(self, done: Callable[[], bool], deadline_ns: int) -> None:
        """Wait until `done()`, looked at after every change. Raises `DeadlineExceeded`."""
        await self.workers.wait(done, deadline_ns)

    async def ready(self, model: str, deadline_ns: int, others: Collection[str] = ()) -> None:
        """Ask for `model`, and wait until some worker has loaded `model` or one of `others`.

        Raises the reason why the model cannot be had, or not in time.
        """

        def having() -> None:
            if not any(routing.having(self.channels, other) for other in others):
                routing.loaded(self.channels, model, on_demand=self._on_demand)

        await self.workers.until(having, deadline_ns, want=lambda: self.demand.want(model))

    async def call(self, work: Work, payload: Payload = None) -> Answer:
        """Run one call. Raises a `PenstockError`; cancelling the task cancels the work.

        `payload` are the raw tensors of an infer call: bytes, which travel in a message, or a block of `inputs`.
        Neither may change before the call has ended, and the block is still the caller's then.
        """
        return await self.run(self.begin(work, payload), self._answer)

    async def stream(self, work: Work, payload: Payload = None) -> PartStream:
        """The answer in parts, once the first part or the end has arrived. Closing the answer ends the work.

        Raises a `PenstockError` as `call` does. What fails from then on ends the iteration with one error.
        """
        return await self.run(self.begin(work, payload), self._open_parts)

    def begin(self, work: Work, payload: Payload = None) -> Attempts:
        """The history of a request that came in. Raises `InputRefused`, and `InvalidInput` for what cannot be said."""
        try:
            return self.retries.begin(work, payload)
        except UNSENDABLE as error:
            raise unsendable(work.call, error) from error

    async def run(self, attempts: Attempts, attempt: Callable[[Channel, Attempts], Awaitable[T]]) -> T:
        """The outcome of `attempt` on a channel; errors that the rule of retries follows lead to another attempt."""
        try:
            while True:
                channel = self._channel_now(attempts) or await self._channel_later(attempts)
                try:
                    return await attempt(channel, attempts)
                except PenstockError as error:
                    if not await self.retries.again(attempts, channel, error):
                        raise
        except UNSENDABLE as error:
            raise unsendable(attempts.work.call, error) from error

    def _channel_now(self, attempts: Attempts) -> Channel | None:
        """The channel of a worker that takes the request now, None where a wait may bring one. Raises as `_choose`."""
        # PERF: most requests find their worker at once, without a wait being made ready.
        return self.workers.at_once(self._choose, attempts, attempts.work.waits_until_ns)

    async def _channel_later(self, attempts: Attempts) -> Channel:
        """A channel after a wait for a restart, a load, or (for a retry) a free credit."""
        work = attempts.work
        return await self.workers.until(
            lambda: self._choose(attempts),
            work.waits_until_ns,
            want=lambda: self.demand.want(work.model, self._slot_of(work)),
            patient=bool(attempts.losses),
        )

    def _choose(self, attempts: Attempts) -> Channel:
        """The channel of the worker that takes a request now. Raises the reason if there is none."""
        work = attempts.work
        channels = [each for each in self.workers.channels if attempts.suits(each)]
        if work.step is not None:
            slot, count, is_open = self._slot_of(work), self._worker_count, self.workers.is_open
            return routing.keeper(channels, work, work.step, slot, count, is_open, on_demand=self._on_demand)
        if attempts.runs:
            # Suspects all go to one worker, so that a poison among them can cost only that one.
            return routing.loaded(channels, work.model)[0]
        return routing.pick(channels, work, avoid=attempts.avoid, on_demand=self._on_demand)

    def _slot_of(self, work: Work) -> int | None:
        """The slot of the only worker that will do, for a request of a sequence."""
        if work.step is None:
            return None
        count = self._worker_count
        return routing.sequence_slot(self.channels, work.model, work.step.id, work.caller, count)

    @staticmethod
    async def _answer(channel: Channel, attempts: Attempts) -> Answer:
        number, future = channel.submit(attempts.work, attempts.payload, solo=attempts.solo)
        try:
            return (await future).answer(channel)
        except asyncio.CancelledError:
            channel.abandon(number, future)
            raise

    async def _open_parts(self, channel: Channel, attempts: Attempts) -> PartStream:
        number, future = channel.submit(attempts.work, attempts.payload, solo=attempts.solo)
        stream = PartStream(
            channel,
            number,
            future,
            attempts.work.parts,
            self._copies,
            self._copy_after_s,
            lambda error: self.retries.suspect(attempts),
        )
        return await stream.begun()


class LocalGeneration(CarriedText):
    """A text that workers of this host write."""

    def __init__(self, client: Client, work: Work, pace: Pace, past: Past | None = None) -> None:
        """`begun` must follow. `past`: another frontend has begun the text."""
        assert isinstance(work.call, GenerateCall)
        self._client, self._attempts = client, client.begin(work)
        super().__init__(work.call, client.kept_ids, pace, past, client.on_carried)
        self._unjudged: WorkerLost | None = None
        """The death on this input that no other run has followed yet."""
        self._followed: PenstockError | None = None
        """The error after which the present run has begun."""

    async def _start(self) -> DeltaStream:
        return await self._client.run(self._attempts, self._open)

    def _take_up(self, past: Past) -> None:
        attempts = self._attempts
        if attempts.suspect:
            raise InputRefused("workers have died on this input, so nobody goes on with its text")
        super()._take_up(past)
        if self._progress.has_begun:
            attempts.take_up(past.mark.identity, self._client.kept_ids.most, past.mark.deaths + past.moves)

    @property
    def _deaths(self) -> int:
        return self._attempts.continued - self._moves

    async def _open(self, channel: Channel, attempts: Attempts) -> DeltaStream:
        written = self._progress.written()
        if attempts.identity is None:
            self._identity = _identity_of(channel, attempts.work.model)
        number, final = channel.submit(
            attempts.work, solo=attempts.solo, apart=attempts.accused, written=written
        )
        if self._progress.gap is not None:
            self._progress.gap.sent(time.monotonic_ns())
        self._channel = channel
        stream = DeltaStream(
            channel,
            number,
            final,
            self._pace,
            self._progress,
            self._suspect,
            lambda: self._why_move(channel),
        )
        return await stream.begun()

    def _suspect(self, error: WorkerLost) -> None:
        """A worker has died on the text. The verdict waits for the next run, or for the end without one."""
        if error is self._followed:
            # NOTE: the reader had the error before this callback ran, and the rule of retries has judged the input.
            return
        if self._progress.can_go_on:
            self._unjudged = error
        else:
            self._client.retries.suspect(self._attempts, alone=error.alone)

    def _why_move(self, channel: Channel) -> PenstockError | None:
        """The reason to go on elsewhere: the worker or its model leaves, and another worker has the model."""
        model = self._attempts.work.model
        status = channel.models.get(model)
        reason: PenstockError | None = None
        if channel.state == "leaving":
            reason = Draining("this worker is stopping", retry_after_s=1)
        elif status is not None and status.state == "unloading":
            reason = ModelNotLoaded("the model is being unloaded", retry_after_s=1)
        # PERF: every stream asks several times a second, and next to none has a reason.
        if reason is None or not self._progress.can_go_on or self._progress.has_ended:
            return None
        others = routing.having(self._client.channels, model)
        has_other = any(
            each is not channel and _identity_of(each, model) == self._identity for each in others
        )
        return reason if has_other else None

    async def _begin_anew(self, error: PenstockError) -> None:
        """Follow a run of which the client has nothing. Raises the error of the request if nothing follows."""
        self._run.close()
        if not await self._client.retries.again(self._attempts, self._channel, error):
            raise error
        await self.begun()

    async def _follow(self, error: PenstockError) -> bool:
        self._attempts.go_on(self._identity, self._client.kept_ids.most, has_passed=self._progress.has_passed)
        self._unjudged, self._followed = None, error
        return await self._client.retries.again(self._attempts, self._channel, error)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self._unjudged is not None:
            self._client.retries.suspect(self._attempts, alone=self._unjudged.alone)


def _identity_of(channel: Channel, model: str) -> str:
    """Stands for all that decides the text of a model at a worker; empty for a model that the worker lacks."""
    status = channel.models.get(model)
    return "" if status is None else status.identity
