"""One request for generated text, over as many runs as it takes until its answer begins.

1. The generation begins when a worker has tokenized the prompt. `Started` follows when the engine has begun.
2. A run that is lost before its answer has begun is followed by another, by the rule of retries. The client sees one
   `Started`, and each piece of the prompt once.
3. A run that is lost later ends the request with one error.
"""

from __future__ import annotations

from typing import Self

from frontend.engine.answer import Answer
from frontend.engine.events import Event, Generation, Prompted, Started
from frontend.engine.local.channel import Channel
from frontend.engine.local.client import Client
from frontend.engine.local.delta_stream import DeltaStream, Pace
from frontend.engine.local.retry import Attempts
from ipc.errors import PenstockError, WorkerLost
from ipc.wire.messages import Work


class LocalGeneration(Generation):
    """A context manager whose exit ends unfinished work."""

    def __init__(self, client: Client, work: Work, pace: Pace) -> None:
        """`begun` must follow."""
        self._client, self._attempts, self._pace = client, client.begin(work), pace
        self._is_told = False
        self._characters = self._tokens = 0
        """Of the prompt, as the client has them."""

    async def begun(self) -> Self:
        """Wait until a worker has tokenized the prompt. Raises a `PenstockError` as `Client.call` does."""
        self._run = await self._client.run(self._attempts, self._open)
        self.prompt_tokens = self._run.prompt_tokens
        return self

    async def _open(self, channel: Channel, attempts: Attempts) -> DeltaStream:
        number, final = channel.submit(attempts.work, solo=attempts.solo, apart=attempts.accused)
        return await DeltaStream(channel, number, final, self._pace, self._suspect).begun()

    def _suspect(self, error: WorkerLost) -> None:
        self._client.retries.suspect(self._attempts, alone=error.alone)

    @property
    def result(self) -> Answer | None:
        """The end of the answer, once the iteration has ended without an error."""
        return self._run.result

    async def __anext__(self) -> list[Event]:
        """The next events. Raises the error of the request, once."""
        while True:
            try:
                events = await anext(self._run)
            except PenstockError as error:
                if self._run.answering:
                    raise
                self._run.close()
                if not await self._client.retries.again(self._attempts, self._run.channel, error):
                    raise
                await self.begun()
                continue
            if fresh := self._untold(events):
                return fresh

    def _untold(self, events: list[Event]) -> list[Event]:
        """`events` without what an earlier run has told."""
        fresh: list[Event] = []
        for event in events:
            if isinstance(event, Prompted):
                event = event.behind(self._characters, self._tokens)
                self._characters = event.start + len(event.text)
                self._tokens = event.first + len(event.tokens)
                if not event.text and not event.tokens:
                    continue
            elif isinstance(event, Started):
                told, self._is_told = self._is_told, True
                if told:
                    continue
            fresh.append(event)
        return fresh

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._run.close()
