"""The workers of this host as one frontend knows them, and which worker a request goes to.

`Workers` has a channel to each, and waits for changes of a worker. Every 100 ms `Workers` looks for worker sockets in
the run directory and advances every channel.

`pick` chooses the worker of a request: model loaded, answering, in credit; among these the first to be free.

The time until a worker is free follows from its work in seconds and the age of its present step. Streams
of text that run are in no queue. Their requests go by the number of streams, and turns of one conversation to one
worker as long as others have little less to do, since a worker keeps the beginnings of prompts.

A sequence goes to the worker in the slot that the hash of its id names, however busy that worker is. When no worker
fits, the error has the reason, and a Retry-After from the queues of the workers or the load time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import zmq

from frontend.engine.interface import Payload, why_failed
from frontend.engine.local.channel import Channel
from frontend.engine.streams.homes import STREAMS_APART, beginning_of, home
from ipc import deadline
from ipc.catalog.model_config import ModelConfig
from ipc.errors import (
    STATE_GONE,
    ModelLoading,
    ModelNotLoaded,
    NoReplica,
    PenstockError,
    QueueFull,
    SequenceUnknown,
    not_begun,
)
from ipc.processes.liveness import is_held
from ipc.processes.paths import RunPaths
from ipc.settings import Settings
from ipc.wire.messages import GenerateCall, ModelStatus, Step, Work

log = logging.getLogger(__name__)

A = TypeVar("A")
T = TypeVar("T")

TICK_S = 0.1
LOOK_AGAIN_S = 0.25
"""A wait looks again after so long, also without a change."""
PASSING = (NoReplica, ModelLoading, ModelNotLoaded, QueueFull)
"""Errors of a choice of worker that may pass."""
_SOCKET_NAME = re.compile(r"^worker-(\d+)\.sock$")


class Workers:
    """All channels of this frontend."""

    def __init__(self, paths: RunPaths, settings: Settings, name: str) -> None:
        self._paths, self._name, self._limits = paths, name, settings.limits
        self._on_demand = settings.catalog.on_demand
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.channels: list[Channel] = []
        """By slot."""
        self._change = asyncio.Event()
        self.on_suspect: Callable[[Work, Payload, bool], None] = lambda work, payload, alone: None
        """That of all channels (`Channel.on_suspect`); set before the first tick."""
        self.follow: Callable[[], None] = lambda: None
        """Called after every change, before tasks that wait for a change look."""

    def close(self) -> None:
        """Say goodbye to all workers."""
        for channel in self.channels:
            channel.close()

    def end(self) -> None:
        """Close the sockets, once their goodbyes are on the way."""
        self._context.destroy(linger=0)

    def tick(self) -> None:
        """Join new workers and advance all channels."""
        try:
            self._discover()
        except OSError as error:
            log.error("looking for workers failed: %s", error)
        for channel in self.channels:
            channel.tick()

    def _discover(self) -> None:
        known = {channel.slot for channel in self.channels}
        for path in self._paths.root.iterdir():
            match = _SOCKET_NAME.match(path.name)
            if match and int(match[1]) not in known:
                channel = Channel(self._context, self._paths, int(match[1]), self._name, self.changed)
                channel.on_suspect = self.on_suspect
                self.channels.append(channel)
                self.channels.sort(key=lambda channel: channel.slot)

    def is_open(self, slot: int) -> bool:
        """Whether a worker lives in a slot and takes requests, of frontends that have joined it.

        This frontend joins a new worker within its next ticks. Other frontends may have begun sequences there before.
        """
        # NOTE: the lock first. The socket of a dead worker keeps its name until the next life has the lock.
        try:
            return self.lives(slot) and self._paths.worker_socket(slot).exists()
        except OSError:
            # NOTE: without a descriptor nobody knows. The caller waits and looks again.
            return True

    def lives(self, slot: int) -> bool:
        """Whether a worker lives in a slot. Raises `OSError` without a descriptor."""
        return is_held(self._paths.lock(f"worker-{slot}"))

    def watch(self, on: bool) -> bool:
        """Ask all workers to send `Stats`, or to stop; returns whether all serving workers have answered since."""
        for channel in self.channels:
            channel.watch(on)
        return all(channel.stats is not None for channel in self.channels if channel.state == "ready")

    def changed(self) -> None:
        """A worker's state, models or credits are others: wake everything that waits."""
        self.follow()
        self._change.set()
        self._change = asyncio.Event()

    async def change(self, timeout_s: float) -> None:
        """Wait for the next change, or so long; never longer than `LOOK_AGAIN_S`."""
        change = self._change
        try:
            async with asyncio.timeout(min(timeout_s, LOOK_AGAIN_S)):
                await change.wait()
        except TimeoutError:
            return

    async def wait(self, done: Callable[[], bool], deadline_ns: int) -> None:
        """Wait until `done()`, looked at after every change. Raises `DeadlineExceeded`."""
        while not done():
            deadline.check(deadline_ns, "before the workers were done")
            await self.change(deadline.remaining_s(deadline_ns))

    @staticmethod
    def at_once(choose: Callable[[A], T], subject: A, deadline_ns: int) -> T | None:
        """The result of `choose` now; None if its error may pass. Raises other errors, and `DeadlineExceeded`."""
        deadline.check(deadline_ns, "before a worker could be found")
        try:
            return choose(subject)
        except PASSING:
            return None

    async def until(
        self,
        attempt: Callable[[], T],
        deadline_ns: int,
        *,
        want: Callable[[], None] = lambda: None,
        patient: bool = False,
    ) -> T:
        """`attempt` again after every change, until it succeeds or its error has outlasted its wait.

        `want` asks for the model that nobody has. A full queue is an answer at once, unless `patient`: a request that
        lost its worker waits for a credit.
        """
        give_up: dict[bool, int] = {}
        while True:
            deadline.check(deadline_ns, "before a worker could be found")
            try:
                return attempt()
            except PASSING as error:
                loads = isinstance(error, ModelLoading | ModelNotLoaded)
                if loads:
                    want()
                if self._is_final(error, patient):
                    raise
                wait_s = self._limits.load_wait_s if loads else self._limits.restart_wait_s
                until_ns = give_up.setdefault(loads, deadline.after(wait_s))
                left_s = deadline.remaining_s(min(until_ns, deadline_ns))
                if left_s <= 0:
                    raise
            await self.change(left_s)

    def _is_final(self, error: PenstockError, patient: bool) -> bool:
        """Whether an error that may pass is not waited for."""
        if isinstance(error, QueueFull):
            return not patient
        return isinstance(error, ModelNotLoaded) and not self._on_demand


