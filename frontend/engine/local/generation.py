"""Generated text of the workers of this host: which worker writes, and who follows one that is lost or leaves.

1. A run is sent to a worker by the rule of retries, with the tokens that earlier runs have written.
2. A death on a text is judged by the run that follows, or by the end without one.
3. A worker that leaves, or unloads the model, loses its streams to a worker that has the model. Without one the streams
   stay.
"""

from __future__ import annotations

import time

from frontend.engine.events import Pace, Past
from frontend.engine.local import routing
from frontend.engine.local.channel import Channel
from frontend.engine.local.client import Client
from frontend.engine.local.retry import Attempts
from frontend.engine.streams.carrying import CarriedText
from frontend.engine.streams.delta_stream import DeltaStream
from ipc.errors import Draining, InputRefused, ModelNotLoaded, PenstockError, WorkerLost
from ipc.wire.messages import GenerateCall, Work


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
