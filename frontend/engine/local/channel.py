"""Frontend side of the socket: one DEALER to one worker slot, on the event loop.

    absent -> connecting -> ready -> (leaving) -> absent

1. `tick` sends `Hello` until `Welcome` answers, then pings.
2. `Welcome` brings the worker's pid and arena: a pidfd is watched and the arena mapped. The pidfd is that of a thread
   which ends when the kernel stops the process, before the kernel takes the memory of the process back.
3. `submit` sends a request and returns a future of its `Delivery`, from which the caller makes an `Answer`.
4. When the pidfd fires, every pending future fails with `WorkerLost`; requests named in the arena's flight record are
   suspects, the others bystanders. The channel starts again from the beginning.

Requests, releases and cancels of one turn of the event loop leave together. A request that the socket does not take
fails with `WorkerLost`.

Streams are read by others (`frontend.engine.local.outstanding`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from frontend.engine.interface import Payload, bytes_of
from frontend.engine.local import dealer
from frontend.engine.local.catalog_following import ToldCatalog
from frontend.engine.local.outstanding import Outstanding, Sent, Streams
from frontend.engine.streams.incoming import Delivery
from ipc.errors import DeadlineExceeded, ProtocolError, WorkerLost, from_code
from ipc.memory.arena import ArenaView
from ipc.memory.input_arena import InputBlock
from ipc.processes.liveness import open_pidfd, start_ticks
from ipc.processes.paths import RunPaths
from ipc.wire.catalogs import Entries, Heard, Replied, Reread, Spread, Told
from ipc.wire.codec import ToFrontend, ToWorker
from ipc.wire.messages import (
    VERSION,
    Cancel,
    Credits,
    Failure,
    Goodbye,
    Hello,
    InputFreed,
    Leaving,
    Load,
    Models,
    ModelStatus,
    Ping,
    Pong,
    Release,
    Result,
    Submit,
    Unload,
    Watch,
    Welcome,
    Work,
    Written,
)
from ipc.wire.stats import Stats

log = logging.getLogger(__name__)

PING_EVERY_S = 0.5
EXPIRE_GRACE_NS = 50_000_000
FOREIGN_WEIGHT = 0.2
MOST_GIVEN_UP, MOST_GIVEN_UP_NBYTES = 64, 1 << 20
"""Requests without a caller that a channel remembers, and the most private bytes of each."""
_REFUSED = "the worker takes no requests"


class Channel:
    """Connection of this frontend to one worker slot."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        paths: RunPaths,
        slot: int,
        name: str,
        changed: Callable[[], None],
    ) -> None:
        self.slot, self.worker = slot, f"worker-{slot}"
        self.state = "absent"
        self._left_at = 0.0
        self.models: dict[str, ModelStatus] = {}
        self.catalog = ToldCatalog()
        self.preloaded = False
        self.free_bytes = 0
        self.credits = Credits(0, 0, 0.0)
        self.stats: Stats | None = None
        self.device, self.uuid, self.threads = "", "", 0
        self._outstanding = Outstanding()
        self.foreign_s = 0.0
        self._context, self._paths, self._name, self._changed = context, paths, name, changed
        self._loop = asyncio.get_running_loop()
        self._dealer: dealer.Dealer | None = None
        self._unsent: list[int] = []
        self._pending: dict[int, Sent] = {}
        self._given_up: dict[int, Sent] = {}
        """Requests that the worker may still be working on though nobody waits, the oldest first."""
        self.on_suspect: Callable[[Work, Payload, bool], None] = lambda work, payload, alone: None
        """Told of each request that nobody waited for when the worker died on the request (alone, or with others)."""
        self._ids = itertools.count(1)
        self._tag, self._pidfd = 0, -1
        self._arena: ArenaView | None = None
        self._last_ping, self._silence = 0.0, dealer.Silence()
        self._mapping: asyncio.Task[None] | None = None
        self._watching = False
        self._reading: dict[int, InputBlock] = {}
        self._asked: dict[int, asyncio.Future[Replied]] = {}
        self.streams = Streams(self._deliver, self._give_back, self._put)
        self._handlers: dict[type, Callable[[Any, bytes], None]] = {
            Result: self._on_result,
            Failure: self._on_failure,
            InputFreed: self._on_input_freed,
            Credits: self._on_credits,
            Models: self._on_models,
            Entries: self._on_entries,
            Replied: self._on_replied,
            Told: lambda message, _: self._put(Heard(message.id)),
            Stats: self._on_stats,
            Pong: self._on_pong,
            Welcome: self._on_welcome,
            Leaving: self._on_leaving,
            Goodbye: self._on_goodbye,
            **self.streams.handlers,
        }

    @property
    def responsive(self) -> bool:
        """Whether the worker takes new requests and answered a ping lately."""
        return self.state == "ready" and not self._silence.is_long

    @property
    def since(self) -> float:
        """When a worker that takes nothing new took its last (Unix seconds); 0 if that is unknown, or if it serves."""
        if self.state != "ready":
            return self._left_at
        return self._silence.heard_at if self._silence.is_long else 0.0

    @property
    def cost(self) -> int:
        """Cost in flight, without streams that rest."""
        return self._outstanding.cost

    @property
    def work_s(self) -> float:
        """Predicted time of the device for what is in flight, without streams that rest."""
        return self._outstanding.seconds

    def wait_s(self, lane: str) -> float:
        """Predicted time until the device has begun all that waits before a new request of a lane."""
        # NOTE: the worker's word is up to a tick old, and a burst is quicker.
        announced = self.credits.bulk_wait_s if lane == "bulk" else self.credits.wait_s
        return max(announced, self._outstanding.before(lane))

    def has_credit(self, work: Work) -> bool:
        """Whether this frontend may send more work of that lane, model and caller."""
        return self._outstanding.allows(work)

    def tick(self) -> None:
        """Advance: connect, say hello, ping. Called every 100 ms or so."""
        self._expire()
        self.streams.look()
        self._silence.look()
        # PERF: smoothed, because the worker's word is up to a tick old: all frontends would run to one worker at once.
        self.foreign_s += FOREIGN_WEIGHT * (self.credits.others_s - self.foreign_s)
        if self.state == "absent":
            if self._paths.worker_socket(self.slot).exists():
                self._connect()
        elif self.state == "connecting" and self._mapping is None:
            self._send(Hello(VERSION, self._name, self._tag, os.getpid(), start_ticks(os.getpid())))
        elif self.state in ("ready", "leaving") and time.monotonic() - self._last_ping > PING_EVERY_S:
            self._last_ping = time.monotonic()
            self._send(Ping(int(self._last_ping * 1000)))

    def _expire(self) -> None:
        """Fail requests past their deadline. The worker does the same, but may hang."""
        now = time.monotonic_ns()
        for request, (future, message, _) in list(self._pending.items()):
            if now >= message.work.deadline_ns + EXPIRE_GRACE_NS and not future.done():
                self.cancel(request)
                future.set_exception(
                    DeadlineExceeded("the deadline passed before the result was ready", retry_after_s=1)
                )

    def _connect(self) -> None:
        self._tag = random.getrandbits(62)
        try:
            path = self._paths.worker_socket(self.slot)
            socket = dealer.connect(self._context, path, f"{self._name}.{self._tag:x}")
        except zmq.ZMQError as error:
            log.error("no socket for worker %d: %s", self.slot, error)
            return
        self._dealer = dealer.Dealer(socket, self._dispatch, self._after_sending)
        self.state = "connecting"

    def submit(
        self,
        work: Work,
        payload: Payload = None,
        *,
        solo: bool = False,
        apart: bool = False,
        written: Written | None = None,
    ) -> tuple[int, asyncio.Future[Delivery]]:
        """Send a request with its payload at the end of this turn of the loop.

        Raises `WorkerLost` when there is no socket. The future fails with `WorkerLost` when the socket takes nothing.
        """
        if self._dealer is None:
            raise WorkerLost(_REFUSED, sent=False, retry_after_s=1)
        request = next(self._ids)
        if isinstance(payload, InputBlock):
            message = Submit(request, work, solo, payload.ref)
            # NOTE: sent every time: the worker may have begun anew, or had no memory to map the arena the last time.
            self._dealer.put(message, introduction=payload.inputs)
            payload.add_reader()
            self._reading[request] = payload
        else:
            message = Submit(request, work, solo, apart=apart, written=written)
            self._dealer.put(message, None if payload is None else bytes_of(payload))
        self._unsent.append(request)
        future: asyncio.Future[Delivery] = self._loop.create_future()
        self._pending[request] = Sent(future, message, payload)
        self._outstanding.begin(message)
        return request, future

    def _after_sending(self, taken: bool) -> None:
        """A bundle has left, or its requests fail."""
        requests, self._unsent = self._unsent, []
        for request in () if taken else requests:
            self._end_reading(request)
            future = self._forget(request)
            if future is not None and not future.done():
                future.set_exception(WorkerLost(_REFUSED, sent=False, retry_after_s=1))

    def cancel(self, request: int) -> None:
        """The caller has gone: drop the future and tell the worker. Idempotent."""
        sent = self._pending.get(request)
        if sent is None:
            return
        self._forget(request)
        self._put(Cancel(request))
        if sent.kept_nbytes <= MOST_GIVEN_UP_NBYTES:
            self._given_up[request] = sent
        if len(self._given_up) > MOST_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]

    def abandon(self, request: int, future: asyncio.Future[Delivery]) -> None:
        """The caller was cancelled: stop the work, or give back a result that had just arrived."""
        self.cancel(request)
        if future.done() and not future.cancelled() and future.exception() is None:
            self._give_back(future.result())

    def release(self, result: Result, arena: ArenaView) -> None:
        """End the lease of a result. Only the worker life that gave the lease gets the message."""
        if result.block is not None and arena is self._arena:
            self._put(Release(result.block.offset, result.block.generation))

    def rest(self, request: int) -> None:
        """The worker's queue counts a stream no longer."""
        if request in self._pending:
            self._outstanding.rest(self._pending[request].message)

    def resume(self, request: int) -> None:
        """The worker's queue counts a stream again."""
        if request in self._pending:
            self._outstanding.resume(self._pending[request].message)

    def cost_of(self, model: str) -> int:
        """Cost in flight of one model, without streams that rest."""
        sent = (each.message for each in self._pending.values() if each.message.work.model == model)
        return sum(message.work.cost for message in sent if not self._outstanding.rests(message))

    def send_load(self, model: str, explicit: bool = False) -> bool:
        """Ask the worker to load a model. The answer is a new state of the model. False if nothing was sent."""
        return self.state == "ready" and self._send(Load(model, explicit))

    def send_unload(self, model: str) -> bool:
        """Ask the worker to unload a model. The answer is a new state of the model. False if nothing was sent."""
        return self.state == "ready" and self._send(Unload(model))

    def ask(self, message: Callable[[int], Reread | Spread]) -> asyncio.Future[Replied]:
        """Send the message of a number; the future is the answer, `WorkerLost` if the worker dies meanwhile."""
        number = next(self._ids)
        future: asyncio.Future[Replied] = self._loop.create_future()
        future.add_done_callback(lambda _: self._asked.pop(number, None))
        self._asked[number] = future
        self._put(message(number))
        return future

    def watch(self, on: bool) -> None:
        """Ask the worker for `stats`, or for no more. Repeat the call: a restarted worker forgets earlier calls."""
        if self.state in ("ready", "leaving") and self._watching != on and self._send(Watch(on)):
            self._watching = on
            self.stats = None

    def leave(self) -> None:
        """The worker drains: send nothing new."""
        if self.state == "ready":
            self.state, self._left_at = "leaving", time.time()
            self._changed()

    def close(self) -> None:
        """Say goodbye and give up whatever is pending."""
        self._send(Goodbye())
        self._reset("the frontend closed", set())

    def _put(self, message: ToWorker) -> None:
        """Send a message at the end of this turn of the loop."""
        if self._dealer is not None:
            self._dealer.put(message)

    def _send(self, message: ToWorker) -> bool:
        """Send a message now; returns whether the socket took the message."""
        if self._dealer is None:
            return False
        self._dealer.put(message)
        return self._dealer.flush()

    def _dispatch(self, message: ToFrontend, inline: bytes) -> None:
        self._handlers[type(message)](message, inline)

    def _on_failure(self, failure: Failure, _: bytes) -> None:
        future = self._forget(failure.id)
        if future is not None and not future.done():
            future.set_exception(
                from_code(
                    failure.code, failure.message, retry_after_s=failure.retry_after_s, detail=failure.detail
                )
            )

    def _on_input_freed(self, message: InputFreed, _: bytes) -> None:
        self._end_reading(message.id)

    def _on_credits(self, credits: Credits, _: bytes) -> None:
        self.credits = credits
        self._outstanding.credit(credits)
        self._changed()

    def _on_models(self, message: Models, _: bytes) -> None:
        changed = {status.name: status for status in message.models}
        remaining = {name: status for name, status in self.models.items() if name not in message.gone}
        self._set_models(remaining | changed, message)

    def _on_entries(self, message: Entries, _: bytes) -> None:
        self.catalog = self.catalog.after(message)
        self._changed()

    def _on_replied(self, message: Replied, _: bytes) -> None:
        future = self._asked.get(message.id)
        if future is not None and not future.done():
            future.set_result(message)
            self._changed()

    def _on_stats(self, stats: Stats, _: bytes) -> None:
        self.stats = stats

    def _on_pong(self, _: Pong, __: bytes) -> None:
        self._silence.end()

    def _on_welcome(self, message: Welcome, _: bytes) -> None:
        if self._mapping is None and self.state == "connecting":
            # NOTE: taken in now, since newer credits and states may lie right behind.
            self.credits, self.device = message.credits, message.device
            self._outstanding.credit(message.credits)
            self.uuid, self.threads = message.uuid, message.threads
            self._set_models({status.name: status for status in message.models}, message)
            self._mapping = self._loop.create_task(self._welcomed(message))

    def _on_leaving(self, _: Leaving, __: bytes) -> None:
        self.leave()

    def _on_goodbye(self, _: Goodbye, __: bytes) -> None:
        self._reset("the worker dropped this session", set())

    def _end_reading(self, request: int) -> None:
        block = self._reading.pop(request, None)
        if block is not None:
            block.end_reader()

    def _on_result(self, result: Result, inline: bytes) -> None:
        self._end_reading(result.id)
        future = self._forget(result.id)
        delivery = self._deliver(result, inline)
        if future is not None and not future.done():
            future.set_result(delivery)
        else:
            self._give_back(delivery)

    def _deliver(self, result: Result, inline: bytes) -> Delivery:
        return Delivery(result, self._arena if result.block is not None else None, inline)

    def _give_back(self, delivery: Delivery) -> None:
        """Nobody reads what has arrived."""
        if delivery.arena is not None:
            self.release(delivery.result, delivery.arena)

    def _forget(self, request: int) -> asyncio.Future[Delivery] | None:
        self._given_up.pop(request, None)
        sent = self._pending.pop(request, None)
        if sent is None:
            return None
        self._outstanding.end(sent.message)
        return sent.future

    def _set_models(self, models: dict[str, ModelStatus], message: Models | Welcome) -> None:
        # NOTE: always another dict: caches and threads hold the dict before, which must not change.
        self.models = models
        self.preloaded, self.free_bytes = message.preloaded, message.free_bytes
        self._changed()

    async def _welcomed(self, message: Welcome) -> None:
        """Watch the worker's process and map its arena off the loop; mapping faults in every page."""
        try:
            if message.version != VERSION:
                raise ProtocolError(
                    f"worker {self.slot} speaks version {message.version}, this frontend {VERSION}"
                )
            self._pidfd = open_pidfd(message.pid, message.start_ticks, message.thread)
            self._loop.add_reader(self._pidfd, self._died)
            self._arena = await asyncio.to_thread(ArenaView, Path(message.arena), message.epoch)
        except (OSError, ProtocolError) as error:
            log.warning("worker %d could not be joined: %s", self.slot, error)
            self._reset("the worker could not be joined", set())
            return
        finally:
            self._mapping = None
        if self.state != "connecting":
            return
        self.state = "ready"
        self._silence.end()
        log.info("joined worker %d (%s, epoch %s)", self.slot, message.device, message.epoch)
        self._changed()

    def _died(self) -> None:
        if self._dealer is not None:
            self._dealer.drain()
        flight = self._arena.flight() if self._arena else set()
        suspects = {request for tag, request in flight if tag == self._tag}
        if self.state == "leaving" and not self._pending:
            log.info("worker %d has ended in order", self.slot)
        else:
            log.warning(
                "worker %d died with %d requests in flight, %d on the device",
                self.slot,
                len(self._pending),
                len(suspects),
            )
        self._reset("the worker process died", suspects, alone=len(flight) == 1)

    def _reset(self, why: str, suspects: set[int], *, alone: bool = False) -> None:
        if self.state == "ready":
            self._left_at = time.time()
        pending, self._pending = self._pending, {}
        given_up, self._given_up = self._given_up, {}
        for request in suspects & given_up.keys():
            self.on_suspect(given_up[request].message.work, given_up[request].payload, alone)
        for request in list(self._reading):
            self._end_reading(request)
        self._outstanding = Outstanding()
        if self._mapping is not None:
            self._mapping.cancel()
            self._mapping = None
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None
        self._unsent = []
        self.state, self.models, self._arena = "absent", {}, None
        self.preloaded, self.free_bytes = False, 0
        self.stats, self._watching = None, False
        self.catalog = ToldCatalog()
        for asked in list(self._asked.values()):
            if not asked.done():
                asked.set_exception(WorkerLost(why, retry_after_s=1))
        for request, (future, _, _) in pending.items():
            if not future.done():
                lost = WorkerLost(why, suspect=request in suspects, alone=alone, retry_after_s=1)
                future.set_exception(lost)
        self._changed()