DEFAULT_LOAD_S = 5
"""Expected seconds of a load without further knowledge."""
CPU_UUID = "cpu"
"""Device id that a worker without a GPU reports."""


def retry_after_s(channels: Sequence[Channel], lane: str) -> float:
    """Whole seconds until the least loaded of these workers has drained a lane of its queue; at least 1."""
    return float(max(1, math.ceil(min([channel.wait_s(lane) for channel in channels], default=0.0))))


def loaded(channels: Sequence[Channel], model: str, *, on_demand: bool = True) -> list[Channel]:
    """Channels whose worker answers and has the model; raises the error of `explain` when there is none."""
    able = having(channels, model)
    if not able:
        raise explain(channels, model, on_demand=on_demand)
    return able


def having(channels: Sequence[Channel], model: str) -> list[Channel]:
    """Channels whose worker answers and has the model."""
    return [c for c in channels if c.responsive and model in c.models and c.models[model].state == "loaded"]


def pick(
    channels: Sequence[Channel], work: Work, *, avoid: Collection[int] = (), on_demand: bool = True
) -> Channel:
    """The channel to use; `avoid` names slots to leave out if there is another.

    A worker that has the LoRA adapter of the call, or is loading it, goes before the others.

    Raises the error of `explain` when no worker has the model, `QueueFull` when all that have it are out of credits.
    """
    able = loaded(channels, work.model, on_demand=on_demand)
    preferred = ([c for c in able if c.slot not in avoid] if avoid else []) or able
    open_ = [c for c in preferred if c.has_credit(work)]
    if not open_:
        raise QueueFull(
            "the queue of every worker with this model is full", retry_after_s=retry_after_s(able, work.lane)
        )

    if lora := work.call.lora:
        open_ = [c for c in open_ if lora in c.models[work.model].loras] or open_

    if len(open_) == 1:
        return open_[0]

    if isinstance(work.call, GenerateCall):
        return _for_text(open_, work.model, work.call)

    def wait_s(channel: Channel) -> float:
        # A step that has taken seconds may take as many more, whatever the pace says.
        return channel.credits.step_s + channel.work_s + channel.foreign_s

    return min(open_, key=lambda c: (wait_s(c), c.cost, c.slot))


def _for_text(channels: Sequence[Channel], model: str, call: GenerateCall) -> Channel:
    """The worker of the conversation, among the workers with about the fewest streams.

    Streams count from their request to their end. A worker whose step runs for seconds is left alone.
    """
    loads = {c.slot: (c.credits.step_s, len(c.streams.texts)) for c in channels}
    step_s, streams = min(loads.values())
    near = [slot for slot, load in loads.items() if load <= (step_s, streams + STREAMS_APART)]
    chosen = home(near, model, beginning_of(call))
    return next(c for c in channels if c.slot == chosen)


