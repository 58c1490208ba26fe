"""What a frontend uses to run calls: finds workers, routes, waits for restarts, retries lost requests.

1. Every 100 ms: look for worker sockets in the run directory, advance every channel, read the poison list.
2. `call` and `stream` pick a channel and send; no channel now means waiting for a change, up to the restart or load
   wait. A model that nobody has is asked for (`frontend.engine.local.demand`).
3. A lost worker means another attempt by the rule of `frontend.engine.local.retry`; a second death on the same
input makes it poison.
4. The answer is an `Answer`: numpy views on the arena, whose lease ends when its context is left. A stream is a
   `PartStream` of them; the retry rule ends with its first part.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

import msgspec
import zmq

from frontend.engine.answer import Answer
from frontend.engine.interface import Payload
from frontend.engine.local import retry, routing
from frontend.engine.local.channel import Channel
from frontend.engine.local.copy_budget import CopyBudget
from frontend.engine.local.demand import Demand
from frontend.engine.local.part_stream import PartStream
from frontend.engine.local.poison import PoisonList
from ipc import deadline
from ipc.errors import (
    Draining,
    InputRefused,
    InvalidInput,
    LoraLoading,
    ModelLoading,
    ModelNotLoaded,
    NoReplica,
    QueueFull,
    SequenceLost,
    WorkerCrashed,
    WorkerLost,
)
from ipc.memory import input_arena
from ipc.memory.input_arena import InputArena
from ipc.processes.paths import RunPaths
from ipc.settings import Settings
from ipc.store.store import Store
from ipc.wire.messages import Work

log = logging.getLogger(__name__)

T = TypeVar("T")
Sender = Callable[[Channel, Work, Payload, bool], Awaitable[T]]

TICK_S = 0.1
FULL_WAIT_S = 0.05
# NOTE: free maps of a request may hold what no message can: numbers beyond 64 bits, hundreds of levels.
_UNSAYABLE = (OverflowError, RecursionError)
_BEYOND = "options, output_schema or metadata: a number is beyond 64 bits, or values are nested too deep"
_SOCKET_NAME = re.compile(r"^worker-(\d+)\.sock$")


class Client:
    """All channels of this frontend."""

    def __init__(
        self,
        paths: RunPaths,
        settings: Settings,
        name: str,
        on_retry: Callable[[str], None] = lambda reason: None,
        copies: CopyBudget | None = None,
        store: Store | None = None,
    ) -> None:
        """`copies` bounds what is kept of parts that slow clients do not take; `store` is that of the server."""
        self._copies = copies or CopyBudget(settings.arena.copy_out_bytes)
        self._copy_after_s = settings.arena.lease_copy_after_s
        self._paths, self._limits, self._name, self._on_retry = paths, settings.limits, name, on_retry
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channels: dict[int, Channel] = {}
        self._change = asyncio.Event()
        self._on_demand, self._workers = settings.catalog.on_demand, settings.worker_count
        self.demand = Demand(lambda: self.channels, self._on_demand)
        self._budget = retry.RetryBudget()
        self.poison = PoisonList(store or Store(paths), settings.limits.poison_ttl_s)
        self.inputs = InputArena(paths, int(name.rpartition("-")[2]), settings.arena.input_bytes)
        self._ticker: asyncio.Task[None] | None = None

    @property
    def channels(self) -> list[Channel]:
        """Channels by slot."""
        return [self._channels[slot] for slot in sorted(self._channels)]

    def start(self) -> None:
        """Begin looking for workers."""
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def close(self) -> None:
        """Stop, say goodbye to all workers, close the sockets."""
        if self._ticker is not None:
            self._ticker.cancel()
        for channel in self.channels:
            channel.close()
        self.inputs.close()
        await asyncio.sleep(0)
        self._context.destroy(linger=0)

    async def _tick(self) -> None:
        turn = 0
        while True:
            try:
                self._discover()
                if turn % 10 == 0:
                    self.poison.refresh()
            except OSError as error:
                log.error("looking for workers failed: %s", error)
            for channel in self.channels:
                channel.tick()
            self.demand.tick()
            turn += 1
            await asyncio.sleep(TICK_S)

    def _discover(self) -> None:
        for path in self._paths.root.iterdir():
            found = _SOCKET_NAME.match(path.name)
            slot = int(found[1]) if found else -1
            if found and slot not in self._channels:
                self._channels[slot] = Channel(self._context, self._paths, slot, self._name, self._changed)

    def watch(self, on: bool) -> bool:
        """Ask all workers for `Stats`, or for no more; whether all that serve have answered since."""
        for channel in self.channels:
            channel.watch(on)
        return all(channel.stats is not None for channel in self.channels if channel.state == "ready")

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def call(self, work: Work, payload: Payload = None) -> Answer:
        """Run one call. Raises a `PenstockError`; cancelling the task cancels the work.

        `payload` are the raw tensors of an infer call: bytes, which travel in a message, or a block of `inputs`.
        Neither may change before the call has ended, and the block is still the caller's then.
        """
        return await self._run(work, payload, self._send)

    async def stream(self, work: Work, payload: Payload = None) -> PartStream:
        """The answer in parts, once the first is there or there is none; closing it ends the work.

        Raises a `PenstockError` as `call` does. What fails from then on ends the iteration with one error.
        """
        return await self._run(work, payload, self._open)

    async def _run(self, work: Work, payload: Payload, send: Sender[T]) -> T:
        try:
            return await self._until_answered(work, payload, send)
        except _UNSAYABLE as error:
            raise InvalidInput(_BEYOND) from error

    async def _until_answered(self, work: Work, payload: Payload, send: Sender[T]) -> T:
        """Send a request until a worker has answered it, or begun to."""
        if self.poison.holds(work.model, work.call, input_arena.bytes_of(payload)):
            raise InputRefused("this input crashed worker processes before and is refused for a while")
        self._budget.count_request()
        suspect = work.step is not None and self.poison.is_suspect(
            work.model, work.call, input_arena.bytes_of(payload)
        )
        attempts = retry.Attempts()
        lora_until = 0
        while True:
            channel = await self._route(work, attempts)
            try:
                return await send(channel, work, payload, attempts.solo or suspect)
            except Draining:
                channel.leave()
            except (ModelLoading, ModelNotLoaded):
                # It was unloaded while the request was on its way; the new state of the worker follows.
                await asyncio.sleep(FULL_WAIT_S)
            except LoraLoading:
                lora_until = lora_until or deadline.after(self._limits.load_wait_s)
                if not await self._lora_loaded(channel, work, min(lora_until, work.waits_until_ns)):
                    raise
            except QueueFull:
                # Another worker may have room; a request that was lost before waits for one.
                if work.step is not None:
                    raise
                attempts.avoid.add(channel.slot)
                slots = {c.slot for c in routing.loaded(self.channels, work.model)}
                if slots <= attempts.avoid:
                    if not attempts.losses:
                        raise
                    attempts.avoid.clear()
                    await asyncio.sleep(FULL_WAIT_S)
            except WorkerLost as lost:
                if (step := work.step) is not None:
                    if lost.suspect:
                        self._suspect(work, payload, alone=suspect)
                    raise SequenceLost(
                        f"the worker was lost, and with it the state of sequence {step.id!a}, which must begin again"
                    ) from lost
                if lost.suspect:
                    # The device had begun it in time.
                    work = msgspec.structs.replace(work, start_by_ns=0)
                error = attempts.next_error(lost, channel.slot, work.deadline_ns, self._budget)
                if isinstance(error, WorkerCrashed):
                    self.poison.add(work.model, work.call, input_arena.bytes_of(payload))
                if error is not None:
                    raise error from lost
                self._on_retry("suspect" if lost.suspect else "bystander")

    async def ready(self, model: str, deadline_ns: int, others: Collection[str] = ()) -> None:
        """Wait until some worker has `model` loaded, or one of `others`, and ask for `model`.

        Raises why it cannot be had, or not in time.
        """

        def having() -> None:
            if not any(routing.having(self.channels, other) for other in others):
                routing.loaded(self.channels, model, on_demand=self._on_demand)

        await self._until(having, model, deadline_ns, patient=False)

    async def wait(self, done: Callable[[], bool], deadline_ns: int) -> None:
        """Wait until `done()`, looked at after every change. Raises `DeadlineExceeded`."""
        while not done():
            deadline.check(deadline_ns, "before the workers were done")
            await self._wait(self._change, min(deadline.remaining_s(deadline_ns), 0.25))

    async def _route(self, work: Work, attempts: retry.Attempts) -> Channel:
        """A channel, now or after a wait for a restart, a load, or (for a retry) a free credit."""
        step = work.step

        def slot() -> int | None:
            if step is None:
                return None
            return routing.sequence_slot(self.channels, work.model, step.id, work.caller, self._workers)

        def pick() -> Channel:
            if step is not None:
                return routing.keeper(
                    self.channels,
                    work.model,
                    work.lane,
                    step,
                    slot(),
                    caller=work.caller,
                    share=work.share,
                    on_demand=self._on_demand,
                )
            if attempts.solo:
                # Suspects all go to one worker, so that a poison among them can cost only that one.
                return routing.loaded(self.channels, work.model)[0]
            return routing.pick(
                self.channels,
                work.model,
                work.lane,
                avoid=attempts.avoid,
                caller=work.caller,
                share=work.share,
                on_demand=self._on_demand,
                lora=work.call.lora,
            )

        return await self._until(
            pick, work.model, work.waits_until_ns, patient=bool(attempts.losses), slot=slot
        )

    async def _until(
        self,
        attempt: Callable[[], T],
        model: str,
        deadline_ns: int,
        patient: bool,
        slot: Callable[[], int | None] = lambda: None,
    ) -> T:
        """`attempt` again after every change, until it succeeds or its error has outlasted its wait.

        A full queue is an answer at once, unless `patient`: a request that lost its worker waits for a credit. `slot`
        is that of the only worker that will do, where there is one.
        """
        give_up: dict[bool, int] = {}
        while True:
            deadline.check(deadline_ns, "before a worker could be found")
            change = self._change
            try:
                return attempt()
            except (NoReplica, ModelLoading, ModelNotLoaded, QueueFull) as error:
                if isinstance(error, QueueFull) and not patient:
                    raise
                loads = isinstance(error, ModelLoading | ModelNotLoaded)
                if loads:
                    self.demand.want(model, slot())
                if isinstance(error, ModelNotLoaded) and not self._on_demand:
                    raise
                wait_s = self._limits.load_wait_s if loads else self._limits.restart_wait_s
                until_ns = give_up.setdefault(loads, deadline.after(wait_s))
                left_s = deadline.remaining_s(min(until_ns, deadline_ns))
                if left_s <= 0:
                    raise
                await self._wait(change, min(left_s, 0.25))

    async def _lora_loaded(self, channel: Channel, work: Work, until_ns: int) -> bool:
        """Wait while a worker loads the LoRA adapter of a request; whether there is time left to ask it again."""
        # The new state of the worker follows its answer.
        await asyncio.sleep(min(FULL_WAIT_S, max(0.0, deadline.remaining_s(until_ns))))
        while (left_s := deadline.remaining_s(until_ns)) > 0:
            status = channel.models.get(work.model)
            if status is None or status.loras.get(work.call.lora) != "loading":
                return True
            await self._wait(self._change, min(left_s, 0.25))
        return False

    @staticmethod
    async def _wait(change: asyncio.Event, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await change.wait()
        except TimeoutError:
            return

    async def _send(self, channel: Channel, work: Work, payload: Payload, solo: bool) -> Answer:
        number, future = channel.submit(work, payload, solo=solo)
        try:
            return (await future).answer(channel)
        except asyncio.CancelledError:
            channel.abandon(number, future)
            raise

    async def _open(self, channel: Channel, work: Work, payload: Payload, solo: bool) -> PartStream:
        number, future = channel.submit(work, payload, solo=solo)
        stream = PartStream(
            channel, number, future, self._copies, self._copy_after_s, lambda: self._suspect(work, payload)
        )
        try:
            await stream.begun()
        except BaseException:
            stream.close()
            raise
        return stream

    def _suspect(self, work: Work, payload: Payload, *, alone: bool = True) -> None:
        """A worker died on a request that does not run again."""
        self.poison.suspect(work.model, work.call, input_arena.bytes_of(payload), alone=alone)
