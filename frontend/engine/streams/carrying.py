"""A text of any number of runs, each behind the one before, of which the reader sees every event once.

1. A run that is lost is followed by another. Before its answer has begun the other begins anew: the client sees one
   `Started`, and each piece of the prompt once. Later the other goes on behind the tokens whose ids have arrived
   (`frontend.engine.streams.delta_stream`).
2. A text that another process has begun goes on by `Past`: the next run is sent the ids of all marks.
3. What writes may leave. Then the text goes on elsewhere, if somebody else has the same model; else the text stays.

`CarriedText` knows no worker. A subclass starts runs, and has the rule by which one follows another: over the workers
of a host (`frontend.engine.local.client`), or over the boxes of a cluster.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Self

from frontend.engine.answer import Answer
from frontend.engine.events import Event, Generation, Mark, Pace, Past, Prompted, Started, TextRelay
from frontend.engine.streams.delta_stream import DeltaStream, Gap, KeptIds, Progress
from frontend.engine.streams.incoming import cut_off
from ipc.errors import (
    Draining,
    InvalidInput,
    LoraLoading,
    ModelLoading,
    ModelNotLoaded,
    NoReplica,
    PenstockError,
    Provisioning,
    QueueFull,
    QueueUnavailable,
    WorkerLost,
)
from ipc.wire.messages import GenerateCall

log = logging.getLogger(__name__)

_LEAVING = (Draining, ModelNotLoaded)
"""What writes stops, or has unloaded the model."""
_NOWHERE = (
    InvalidInput,
    LoraLoading,
    ModelLoading,
    ModelNotLoaded,
    NoReplica,
    Provisioning,
    QueueFull,
    QueueUnavailable,
)
"""Nobody has the model, or the LoRA adapter, which may have been unloaded since the text began."""
_FIRST = (Started, Prompted)
"""Events that a run tells before those of its choices."""


class CarriedText(Generation):
    """A context manager whose exit ends unfinished work."""

    def __init__(
        self,
        call: GenerateCall,
        kept: KeptIds,
        pace: Pace,
        past: Past | None,
        on_carried: Callable[[str], None],
    ) -> None:
        """`begun` must follow. `past`: another process has begun the text. `on_carried`: see `Client`."""
        self._call, self._pace, self._on_carried = call, pace, on_carried
        self._progress, self._past = Progress(call, kept, past), past
        self._identity = ""
        self._moves = 0
        """Processes that have lost the text, which count like workers that died."""
        self._is_told = self._over = False
        self._characters = self._tokens = 0
        """Of the prompt, as the client has them."""

    @abstractmethod
    async def _start(self) -> DeltaStream:
        """A run that has begun. Raises a `PenstockError` if none can."""

    @abstractmethod
    async def _begin_anew(self, error: PenstockError) -> None:
        """Follow a run of which the client has nothing. Raises the error of the request if nothing follows."""

    @abstractmethod
    async def _follow(self, error: PenstockError) -> bool:
        """Prepare the run that goes on with the text; false if `error` is the end. Raises another end."""

    @property
    @abstractmethod
    def _deaths(self) -> int:
        """How often a death has cost the text a run."""

    async def begun(self) -> Self:
        """Wait until a prompt is tokenized. Raises a `PenstockError` as `Client.call` does.

        Raises `InputRefused`, `InvalidInput` and `QueueFull` for a text of another process that cannot go on here.
        """
        try:
            if self._past is not None:
                self._take_up(self._past)
            self._run = await self._start()
        except BaseException:
            # NOTE: tokens may have arrived with the word that the prompt is tokenized.
            self._progress.drop()
            raise
        self.prompt_tokens = self._run.prompt_tokens
        return self

    def _take_up(self, past: Past) -> None:
        """Another process has begun the text."""
        mark = past.mark
        if mark.pictures != self._pictures:
            raise InvalidInput("a picture of the input is another one now, so nobody goes on with its text")
        self._past = None
        self._is_told = any(isinstance(event, Started) for event in past.events)
        if not self._progress.has_begun:
            return
        if not self._progress.can_go_on:
            text = "this server has no room for the tokens of another text (generation.continuation_bytes)"
            raise QueueFull(text, retry_after_s=1)
        self._identity, self._moves = mark.identity, past.moves
        self._pace.take_up(past, time.monotonic_ns())

    @cached_property
    def _pictures(self) -> str:
        """A hash of the pictures of the prompt, empty without any."""
        if not self._call.images:
            return ""
        digest = hashlib.blake2b(digest_size=16)
        for picture in self._call.images:
            digest.update(len(picture).to_bytes(8, "little"))
            digest.update(picture)
        return digest.hexdigest()

    def mark(self) -> Mark | None:
        """See `Generation.mark`."""
        return self._progress.mark(self._identity, self._deaths, self._pictures)

    def pass_to(self, relay: TextRelay) -> bool:
        """See `Generation.pass_to`."""
        self._run.relay = relay
        return True

    @property
    def result(self) -> Answer | None:
        """See `Generation.result`."""
        return self._run.result

    async def __anext__(self) -> list[Event]:
        """The next events. Raises the error of the request, once."""
        while not self._over:
            try:
                events = await anext(self._run)
            except PenstockError as error:
                if isinstance(error, (WorkerLost, *_LEAVING)) and self._progress.has_ended:
                    # Nothing lacks but the word that the job is done.
                    self._over = True
                    return [self._pace.ended()]
                await (self._go_on(error) if self._progress.has_begun else self._begin_anew(error))
                continue
            gap = self._progress.gap
            if gap is not None and gap.over_ns:
                self._progress.gap = None
                log.info("%s goes on with a text: %s", self._run.channel.worker, gap)
            if fresh := self._untold(events):
                return fresh
        raise StopAsyncIteration

    async def _go_on(self, error: PenstockError) -> None:
        """Have the rest of a text written by another run. Raises the error of the request if nothing follows."""
        if not isinstance(error, (WorkerLost, *_LEAVING)):
            raise error
        run, progress = self._run, self._progress
        lost = cut_off(error) if isinstance(error, WorkerLost) else error
        outcome: str | None = "refused" if progress.can_go_on else "unkept"
        try:
            if not progress.can_go_on:
                raise lost from error
            run.close()
            progress.gap = Gap(time.monotonic_ns())
            try:
                if not await self._follow(error):
                    raise lost
                outcome = "failed"
                await self.begun()
            except (WorkerLost, *_NOWHERE) as why:
                raise lost from why
            outcome = "carried" if isinstance(error, WorkerLost) else "moved"
        except asyncio.CancelledError:
            outcome = None
            raise
        finally:
            if outcome is not None:
                self._on_carried(outcome)

    def _untold(self, events: list[Event]) -> list[Event]:
        """`events` without what an earlier run has told."""
        if not isinstance(events[0], _FIRST):
            # PERF: most lists. What comes before all choices is at the begin of the first lists of a run.
            return events
        fresh: list[Event] = []
        for event in events:
            if isinstance(event, Prompted):
                event = event.behind(self._characters, self._tokens)
                self._characters = event.start + len(event.text)
                self._tokens = event.first + len(event.tokens)
                if not event.text and not event.tokens:
                    continue
            elif isinstance(event, Started):
                was_told, self._is_told = self._is_told, True
                if was_told:
                    continue
            fresh.append(event)
        return fresh

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._run.close()
        self._progress.drop()