def sequence_slot(
    channels: Sequence[Channel], model: str, sequence: int | str, caller: str, workers: int
) -> int | None:
    """`home` among the slots that offer the model, of `workers` slots. None while no worker has told of the model."""
    up = [c for c in channels if c.state == "ready"]
    if not any(model in c.models for c in up):
        return None
    config = _config(up, model)
    if config is not None:
        slots = config.worker_slots(workers, any(c.uuid == CPU_UUID for c in up))
    else:
        # NOTE: only workers that have the model loaded tell its configuration; others tell whether they offer it.
        without = {c.slot for c in up if model not in c.models}
        slots = [slot for slot in range(workers) if slot not in without] or list(range(workers))
    return home(slots, model, sequence, caller)


def _config(channels: Sequence[Channel], model: str) -> ModelConfig | None:
    """The configuration of a model, by the first worker that tells it."""
    configs = [c.models[model].config for c in channels if model in c.models]
    return next((config for config in configs if config is not None), None)


def keeper(
    channels: Sequence[Channel],
    work: Work,
    step: Step,
    slot: int | None,
    workers: int,
    is_open: Callable[[int], bool],
    *,
    on_demand: bool = True,
) -> Channel:
    """The channel of the worker that keeps the sequence of `step`; no other worker will do.

    Args:
        slot: slot of the worker. None while no worker has told of the model: then any of `workers` slots may be meant.
        is_open: whether a worker that this frontend may have yet to join lives in a slot (`Workers.is_open`).

    Raises:
        NoReplica: the worker does not answer now.
        SequenceUnknown: the worker has died or is leaving, and the request goes on with a sequence.
        QueueFull: this frontend has no credit left there.
        Others of `explain`: the worker has not loaded the model.
    """
    model, by_slot = work.model, {c.slot: c for c in channels}

    def may_keep_state(slot: int) -> bool:
        state = by_slot[slot].state if slot in by_slot else "absent"
        return state == "ready" or (state != "leaving" and is_open(slot))

    homes = range(workers) if slot is None else (slot,)
    if not step.start and not any(may_keep_state(home) for home in homes):
        config = _config(channels, model)
        name = model if config is None else config.name
        raise SequenceUnknown(not_begun(step.id, name, STATE_GONE))
    if slot is None:
        raise explain(channels, model, on_demand=on_demand)
    chosen = by_slot.get(slot)
    if chosen is None or not chosen.responsive:
        raise NoReplica("the worker of this sequence is not up", retry_after_s=2)
    if not having([chosen], model):
        raise explain([chosen], model, on_demand=on_demand)
    if not chosen.has_credit(work):
        raise QueueFull(
            "the queue of the worker with this sequence is full",
            retry_after_s=retry_after_s([chosen], work.lane),
        )
    return chosen


def explain(channels: Sequence[Channel], model: str, *, on_demand: bool = True) -> PenstockError:
    """Why no worker can run `model` now; `on_demand`: a model that is only available is loaded when asked for."""
    up = [c for c in channels if c.state == "ready"]
    statuses = [c.models[model] for c in up if model in c.models]
    if not up or any(status.state == "loaded" for status in statuses):
        return NoReplica("no worker is up", retry_after_s=2)
    loading = [status for status in statuses if status.state == "loading"]
    available = [status for status in statuses if status.state == "available"]
    failed = [status for status in statuses if status.state == "failed"]
    lasting = [status for status in failed if status.permanent]
    leaving = any(status.state == "unloading" for status in statuses)
    if loading:
        return _loading(model, loading)
    if lasting or (failed and not (available or leaving)):
        return why_failed((lasting or failed)[0])
    if available and on_demand:
        return _loading(model, available)
    if available:
        return ModelNotLoaded(f"Model '{model}' is not loaded and is not loaded on demand", retry_after_s=5)
    why = "is being unloaded" if statuses else "is not known to the workers yet"
    return ModelNotLoaded(f"Model '{model}' {why}", retry_after_s=1)


def _loading(model: str, statuses: Sequence[ModelStatus]) -> ModelLoading:
    """A load runs or begins: its stage, and what the quickest is still expected to take, which is Retry-After too."""
    expected = [
        status.left_s or status.load_s * (1 - status.progress)
        for status in statuses
        if status.left_s or status.load_s
    ]
    seconds = max(1, math.ceil(min(expected))) if expected else DEFAULT_LOAD_S
    first = max(statuses, key=lambda status: status.progress)
    stage = "the load is about to begin"
    if first.state == "loading":
        done = f"{first.progress:.0%} done"
        stage = f"{first.stage}, {done}" if first.stage else "the load waits for its turn"
    left = f", about {seconds} s left" if expected else ""
    return ModelLoading(f"Model '{model}' is loading: {stage}{left}", retry_after_s=seconds)
